"""What the engine is to reach on an H200: each mark is a YAML's figure, run by `tk run` or as a step of the report."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from experiments.document import read_document
from experiments.gpu_report.estimates import AGAIN_S
from experiments.planning.plan import Sweep, make_sweep
from experiments.runs.rows import Row, Stage
from tmodel import RANDOM_PRESETS, kv_bytes_per_block
from tmodel.random_weights import random_config

FOLDER = Path(__file__).parent.parent / "engine_marks"


@dataclass(frozen=True)
class MarkRun:
    """An experiment under engine_marks/ with overrides.

    Attributes:
        engine_s: What its longest task takes, by reasoning: loading the weights, recording CUDA graphs, and one round
            for the answers, one that is not counted and the timed ones; or the same of a peer.
        engines: How many such tasks there are.
    """

    file: str
    engine_s: float
    engines: int = 1
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.file.removesuffix(".yaml"), *self.overrides))

    @property
    def command(self) -> str:
        options = "".join(f" --set {override}" for override in self.overrides)
        return f"tk run experiments/engine_marks/{self.file}{options}"

    @property
    def seconds(self) -> float:
        """Of what a mark reads of it: servers that start, the checks, and the engines."""
        return AGAIN_S + CHECKS_S + self.engines * self.engine_s

    @property
    def least(self) -> float:
        """Of a server's start and the longest task: with less, going on with it does not pay."""
        return AGAIN_S + self.engine_s


@dataclass(frozen=True)
class Figure:
    """What was reached, for the eye, and whether that meets the mark; or the note says why it is not known."""

    text: str | None
    met: bool = False
    note: str = ""

    @property
    def verdict(self) -> Literal["met", "missed", "not measured"]:
        return "not measured" if self.text is None else "met" if self.met else "missed"


Reached = Callable[[Sequence[Row], float | None], Figure]
"""The figure of a run's rows, and of the device's measured copy bandwidth in bytes a second."""


@dataclass(frozen=True)
class EngineMark:
    """One figure that the engine is judged by. Without a run, `elsewhere` is the command that measures it, and `note`
    says why it is not measured here.
    """

    figure: str
    mark: str
    run: MarkRun | None
    reached: Reached | None = None
    elsewhere: str = ""
    note: str = ""

    @property
    def command(self) -> str:
        return self.run.command if self.run is not None else self.elsewhere


def _of_floor(rows: Sequence[Row], copy_rate: float | None) -> Figure:
    """The time of reading all weights, and the keys and values of half the outputs, over that of a token."""
    (row,) = _of_stage(rows, "engine")
    if not copy_rate:
        return Figure(None, note="no copy bandwidth was measured")
    config = random_config(RANDOM_PRESETS["Qwen3-4B"])
    context = (row.prompt_tokens or 0) + (row.output_tokens or 0) / 2
    read = (row.weight_bytes or 0) + kv_bytes_per_block(config, 1, torch.bfloat16) * context
    floor, token = read / copy_rate, (row.tpot_s or {})["p50"]
    return Figure(f"{floor / token:.0%}, {1 / token:,.0f} tokens/s", floor / token >= 0.80)


def _rate(rows: Sequence[Row], copy_rate: float | None) -> Figure:
    (row,) = _of_stage(rows, "engine")
    rate = row.tokens_per_s or 0.0
    return Figure(f"{rate:,.0f} tokens/s (IQR {row.tokens_per_s_iqr or 0:,.0f})", rate >= 25_000)


def _over(peer: str) -> Reached:
    def reached(rows: Sequence[Row], copy_rate: float | None) -> Figure:
        of_peer = [row for row in rows if row.peer == peer]
        row = next((row for row in of_peer if row.stage == "speedup" and row.status == "ok"), None)
        if row is None:
            return Figure(None, note=next((row.reason for row in of_peer if row.reason), "the run did not get to it"))
        equal = f"{row.requests_equal} of {row.requests} requests with the same tokens"
        return Figure(f"{row.speedup:.1f}x", (row.speedup or 0) >= 24, equal)

    return reached


def _loss(rows: Sequence[Row], copy_rate: float | None) -> Figure:
    replicates: dict[str, list[float]] = {}
    for row in _of_stage(rows, "engine"):
        replicates.setdefault(row.settings["prefix_cache"], []).append(row.tokens_per_s or 0.0)
    rates = {name: statistics.median(of_each) for name, of_each in replicates.items()}
    none = rates.pop("none")
    losses = {name: 1 - rate / none for name, rate in rates.items()}
    return Figure(", ".join(f"{name} {loss:.1%}" for name, loss in losses.items()), max(losses.values()) < 0.01)


def _same_tokens(rows: Sequence[Row], copy_rate: float | None) -> Figure:
    parities = _of_stage(rows, "parity")
    equal, of = min(row.requests_equal or 0 for row in parities), parities[0].requests
    arms = sum(row.replicate == 0 for row in _of_stage(rows, "engine"))
    return Figure(f"{equal} of {of} requests", equal == of and len(parities) == arms - 1)


def _of_stage(rows: Sequence[Row], stage: Stage) -> list[Row]:
    return [row for row in rows if row.stage == stage]


CHECKS_S = 25.0
"""The checks of a run: each of some 12 ops in a process of its own, 4 side by side: 8 s with what it compiles."""

_TRANSFORMERS = MarkRun("transformers.yaml", 160.0, 3)
_OVERLAP = "overlap_and_graphs.yaml"
ENGINE_MARKS: tuple[EngineMark, ...] = (
    EngineMark("Qwen3-4B, batch 1, of the weight-read floor", ">= 80%", MarkRun("batch_1.yaml", 20.0), _of_floor),
    EngineMark("nano-vllm's benchmark, Qwen3-0.6B", ">= 25,000 tokens/s", MarkRun("nano_vllm.yaml", 55.0), _rate),
    EngineMark("the same tokens with CUDA graphs and overlap on and off, Qwen3-0.6B", "all requests",
               MarkRun(_OVERLAP, 25.0, 4), _same_tokens),
    EngineMark("the same tokens with CUDA graphs and overlap on and off, Qwen3-4B", "all requests",
               MarkRun(_OVERLAP, 40.0, 4, ("model.preset=Qwen3-4B",)), _same_tokens),
    EngineMark("tokens/s lost by a prefix cache at 0% hits, Qwen3-0.6B", "< 1%",
               MarkRun("prefix_cache.yaml", 17.0, 15), _loss),
    EngineMark("over transformers' generate, one padded batch, Qwen3-0.6B", ">= 24x", _TRANSFORMERS,
               _over("transformers_batched")),
    EngineMark("over transformers' generate, one at a time, Qwen3-0.6B", ">= 24x", _TRANSFORMERS,
               _over("transformers_one_at_a_time")),
    EngineMark("schedule + commit of 256 sequences, over nano-vllm's", "< 0.25", None,
               elsewhere="python -m tests.bench.beside_nano_vllm PATH/TO/nano-vllm",
               note="a CPU's figure, which no GPU is needed for: the command prints it"),
    EngineMark("speculative decoding", "never slower", None, elsewhere="-", note="this engine does not speculate yet"),
)  # fmt: skip

RUNS: dict[str, MarkRun] = {mark.run.name: mark.run for mark in ENGINE_MARKS if mark.run is not None}
"""By name, the most valuable first; several marks may read one run."""


def engine_figures(rows: Sequence[Row], marks: Sequence[EngineMark] = ENGINE_MARKS) -> dict[EngineMark, Figure]:
    """What was reached of every mark, in order; "not measured" where there is no run of it."""
    rate = next((row.copy_bytes_per_s for row in rows if row.stage == "rates"), None)
    return {mark: _figure(mark, rows, rate) for mark in marks}


def _figure(mark: EngineMark, rows: Sequence[Row], copy_rate: float | None) -> Figure:
    own = [row for row in rows if mark.run is not None and row.workload == mark.run.name]
    engines = _of_stage(own, "engine")
    if mark.reached is None or not engines:
        return Figure(None, note=mark.note)
    bad = next((row for row in engines if row.status != "ok"), None)
    return Figure(None, note=str(bad.reason)) if bad is not None else mark.reached(own, copy_rate)


def sweep_of(run: MarkRun, device: str, folder: Path = FOLDER) -> Sweep:
    """The run as it is on `device`."""
    return make_sweep(read_document(folder / run.file, [f"device={device}", *run.overrides]))


def models_of(runs: Sequence[str]) -> list[str]:
    """The presets that these runs serve, by the runs' names."""
    documents = (read_document(FOLDER / RUNS[name].file, RUNS[name].overrides) for name in runs)
    return list(dict.fromkeys(document.data["model"]["preset"] for document in documents))
