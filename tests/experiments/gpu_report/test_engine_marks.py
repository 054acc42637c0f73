"""The engine's marks: each one's YAML through a GPU's code with a small model on a CPU, and its figure."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tsched.execution.placement
from experiments.document import ExperimentError, read_document
from experiments.gpu_report.engine_marks import ENGINE_MARKS, FOLDER, RUNS, EngineRow, MarkRun, engine_rows, measure
from experiments.gpu_report.steps import make_steps
from experiments.gpu_report.table import report
from experiments.gpu_report.worker import ACTIONS
from experiments.peers import with_peers
from experiments.planning.plan import make_sweep
from tests.experiments.in_process import InProcess
from tests.experiments.planning.single_plan import make_plan
from tkernels import OPS, Tuning
from tkernels.device import TARGETS
from tmodel import RANDOM_PRESETS

SMALL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
SMALLER = {
    "batch_1.yaml": ["workload.input_len=40", "workload.output_len=16"],
    "nano_vllm.yaml": ["workload.num_requests=4", "workload.input_len=20", "workload.output_len=9"],
    "transformers.yaml": ["workload.num_requests=2", "workload.input_len=9", "workload.output_len=5"],
    "prefix_cache.yaml": ["workload.num_requests=3", "workload.input_len=40", "workload.output_len=5"],
    "overlap_and_graphs.yaml": ["workload.num_requests=3", "workload.input_len=20", "workload.output_len=9"],
}
RATES = {
    "step": "device", "event": "fact", "kind": "rates",
    "copy_bytes_per_s": 4.3e12, "read_bytes_per_s": 4.4e12, "matmul_flops_per_s": 7.9e14,
}  # fmt: skip


@pytest.fixture
def _small_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("Qwen3-0.6B", "Qwen3-4B"):
        monkeypatch.setitem(RANDOM_PRESETS, name, SMALL)


def rows_by_figure(lines: list[dict[str, Any]]) -> dict[str, EngineRow]:
    return {row.figure: row for row in engine_rows(lines)}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.usefixtures("_small_models")
def test_a_mark_is_measured_by_its_own_yaml(name: str, tmp_path: Path) -> None:
    """Every mark that reads this run has a figure, and no other has."""
    run = RUNS[name]
    overrides = [*run.overrides, *SMALLER[run.file], "repeats=1", "device=cpu", "dtype=float32"]
    overrides += ["scheduler.kv_cache_bytes=4194304", "scheduler.max_num_batched_tokens=128"]
    sweep = make_sweep(read_document(FOLDER / run.file, overrides))
    assert not sweep.plans[0].unsupported
    fact = measure(run, sweep, tmp_path / "out", Tuning(), InProcess())
    assert fact["failures"] == []
    lines = [RATES, {"step": f"mark {name}", "event": "fact", **fact}]
    found = rows_by_figure(lines)
    for mark in ENGINE_MARKS:
        row = found[mark.figure]
        measured = mark.run is not None and mark.run.name == name
        assert (row.reached is not None) == measured, row
        assert (row.verdict != "not measured") == measured
    if run.file == "overlap_and_graphs.yaml":
        assert "3 of 3 requests" in [row.reached for row in found.values()]
    assert f"`{run.command}`" in report(lines)


@pytest.mark.parametrize("name", RUNS)
def test_where_its_model_does_not_fit_a_mark_says_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tsched.execution.placement, "device_memory", lambda device: (10**9, 0))
    run = RUNS[name]
    needed = "billion random weights take [0-9.]+ GB as bfloat16, this machine has 1.0 GB"
    with pytest.raises(ExperimentError, match=needed):
        make_plan(read_document(FOLDER / run.file, run.overrides))


def test_every_mark_has_a_command_and_every_run_a_step() -> None:
    steps = make_steps(with_peers(OPS), TARGETS["sm_90"], 16)
    assert [step.point for step in steps if step.kind == "mark"] == list(RUNS)
    assert "mark" in ACTIONS
    assert {run.file for run in RUNS.values()} == {path.name for path in FOLDER.glob("*.yaml")}
    for row in engine_rows(()):
        assert (row.reached, row.verdict) == (None, "not measured")
        assert row.command


def engine_fact(run: MarkRun, *rows: dict[str, Any]) -> dict[str, Any]:
    common = {"step": "mark", "event": "fact", "kind": "engine mark", "run": run.name, "failures": []}
    return {**common, "rows": rows, "weight_bytes": 8_044_936_192, "kv_bytes_per_token": 147_456}


def served(settings: dict[str, Any] | None = None, **figures: Any) -> dict[str, Any]:
    return {"stage": "engine", "status": "ok", "settings": settings or {}, **figures}


@pytest.mark.parametrize(("token_us", "reached", "verdict"), [(2300.0, "83%", "met"), (2500.0, "76%", "missed")])
def test_the_floor_of_batch_1_is_weights_and_keys_at_the_cards_own_rate(
    token_us: float, reached: str, verdict: str
) -> None:
    """1,024 tokens of context in the mean: 1.91 ms, 525 tokens/s, at 4.3 TB/s."""
    row = served(prompt_tokens=896, output_tokens=256, tpot_s={"p50": token_us / 1e6})
    found = engine_rows([RATES, engine_fact(RUNS["batch_1"], row)])[0]
    assert found.reached == f"{reached}, {1e6 / token_us:,.0f} tokens/s"
    assert found.verdict == verdict
    assert engine_rows([engine_fact(RUNS["batch_1"], row)])[0].note == "no copy bandwidth was measured"


def test_what_the_other_marks_ask_for() -> None:
    def row(run: str, figure: str, *rows: dict[str, Any]) -> EngineRow:
        (found,) = [row for row in engine_rows([engine_fact(RUNS[run], *rows)]) if row.figure.startswith(figure)]
        return found

    for rate, verdict in ((25_000.0, "met"), (24_999.0, "missed")):
        rates = {"tokens_per_s": rate, "tokens_per_s_iqr": 5.0}
        assert row("nano_vllm", "nano", served(**rates)).verdict == verdict
    for hash_rate, verdict in ((995.0, "met"), (985.0, "missed")):
        arms = {"none": 1000.0, "hash": hash_rate, "radix": 999.0}
        rows = [served({"prefix_cache": name}, tokens_per_s=rate) for name, rate in arms.items()]
        found = row("prefix_cache", "tokens/s lost", *rows)
        assert (found.verdict, found.reached) == (verdict, f"hash {1 - hash_rate / 1000:.1%}, radix 0.1%")
    peer = {"stage": "speedup", "peer": "transformers_batched", "settings": {}, "requests": 32, "requests_equal": 30}
    for speedup, verdict in ((24.5, "met"), (9.0, "missed")):
        found = row(
            "transformers", "over transformers' generate, one padded", {**peer, "status": "ok", "speedup": speedup}
        )
        assert (found.verdict, found.note) == (verdict, "30 of 32 requests with the same tokens")
    refused = {**peer, "stage": "peers", "status": "failed", "reason": "out of memory"}
    assert row("transformers", "over transformers' generate, one padded", refused).note == "out of memory"
    equal = [{"stage": "parity", "status": "ok", "requests": 64, "requests_equal": equal} for equal in (64, 63, 64)]
    found = row(
        "overlap_and_graphs",
        "the same tokens with CUDA graphs and overlap on and off, Qwen3-0.6B",
        *[served() for _ in range(4)],
        *equal,
    )
    assert (found.verdict, found.reached) == ("missed", "63 of 64 requests")


def test_a_run_whose_arm_failed_has_no_figure() -> None:
    failed = {"stage": "engine", "status": "failed", "reason": "its matmul is wrong", "settings": {}}
    found = engine_rows([engine_fact(RUNS["nano_vllm"], failed)])[1]
    assert (found.verdict, found.note) == ("not measured", "its matmul is wrong")
