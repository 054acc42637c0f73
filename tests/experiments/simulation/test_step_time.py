"""The time model, against figures worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.document import ExperimentError
from experiments.simulation.hardware import Gpu, find_gpu
from experiments.simulation.shapes import find_shape, shape_of
from experiments.simulation.step_time import StepTime, Work
from tests.tmodel.formats.by_hand import Kind
from tests.tmodel.formats.models import write_models
from tests.tsched.schedulers import build_scheduler
from tmodel import RANDOM_PRESETS
from tmodel.loading import parse_config
from tsched import LLM
from tsched.requests.sampling_params import SamplingParams

GPU = Gpu("slow", 10**9, memory_bytes_per_s=1e9, flops_per_s=1e12, host_bytes_per_s=1e8)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 100, "tie_word_embeddings": True,
}  # fmt: skip
MODEL = shape_of(parse_config(CONFIG), "small")
LAUNCHES = 2 * 10 * 1.3e-6


def test_qwen3_4b_weighs_what_is_published() -> None:
    shape = find_shape("Qwen3-4B")
    assert shape.kv_bytes_per_token == 147_456
    assert shape.weight_bytes / 1e9 == pytest.approx(8.04, abs=0.005)
    assert find_shape("Llama-3.1-8B").weight_bytes / 2 / 1e9 == pytest.approx(8.03, abs=0.005)


def test_a_decode_step_waits_for_memory() -> None:
    layer_weights = 2 * (8 * 16 + 8 * 8 + 3 * 8 * 16)  # two layers of QKV, output, and gate, up and down
    assert (MODEL.active_weights, MODEL.layer_bytes) == (layer_weights, 2 * layer_weights)
    kv = 2 * 2 * 2 * 2 * 2  # bytes, keys and values, layers, heads, dims
    assert MODEL.kv_bytes_per_token == kv
    moved = 2 * layer_weights + 2 * 800 + (30 + 2) * kv  # two rows with 30 tokens of context between them
    assert StepTime(GPU, MODEL, 16).step(Work(2, 2, 30, 30)) == pytest.approx(moved / 1e9 + LAUNCHES, rel=1e-12)


def test_a_long_prefill_waits_for_products() -> None:
    tokens = 10_000
    pairs = tokens * (tokens + 1) // 2
    flops = 2 * MODEL.active_weights * tokens + 2 * 800 + 4 * 2 * 4 * 2 * pairs
    assert StepTime(GPU, MODEL, 16).step(Work(tokens, 1, pairs, tokens)) == pytest.approx(flops / 1e12 + LAUNCHES)


def test_copies_take_their_bytes_time() -> None:
    block = 16 * MODEL.kv_bytes_per_token
    assert StepTime(GPU, MODEL, 16).copies(3, 5) == pytest.approx(3 * block / 1e8 + 5 * 2 * block / 1e9)


def test_work_of_a_windowed_plan_counts_the_keys_that_each_token_sees() -> None:
    window = 6
    scheduler = build_scheduler(
        num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=9, max_model_len=40, window=window
    )
    for i, length in enumerate((3, 17, 5)):
        scheduler.add(i, list(range(length)), SamplingParams(max_tokens=9, ignore_eos=True))
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        spans = list(zip(plan.starts.tolist(), plan.ends.tolist(), strict=True))
        pairs = sum(min(place + 1, window) for start, end in spans for place in range(start, end))
        context = sum(end - max(0, start + 1 - window) for start, end in spans)
        assert Work.of(plan, window) == Work(plan.num_tokens, plan.sampled.size, pairs, context)
        scheduler.commit(plan, np.zeros(plan.sampled.size, dtype=np.int64))


def test_work_of_a_plan_counts_each_pair_of_a_token_and_a_key() -> None:
    scheduler = build_scheduler(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=9, max_model_len=40)
    for i, length in enumerate((3, 17, 5)):
        scheduler.add(i, list(range(length)), SamplingParams(max_tokens=6, ignore_eos=True))
    kinds = set()
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        pairs = sum(
            place + 1
            for start, count in zip(plan.starts.tolist(), plan.counts.tolist(), strict=True)
            for place in range(start, start + count)
        )
        expected = Work(plan.num_tokens, plan.sampled.size, pairs, sum(plan.ends.tolist()))
        assert Work.of(plan) == expected
        kinds.add((plan.num_decodes > 0, plan.num_decodes < plan.rows.size))
        scheduler.commit(plan, np.zeros(plan.sampled.size, dtype=np.int64))
    assert kinds == {(False, True), (True, True), (True, False)}


def test_a_directory_gives_its_shape(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = find_shape(str(tmp_path))
    assert (shape.name, shape.num_layers, shape.query_width, shape.kv_bytes_per_token) == (tmp_path.name, 2, 64, 256)
    weights = 2 * (32 * (2 * 64 + 2 * 32) + 3 * 32 * 48)
    norms = 2 * (2 * 32 + 2 * 16) + 32
    assert (shape.active_weights, shape.layer_bytes, shape.head_weights) == (weights, 2 * weights, 9600)
    assert shape.weight_bytes == 2 * (weights + 2 * 9600 + norms)


def test_of_experts_the_distinct_ones_are_read_and_the_chosen_ones_computed(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = find_shape(str(tmp_path))
    experts, router, dense = 8 * 3 * 32 * 24, 8 * 32, 3 * 32 * 48
    shared = 2 * 32 * (2 * 64 + 2 * 32) + router + dense
    assert (shape.expert_bytes, shape.layer_bytes, shape.chosen) == (2 * experts, 2 * (shared + experts), 0.25)
    assert shape.active_weights == shared + experts // 4
    gpu = replace(find_gpu("H100"), flops_per_s=1e30)
    launches = StepTime(gpu, replace(shape, layer_bytes=0, expert_bytes=0, kv_bytes_per_token=0), 16)
    read = StepTime(gpu, replace(shape, kv_bytes_per_token=0), 16)
    for tokens, distinct in ((1, 2), (2, 2 + 6 / 4), (1000, 8)):
        work = Work(tokens, 0, 0, 0)
        seconds = read.step(work) - launches.step(work)
        assert seconds == pytest.approx(2 * (shared + experts * distinct / 8) / gpu.memory_bytes_per_s, rel=1e-4)
        slow = replace(gpu, flops_per_s=1.0, memory_bytes_per_s=1e30)
        assert StepTime(slow, shape, 16).step(work) == pytest.approx(2 * tokens * (shared + experts / 4))
    assert read.decodes(3, 5, 2)[0] == read.step(Work(3, 3, 5, 5))


def test_verifying_tokens_of_qwen3_30b_reads_the_weights_of_more_steps() -> None:
    config, shape = RANDOM_PRESETS["Qwen3-30B-A3B"], find_shape("Qwen3-30B-A3B")
    hidden, experts, chosen = config["hidden_size"], config["num_experts"], config["num_experts_per_tok"]
    heads = 2 * (config["num_attention_heads"] + config["num_key_value_heads"])  # of queries and outputs, keys, values
    router, expert = hidden * experts, 3 * hidden * config["moe_intermediate_size"]
    attention, head = heads * config["head_dim"] * hidden, hidden * config["vocab_size"]

    def read(tokens: int, router: int) -> float:
        distinct = experts * (1 - (1 - chosen / experts) ** tokens)
        return config["num_hidden_layers"] * (attention + router + distinct * expert) + head

    traffic = {tokens: shape.weight_traffic(tokens) for tokens in (1, 2, 3, 5)}
    assert traffic == pytest.approx({tokens: read(tokens, router) / read(1, router) for tokens in traffic}, rel=1e-12)
    assert {tokens: round(times, 2) for tokens, times in traffic.items()} == {1: 1, 2: 1.56, 3: 2.08, 5: 3.03}
    # As many digits of the plan's figures, which leave the routers out: 0.4% of what a step of one token reads.
    without = {tokens: round(read(tokens, 0) / read(1, 0), 2) for tokens in traffic}
    assert without == {1: 1, 2: 1.56, 3: 2.09, 5: 3.04}
    gpu = replace(find_gpu("H100"), flops_per_s=1e30)
    step_time = StepTime(gpu, replace(shape, kv_bytes_per_token=0), 16)
    launches = 48 * 10 * 1.3e-6
    seconds = {tokens: step_time.step(Work(tokens, tokens, 0, 0)) - launches for tokens in traffic}
    assert {tokens: one / seconds[1] for tokens, one in seconds.items()} == pytest.approx(traffic)
    assert MODEL.weight_traffic(5) == 1  # of a model without experts


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("settings", "of_square", "of_wide"),
    [
        # 16,384 codes of half a byte and, for 128 outputs of a group each, a scale and a zero-point of two bytes.
        (GPTQ, 8192 + 128 * 4, 16384 + 256 * 4),
        # A byte for each code, and four for a block's scale.
        (FP8, 16384 + 4, 32768 + 2 * 4),
    ],
)
def test_quantized_layers_weigh_what_their_schemes_take(
    settings: dict[str, Any], of_square: int, of_wide: int, tmp_path: Path
) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 300, "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    dense = find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    shape = find_shape(str(tmp_path))
    squares, wide = 2 * 4, 2 * 3  # query, key, value, output; gate, up, down
    stored = squares * of_square + wide * of_wide
    assert (dense.quantization, shape.quantization) == (None, settings["quant_method"])
    assert (dense.layer_bytes, shape.layer_bytes) == (2 * (squares * 16384 + wide * 32768), stored)
    assert dense.weight_bytes - shape.weight_bytes == dense.layer_bytes - stored
    assert shape.active_weights == dense.active_weights  # a product takes as long
    waits = [StepTime(GPU, one, 16).step(Work(1, 0, 0, 0)) for one in (dense, shape)]
    assert waits[0] - waits[1] == pytest.approx((dense.layer_bytes - stored) / 1e9)


def test_gpt_oss_reads_the_codes_scales_and_biases_of_distinct_experts(tmp_path: Path) -> None:
    published = RANDOM_PRESETS["gpt-oss-20b"]
    hidden, layers, experts = 2880, 24, 32
    sizes = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers}
    assert sizes.items() <= published.items()
    # A code is half a byte, and 32 of them share an exponent, which is kept as a scale of two bytes.
    codes = layers * experts * 3 * hidden * hidden
    biases = 2 * layers * experts * 3 * hidden
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**published, "quantization_config": quantization}))
    dense, shape = find_shape("gpt-oss-20b"), find_shape(str(tmp_path))
    assert dense.expert_bytes == 2 * codes + biases
    assert shape.expert_bytes == codes // 2 + codes // 32 * 2 + biases
    assert dense.weight_bytes / 1e9 == pytest.approx(41.8, abs=0.05)  # 20,914,757,184 weights
    assert dense.weight_bytes - shape.weight_bytes == dense.expert_bytes - shape.expert_bytes
    # Of a token's step: 4 of 32 experts, and queries, keys, values, outputs and routers.
    shared = layers * (hidden * 64 * (64 + 8 + 8 + 64) + hidden * experts)
    assert dense.read_bytes(1) == 2 * shared + dense.expert_bytes / 8
    assert shape.read_bytes(1) == 2 * shared + shape.expert_bytes / 8
    assert shape.active_weights == shared + codes // 8


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ExperimentError, match="H200, H100.*did you mean 'H100'"):
        find_gpu("H10")
    with pytest.raises(ExperimentError, match="did you mean 'Qwen3-4B'"):
        find_shape("Qwen3-4")
    assert find_gpu("H200").memory_bytes_per_s == 4.8e12


def test_a_directory_beats_a_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "Qwen3-4B", "Llama-3.1-8B"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 64}))
        assert find_shape(name).kv_bytes_per_token == MODEL.kv_bytes_per_token


@pytest.mark.parametrize("kind", [Kind("gptq", 4, 32), Kind("awq", 4, 128)], ids=str)
def test_a_quantized_model_weighs_what_it_does_when_it_is_loaded(kind: Kind, tmp_path: Path) -> None:
    quantized, _ = write_models(tmp_path, kind)
    llm = LLM(quantized, device="cpu", dtype="bfloat16", kv_cache_bytes=10**6)
    assert find_shape(str(quantized)).weight_bytes == llm.weight_bytes
