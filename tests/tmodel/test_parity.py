"""Every architecture against transformers' on random weights: every row of logits, however it was scheduled."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tkernels
from tests.tmodel.packed import Driver, Step, in_chunks, in_one_go, load, token_by_token
from tkernels.recording import Recording
from tkernels.selection import unsupported_in, with_parts
from tmodel import PRESETS, Limits, Model, ModelConfig, known_architectures, load_config
from tmodel.config import Axes
from tmodel.decoders.experts import ExpertsLayer
from tmodel.random_weights import random_config
from tmodel.transformers_models import new_transformers_model

LARGEST_DIFFERENCE = 1e-4
"""Of float32 logits from transformers'."""
LARGEST_RATIO = 1.1
"""Of the RMS distance from float64 to transformers' own."""
LENGTHS = (37, 5, 61, 1, 24)
SCHEDULES: dict[str, Callable[[Sequence[int]], list[Step]]] = {
    "in one go": in_one_go,
    "in chunks": lambda lengths: in_chunks(lengths, 7),
    "token by token": lambda lengths: token_by_token(lengths, 4),
}


@dataclass(frozen=True)
class Shape:
    """A model of an architecture: its fields of config.json (one given as ... is left out), and what they cover."""

    architecture: str
    covers: str
    fields: Mapping[str, Any]


QWEN3 = "Qwen3ForCausalLM"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONGROPE = {  # every sequence goes beyond the original length; but for a single token, which is not turned
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4,
    "short_factor": [1.0] * 8, "long_factor": [1.0 + i / 2 for i in range(8)],
}  # fmt: skip


GPT2 = {"heads": (3, 3), "eos_token_id": None}
FOUR, EIGHT, SIXTEEN, ALL = (  # E, K
    {"num_experts": experts, "num_experts_per_tok": top_k, "moe_intermediate_size": 24}
    for experts, top_k in ((4, 2), (8, 2), (16, 4), (8, 8))
)
GPT_OSS = {"intermediate_size": 24, "sliding_window": 9}
OLMOE = {"head_dim": ..., "eos_token_id": None, "heads": (3, 1)}


def shapes(architecture: str, **covered: Mapping[str, Any]) -> list[Shape]:
    """Shapes by what they cover."""
    return [Shape(architecture, covers.replace("_", " "), fields) for covers, fields in covered.items()]


SHAPES = (
    *shapes(
        QWEN3,
        four_heads_share_keys_tied={"heads": (4, 1), "tie_word_embeddings": True},
        two_heads_share_keys_biased={"heads": (4, 2), "attention_bias": True},
        no_heads_share_keys_head_dim_80={"heads": (3, 3), "head_dim": 80},
        windows={"heads": (6, 2), "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        sharded={"heads": (8, 2), "num_hidden_layers": 3, "rope_theta": 1e6},
        yarn={"rope_parameters": YARN},
    ),
    *shapes(
        "LlamaForCausalLM",
        llama3_tied={"rope_parameters": LLAMA3, "heads": (4, 1), "tie_word_embeddings": True},
        every_bias={"attention_bias": True, "mlp_bias": True, "heads": (2, 1), "head_dim": ...},
        linear_no_heads_share_keys={
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "heads": (3, 3),
        },
        yarn_head_dim_80={"rope_parameters": YARN, "head_dim": 80},
        longrope={"rope_parameters": LONGROPE},
        sharded={"heads": (8, 2), "num_hidden_layers": 3, "rope_theta": 5e5},
    ),
    *shapes(
        "MistralForCausalLM",
        windows={"heads": (6, 2), "sliding_window": 9},
        window_of_one={"sliding_window": 1},
        window_beyond_all={"sliding_window": 100, "tie_word_embeddings": True},
        no_window_head_dim_80={"sliding_window": None, "heads": (3, 1), "head_dim": 80},
        windows_yarn={"sliding_window": 17, "rope_parameters": YARN},
        sharded={"sliding_window": 32, "num_hidden_layers": 3, "rope_theta": 1e6},
    ),
    *shapes(
        "Qwen2ForCausalLM",
        windows={"heads": (6, 2), "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        tied={"heads": (3, 1), "tie_word_embeddings": True, "head_dim": ...},
        windows_by_type={
            "use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"],
        },
        no_heads_share_keys_head_dim_80={"heads": (3, 3), "head_dim": 80},
        yarn={"rope_parameters": YARN},
        sharded={"heads": (8, 2), "num_hidden_layers": 3, "rope_theta": 1e6},
    ),
    *shapes(
        "GPT2LMHeadModel",
        tied=GPT2,
        untied_gelu_fast={**GPT2, "tie_word_embeddings": False, "activation_function": "gelu_fast"},
        width_and_epsilon_of_its_own={**GPT2, "n_inner": 80, "layer_norm_epsilon": 1e-3},
        scale_by_layer={**GPT2, "scale_attn_by_inverse_layer_idx": True},
        one_head_upcast={**GPT2, "heads": (1, 1), "reorder_and_upcast_attn": True},
        no_scale_gelu_by_erf={**GPT2, "scale_attn_weights": False, "activation_function": "gelu"},
    ),
    *shapes(
        "Qwen3MoeForCausalLM",
        eight_two_normalized={**EIGHT, "norm_topk_prob": True},
        four_two={**FOUR, "heads": (4, 1), "attention_bias": True},
        sixteen_four_windows={**SIXTEEN, "use_sliding_window": True, "sliding_window": 9},
        all_eight_tied_head_dim_80={**ALL, "tie_word_embeddings": True, "heads": (3, 3), "head_dim": 80},
        dense_first={**EIGHT, "norm_topk_prob": True, "mlp_only_layers": [0], "head_dim": ..., "heads": (3, 1)},
        sharded={**SIXTEEN, "norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 3},
    ),
    *shapes(
        "MixtralForCausalLM",
        eight_two=EIGHT,
        four_two_windows={**FOUR, "heads": (6, 2), "sliding_window": 9},
        sixteen_four_tied_head_dim_80={**SIXTEEN, "tie_word_embeddings": True, "heads": (3, 1), "head_dim": 80},
        all_eight_yarn={**ALL, "rope_parameters": YARN},
        sharded={**FOUR, "num_hidden_layers": 3, "rope_theta": 1e6},
        one_of_four={**FOUR, "num_experts_per_tok": 1, "head_dim": ..., "heads": (3, 3)},
    ),
    *shapes(
        "OlmoeForCausalLM",
        eight_two={**OLMOE, **EIGHT},
        four_two_normalized={**OLMOE, **FOUR, "norm_topk_prob": True, "heads": (3, 3)},
        sixteen_four_tied={**OLMOE, **SIXTEEN, "tie_word_embeddings": True},
        all_eight_biased={**OLMOE, **ALL, "attention_bias": True},
        sharded={**OLMOE, **EIGHT, "num_hidden_layers": 3},
        sixteen_four_normalized_linear={
            **OLMOE, **SIXTEEN, "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    *shapes(
        "GptOssForCausalLM",
        eight_two_yarn={**GPT_OSS, **EIGHT, "rope_parameters": {**YARN, "truncate": False}},
        four_two_tied_no_bias={
            **GPT_OSS, **FOUR, "tie_word_embeddings": True, "attention_bias": False, "heads": (4, 1),
        },
        sixteen_four_windows_by_type={
            **GPT_OSS, **SIXTEEN, "sliding_window": 17, "layer_types": ["full_attention", "sliding_attention"],
        },
        all_eight_low_limit_head_dim_80={**GPT_OSS, **ALL, "swiglu_limit": 1.5, "heads": (3, 3), "head_dim": 80},
        sharded={**GPT_OSS, **FOUR, "num_hidden_layers": 3, "heads": (8, 2)},
        one_of_four={**GPT_OSS, **FOUR, "num_experts_per_tok": 1, "sliding_window": 1},
    ),
)  # fmt: skip
"""Of every architecture of the house, shapes that between them cover what its fields can say."""

WINDOWS = next(shape.fields for shape in SHAPES if (shape.architecture, shape.covers) == (QWEN3, "windows"))


def first_shape(architecture: str) -> Shape:
    return next(shape for shape in SHAPES if shape.architecture == architecture)


def raw_config(
    architecture: str, *, heads: tuple[int, int] = (4, 2), rope_theta: float = 10000.0, **fields: Any
) -> dict[str, Any]:
    """The config.json of a small model; a field given as ... is left out."""
    raw = {
        "architectures": [architecture],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        **{"vocab_size": 97, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 2, "head_dim": 16},
        **fields,
    }
    return {name: value for name, value in raw.items() if value is not ...}


def random_model(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    architecture: str = QWEN3,
    *,
    heads: tuple[int, int] = (4, 2),
    rope_theta: float = 10000.0,
    **fields: Any,
) -> Path:
    """A transformers checkpoint whose logits spread over several units and whose attention is far from even."""
    model = new_transformers_model(raw_config(architecture, heads=heads, rope_theta=rope_theta, **fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):  # a norm's
                parameter.copy_(1 + 0.4 * noise)
            elif parameter.ndim >= 2:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.3 * noise)
    shards = {"max_shard_size": "60KB"} if model.config.num_hidden_layers == 3 else {}
    model.to(dtype).save_pretrained(directory, **shards)
    return directory


def random_sequences(lengths: Sequence[int], vocab_size: int = 97, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


Routing = list[list[torch.Tensor]]
"""Of each layer with experts, by sequence: [tokens, E] scores or [tokens, K] experts."""


def transformers_logits(
    directory: Path,
    sequences: Sequence[torch.Tensor],
    dtype: torch.dtype,
    *,
    scores: Routing | None = None,
    experts: Routing | None = None,
) -> torch.Tensor:
    """[rows, vocab] over all sequences, each alone.

    Args:
        directory: The model's.
        sequences: Its inputs.
        dtype: Of the model.
        scores: Becomes what the routers found.
        experts: That every token gets, whatever the routers find. What they count for is the routers' own.
    """
    from transformers import AutoModelForCausalLM

    # transformers' fast experts have no float64.
    kind = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **kind)
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    for index, router in enumerate(routers):
        found: list[torch.Tensor] = []
        if scores is not None:
            scores.append(found)
        forced = None if experts is None else iter(experts[index])

        def hook(
            router: Any, _: Any, out: Any, found: list[torch.Tensor] = found, forced: Any = forced
        ) -> tuple[torch.Tensor, ...] | None:
            logits, weights, _ = out
            found.append(logits)
            if forced is None:
                return None
            chosen = next(forced)
            counts = logits.float().softmax(-1).gather(1, chosen)
            if getattr(router, "norm_topk_prob", True):
                counts = counts / counts.sum(-1, keepdim=True)
            return logits, counts.to(weights.dtype), chosen

        router.register_forward_hook(hook)
    with torch.inference_mode():
        return torch.cat([model(input_ids=tokens[None]).logits[0] for tokens in sequences])


def chosen_experts(directory: Path, scores: Routing) -> Routing:
    """The experts that routers with these scores give each token."""
    top_k = getattr(load_config(directory).fields, "num_experts_per_tok", 0)
    return [[one.topk(top_k).indices for one in of_layer] for of_layer in scores]


def near_ties(directory: Path, scores: Routing, rows: int) -> torch.Tensor:
    """[rows] bool: whose last expert is ahead of the next by 1e-5 or less in some layer."""
    top_k = getattr(load_config(directory).fields, "num_experts_per_tok", 0)
    near = torch.zeros(rows, dtype=torch.bool)
    for logits in (torch.cat(of_layer).sort(descending=True).values for of_layer in scores):
        if top_k < logits.shape[1]:
            near |= logits[:, top_k - 1] - logits[:, top_k] <= 1e-5
    return near


def force_experts(driver: Driver, experts: Routing) -> None:
    """Gives every token of a driver's model the experts of `experts`, whatever the routers find."""
    model: Any = driver.model
    by_layer = iter(experts)
    layers = []
    for layer in model.layers:
        if isinstance(layer.mlp, ExpertsLayer):
            route = partial(_count_forced, driver, next(by_layer))
            layer = dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, route=route))
        layers.append(layer)
    driver.model = copy.copy(model)
    driver.model.layers = layers  # type: ignore[attr-defined]


def _count_forced(
    driver: Driver, experts: list[torch.Tensor], logits: torch.Tensor, top_k: int, *, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.stack([experts[sequence][place] for sequence, place in driver.rows])
    counts = logits.float().softmax(-1).gather(1, chosen)
    return chosen.int(), counts / counts.sum(-1, keepdim=True) if normalize else counts


def packed_logits(
    model: Model,
    sequences: Sequence[torch.Tensor],
    dtype: torch.dtype,
    schedule: str,
    padding: int = 0,
    experts: Routing | None = None,
) -> torch.Tensor:
    """[rows, vocab] over all sequences, packed together as `schedule` says; `experts` are those that tokens get."""
    steps = SCHEDULES[schedule]([len(tokens) for tokens in sequences])
    driver = Driver(model, sequences, dtype, padding)
    if experts:
        force_experts(driver, experts)
    return torch.cat(driver.run(steps))


def distances_to_float64(
    directory: Path, dtype: torch.dtype, sequences: Sequence[torch.Tensor], *, forced: bool = True
) -> tuple[dict[str, float], float]:
    """RMS distances of logits in `dtype` from transformers' in float64: ours by schedule, and transformers' own.

    Where there are experts, `forced` gives every token those of the float64 model: else a near tie that falls another
    way, in either, is what the distance tells of.
    """
    scores: Routing = []
    exact = transformers_logits(directory, sequences, torch.float64, scores=scores)
    experts = chosen_experts(directory, scores) if forced else None
    model = load(directory, dtype)

    def distance(logits: torch.Tensor) -> float:
        return float((logits.double() - exact).square().mean().sqrt())

    ours = {
        schedule: distance(packed_logits(model, sequences, dtype, schedule, experts=experts)) for schedule in SCHEDULES
    }
    return ours, distance(transformers_logits(directory, sequences, dtype, experts=experts))


def assert_parity(logits: torch.Tensor, expected: torch.Tensor, near: torch.Tensor | None = None) -> None:
    """Near enough, and the same five best wherever the fifth is ahead of the sixth by more than both may be off.

    Rows that are `near` a tie of experts are left out; they must be few.
    """
    if near is not None and near.any():
        assert near.float().mean() < 0.01
        logits, expected = logits[~near], expected[~near]
    assert logits.dtype == expected.dtype == torch.float32
    assert expected.std() > 1, "near-zero logits would prove nothing"
    assert (logits - expected).abs().max() <= LARGEST_DIFFERENCE
    values, best = expected.topk(6)
    clear = values[:, 4] - values[:, 5] > 2 * LARGEST_DIFFERENCE
    assert clear.float().mean() > 0.9
    assert torch.equal(logits.topk(5).indices.sort().values[clear], best[:, :5].sort().values[clear])


def test_every_architecture_has_shapes() -> None:
    counts = Counter(shape.architecture for shape in SHAPES)
    assert counts.keys() == known_architectures().keys()
    assert min(counts.values()) >= 6


@pytest.mark.parametrize("architecture", known_architectures())
def test_an_absent_field_means_what_it_means_to_transformers(architecture: str) -> None:
    import transformers

    theirs = getattr(transformers, architecture).config_class.__dataclass_fields__
    ours = known_architectures()[architecture].fields.model_fields
    optional = {name: field.default for name, field in ours.items() if not field.is_required() and name in theirs}
    assert len(optional) >= 5
    assert optional == {name: theirs[name].default for name in optional}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.architecture}-{shape.covers}")
def test_float32_logits_are_those_of_transformers(tmp_path: Path, shape: Shape) -> None:
    """6 shapes x 3 schedules x 128 rows an architecture, with the `torch` kernels."""
    directory = random_model(tmp_path, architecture=shape.architecture, **shape.fields)
    assert (directory / "model.safetensors.index.json").exists() == (shape.covers == "sharded")
    files = [load_file(file) for file in directory.glob("*.safetensors")]
    saved = {name: tuple(tensor.shape) for file in files for name, tensor in file.items()}
    assert dict(load_config(directory).tensors()) == saved
    sequences = random_sequences(LENGTHS)
    scores: Routing = []
    expected = transformers_logits(directory, sequences, torch.float32, scores=scores)
    near = near_ties(directory, scores, len(expected))
    assert len(expected) * 6 * len(SCHEDULES) >= 1000
    model = load(directory, torch.float32)
    for schedule in SCHEDULES:
        assert_parity(packed_logits(model, sequences, torch.float32, schedule), expected, near)


def triton_variants(called: Axes) -> dict[str, list[str]]:
    """Of each op the Triton variants that serve it alone; others, for few tokens, are run by one that chooses."""
    cpu = torch.device("cpu")
    axes = with_parts(called, dict.fromkeys(composed_fusions(called), "composed"), tkernels.OPS, cpu)
    return {
        op.name: [
            variant.name
            for variant in op.variants.values()
            if variant.kind == "triton"
            and (op.name not in axes or not unsupported_in(variant, axes[op.name], cpu, torch.float32))
        ]
        for op in tkernels.OPS.values()
    }


def composed_fusions(called: Axes) -> dict[str, tuple[str, ...]]:
    """Of the ops that a model calls, those that may be composed of parts, and these."""
    return {name: ops["composed"].parts for name in called if "composed" in (ops := tkernels.OPS[name].variants)}


def triton_arms(called: Axes) -> list[dict[str, str]]:
    """Choices without any `torch` kernel that between them use every Triton variant that can serve an op of a model
    alone, each fusion in one launch and composed of every variant of its parts.

    Args:
        called: The ops that the model calls, and their axes.
    """
    triton = triton_variants(called)
    fusions = composed_fusions(called)
    alone = [name for name in called if name not in fusions]
    in_parts = list(dict.fromkeys([*alone, *(part for parts in fusions.values() for part in parts)]))
    whole = [part for name, parts in fusions.items() for part in ([name] if triton[name] else parts)]
    ways = [in_parts] * max(len(triton[name]) for name in in_parts)
    ways += [list(dict.fromkeys([*alone, *whole]))] * max(len(triton[name]) for name in fusions)
    return [{name: triton[name][i % len(triton[name])] for name in way} for i, way in enumerate(ways)]


def called_ops(config: ModelConfig) -> Axes:
    """The ops that a model of `config` calls, and their axes."""
    limits = Limits(max_num_tokens=2048, max_num_seqs=4, max_model_len=64, block_size=16, num_blocks=16)
    return config.architecture.axes(config, limits)


def assert_triton_parity(directory: Path, arms: Sequence[Mapping[str, str]]) -> None:
    """Under each arm every kernel that it names runs, none of torch's does, and the logits are transformers'."""
    sequences = random_sequences((18, 3))
    expected = transformers_logits(directory, sequences, torch.float32)
    for choices in arms:
        recording = Recording("cpu")
        model = load(directory, torch.float32, choices, ranges=recording)
        for schedule in SCHEDULES:
            assert_parity(packed_logits(model, sequences, torch.float32, schedule), expected)
        ran = {span.name for span in recording.spans()}
        assert {f"{op}.{variant}" for op, variant in choices.items()} <= ran
        assert not {name for name in ran if name.endswith(".torch")}


def test_the_arms_hold_every_triton_variant_that_a_model_can_reach() -> None:
    for preset in PRESETS.values():
        called = called_ops(random_config(preset.config))
        reached = {*called, *(part for parts in composed_fusions(called).values() for part in parts)}
        every = {(name, variant) for name in reached for variant in triton_variants(called)[name]}
        chosen = {variant.name for variant in tkernels.OPS["matmul"].variants.values() if variant.kind == "triton"}
        assert chosen - {variant for name, variant in every if name == "matmul"} <= {"gemv", "split_k"}
        assert {(op, variant) for arm in triton_arms(called) for op, variant in arm.items()} == every


def arms_of_tiny() -> list[Any]:
    """The first arm, and the others as slow ones: each runs a model in the interpreter for ten seconds."""
    arms = triton_arms(called_ops(random_config(PRESETS["tiny"].config)))
    slow = [[], *([pytest.mark.slow] for _ in arms[1:])]
    return [pytest.param(arm, marks=one, id="-".join(arm.values())) for arm, one in zip(arms, slow, strict=True)]


@pytest.mark.parametrize("choices", arms_of_tiny())
def test_triton_kernels_give_the_logits_of_transformers(tmp_path: Path, choices: dict[str, str]) -> None:
    assert_triton_parity(random_model(tmp_path), [choices])


def new_arms(architecture: str) -> list[dict[str, str]]:
    """The architecture's first arm, and those with a variant that no arm of an architecture before it has."""
    seen: set[tuple[str, str]] = set()
    configs = {one.config["architectures"][0]: one.config for one in PRESETS.values()}
    for name in (QWEN3, *(name for name in known_architectures() if name != QWEN3)):
        config = configs.get(name) or {"eos_token_id": None, **raw_config(name, **first_shape(name).fields)}
        arms = triton_arms(called_ops(random_config(config)))
        if name == architecture:
            return [arm for arm in arms if arm is arms[0] or arm.items() - seen]
        seen |= {pair for arm in arms for pair in arm.items()}
    raise AssertionError(f"{architecture} is not known")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in known_architectures() if name != QWEN3])
def test_triton_kernels_of_an_architecture_give_the_logits_of_transformers(architecture: str, tmp_path: Path) -> None:
    directory = random_model(tmp_path, architecture=architecture, **first_shape(architecture).fields)
    assert_triton_parity(directory, new_arms(architecture))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_padding_changes_nothing(tmp_path: Path, schedule: str) -> None:
    directory = random_model(tmp_path, **WINDOWS)
    sequences = random_sequences((9, 17))
    model = load(directory, torch.float32)
    expected = packed_logits(model, sequences, torch.float32, schedule)
    padded = packed_logits(model, sequences, torch.float32, schedule, padding=3)
    assert torch.isfinite(padded).all()
    torch.testing.assert_close(padded, expected, rtol=0, atol=1e-5)


def test_float64_follows_transformers_in_float64(tmp_path: Path) -> None:
    directory = random_model(tmp_path)
    sequences = random_sequences(LENGTHS)
    logits = packed_logits(load(directory, torch.float64), sequences, torch.float64, "in chunks")
    assert logits.dtype == torch.float64
    # transformers computes its norms and angles in float32 whatever the model's dtype.
    torch.testing.assert_close(logits, transformers_logits(directory, sequences, torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", known_architectures())
def test_half_precision_is_as_near_to_float64_as_transformers_is(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """RMS distance over 1,024 rows from the float64 model of the same rounded weights: at most 1.1 times theirs."""
    directory = random_model(tmp_path, dtype, architecture, **first_shape(architecture).fields)
    ours, theirs = distances_to_float64(directory, dtype, random_sequences((64,) * 16))
    for schedule, distance in ours.items():
        assert distance <= LARGEST_RATIO * theirs, f"{schedule}: ours {distance:.4f}, transformers {theirs:.4f}"


def test_any_wanted_rows_of_a_mixed_batch_come_back(tmp_path: Path) -> None:
    """Decode rows and prefill chunks together: all T rows, and every ascending choice of fewer, are the same rows."""
    directory = random_model(tmp_path)
    model = load(directory, torch.float32)
    sequences = random_sequences((9, 6, 12))
    mixed = []

    def in_parts(batch: Any, cache: Any) -> torch.Tensor:
        every = model(batch, cache)
        assert len(every) == len(batch.token_ids)
        if 0 < batch.num_decodes < len(batch.context_lens):
            mixed.append(batch.num_decodes)
            last = torch.cat((torch.arange(batch.num_decodes), batch.num_decodes + batch.cu_seqlens_q[1:].long() - 1))
            for wanted in (last, last[1:], last[-1:], torch.arange(1, len(every))):
                some = model(dataclasses.replace(batch, logit_indices=wanted), cache)
                torch.testing.assert_close(some, every[wanted], rtol=0, atol=1e-5)
        return every

    in_parts.config = model.config  # type: ignore[attr-defined]
    driver = Driver(in_parts, sequences, torch.float32)  # type: ignore[arg-type]
    logits = torch.cat(driver.run(token_by_token((9, 6, 12), 4)))
    assert len(mixed) == 2
    assert_parity(logits, transformers_logits(directory, sequences, torch.float32))


def test_only_the_wanted_rows_come_back(tmp_path: Path) -> None:
    directory = random_model(tmp_path)
    model = load(directory, torch.float32)
    sequences = random_sequences((11, 6))
    expected = packed_logits(model, sequences, torch.float32, "in one go")
    wanted = torch.tensor([10, 16])  # each sequence's last
    driver = Driver(model, sequences, torch.float32)

    def last_rows_only(batch: Any, cache: Any) -> torch.Tensor:
        some = model(dataclasses.replace(batch, logit_indices=wanted), cache)
        torch.testing.assert_close(some, expected[wanted], rtol=0, atol=1e-5)
        return model(batch, cache)

    last_rows_only.config = model.config  # type: ignore[attr-defined]
    driver.model = last_rows_only  # type: ignore[assignment]
    torch.testing.assert_close(torch.cat(driver.run(in_one_go((11, 6)))), expected, rtol=0, atol=1e-5)
