"""What a report measures with, as far as it runs without a GPU: signatures, cases, reruns, stress, whole models."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from experiments.cli import app
from experiments.commands.requests import GpuReportRequest
from experiments.document import ExperimentError
from experiments.gpu_report.correctness import (
    Signature,
    Tried,
    cases,
    check,
    rerun,
    signatures,
    vary_batches,
    verify,
)
from experiments.gpu_report.engine import Work, compare, fit_works, load_models, our_step, their_step
from experiments.gpu_report.steps import new_step
from experiments.gpu_report.worker import Job, timing_rows
from experiments.gpu_report.worth import report_points
from experiments.runs.rows import Row
from tests.tkernels.outside import write_variant
from tkernels import OPS, Config, Tuning, UnsupportedError
from tkernels.contract import FLOATS
from tkernels.measurement import CPU_SIZE, Measurement, Method, measure
from tkernels.variant import Variant
from tkernels.verification.check import check_case
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


@pytest.mark.parametrize("changed", [False, True])
def test_bits_that_depend_on_the_batch_are_found_with_their_replay(tmp_path: Path, changed: bool) -> None:
    stored = "    out = gate / (1 + tl.exp(-gate)) * up * FACTOR\n"
    passed = [("FACTOR=1,", "FACTOR=1, tokens=tokens,"), ("width, FACTOR: ", "width, tokens, FACTOR: ")]
    wrong = (*passed, (stored, f"{stored}    out *= tl.where(tokens > 1, 1.0 + 1.0e-6, 1.0)\n"))
    found = vary_batches(doubled(tmp_path, *(wrong if changed else ())), 3, CPU)
    assert found.runs == 3
    if changed:
        assert found.right is not None
        assert found.right < 3
        assert "against its bits alone" in found.problem
        assert "replay: tk check --sanitize batch" in found.problem
    else:
        assert (found.right, found.problem) == (3, "")


@pytest.mark.parametrize("changed", [False, True])
def test_a_marked_shape_is_judged_with_the_weight_as_the_variant_wants_it(tmp_path: Path, changed: bool) -> None:
    variant = doubled(tmp_path, *((("FACTOR=1,", "FACTOR=2,"),) if changed else ()))
    found = verify(variant, variant.contract.case(AXES, 0, CPU), CPU)
    assert (found.runs, found.right) == (1, 0 if changed else 1)
    assert ("replay: tk check" in found.problem) == changed


def test_what_does_not_fit_the_device_is_judged_at_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def too_large(variant: Variant, case: Any, *given: Any) -> Any:
        tried.append(case.axes["T"])
        if case.axes["T"] > CPU_SIZE:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return check_case(variant, case, *given)

    monkeypatch.setattr("experiments.gpu_report.correctness.check_case", too_large)
    variant = OPS["swiglu"].variants["torch"]
    axes = {**AXES, "T": 2 * CPU_SIZE, "I": 8}
    assert verify(variant, variant.contract.case(axes, 0, CPU), CPU) == Tried(1, 1, "")
    assert tried == [2 * CPU_SIZE, CPU_SIZE]


def test_a_shape_that_a_variant_does_not_take_is_no_fault() -> None:
    variant = OPS["rms_norm"].variants["rows_per_program"]
    axes = {**report_points(variant.contract)["T=4096,H=2560"], "T": 4}
    with pytest.raises(UnsupportedError, match="rows wider than 2048"):
        verify(variant, variant.contract.case(axes, 0, CPU), CPU)


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


def test_without_a_gpu_the_dry_run_counts_every_step_and_the_run_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "400")
    runner = CliRunner()
    dry = runner.invoke(app, ["gpu-report", "--out", str(tmp_path / "new"), "--dry-run", "--minutes", "9,9,9"])
    assert dry.exit_code == 0
    for said in (
        "device",
        "stress paged_decode.last_arriver",
        "mark nano_vllm",
        "within 9 minutes of command 3",
        "the kernels' marks and the first of the engine's: all is there after command",
    ):
        assert said in dry.stdout
    every = int(re.findall(r"(\d+) steps; estimates", dry.stdout)[0])
    ended = sum(map(int, re.findall(r"(\d+) would end within", dry.stdout)))
    (rest,) = re.findall(r"^not begun: (\d+) \(", dry.stdout, re.MULTILINE)
    (refused,) = re.findall(r"cannot run here, and the report says so: (\d+) \(", dry.stdout)
    cut = len(re.findall("cut off here, it goes on", dry.stdout))
    assert ended + int(rest) + int(refused) <= every <= ended + int(rest) + int(refused) + cut
    assert len(dry.stdout.splitlines()) < ended + cut + 20
    assert not (tmp_path / "new").exists()
    real = runner.invoke(app, ["gpu-report", "--out", str(tmp_path / "new")])
    assert real.exit_code == 2
    assert "tk gpu-report needs a CUDA device, and there is none here" in real.stderr


@pytest.mark.parametrize(
    ("minutes", "dry", "lengths"),
    [("9", False, [9.0]), ("0.5", False, [0.5]), ("9,9.5", True, [9.0, 9.5])],
)
def test_minutes_are_numbers(minutes: str, dry: bool, lengths: list[float]) -> None:
    assert GpuReportRequest(Path("x"), minutes, dry_run=dry).lengths == lengths


@pytest.mark.parametrize(
    ("minutes", "dry"),
    [
        ("9,x", True),
        ("", True),
        ("9,", True),
        ("0", False),
        ("nan", False),
        ("inf", False),
        ("-9", False),
        ("9,9", False),
    ],
)
def test_malformed_minutes_are_refused_with_what_is_allowed(minutes: str, dry: bool) -> None:
    allowed = "must be a number from 0.1, or, with --dry-run, those of several commands, as in 9,9,9"
    with pytest.raises(ExperimentError, match=re.escape(f"--minutes {minutes}: {allowed}")):
        _ = GpuReportRequest(Path("x"), minutes, dry_run=dry).lengths


def test_a_signature_names_its_config() -> None:
    assert Signature({"I": 8}, Config(BLOCK=64)).text == "I=8 [BLOCK=64,num_warps=4,num_stages=2]"
    assert Signature({"I": 8}, None).text == "I=8"
