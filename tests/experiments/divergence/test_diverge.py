"""`tk diverge`: a planted wrong kernel and a planted wrong layer are named, right ones are not, and calls replay."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import tkernels
from experiments.cli import app
from experiments.divergence import transformers_reading
from experiments.divergence.finding import compare_logits, compare_with_transformers, find_divergence
from experiments.divergence.reading import HeardModel, Reading
from experiments.divergence.transformers_reading import load_both
from tests.tkernels.outside import write_variant
from tests.tmodel.test_parity import SHAPES, random_model
from tests.tsched.conftest import checkpoint, checkpoint_without_tokenizer
from tmodel import find_model, load_config

__all__ = ["checkpoint", "checkpoint_without_tokenizer"]

PROMPTS = ([7, 3, 250, 11, 40, 8, 19, 150, 6, 77, 31, 201, 5, 90, 13, 64, 299, 2], [101, 4, 33, 12, 9])
"""More than a page, and less."""

PROMPTS_BELOW_97 = [[token % 97 for token in prompt] for prompt in PROMPTS]
GPT2 = next(shape.fields for shape in SHAPES if shape.architecture == "GPT2LMHeadModel")


def tk(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def read(directory: Path, dtype: torch.dtype = torch.float32, **kernels: str) -> tuple[HeardModel, Reading]:
    model = HeardModel(
        lambda: directory, load_config(directory), kernels, lengths=[18, 5], after=3,
        device=torch.device("cpu"), dtype=dtype, ops=tkernels.OPS,
    )  # fmt: skip
    return model, model.read(PROMPTS)


def changed(directory: Path, out: Path, factors: dict[str, float]) -> Path:
    """A copy of a checkpoint with some tensors multiplied."""
    shutil.copytree(directory, out)
    tensors = load_file(out / "model.safetensors")
    for name, factor in factors.items():
        tensors[name] *= factor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def steep(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with gates below 4 in layer 0, and above in layer 1."""
    gates = {"model.layers.0.mlp.gate_proj.weight": 0.1, "model.layers.1.mlp.gate_proj.weight": 3.0}
    return changed(checkpoint, tmp_path_factory.mktemp("steep") / "model", gates)


CLAMPED = ("out = gate /", "gate = tl.minimum(gate, 4.0)\n    out = gate /")
"""Wrong where a gate is above 4, and right elsewhere."""


def test_a_planted_wrong_kernel_is_named_and_its_call_replays(steep: Path, tmp_path: Path) -> None:
    folder = write_variant(tmp_path / "mine", CLAMPED)
    arguments = ("--model", steep, "--variants-from", folder, "--max-tokens", 1, "--out", tmp_path / "out")
    done = tk("diverge", "swiglu=doubled", "default", *arguments, "--json")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert found["wrong_calls"].keys() == {"A"}
    wrong = found["wrong_calls"]["A"]
    assert (wrong["step"], wrong["layer"], wrong["op"]) == ("prefill, first half", "layer 1", "swiglu")
    row = wrong["index"][0]  # of the first halves of 24 and of 9 tokens
    assert (wrong["variant"], wrong["output"]) == ("doubled", "out")
    assert wrong["token"] == ([0, row] if row < 12 else [1, row - 12])
    assert wrong["ratio"] > 1000
    assert abs(wrong["got"]) < abs(wrong["expected"])
    assert found["logits"]["top1"] < found["logits"]["rows"] == 24 + 9 + 2
    apart = {one["place"]: one["apart"] for one in found["differences"]}
    assert list(apart) == ["model.layers.0", "model.layers.1", "lm_head", "logits"]
    assert apart["model.layers.1"] < 1e-6 < 1e-2 < apart["lm_head"]

    program, *replay = shlex.split(wrong["replay"])
    assert program == "tk"
    again = tk(*replay, "--json")
    assert again.exit_code == 1
    (failed,) = json.loads(again.stdout)
    (failure,) = failed["failures"]
    index = ", ".join(map(str, wrong["index"]))
    assert f"out[{index}]: expected {wrong['expected']:.9g}, got {wrong['got']:.9g}" in failure["message"]
    assert failure["replay"] == wrong["replay"]
    others = list(tkernels.OPS["swiglu"].variants)
    (file,) = (tmp_path / "out").iterdir()
    right = tk("check", "--call", file, "--json")
    assert (right.exit_code, [row["variant"] for row in json.loads(right.stdout)]) == (0, others)


@pytest.mark.parametrize(
    ("weight", "place"),
    [
        ("layers.1.input_layernorm", ("model.layers.1.self_attn.q_proj", "input")),
        ("layers.1.self_attn.v_proj", ("model.layers.1.self_attn.v_proj", "output")),
        ("layers.0.self_attn.k_norm", ("model.layers.0.self_attn.o_proj", "input")),
        ("layers.1.self_attn.o_proj", ("model.layers.1.self_attn.o_proj", "output")),
        ("layers.0.mlp.up_proj", ("model.layers.0.mlp.down_proj", "input")),
        ("layers.0.mlp.down_proj", ("model.layers.0.mlp.down_proj", "output")),
        ("norm", ("lm_head", "input")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_planted_wrong_layer_of_transformers_is_named(
    checkpoint: Path, weight: str, place: tuple[str, str], dtype: torch.dtype
) -> None:
    """In float32 off by a thousandth, in bf16, whose eps is eight of them, by a half."""
    ours = reading(checkpoint, dtype)
    models = load_both(checkpoint, torch.device("cpu"), dtype)
    for model in models:
        with torch.no_grad():
            model.model.get_submodule(weight).weight *= 1.001 if dtype == torch.float32 else 1.5
    wrong = compare_with_transformers(ours, *models).wrong_part
    assert wrong is not None
    assert wrong.place == place
    assert wrong.ratio > 1


READINGS: dict[torch.dtype, Reading] = {}


def reading(directory: Path, dtype: torch.dtype) -> Reading:
    """This engine's, once for each dtype."""
    if dtype not in READINGS:
        READINGS[dtype] = read(directory, dtype)[1]
    return READINGS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_model_differs_from_transformers_by_rounding_alone(checkpoint: Path, dtype: torch.dtype) -> None:
    ours = reading(checkpoint, dtype)
    beside = compare_with_transformers(ours, *load_both(checkpoint, torch.device("cpu"), dtype))
    theirs, exact = beside.theirs, beside.exact
    assert beside.wrong_part is None
    assert theirs.sequences == ours.sequences
    assert theirs.places.keys() == ours.places.keys()
    mine, other = ((one.logits.double() - exact.logits).square().mean().sqrt() for one in (ours, theirs))
    assert 0 < mine < 2 * other
    assert len(ours.places) == 2 * 2 * 5 + 2  # both sides of q, k, v, o and down of two layers, and the head's


def test_a_reading_is_what_the_engine_and_transformers_compute(checkpoint: Path) -> None:
    """In two halves and then token by token; the tokens that it adds are the likeliest."""
    model, ours = read(checkpoint)
    assert model.wrong is None
    assert [len(sequence) for sequence in ours.sequences] == [18 + 3, 5 + 3]
    assert [tuple(one[: len(prompt)]) for one, prompt in zip(ours.sequences, PROMPTS, strict=True)] == [
        tuple(prompt) for prompt in PROMPTS
    ]
    rows = [0, 21]
    for start, prompt, sequence in zip(rows, PROMPTS, ours.sequences, strict=True):
        for place in range(len(prompt), len(sequence)):
            assert int(ours.logits[start + place - 1].argmax()) == sequence[place]
    from transformers import Qwen3ForCausalLM

    transformers_model = Qwen3ForCausalLM.from_pretrained(checkpoint)
    with torch.inference_mode():
        expected = torch.cat([transformers_model(input_ids=torch.tensor([one])).logits[0] for one in ours.sequences])
    torch.testing.assert_close(ours.logits, expected, rtol=0, atol=1e-4)


def test_right_kernels_are_right_on_a_model_s_own_values(checkpoint: Path) -> None:
    """Fused and composed Triton variants beside torch's: nothing is wrong, and nothing is bit-equal."""
    kernels = {
        "rms_norm": "row_per_program",
        "add_rms_norm": "rows_per_program",
        "matmul": "persistent",
        "swiglu": "fused",
        "qk_norm_rope_scatter": "head_tile",
        "paged_prefill": "packed_gqa",
        "paged_decode": "split_kv",
    }
    found = find_divergence(
        (kernels, {}), find_model(checkpoint), PROMPTS, 1, device=torch.device("cpu"), dtype=torch.float32,
        ops=tkernels.OPS, advance=lambda step: None,
    )  # fmt: skip
    assert found.is_rounding
    assert 0 < found.logits.largest < 1e-3
    assert found.logits.top1 == found.logits.rows == 25


SCATTER = """
from tkernels import Variant
from tkernels.ops.kv_scatter.contract import baseline

def scatter(k, v, k_cache, v_cache, slots):
    baseline(k, v * 1.5, k_cache, v_cache, slots)

VARIANT = Variant(wins="never", function=scatter, deterministic=True, batch_invariant=True)
"""


def test_a_wrong_write_to_the_cache_is_found_where_it_is_made(checkpoint: Path, tmp_path: Path) -> None:
    """Not in the attention that reads it: in a part of a composed fusion, on its own arguments."""
    (tmp_path / "kv_scatter").mkdir()
    (tmp_path / "kv_scatter" / "louder.py").write_text(SCATTER)
    ops = tkernels.OPS.with_variants_from(tmp_path)
    found = find_divergence(
        ({}, {"kv_scatter": "louder"}), find_model(checkpoint), PROMPTS, 0, device=torch.device("cpu"),
        dtype=torch.float32, ops=ops, advance=lambda step: None,
    )  # fmt: skip
    (wrong,) = found.wrong_calls.values()
    assert found.wrong_calls.keys() == {"B"}
    assert wrong.call.kernel.variant.name == "louder"
    assert (wrong.layer, wrong.call.output, wrong.token) == ("layer 0", "v_cache", None)


def test_a_wrong_layer_of_transformers_ends_the_command_with_1(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = transformers_reading.load_transformers

    def load_wrong(*arguments: Any) -> Any:
        model = load(*arguments)
        with torch.no_grad():
            model.model.layers[1].self_attn.o_proj.weight[5] *= -1
        return model

    arguments = ("--model", checkpoint, "--prompt", "def scan(line", "--max-tokens", 1, "--out", tmp_path / "out")
    right = tk("diverge", "default", "transformers", *arguments)
    assert right.exit_code == 0, right.output
    assert "Nothing is wrong: " in right.stdout
    monkeypatch.setattr(transformers_reading, "load_transformers", load_wrong)
    wrong = tk("diverge", "transformers", "default", *arguments)
    assert wrong.exit_code == 1, wrong.output
    assert "first differ at the output of model.layers.1.self_attn.o_proj:\n  [5] of token " in wrong.stdout
    assert "Every kernel is right on its own arguments" in wrong.stdout
    assert not (tmp_path / "out").exists()  # no call is wrong, so none is kept


def test_logits_are_compared_row_by_row() -> None:
    """Four rows of two sequences: one has another likeliest token, one another of the first five."""
    a = torch.tensor([[9.0, 8, 7, 6, 5, 4]] * 4)
    b = a.clone()
    b[1, 0] = 7.5  # token 1 leads by a half
    b[3, 4:] = torch.tensor([4.5, 4.75])
    found = compare_logits(Reading([[1, 2, 3], [4]], a, {}), Reading([[1, 2, 3], [4]], b, {}))
    assert (found.rows, found.top1, found.top5) == (4, 3, 3)
    assert (found.first_other, found.likeliest, found.leads) == ((0, 1), (0, 1), (1.0, 0.5))
    assert (found.largest, found.largest_at, found.largest_of) == (1.5, (0, 1), 0)
    same = compare_logits(Reading([[1, 2, 3, 4]], a, {}), Reading([[1, 2, 3, 4]], a, {}))
    assert (same.top1, same.top5, same.first_other, same.leads, same.largest) == (4, 4, None, None, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("transformers", "transformers"), "A and B are transformers both"),
        (("tranformers", "default"), "A tranformers: an arm is default, transformers, or op=variant"),
        (("default", "swiglu=fusd"), "did you mean 'fused'?"),
        (("default", "swiglu=fused,swiglu=torch"), "swiglu is given twice"),
        (("default", "default", "--prompt", ""), "--prompt '': 0 tokens; with --max-tokens 8 the model reads from 1"),
        (("default", "default", "--max-tokens", "128"), "--max-tokens 128: "),
        (("default", "default", "--dtype", "float8"), "dtype must be"),
    ],
)
def test_what_cannot_be_done_is_refused(checkpoint: Path, arguments: tuple[str, ...], message: str) -> None:
    done = tk("diverge", *arguments, "--model", checkpoint)
    assert done.exit_code == 2, done.output
    assert message in done.stderr


def test_a_text_needs_a_tokenizer(checkpoint_without_tokenizer: Path) -> None:
    done = tk("diverge", "default", "default", "--model", checkpoint_without_tokenizer, "--prompt", "a")
    assert (done.exit_code, "has no tokenizer; without --prompt, tokens are drawn" in done.stderr) == (2, True)


def test_variants_that_round_where_transformers_rounds_come_nearer_to_it(checkpoint: Path) -> None:
    """In bf16; neither set is wrong."""
    ops = tkernels.OPS.with_variants_from(Path(__file__).parent / "as_transformers")
    like = dict.fromkeys(("rms_norm", "add_rms_norm", "qk_norm_rope"), "as_transformers")
    apart = []
    for kernels in ({}, like):
        found = find_divergence(
            (kernels, None), find_model(checkpoint), PROMPTS, 0, device=torch.device("cpu"), dtype=torch.bfloat16,
            ops=ops, advance=lambda step: None,
        )  # fmt: skip
        assert found.is_rounding
        apart.append(found.differences[-1].apart)  # of the logits
    assert apart[1] < apart[0] / 2
    rounding = {one.place: one for one in found.rounding}
    norms = [("model.layers.*.self_attn.q_proj", "input"), ("lm_head", "input")]
    assert [(rounding[place].elements, rounding[place].other) for place in norms] == [(2 * 23 * 32, 0), (23 * 32, 0)]
    assert 0 < rounding["model.layers.*.self_attn.o_proj", "input"].other < 2 * 23 * 64 / 10


def test_two_layers_of_one_last_name_are_two_places(tmp_path: Path) -> None:
    """GPT-2 has a c_proj behind its attention and one behind its MLP."""
    directory = random_model(tmp_path, architecture="GPT2LMHeadModel", **GPT2)
    found = find_divergence(
        ({}, None), find_model(directory), PROMPTS_BELOW_97, 1, device=torch.device("cpu"), dtype=torch.float32,
        ops=tkernels.OPS, advance=lambda step: None,
    )  # fmt: skip
    assert found.is_rounding
    places = {one.place for one in found.rounding}
    assert {(f"transformer.h.*.{part}.c_proj", "output") for part in ("attn", "mlp")} < places


@pytest.mark.parametrize(
    ("architecture", "router"), [("Qwen3MoeForCausalLM", "mlp.gate"), ("GptOssForCausalLM", "mlp.router")]
)
def test_a_mixture_of_experts_is_beside_transformers(architecture: str, router: str, tmp_path: Path) -> None:
    """Routers are places of their own, layer by layer; the experts of a layer are one kernel's."""
    fields = next(shape.fields for shape in SHAPES if shape.architecture == architecture)
    directory = random_model(tmp_path, architecture=architecture, **fields)
    found = find_divergence(
        ({}, None), find_model(directory), PROMPTS_BELOW_97, 1, device=torch.device("cpu"), dtype=torch.float32,
        ops=tkernels.OPS, advance=lambda step: None,
    )  # fmt: skip
    assert found.is_rounding
    places = {one.place for one in found.rounding}
    assert (f"model.layers.*.{router}", "output") in places
    assert not {place for place, _ in places if "experts" in place}
