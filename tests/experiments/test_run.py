"""Runs, from a plan to the rows of a folder."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from rich.console import Console

import experiments.stages.engine
from experiments.commands.requests import RunRequest
from experiments.commands.run import _carry_out
from experiments.document import read_document
from experiments.planning.plan import Plan, make_sweep
from experiments.planning.resolved import resolved_text
from experiments.reporting.tables import print_report
from experiments.runs.folder import RunFolder
from experiments.runs.rows import Row
from experiments.stages.parity import first_difference
from experiments.stages.timed_llm import TimedLLM
from experiments.sweep.runner import RunInterrupted, failures
from experiments.sweep.tasks import Executor
from tests.tkernels.outside import write_variant
from tkernels.source_hash import source_hash

Run = Callable[..., RunFolder]
KERNELS: dict[str, Any] = {
    "kernels": {"swiglu": ["torch", "fused"]}, "shapes": {"swiglu": [{"T": 3, "I": 33}]}, "dtype": "bfloat16",
}  # fmt: skip
PROMPTS: dict[str, Any] = {"workload": {"kind": "prompts", "prompts": ["def scan(", "start"], "max_tokens": 5}}
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8, "kv_cache_bytes": 1 << 18}
WRONG = ("offs, out.to(out_ptr", "offs, (out * 1.1).to(out_ptr")


def rows_of(folder: RunFolder, stage: str) -> Sequence[Any]:
    return [row for row in folder.rows if row.stage == stage]


def printed(plan: Plan, folder: RunFolder, width: int) -> str:
    console = Console(width=width, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    prompts = {one.name: one.prompts for one in plan.experiment.workload if one.kind == "prompts"}
    print_report(console, prompts, folder.rows)
    return console.export_text()


def test_a_kernel_only_run_fills_its_folder(run: Run, tmp_path: Path) -> None:
    folder = run(**KERNELS)
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "columns.json", "environment.json", "experiment.yaml", "resolved.yaml", "results.jsonl", "run.json", "sources",
    ]  # fmt: skip
    assert (folder.path / "experiment.yaml").read_text() == (tmp_path / "experiment.yaml").read_text()
    lines = (folder.path / "results.jsonl").read_text().splitlines()
    assert [Row.model_validate_json(line) for line in lines] == folder.rows
    modelled = [] if torch.cuda.is_available() else [("foretold", "fused", "ok")]
    assert [(row.stage, row.variant, row.status) for row in folder.rows] == [
        ("check", "torch", "ok"), ("check", "fused", "ok"), ("kernels", "torch", "ok"), ("kernels", "fused", "ok"),
        *modelled,
    ]  # fmt: skip
    assert {row.run_id for row in folder.rows} == {folder.run_id}
    assert {row.dtype for row in folder.rows} == {"bfloat16"}
    assert all(1e7 < row.host_peak_bytes < 1e11 for row in folder.rows if row.host_peak_bytes is not None)
    assert None not in {row.host_peak_bytes for row in folder.rows}
    assert {row.device_peak_bytes is None for row in folder.rows} == {not torch.cuda.is_available()}
    assert all(0 <= (load or 0.0) < 1e6 for row in folder.rows for load in (row.load_before, row.load_after))
    torch_row, fused_row = rows_of(folder, "kernels")
    assert torch_row.bytes_moved == fused_row.bytes_moved == 3 * 3 * 33 * 2
    assert torch_row.axes["activation"] == "bfloat16"
    if not torch.cuda.is_available():
        assert torch_row.min_us <= torch_row.median_us <= torch_row.max_us
        assert torch_row.yardstick_us > 1
        assert fused_row.yardstick_us is None
        assert fused_row.median_us is None
        assert "interpreted" in fused_row.speed_reason
        assert "CPU" in torch_row.roofline_reason
        (foretold,) = rows_of(folder, "foretold")
        assert (foretold.predicted_us is None) != (foretold.predicted_reason is None)
        assert foretold.median_us is None
    assert failures(folder) == []


def test_the_environment_says_what_the_figures_depend_on(run: Run) -> None:
    folder = run(**KERNELS, seed=7)
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment["run_id"] == folder.run_id
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["seeds"] == {"inputs": 7}
    assert environment["unchecked"] == []
    assert {row.seed for row in rows_of(folder, "check")} == {7}
    assert set(environment["kernels"]) == {"swiglu.torch", "swiglu.fused"}
    assert environment["kernels"]["swiglu.torch"] is None
    assert len(environment["kernels"]["swiglu.fused"]) == len(source_hash({}))
    assert environment["git"]["commit"] or environment["git"]["reason"]
    assert environment["tuning"]["mode"] == "nearest"


def test_the_resolved_experiment_is_one_that_resolves_to_itself(run: Run, tmp_path: Path) -> None:
    write_variant(tmp_path / "mine")
    pinned = {"swiglu": ["torch", {"doubled": {"num_warps": [4, 8]}}]}
    folder = run(kernels=pinned, variants_from=["mine"], shapes={"swiglu": [{"T": 2, "I": 8}]})
    again = make_sweep(read_document(folder.path / "resolved.yaml"))
    (plan,) = again.plans
    assert [arm.labels["swiglu"] for arm in plan.arms] == [
        "torch",
        "doubled[num_warps=4]",
        "doubled[num_warps=8]",
    ]
    assert plan.variant_folders == ((tmp_path / "mine").resolve(),)
    assert resolved_text(again) == (folder.path / "resolved.yaml").read_text()


def test_a_run_says_that_it_has_no_use_for_a_servers_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise RunInterrupted(tmp_path)

    file = tmp_path / "experiment.yaml"
    file.write_text(json.dumps({"name": "a", **KERNELS, "serving": {"queue_timeout": 5}}))
    sweep = make_sweep(read_document(file))
    assert yaml.safe_load(resolved_text(sweep))["serving"]["queue_timeout"] == 5
    monkeypatch.setattr("experiments.sweep.runner.run_experiment", interrupt)
    assert _carry_out(RunRequest(file), sweep, cast("Executor", None)) == 130
    assert "serving: its limits are for tk serve; a run has no use for them" in capsys.readouterr().err


def test_an_outside_variant_is_checked_timed_and_served(run: Run, tmp_path: Path, checkpoint: Path) -> None:
    write_variant(tmp_path / "mine")
    folder = run(
        model={"path": str(checkpoint)}, scheduler=SMALL, variants_from=["mine"],
        kernels={"swiglu": ["torch", "doubled"]}, **PROMPTS,
    )  # fmt: skip
    assert failures(folder) == []
    checked = {(row.op, row.variant, row.point): row.status for row in rows_of(folder, "check")}
    assert checked[("swiglu", "doubled", "decode")] == checked[("swiglu", "doubled", "prefill")] == "ok"
    first, second = rows_of(folder, "engine")
    assert (first.arm["swiglu"], second.arm["swiglu"]) == ("torch", "doubled")
    assert first.output_tokens == second.output_tokens == 10
    assert first.texts == second.texts
    assert first.tokens_per_s > 0
    assert len(first.seconds) == 3
    (parity,) = rows_of(folder, "parity")
    assert parity.tokens_equal
    assert parity.requests_equal == 2
    assert 0 < parity.logprob_drift < 1e-3
    assert parity.first_arm == first.arm


OWN_WEIGHT = """
from pathlib import Path
import torch
from tkernels import Variant
from tkernels.quantized.weight import dequantize

class Dense:
    def __init__(self, weight):
        with Path(__file__).with_suffix(".log").open("a") as log:
            log.write("prepared ")
        self.weight = dequantize(weight)

def dequant_gemm(x, weight, *, bias=None):
    assert isinstance(weight, Dense), "it takes what it prepared, and nothing else"
    return torch.nn.functional.linear(x, weight.weight.to(x.dtype), bias)

VARIANT = Variant(
    wins="never", function=dequant_gemm, prepare=Dense, deterministic=False, batch_invariant=False,
)
"""


def test_a_weight_is_prepared_once_and_what_is_timed_is_what_was_checked(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine" / "dequant_gemm").mkdir(parents=True)
    (tmp_path / "mine" / "dequant_gemm" / "own.py").write_text(OWN_WEIGHT)
    shape = {"M": 2, "N": 16, "K": 64, "group_size": 32, "bits": 4, "coding": "uniform", "permuted": False}
    shape |= {"sparse": False, "padding": 0, "symmetric": False, "bias": False}
    kernels, shapes = {"dequant_gemm": "own"}, {"dequant_gemm": [shape]}
    folder = run(variants_from=["mine"], kernels=kernels, shapes=shapes, device="cpu")
    assert failures(folder) == []
    (check,), (timed,) = rows_of(folder, "check"), rows_of(folder, "kernels")
    assert (check.status, timed.status) == ("ok", "ok")
    assert timed.median_us > 0
    log = (tmp_path / "mine" / "dequant_gemm" / "own.log").read_text()
    assert log.split() == ["prepared"] * 2  # by the check, and before the first sample


def test_a_wrong_variant_gets_no_speed_and_is_not_served(run: Run, tmp_path: Path, checkpoint: Path) -> None:
    write_variant(tmp_path / "mine", WRONG)
    folder = run(
        model={"path": str(checkpoint)}, scheduler=SMALL, variants_from=["mine"],
        kernels={"swiglu": ["doubled", "torch"]}, **PROMPTS,
    )  # fmt: skip
    bad = [row for row in rows_of(folder, "check") if row.variant == "doubled"]
    assert {row.status for row in bad} == {"wrong"}
    assert all(row.max_error_ratio > 1 and "--op swiglu --variant doubled" in row.replay for row in bad)
    assert "doubled" not in {row.variant for row in rows_of(folder, "kernels")}
    first, second = rows_of(folder, "engine")
    assert (first.status, second.status) == ("wrong", "ok")
    assert "swiglu.doubled is wrong" in first.reason
    assert rows_of(folder, "parity") == []
    assert len(failures(folder)) == len(bad) + 1


def test_an_unsupported_arm_is_a_row_and_no_failure(run: Run, tmp_path: Path, checkpoint: Path) -> None:
    write_variant(tmp_path / "mine", ('wins="never"', 'wins="never", supports=lambda axes, device: "only on Tuesdays"'))
    keys: dict[str, Any] = {
        "model": {"path": str(checkpoint)},
        "scheduler": SMALL,
        "variants_from": ["mine"],
        **PROMPTS,
    }
    folder = run(**keys, kernels={"swiglu": ["doubled", "torch"]})
    first, second = rows_of(folder, "engine")
    assert (first.status, second.status) == ("unsupported", "ok")
    assert "only on Tuesdays" in first.reason
    assert failures(folder) == []


def test_a_shape_that_a_variant_does_not_support_is_a_row_and_keeps_no_arm_from_running(
    run: Run, tmp_path: Path, checkpoint: Path
) -> None:
    narrow = 'wins="never", supports=lambda axes, device: None if axes["I"] < 100 else "too wide"'
    write_variant(tmp_path / "mine", ('wins="never"', narrow))
    keys: dict[str, Any] = {
        "model": {"path": str(checkpoint)},
        "scheduler": SMALL,
        "variants_from": ["mine"],
        **PROMPTS,
    }
    folder = run(**keys, kernels={"swiglu": "doubled"}, shapes={"swiglu": [{"T": 1, "I": 100}]})
    status = {row.point: row.status for row in rows_of(folder, "check") if row.variant == "doubled"}
    assert status == {"decode": "ok", "prefill": "ok", "T=1,I=100": "unsupported"}
    assert [row.status for row in rows_of(folder, "engine")] == ["ok"]
    assert failures(folder) == []


@pytest.mark.parametrize("error", ["1 // 0", "exec('raise RuntimeError(8)')"])
def test_a_launcher_that_raises_is_a_row_and_the_others_go_on(
    run: Run, tmp_path: Path, checkpoint: Path, error: str
) -> None:
    write_variant(
        tmp_path / "mine", ("    tokens, width = out.shape\n", f"    tokens, width = out.shape\n    {error}\n")
    )
    keys: dict[str, Any] = {"model": {"path": str(checkpoint)}, "scheduler": SMALL, "variants_from": ["mine"]}
    folder = run(**keys, **PROMPTS, kernels={"swiglu": ["doubled", "torch"]}, device="cpu", repeats=1)
    bad = [row for row in rows_of(folder, "check") if row.variant == "doubled"]
    assert {(row.point, row.status) for row in bad} == {("decode", "failed"), ("prefill", "failed")}
    assert all("Error: " in row.reason for row in bad)
    assert [row.status for row in rows_of(folder, "engine")] == ["failed", "ok"]


def test_a_request_that_fails_makes_the_run_fail(run: Run, checkpoint: Path) -> None:
    """The pool holds the shorter ones alone."""
    workload = {"kind": "synthetic", "num_requests": 3, "input_len": {"uniform": [4, 60]}, "output_len": 2, "seed": 0}
    folder = run(
        model={"path": str(checkpoint)}, scheduler={**SMALL, "kv_cache_bytes": 3 << 13}, repeats=1, workload=workload,
        device="cpu",
    )  # fmt: skip
    (row,) = rows_of(folder, "engine")
    assert (row.status, row.reason) == ("ok", None)
    assert 0 < row.requests_failed < row.requests
    (bad,) = failures(folder)
    assert bad.startswith(f"engine: {row.requests_failed} of 3 requests failed: ")
    assert row.requests_error in bad


def test_nothing_supported_is_a_failure(run: Run, tmp_path: Path, checkpoint: Path) -> None:
    write_variant(tmp_path / "mine", ('wins="never"', 'wins="never", supports=lambda axes, device: "only on Tuesdays"'))
    keys: dict[str, Any] = {
        "model": {"path": str(checkpoint)},
        "scheduler": SMALL,
        "variants_from": ["mine"],
        **PROMPTS,
    }
    assert failures(run(**keys, kernels={"swiglu": "doubled"})) == ["no arm is supported here"]


def test_a_crash_in_one_arm_is_a_row_and_the_others_go_on(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crashing(*args: Any, **kwargs: Any) -> TimedLLM:
        if kwargs["block_size"] == 16:
            raise RuntimeError("out of\nmemory")
        return TimedLLM(*args, **kwargs)

    monkeypatch.setattr(experiments.stages.engine, "TimedLLM", crashing)
    folder = run(model={"path": str(checkpoint)}, scheduler={**SMALL, "block_size": [8, 16, 32]}, repeats=1, **PROMPTS)
    rows = rows_of(folder, "engine")
    assert [(row.settings, row.status) for row in rows] == [
        ({"block_size": 8}, "ok"), ({"block_size": 16}, "failed"), ({"block_size": 32}, "ok"),
    ]  # fmt: skip
    assert rows[1].reason == "RuntimeError: out of memory"
    assert [(row.settings, row.tokens_equal) for row in rows_of(folder, "parity")] == [({"block_size": 32}, True)]
    assert failures(folder) == ["engine failed: RuntimeError: out of memory"]


def test_peers_serve_the_same_tokens(run: Run, checkpoint: Path) -> None:
    workload = {
        "kind": "synthetic", "num_requests": 3, "input_len": {"uniform": [2, 9]}, "output_len": {"uniform": [3, 6]},
    }  # fmt: skip
    peers = ["transformers_one_at_a_time", "transformers_batched"]
    folder = run(
        model={"path": str(checkpoint)}, scheduler=SMALL, workload=workload, peers=peers, repeats=1, replicates=2
    )
    assert failures(folder) == []
    engines = rows_of(folder, "engine")
    assert [row.replicate for row in engines] == [0, 1]
    for peer in peers:
        rows = [row for row in rows_of(folder, "peers") if row.peer == peer]
        assert [row.replicate for row in rows] == [0, 1]
        assert rows[0].peer_settings == rows[1].peer_settings
        for row in rows:
            assert row.status == "ok"
            assert row.arm == {}
            assert row.output_tokens == engines[0].output_tokens
            assert set(row.peer_settings) == {"attention", "cache"}
        (beside,) = [row for row in rows_of(folder, "speedup") if row.peer == peer]
        assert beside.arm == engines[0].arm
        assert beside.tokens_equal
        assert beside.requests_equal == beside.requests == 3
        assert len(beside.speedups) == 2
        assert beside.speedup_of == "median of replicates"
        assert min(beside.speedups) <= beside.speedup <= max(beside.speedups)
        pairs = zip(engines, rows, strict=True)
        ratios = [theirs.seconds[0] / mine.seconds[0] for mine, theirs in pairs]
        assert beside.speedups == pytest.approx(ratios)


def test_a_peer_that_cannot_compare_is_a_row(run: Run, checkpoint: Path) -> None:
    folder = run(model={"path": str(checkpoint)}, scheduler=SMALL, peers=["transformers_batched"], repeats=1, **PROMPTS)
    (row,) = rows_of(folder, "peers")
    assert row.status == "unsupported"
    assert "ignore_eos" in row.reason
    assert rows_of(folder, "engine")[0].status == "ok"


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_terminal(
    run: Run, plan: Callable[..., Plan], tmp_path: Path, checkpoint: Path, width: int
) -> None:
    write_variant(tmp_path / "mine", WRONG)
    keys: dict[str, Any] = {
        "model": {"path": str(checkpoint)},
        "scheduler": SMALL,
        "variants_from": ["mine"],
        **PROMPTS,
    }
    pinned = {"row_per_program": {"num_warps": [2, 4]}}
    keys["kernels"] = {"swiglu": ["torch", "doubled"], "rms_norm": ["torch", pinned]}
    folder = run(**keys)
    text = printed(plan(**keys), folder, width)
    assert max(len(line.rstrip()) for line in text.splitlines() if "replay" not in line) <= width
    for word in (
        "rms_norm",
        "row_per_program[num_warps=2]",
        "decode",
        "wrong",
        "tokens/s",
        "replay: tk check ",
    ):
        assert word in text
    replays = {row.replay for row in folder.rows if row.stage == "check" and row.status == "wrong"}
    assert replays
    assert replays <= {line.strip().removeprefix("replay: ") for line in text.splitlines()}


def test_a_folder_in_use_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").touch()
    with pytest.raises(FileExistsError, match="exists and is not an empty directory; a run is written to a new one"):
        run(**KERNELS)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]


@pytest.mark.parametrize(
    ("a", "b", "place"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)]
)
def test_the_first_place_where_outputs_differ(a: list[int], b: list[int], place: int | None) -> None:
    assert first_difference(a, b) == place
