"""`tk quantize`, `tk eval` and `tk generate` on what it wrote, and an experiment's quantization stage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from experiments.cli import app
from experiments.document import ExperimentError
from experiments.planning.plan import Plan
from experiments.quantization.models import QuantizedModel, list_quantized_models
from experiments.reporting.quantization import quantization_table
from experiments.sweep.runner import CACHE
from tests.experiments.conftest import Run
from tests.experiments.reporting.recorded import everything
from tests.tsched.conftest import TEXT, checkpoint
from tmodel.quantizers import METHODS as LIBRARY

__all__ = ["checkpoint"]

METHODS = {
    "rtn": (4, 32), "gptq": (4, 32), "awq": (4, 32), "squeezellm": (4, -1), "smoothquant": (8, -1), "fp8": (8, -1),
}  # fmt: skip
RTN = ("--method", "rtn", "--bits", 4, "--group-size", 32)


def tk(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def dense(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sizes that every format takes, with the tokenizer of the scheduler tests' one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("dense")
    config = Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.2, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((checkpoint / name).read_bytes())
    return directory


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT * 8)
    return file


@pytest.mark.parametrize("method", METHODS)
def test_quantize_then_eval_then_generate(method: str, dense: Path, text: Path, tmp_path: Path) -> None:
    bits, group_size = METHODS[method]
    out = tmp_path / "out"
    calibration = ["--calibration", text, "--window", 32] if LIBRARY[method].walk != "none" else []
    options = ["--method", method, "--bits", bits, *calibration]
    done = tk("quantize", dense, out, *options, *(["--group-size", group_size] if group_size != -1 else []))
    assert done.exit_code == 0, done.output
    assert f"{method}, {bits} bits" in done.stdout
    assert (out / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()

    done = tk("eval", "--model", out, "--reference", dense, "--text", text, "--window", 32, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert 0 < found["kl"] < 0.5
    assert 0.5 < found["top1_agreement"] <= 1
    done = tk("eval", "--model", dense, "--reference", out, "--text", text, "--window", 32)
    assert done.exit_code == 2
    assert f"--reference {out}: is quantized, by " in done.stderr

    done = tk("generate", "--model", out, "--prompt", "def scan(", "--max-tokens", 4, "--ignore-eos")
    assert done.exit_code == 0, done.output
    assert "[4 tokens" in done.stderr

    again = tk("quantize", dense, out, *options)
    assert again.exit_code == 2
    assert "exists and is not an empty directory" in again.stderr


def test_a_method_is_told_its_options(dense: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = ["act_order=groups", "symmetric=true", "checkpoint_format=gptq_v2", "damping=0.1", "search=yes"]
    options = ["--bits", 4, "--group-size", 32, "--calibration", text, "--window", 32]
    done = tk(
        "quantize", dense, out, "--method", "gptq", *options, *(part for one in told for part in ("--option", one))
    )
    assert done.exit_code == 0, done.output
    found = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (found["desc_act"], found["sym"], found["checkpoint_format"]) == (False, True, "gptq_v2")


def test_options_of_a_method_are_an_axis(dense: Path, text: Path, plan: Callable[..., Plan]) -> None:
    options = {"act_order": ["groups", "none"], "search": True}
    methods = {"gptq": {"bits": [3, 4], "group_size": 32, "options": options}, "rtn": {"bits": 4, "group_size": 32}}
    quantization = plan(**experiment(dense, text, methods=methods)).experiment.quantization
    assert quantization is not None
    models = list_quantized_models(quantization)
    assert [one.label for one in models] == [
        "gptq (act_order groups, search True) 3 bits, groups of 32",
        "gptq (act_order groups, search True) 4 bits, groups of 32",
        "gptq (act_order none, search True) 3 bits, groups of 32",
        "gptq (act_order none, search True) 4 bits, groups of 32",
        "rtn 4 bits, groups of 32",
    ]
    assert models[2].configure().options.model_dump()["act_order"] == "none"


def test_what_cannot_be_quantized_is_refused_before_anything_is_written(
    dense: Path, text: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("def scan(line):")
    out = tmp_path / "out"
    for source, options, expected in (
        (
            dense,
            ("--method", "gtpq", "--bits", 4),
            "unknown method 'gtpq': there is rtn, gptq, awq, squeezellm, smoothquant, fp8; did",
        ),
        (dense, ("--method", "awq", "--bits", 3, "--calibration", text), "awq writes 4 bits, not 3"),
        (dense, ("--method", "gptq", "--bits", 4, "--calibration", text), "group_size 128 does not divide"),
        (dense, ("--method", "gptq", "--bits", 4, "--group-size", 32), "gptq needs --calibration"),
        (dense, ("--method", "gptq", "--bits", 4, "--group-size", 32, "--calibration", short), "are too few"),
        (
            dense,
            ("--method", "gptq", "--bits", 4, "--group-size", 32, "--calibration", tmp_path / "none"),
            "none: no such file",
        ),
        (tmp_path / "nowhere", ("--method", "rtn", "--bits", 4), "there is no directory"),
        (dense, (*RTN, "--calibration", text), f"--calibration {text}: rtn looks at no text"),
        (dense, (*RTN, "--window", 32), "--window 32: rtn looks at no text"),
        (dense, ("--method", "gptq", "--bits", 4, "--option", "damping"), "--option damping: must be name=value"),
        (dense, ("--method", "gptq", "--bits", 4, "--option", "search=1"), "gptq's options: search: "),
        (dense, ("--method", "gptq", "--bits", 4, "--option", "serch=true"), "did you mean 'search'"),
        (dense, ("--method", "rtn", "--bits", 4, "--option", "damping=[", "--option", "a=1"), "'[' is no YAML value"),
        (dense, ("--method", "gptq", "--bits", 4, "--option", "search=on", "--option", "search=on"), "is given twice"),
    ):
        done = tk("quantize", source, out, *options)
        assert done.exit_code == 2, done.output
        assert expected in done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt", "text.txt"]


def experiment(dense: Path, file: Path, **changes: Any) -> dict[str, Any]:
    settings = {
        "methods": {"rtn": {"bits": [2, 8], "group_size": 32}, "squeezellm": {"bits": 4}},
        "window": 32,
        "text": str(file),
        "calibration": str(file),
        "max_tokens": 200,
        **changes,
    }
    return {
        "model": {"path": str(dense)},
        "quantization": settings,
        "scheduler": {"max_num_seqs": 2, "kv_cache_bytes": 2**20},
        "workload": {"kind": "synthetic", "num_requests": 2, "input_len": 8, "output_len": 4},
        "repeats": 1,
    }


def test_the_stage_judges_every_model_beside_the_dense_one(
    dense: Path, text: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(**experiment(dense, text))
    rows = [row for row in folder.rows if row.stage == "quantization"]
    assert [(row.method, row.bits, row.group_size) for row in rows] == [
        ("dense", None, None), ("rtn", 2, 32), ("rtn", 8, 32), ("squeezellm", 4, -1),
    ]  # fmt: skip
    first, worst, best, _ = rows
    assert {row.status for row in rows} == {"ok"}
    assert {row.num_tokens for row in rows} == {192}  # six whole windows of 32
    assert first.kl is None
    assert worst.kl is not None
    assert best.kl is not None
    assert best.kl < 0.001 < worst.kl
    for row in rows[1:]:
        assert first.memory_bytes is not None
        assert first.disk_bytes is not None
        assert row.memory_bytes is not None
        assert row.disk_bytes is not None
        assert row.memory_bytes < 0.8 * first.memory_bytes
        assert row.disk_bytes < 0.8 * first.disk_bytes
        assert row.tokens_per_s is not None
        assert row.speed_reason is None

    def made_again(*arguments: object) -> Path:
        raise AssertionError("the checkpoints are in the cache")

    monkeypatch.setattr("experiments.quantization.models.quantize_checkpoint", made_again)
    cached = sorted(path.name for path in (tmp_path / CACHE).iterdir())
    assert len(cached) == 3
    done = tk("run", tmp_path / "experiment.yaml", "--out", tmp_path / "again")
    assert done.exit_code == 0, done.output
    assert "rtn 2 bits g32" in done.stdout
    assert (tmp_path / "again" / "figures" / "quantization.svg").read_text().count("<path") > 4


def test_interpreted_kernels_have_no_speed(dense: Path, text: Path, run: Run) -> None:
    given = experiment(dense, text, methods={"rtn": {"bits": 4, "group_size": 32}})
    folder = run(**given, kernels={"rms_norm": "row_per_program"})
    for row in folder.rows:
        if row.stage == "quantization":
            assert row.tokens_per_s is None
            assert row.speed_reason == "rms_norm interpreted on a CPU: not measured"


def test_settings_that_cannot_be_are_refused_by_their_place(
    dense: Path, text: Path, plan: Callable[..., Plan], tmp_path: Path
) -> None:
    for changes, expected in (
        (
            {"methods": {"rtm": {"bits": 4}}},
            "unknown method 'rtm': there is rtn, gptq, awq, squeezellm, smoothquant, fp8; did",
        ),
        ({"methods": {"awq": {"bits": 3}}}, "awq writes 4 bits, not 3"),
        ({"methods": {"gptq": {"bits": 4, "group_size": 128}}}, "group_size 128 does not divide"),
        ({"methods": {"rtn": {"bit": 4}}}, "unknown key: there is bits, group_size, options; did you mean 'bits'?"),
        ({"methods": {"gptq": {"bits": 4, "options": {"dampign": 1}}}}, "did you mean 'damping'?"),
        ({"methods": {"gptq": {"bits": 4, "options": {"act_order": ["none", "all"]}}}}, "'none', got 'all'"),
        ({"methods": {"rtn": {"bits": 4, "options": {"search": True}}}}, "rtn has no option 'search': it has no"),
        ({"methods": {}}, "quantization.methods"),
        ({"window": 129}, "129 tokens, and the model was made for 128"),
        ({"text": "none.txt"}, "none.txt: no such file"),
    ):
        with pytest.raises(ExperimentError) as refused:
            plan(**experiment(dense, text, **changes))
        assert refused.value.problems[0].startswith(f"quantization.{next(iter(changes))}")
        assert any(expected in problem for problem in refused.value.problems), refused.value.problems
    with pytest.raises(ExperimentError) as refused:
        plan(quantization={"methods": {"rtn": {"bits": 4}}}, kernels={"rms_norm": "torch"})
    assert "quantization needs a model" in refused.value.problems[0]


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (QuantizedModel("gptq", 4, 32), "gptq"),
        (QuantizedModel("gptq", 8, 32, (("search", True),)), "gptq (search True)"),
        (QuantizedModel("smoothquant", 8, -1), "smoothquant W8A8"),
        (QuantizedModel("fp8", 8, -1), "fp8 W8A8"),
    ],
)
def test_a_model_whose_inputs_are_quantized_too_is_called_so(model: QuantizedModel, told: str) -> None:
    assert model.told == told


def test_the_table_sets_perplexity_beside_the_dense_model_of_the_same_settings() -> None:
    dense, rtn = [row for row in everything() if row.stage == "quantization"]
    settings = {**rtn.settings, "dtype": "bfloat16"}
    rows = [dense, rtn, *(row.model_copy(update={"settings": settings}) for row in (dense, rtn))]
    rows[2] = rows[2].model_copy(update={"perplexity": 30.0})
    table = quantization_table(rows)
    place = [column.name for column in table.columns].index("cost")
    costs = [line[place].text for line in table.lines if not isinstance(line, str)]
    assert costs == ["-", "+1.89%", "-", "-10.00%"]
    alone = quantization_table([rtn]).lines[0]
    assert not isinstance(alone, str)
    assert alone[place].text == "-"
