"""What the engine is to reach on an H200: each mark is a YAML's figure, run by `tk run` or as a step of the report."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from experiments.document import read_document
from experiments.gpu_report.journal import Fact, facts
from experiments.planning.plan import Sweep, make_sweep
from experiments.runs.rows import Row
from experiments.sweep.runner import run_experiment
from experiments.sweep.tasks import Executor
from tkernels import Tuning
from tmodel import kv_bytes_per_block
from tsched.execution.cache_size import estimate_weight_bytes

FOLDER = Path(__file__).parent.parent / "engine_marks"

_KEPT = frozenset(
    {
        "stage", "status", "reason", "settings", "workload", "peer", "requests", "requests_equal", "prompt_tokens",
        "output_tokens", "tokens_per_s", "tokens_per_s_iqr", "ttft_s", "tpot_s", "speedup", "speedup_iqr", "replicate",
    }
)  # fmt: skip
"""Of a run's rows, what a mark or a reader of the report needs."""


@dataclass(frozen=True)
class MarkRun:
    """An experiment under engine_marks/ with overrides, and the seconds that it takes, by reasoning."""

    file: str
    seconds: float
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.file.removesuffix(".yaml"), *self.overrides))

    @property
    def command(self) -> str:
        options = "".join(f" --set {override}" for override in self.overrides)
        return f"tk run experiments/engine_marks/{self.file}{options}"


@dataclass(frozen=True)
class Figure:
    """What was reached, for the eye, and whether that meets the mark; or why it is not known."""

    text: str | None
    met: bool = False
    note: str = ""


Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class EngineMark:
    """One figure that the engine is judged by. `reached`: of the run's facts and the device's measured copy bandwidth,
    bytes a second. Without a run, `command` is how it is measured elsewhere, and `note` says why it is not here.
    """

    figure: str
    mark: str
    run: MarkRun | None
    reached: Callable[[Fact, float | None], Figure] | None = None
    command: str = ""
    note: str = ""


def _of_floor(fact: Fact, copy_rate: float | None) -> Figure:
    """The time of reading all weights, and the keys and values of half the outputs, over that of a token."""
    (row,) = _engine_rows(fact)
    if not copy_rate:
        return Figure(None, note="no copy bandwidth was measured")
    context = row["prompt_tokens"] + row["output_tokens"] / 2
    floor = (fact["weight_bytes"] + fact["kv_bytes_per_token"] * context) / copy_rate
    token = row["tpot_s"]["p50"]
    return Figure(f"{floor / token:.0%}, {1 / token:,.0f} tokens/s", floor / token >= 0.80)


def _rate(fact: Fact, copy_rate: float | None) -> Figure:
    (row,) = _engine_rows(fact)
    return Figure(
        f"{row['tokens_per_s']:,.0f} tokens/s (IQR {row.get('tokens_per_s_iqr', 0):,.0f})",
        row["tokens_per_s"] >= 25_000,
    )


def _over(peer: str) -> Callable[[Fact, float | None], Figure]:
    def reached(fact: Fact, copy_rate: float | None) -> Figure:
        rows = [row for row in fact["rows"] if row.get("peer") == peer]
        row = next((row for row in rows if row["stage"] == "speedup" and row["status"] == "ok"), None)
        if row is None:
            reasons = [str(row["reason"]) for row in rows if row["status"] != "ok"]
            return Figure(None, note=next(iter(reasons), "the run did not get to it"))
        equal = f"{row['requests_equal']} of {row['requests']} requests with the same tokens"
        return Figure(f"{row['speedup']:.1f}x", row["speedup"] >= 24, equal)

    return reached


def _loss(fact: Fact, copy_rate: float | None) -> Figure:
    replicates: dict[str, list[float]] = {}
    for row in _engine_rows(fact):
        replicates.setdefault(row["settings"]["prefix_cache"], []).append(row["tokens_per_s"])
    rates = {name: statistics.median(of_each) for name, of_each in replicates.items()}
    none = rates.pop("none")
    losses = {name: 1 - rate / none for name, rate in rates.items()}
    return Figure(", ".join(f"{name} {loss:.1%}" for name, loss in losses.items()), max(losses.values()) < 0.01)


def _same_tokens(fact: Fact, copy_rate: float | None) -> Figure:
    rows = [row for row in fact["rows"] if row["stage"] == "parity"]
    equal, of = min(row["requests_equal"] for row in rows), rows[0]["requests"]
    arms = sum(row.get("replicate", 0) == 0 for row in _engine_rows(fact))
    return Figure(f"{equal} of {of} requests", equal == of and len(rows) == arms - 1)


def _engine_rows(fact: Fact) -> list[Mapping[str, Any]]:
    return [row for row in fact["rows"] if row["stage"] == "engine"]


_TRANSFORMERS = MarkRun("transformers.yaml", 540.0)
_OVERLAP = "overlap_and_graphs.yaml"
ENGINE_MARKS: tuple[EngineMark, ...] = (
    EngineMark("Qwen3-4B, batch 1, of the weight-read floor", ">= 80%", MarkRun("batch_1.yaml", 190.0), _of_floor),
    EngineMark("nano-vllm's benchmark, Qwen3-0.6B", ">= 25,000 tokens/s", MarkRun("nano_vllm.yaml", 220.0), _rate),
    EngineMark("the same tokens with CUDA graphs and overlap on and off, Qwen3-0.6B", "all requests",
               MarkRun(_OVERLAP, 130.0), _same_tokens),
    EngineMark("the same tokens with CUDA graphs and overlap on and off, Qwen3-4B", "all requests",
               MarkRun(_OVERLAP, 190.0, ("model.preset=Qwen3-4B",)), _same_tokens),
    EngineMark("tokens/s lost by a prefix cache at 0% hits, Qwen3-0.6B", "< 1%",
               MarkRun("prefix_cache.yaml", 280.0), _loss),
    EngineMark("over transformers' generate, one padded batch, Qwen3-0.6B", ">= 24x", _TRANSFORMERS,
               _over("transformers_batched")),
    EngineMark("over transformers' generate, one at a time, Qwen3-0.6B", ">= 24x", _TRANSFORMERS,
               _over("transformers_one_at_a_time")),
    EngineMark("schedule + commit of 256 sequences, over nano-vllm's", "< 0.25", None,
               command="python -m tests.bench.beside_nano_vllm PATH/TO/nano-vllm",
               note="a CPU's figure, which no GPU is needed for: the command prints it"),
    EngineMark("speculative decoding", "never slower", None, command="-", note="this engine does not speculate yet"),
)  # fmt: skip

RUNS: dict[str, MarkRun] = {mark.run.name: mark.run for mark in ENGINE_MARKS if mark.run is not None}
"""By name, the most valuable first; several marks may read one run."""


@dataclass(frozen=True)
class EngineRow:
    """One line of the table."""

    figure: str
    mark: str
    reached: str | None
    verdict: Literal["met", "missed", "not measured"]
    command: str
    note: str = ""


def engine_rows(lines: Sequence[Fact], marks: Sequence[EngineMark] = ENGINE_MARKS) -> list[EngineRow]:
    """Every mark's row, in order; "not measured" where there is no run of it."""
    known = facts(lines)
    runs = {fact["run"]: fact for fact in known if fact.get("kind") == "engine mark"}
    rates = [fact["copy_bytes_per_s"] for fact in known if fact.get("kind") == "rates"]
    return [_row(mark, runs, rates[-1] if rates else None) for mark in marks]


def _row(mark: EngineMark, runs: Mapping[str, Fact], copy_rate: float | None) -> EngineRow:
    command = mark.run.command if mark.run is not None else mark.command
    fact = runs.get(mark.run.name) if mark.run is not None else None
    if fact is None or mark.reached is None:
        return EngineRow(mark.figure, mark.mark, None, "not measured", command, mark.note)
    bad = [row for row in _engine_rows(fact) if row["status"] != "ok"]
    figure = Figure(None, note=str(bad[0]["reason"])) if bad else mark.reached(fact, copy_rate)
    if figure.text is None:
        return EngineRow(mark.figure, mark.mark, None, "not measured", command, figure.note)
    return EngineRow(mark.figure, mark.mark, figure.text, "met" if figure.met else "missed", command, figure.note)


def sweep_of(run: MarkRun, device: str, folder: Path = FOLDER) -> Sweep:
    """The run as it is on `device`."""
    return make_sweep(read_document(folder / run.file, [f"device={device}", *run.overrides]))


def measure(run: MarkRun, sweep: Sweep, out: Path, tuning: Tuning, executor: Executor | None = None) -> dict[str, Any]:
    """Runs it into the new folder `out`, with the configs of `tuning`, on `executor`; returns the fact."""
    (plan,) = sweep.plans
    assert plan.model is not None
    rows = run_experiment(sweep, out, run.overrides, Console(quiet=True), tuning, executor=executor).rows
    config = plan.model.config
    return {
        "kind": "engine mark",
        "run": run.name,
        "rows": [_compact(row) for row in rows if row.stage in ("engine", "parity", "peers", "speedup")],
        "failures": [str(row.reason) for row in rows if row.status in ("wrong", "failed")][:3],
        "weight_bytes": estimate_weight_bytes(plan.model.directory(), config, plan.dtype),
        "kv_bytes_per_token": kv_bytes_per_block(config, 1, plan.dtype),
    }


def _compact(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.model_dump(mode="json").items() if key in _KEPT and value is not None}
