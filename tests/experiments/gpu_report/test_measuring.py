"""What a report measures with, as far as it runs without a GPU: signatures, cases, reruns, stress, whole models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from experiments.cli import app
from experiments.gpu_report.correctness import Signature, Tried, cases, check, rerun, signatures
from experiments.gpu_report.engine import Work, compare, fit_works, load_models, our_step, their_step
from experiments.gpu_report.steps import new_step
from experiments.gpu_report.worker import Job, timing_rows
from experiments.runs.rows import Row
from tests.tkernels.outside import write_variant
from tkernels import OPS, Config, Tuning
from tkernels.contract import FLOATS
from tkernels.measurement import Measurement, Method, measure
from tkernels.variant import Variant
from tmodel import RANDOM_PRESETS

CPU = torch.device("cpu")
AXES = {"T": 2, "I": 64, "activation": "float32", "layout": "contiguous", "values": "ordinary"}


def doubled(folder: Path, *changes: tuple[str, str]) -> Variant:
    return OPS.with_variants_from(write_variant(folder, *changes))["swiglu"].variants["doubled"]


def test_signatures_are_different_of_every_dtype_and_the_same_every_time() -> None:
    variant = OPS["swiglu"].variants["fused"]
    found = signatures(variant, CPU, 6)
    assert len({s.text for s in found}) == 6
    assert {s.axes["activation"] for s in found} == set(FLOATS)
    assert signatures(variant, CPU, 6) == found
    drawn = list(cases(variant, found[0], 5, CPU))
    assert all(case.axes[name] == value for case in drawn for name, value in found[0].axes.items())
    assert len({case.seed for case in drawn}) == 5


@pytest.mark.parametrize("changed", [False, True])
def test_a_wrong_variant_is_found_with_its_replay(tmp_path: Path, changed: bool) -> None:
    wrong = (("FACTOR=1,", "FACTOR=2,"),) if changed else ()
    variant = doubled(tmp_path, *wrong)
    found = check(variant, signatures(variant, CPU, 1)[0], 3, CPU)
    assert found.runs == 3
    if changed:
        assert found.right is not None
        assert found.right < 3
        assert "replay: tk check" in found.problem
    else:
        assert (found.right, found.problem) == (3, "")


COUNTING = (
    ("FACTOR=1,", "FACTOR=next(COUNT),"),
    ("VARIANT =", "import itertools\nCOUNT = itertools.count(1)\nVARIANT ="),
)


@pytest.mark.parametrize("busy", [False, True])
def test_reruns_compare_every_bit(tmp_path: Path, busy: bool) -> None:
    assert rerun(doubled(tmp_path / "a"), AXES, CPU, 3, busy=busy) == Tried(3, None, "")
    assert rerun(doubled(tmp_path / "b", *COUNTING), AXES, CPU, 3, busy=busy).problem == "3 runs gave other bits"
    may_differ = ("deterministic=True", "deterministic=False")
    assert rerun(doubled(tmp_path / "c", *COUNTING, may_differ), AXES, CPU, 3, busy=busy).problem == ""


def test_reruns_find_counters_that_were_left(tmp_path: Path) -> None:
    from tkernels.workspace import Buffer

    variant = doubled(tmp_path)
    variant.zeroed.take("arrived", Buffer((1,), torch.int32, zeroed=True), CPU).fill_(1)
    assert rerun(variant, AXES, CPU, 2, busy=True).problem == "counters not at zero: arrived"


def rows_of(found: Measurement) -> list[Row]:
    job = Job(new_step("time", 1.0, found.op, found.variant), "r1", OPS, CPU, Tuning(), lambda message: None)
    return list(timing_rows(job, found))


def test_a_timing_is_the_rows_of_a_sweeps_check_and_of_its_time() -> None:
    checked, timed = rows_of(measure(OPS["swiglu"].variants["torch"], "small", AXES, CPU, method=Method(samples=3)))
    assert (checked.stage, checked.status, checked.point) == ("check", "ok", "small")
    assert (timed.stage, timed.status, timed.axes) == ("kernels", "ok", AXES)
    assert timed.median_us is not None
    assert timed.median_us > 0
    assert len(timed.samples_us or ()) == 3
    assert timed.dtype == "float32"


@pytest.mark.parametrize(
    ("status", "stage"), [("unsupported", "check"), ("wrong", "check"), ("failed", "kernels"), ("void", "kernels")]
)
def test_what_has_no_time_has_a_row_that_says_why(status: Any, stage: str) -> None:
    (row,) = rows_of(Measurement("swiglu", "fused", "triton", "small", AXES, status, "for this reason"))
    assert (row.stage, row.status) == (stage, "failed" if status == "void" else status)
    assert (row.reason, row.median_us, row.point) == ("for this reason", None, "small")


SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 64, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 32,
}  # fmt: skip


def small_preset(preset: str) -> dict[str, Any]:
    """A random preset with small sizes for its own."""
    return {name: SIZES.get(name, value) for name, value in RANDOM_PRESETS[preset].items()}


@pytest.fixture
def _tiny_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(RANDOM_PRESETS, "small", small_preset("Qwen3-0.6B"))


@pytest.mark.parametrize("preset", RANDOM_PRESETS)
@pytest.mark.usefixtures("_tiny_preset")
def test_our_model_and_transformers_compute_the_same_on_the_same_random_weights(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RANDOM_PRESETS, "small", small_preset(preset))
    works = fit_works("small", (Work("prefill", 2, 24), Work("decode", 3, 20), Work("prefill", 1, 40)))
    assert [work.tokens for work in works] == [24, 20, 32 if preset == "gpt2" else 40]
    theirs, ours = load_models("small", CPU, torch.float32, OPS, Tuning(), works)
    for prefill in (works[0], works[2]):
        batch, cache = our_step(prefill, ours.config, CPU, torch.float32)
        logits = ours(batch, cache)  # [B, vocab]
        expected = their_step(prefill, theirs, ours.config, CPU)()[:, 0]
        assert torch.allclose(logits, expected, atol=1e-6)
    own, other = compare(works[1], theirs, ours, CPU, torch.float32, samples=2)
    assert (own.peer, own.settings, other.peer) == (None, {"cuda_graphs": False}, "transformers")
    for found in (own, other):
        assert found.timing is not None
        assert found.timing.median_us > 0
    assert works[1].name == "decode B=3, 20 tokens"


@pytest.mark.usefixtures("_tiny_preset")
def test_a_step_that_cannot_be_taken_says_why() -> None:
    works = (Work("decode", 1, 20),)
    _, ours = load_models("small", CPU, torch.float32, OPS, Tuning(), works)

    class Broken(torch.nn.Module):
        config = None

        def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
            yield torch.nn.Parameter(torch.zeros(1))

        def forward(self, *given: object, **named: object) -> None:
            raise ValueError("no such thing")

    *_, theirs = compare(Work("prefill", 1, 20), Broken(), ours, CPU, torch.float32, samples=2)
    assert (theirs.timing, theirs.reason) == (None, "ValueError: no such thing")


def test_without_a_gpu_the_dry_run_lists_every_step_and_the_run_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    dry = runner.invoke(app, ["gpu-report", "--out", str(tmp_path / "new"), "--dry-run"])
    assert dry.exit_code == 0
    for said in (
        "device",
        "check paged_decode.split_kv",
        "time dequant_gemm.gemlite",
        "engine Qwen3-4B",
        "within 9 min",
    ):
        assert said in dry.stdout
    assert not (tmp_path / "new").exists()
    real = runner.invoke(app, ["gpu-report", "--out", str(tmp_path / "new")])
    assert real.exit_code == 2
    assert "tk gpu-report needs a CUDA device, and there is none here" in real.stderr


def test_a_signature_names_its_config() -> None:
    assert Signature({"I": 8}, Config(BLOCK=64)).text == "I=8 [BLOCK=64,num_warps=4,num_stages=2]"
    assert Signature({"I": 8}, None).text == "I=8"
