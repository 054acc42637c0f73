"""The rows of results.jsonl: one per fact, and its stage and status decide which columns it has.

A figure that is known not to exist is null, with its reason beside it; one that the status does not allow is absent, so
that no speed of a wrong kernel can be written down. What each column means, and in what unit, is said at its field:
columns.json in a run's folder says it to those who read the rows without this code, and the table of figures
(`experiments.runs.table`) takes its units from there.
"""

import math
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

SCHEMA = 1
"""Of a run's folder: which files there are, and what they hold. A reader refuses a newer one."""

VERSION = 2
"""Of the rows, as run.json has it under "rows_version"; `from_version_1` reads the first."""

Status = Literal["ok", "wrong", "unsupported", "failed"]
Stage = Literal[
    "check", "kernels", "foretold", "engine", "parity", "step", "peers", "speedup", "http", "quantization",
    "rates", "tuning", "hardware", "forward", "report",
]  # fmt: skip
"""check: a variant at one point against the float64 oracle. kernels: its time there, where the check was ok. foretold:
what a model says of its time on a GPU that is not there, which is compared with no measured figure. engine: a
workload served by one arm, a request of n completions counting as n. parity: an arm's tokens and log-probabilities
beside the first arm's. step: what one named range took of an arm's steps, in rounds that are recorded apart from the
timed ones and without overlap, so that a step's time is the sum of its parts. peers: a workload served by a peer.
speedup: the first arm that was timed over a peer, replicate by replicate. http: a workload served by an OpenAI server
that runs elsewhere, as its client sees it. quantization: the model as one method leaves it, beside the dense one, whose
own row has method "dense" and no bits.

Those of a GPU report alone: rates: what the device can do at most. tuning: a variant's best config in a bucket of
shapes. hardware: a variant tried on the device itself, over many cases or runs. forward: one step of a whole model on
random weights, ours or a peer's. report: a step that has no figures, or that did not come to its end.
"""


def column(meaning: str, unit: str | None = None, default: Any = None) -> Any:
    """A field that columns.json documents. unit: of a number, "count" and "ratio" included; None of everything else."""
    extra: dict[str, JsonValue] = {"unit": unit}
    return Field(default, description=meaning, json_schema_extra=extra)


Finite = Annotated[float, Field(allow_inf_nan=False)]

_ODD_FIGURES: Mapping[str, float] = {"infinite": math.inf, "minus infinity": -math.inf, "not a number": math.nan}

_SERVED = (
    "workload", "requests", "requests_failed", "requests_error", "prompt_tokens", "output_tokens", "tokens_per_s",
    "tokens_per_s_iqr", "seconds", "ttft_s", "tpot_s", "gap_s", "speed_reason",
)  # fmt: skip
_COMPARED = (
    "workload", "first_arm", "tokens_equal", "requests_equal", "requests", "first_divergence", "logprob_drift",
)  # fmt: skip
_QUANTIZED = ("method", "bits", "group_size")
_TRIED = ("test", "point", "runs", "runs_right")

COLUMNS: Mapping[Stage, Mapping[Status, tuple[str, ...]]] = {
    "check": {
        "ok": ("point", "seed", "max_error_ratio", "rms_error_ratio"),
        "wrong": ("point", "seed", "max_error_ratio", "rms_error_ratio", "replay"),
        "unsupported": ("point",),
        "failed": ("point", "seed", "replay"),
    },
    "kernels": {
        "ok": (
            "point", "bytes_moved", "flops", "config", "median_us", "iqr_us", "min_us", "max_us", "samples_us", "timer",
            "speed_reason", "roofline_fraction", "roofline_bound", "roofline_reason",
        ),
        "failed": ("point",),
    },
    "foretold": {
        "ok": (
            "point", "gpu", "predicted_us", "predicted_limit_us", "predicted_bound", "predicted_from",
            "predicted_reason", "model_version",
        ),
    },
    "engine": {
        "ok": (
            *_SERVED, "texts", "steps", "preemptions", "peak_occupancy", "last_page_waste", "peak_running",
            "hit_tokens", "saved_bytes", "evicted_blocks", "weight_bytes", "prepare_s",
        ),
        "wrong": ("workload",),
        "unsupported": ("workload",),
        "failed": ("workload",),
    },
    "parity": {"ok": _COMPARED, "wrong": _COMPARED},
    "step": {
        "ok": (
            "workload", "range", "category", "clock", "calls", "total_us", "self_us", "steps", "step_us", "share",
            "speed_reason",
        ),
        "failed": ("workload",),
    },
    "peers": {
        "ok": (*_SERVED, "peer", "peer_settings"),
        "unsupported": ("workload", "peer"),
        "failed": ("workload", "peer"),
    },
    "speedup": {
        "ok": (
            "workload", "peer", "peer_settings", "speedup", "speedup_iqr", "speedups", "speedup_of", "requests",
            "tokens_equal", "requests_equal",
        ),
        "failed": ("workload", "peer"),
    },
    "http": {
        "ok": (*_SERVED, "url", "served_model", "goodput", "slo_met"),
        "failed": ("workload", "url"),
    },
    "quantization": {
        "ok": (
            *_QUANTIZED, "num_tokens", "window", "nats", "perplexity", "kl", "top1_agreement", "disk_bytes",
            "memory_bytes", "tokens_per_s", "tokens_per_s_iqr", "speedup", "speed_reason",
        ),
        "unsupported": _QUANTIZED,
        "failed": _QUANTIZED,
    },
    "rates": {"ok": ("copy_bytes_per_s", "read_bytes_per_s", "matmul_flops_per_s")},
    "tuning": {"ok": ("point", "config"), "unsupported": ("point",), "failed": ("point",)},
    "hardware": {"ok": _TRIED, "wrong": _TRIED, "unsupported": ("test", "point")},
    "forward": {"ok": ("workload", "peer", "median_us", "iqr_us"), "failed": ("workload", "peer")},
    "report": {"ok": (), "failed": ()},
}  # fmt: skip
"""The columns of a stage's rows by their status, beside `SHARED`: they are given, and no other is."""

_REASON_OF: Mapping[str, str] = {
    "median_us": "speed_reason", "tokens_per_s": "speed_reason", "total_us": "speed_reason",
    "roofline_fraction": "roofline_reason", "predicted_us": "predicted_reason",
}  # fmt: skip
"""Figure -> the column that says why it is null, and is null itself where the figure is not."""


class Row(BaseModel):
    """One fact. The columns after `yardstick_us` are those of COLUMNS; of other stages and statuses they are absent."""

    # JSON has no other numbers, and a text in their place makes texts of the whole column for those who read it.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="null")

    run_id: str = column("the run that wrote it, as in run.json", default=...)
    task: str = column("key of the task that wrote it; follows from the YAML alone", default="")
    replicate: int = column("which repetition of the task, each in a process of its own; 0 if not repeated", "index", 0)
    task_rows: int = column("rows of the task, written in one go: where there are fewer, it was cut off", "count", 1)
    stage: Stage = column("what kind of fact this is; decides which other columns there are", default=...)
    arm: dict[str, str] = column("op -> variant, with pinned values in brackets", default=...)
    settings: dict[str, Any] = column("the swept settings that are no kernel, in their own units", default={})
    op: str | None = column("the op, of a row about one")
    variant: str | None = column("its variant, with pinned values in brackets")
    axes: dict[str, Any] | None = column("the op's axes at this point: sizes in elements, and names of dtypes")
    serves: list[dict[str, Any]] | None = column(
        "of a timed point, the workloads whose steps have these sizes, each with the settings that make them; null of "
        "a point that no workload asks for"
    )
    dtype: str = column("of the activations", default=...)
    device: str = column("type of the device: cpu or cuda; its name is in environment.json", default=...)
    status: Status = column("ok, or why there is no figure: wrong, unsupported, failed", default=...)
    reason: str | None = column("why it is not ok; null where it is")
    not_finite: str | None = column(
        "the figures that are null because they came out infinite or as no number, in words: max_error_ratio is "
        "infinite; null where there are none"
    )
    host_peak_bytes: int | None = column(
        "most memory that the row's process had held by then; null of a row that follows from others, and of one that "
        "its process did not live to write",
        "bytes",
    )
    device_peak_bytes: int | None = column(
        "the same of the GPU's memory, as torch allocated it; null on a CPU", "bytes"
    )
    load_before: float | None = column(
        "processes of the machine that ran or waited to run when the row's task began, a mean over the minute before",
        "count",
    )
    load_after: float | None = column("the same when the row was written", "count")
    yardstick_us: float | None = column(
        "median time of a fixed piece of work, taken in turns with this row's times: how fast the machine was; null "
        "where none was taken, as on a GPU",
        "us",
    )

    point: str | None = column("name of the point among the op's")
    seed: int | None = column("of the inputs", "index")
    max_error_ratio: float | None = column("largest error over what the error rule allows: right to 1", "ratio")
    rms_error_ratio: float | None = column("root mean square error over what is allowed: right to 1", "ratio")
    replay: str | None = column("the command that shows the fault again")

    bytes_moved: int | None = column("each unique byte that the op must read or write, once", "bytes")
    flops: int | None = column("floating-point operations of the op, a multiply-add being two", "count")
    config: dict[str, int] | None = column(
        "the launch config as the launcher was given it; what counts parts, as num_splits does, is the most that it "
        "may use. Null where the variant has none",
        "count",
    )
    median_us: float | None = column("median of the samples, per call", "us")
    iqr_us: float | None = column("distance between the samples' first and third quartile", "us")
    min_us: float | None = column("smallest sample", "us")
    max_us: float | None = column("largest sample", "us")
    samples_us: list[Finite] | None = column("the samples, in order, each a mean over a few calls", "us")
    timer: str | None = column("what took the time, and of a GPU how it was launched and whether its L2 was cold")
    speed_reason: str | None = column(
        "why there is no time and no rate; null where there is one. Of an arm whose steps were not recorded, in a "
        "single row whose range is step"
    )
    roofline_fraction: float | None = column("the time that the roofline allows over median_us", "ratio")
    roofline_bound: str | None = column("what the roofline is limited by")
    roofline_reason: str | None = column("why there is no fraction; null where there is one")

    gpu: str | None = column("the GPU that a modelled time is for, by the name that `tk inspect --predict` takes")
    predicted_us: float | None = column("modelled time of a call there: no measurement", "us")
    predicted_limit_us: float | None = column("the time that the data sheet's peaks allow; null of several ops", "us")
    predicted_bound: str | None = column("what the model finds its longest launch bound by")
    predicted_from: dict[str, Any] | None = column(
        "constants that the nearest compiled code has and this call has not; null where the code is this call's own"
    )
    predicted_reason: str | None = column("why the model says nothing; null where it does")
    model_version: int | None = column("of the model", "index")

    workload: str | None = column("name of the workload")
    requests: int | None = column("completions that were asked for; of a parity, those that both arms served", "count")
    requests_failed: int | None = column("of those, that failed", "count")
    requests_error: str | None = column("why the first of these failed; null where none did, or a peer does not say")
    prompt_tokens: int | None = column("of all requests", "tokens")
    output_tokens: int | None = column("of all requests", "tokens")
    tokens_per_s: float | None = column(
        "output tokens a second, the median over rounds; of a quantized model those of the first workload, in turns "
        "with the dense model",
        "tokens/s",
    )
    tokens_per_s_iqr: float | None = column("distance between the rounds' quartiles; null of one round", "tokens/s")
    seconds: list[Finite] | None = column("of each round, from its start to its last token", "s")
    ttft_s: dict[str, float] | None = column(
        "p50, p90, p99 over rounds of the requests' times to the first token; of late requests alone where there are "
        "some",
        "s",
    )
    tpot_s: dict[str, float] | None = column(
        "p50, p90, p99 over rounds of the requests' mean times between tokens; of late requests none", "s"
    )
    gap_s: dict[str, float] | None = column(
        "p50, p90, p99 of all times between two tokens of a request; of late requests none", "s"
    )

    texts: list[str] | None = column("what each prompt was continued with; null of token ids")
    steps: int | None = column("of the engine, in one round; of a recorded range, in all recorded rounds", "count")
    preemptions: int | None = column("sequences that gave way, in one round", "count")
    peak_occupancy: float | None = column("of the KV cache's blocks, those lent at the peak", "ratio")
    last_page_waste: float | None = column("of the slots lent then, those past their sequences' ends", "ratio")
    peak_running: int | None = column("most sequences in one step", "count")
    hit_tokens: int | None = column("prompt tokens found in the prefix cache", "tokens")
    saved_bytes: int | None = column("of keys and values that these did not have to compute", "bytes")
    evicted_blocks: int | None = column("what the prefix cache gave up for others", "count")
    weight_bytes: int | None = column("of the model's weights as they are kept", "bytes")
    prepare_s: float | None = column("what it took to bring quantized weights into that layout", "s")

    first_arm: dict[str, str] | None = column("the arm that it is compared with, op -> variant")
    tokens_equal: bool | None = column("whether all output tokens are the first arm's; of a peer, the compared arm's")
    requests_equal: int | None = column("requests whose tokens are all the same", "count")
    first_divergence: dict[str, float | int | None] | None = column(
        "request and place of the first output token that differs, and how much more likely the first arm found its "
        "own token there than this arm's (null where it did not report both)",
        "index, index, nats",
    )
    logprob_drift: float | None = column(
        "largest difference of a log-probability that both report, up to the first place where tokens differ", "nats"
    )

    range: str | None = column("as a profiler shows it: schedule, layer 3, paged_decode.split_kv, device idle")
    category: Literal["step", "phase", "layer", "part", "op", "section", "gap"] | None = column(
        "step, phase of one, layer, part of the model that is no op, op, section of one, or gap: what is in no range"
    )
    clock: Literal["host", "device"] | None = column(
        "whose time: all is the host's on a CPU; on a GPU a range that launches work has a row of each"
    )
    calls: int | None = column("of the range in all steps, those in replayed CUDA graphs included", "count")
    total_us: float | None = column("of all calls, what is nested in the range included", "us")
    self_us: float | None = column("the same less what nested ranges took: of one clock they sum up to step_us", "us")
    step_us: float | None = column("of all the steps together", "us")
    share: float | None = column("total_us over step_us", "ratio")

    peer: str | None = column("name of the peer")
    peer_settings: dict[str, Any] | None = column("what it was run with, in their own units")
    speedup: float | None = column(
        "of an arm over a peer, the median of speedups; of a quantized model over the dense one in the same turn, the "
        "median",
        "ratio",
    )
    speedup_iqr: float | None = column("distance between the quartiles of speedups; null of one", "ratio")
    speedups: list[Finite] | None = column(
        "the arm's tokens a second over the peer's, each the median over its rounds, in every replicate in which both "
        "were timed",
        "ratio",
    )
    speedup_of: Literal["median of replicates", "one replicate"] | None = column("which of both speedup is")

    url: str | None = column("of the server")
    served_model: str | None = column("what the server calls its model")
    goodput: float | None = column(
        "requests a second that met the workload's slo, the median over rounds; null where it has none", "requests/s"
    )
    slo_met: float | None = column("of all rounds' requests, those that met it; null where there is none", "ratio")

    method: str | None = column("how codes are chosen; dense: of the model that is not quantized")
    bits: int | None = column("of a code; null of the dense model", "bits")
    group_size: int | None = column("inputs that share a scale, -1 being all; null of the dense model", "count")
    num_tokens: int | None = column("of the text, that were predicted", "tokens")
    window: int | None = column("that were read at once", "tokens")
    nats: float | None = column("mean negative log-likelihood of a token", "nats")
    perplexity: float | None = column("exp(nats)", "ratio")
    kl: float | None = column("mean KL divergence from the dense model's distribution; null of itself", "nats")
    top1_agreement: float | None = column(
        "of the tokens, where both find the same one likeliest; null of itself", "ratio"
    )
    disk_bytes: int | None = column("of its safetensors", "bytes")
    memory_bytes: int | None = column("of all its weights as they are served", "bytes")

    copy_bytes_per_s: float | None = column("bandwidth of a large copy, bytes read and bytes written", "bytes/s")
    read_bytes_per_s: float | None = column("bandwidth of reading a large tensor", "bytes/s")
    matmul_flops_per_s: float | None = column("rate of a large bfloat16 matrix product", "FLOP/s")
    test: Literal["drawn cases", "marked shape", "rerun", "stress", "batch", "sanitizer"] | None = column(
        "what was tried: cases against float64, the same call again, that beside other work, members of other batches, "
        "compute-sanitizer"
    )
    runs: int | None = column("cases or runs of the test", "count")
    runs_right: int | None = column(
        "of those, that were right; null of a test that judges all of them at once", "count"
    )

    @model_validator(mode="before")
    @classmethod
    def _restore_odd_figures(cls, data: Any) -> Any:
        """A row as it was before it was written: what `not_finite` says in words is the figures' own again."""
        if not isinstance(data, Mapping) or not isinstance(said := data.get("not_finite"), str):
            return data
        row = {**data, "not_finite": None}
        for one in said.split("; "):
            path, _, words = one.partition(" is ")
            name, _, key = path.partition(".")
            if words not in _ODD_FIGURES or not isinstance(row.get(name), Mapping if key else NoneType):
                raise ValueError(f"not_finite tells of no figure: {one!r}")
            row[name] = {**row[name], key: _ODD_FIGURES[words]} if key else _ODD_FIGURES[words]
        return row

    @model_validator(mode="after")
    def _check_columns(self) -> "Row":
        if (self.status == "ok") != (self.reason is None):
            raise ValueError(f"a row that is {self.status} {'has no' if self.status == 'ok' else 'needs its'} reason")
        given, wanted = self.model_fields_set - SHARED, set(COLUMNS[self.stage].get(self.status, ()))
        if given != wanted:
            raise ValueError(f"a {self.stage} row that is {self.status} has {sorted(wanted)}, got {sorted(given)}")
        for figure, reason in _REASON_OF.items():
            if figure in given and (getattr(self, figure) is None) != (getattr(self, reason) is not None):
                raise ValueError(f"{figure} is either given or null with its {reason}")
        return self

    @property
    def unserved(self) -> str | None:
        """Of a served row that is ok, which requests failed all the same."""
        if not self.requests_failed:
            return None
        why = f": {self.requests_error}" if self.requests_error else ""
        return f"{self.requests_failed} of {self.requests} requests failed{why}"

    def figures(self) -> Iterator[tuple[str, Any]]:
        """The columns that the row has: name and value, of a mapping's each key as "ttft_s.p50"."""
        for name in Row.model_fields:
            if name not in self.model_fields_set and name not in SHARED:
                continue
            value = getattr(self, name)
            yield from (
                ((f"{name}.{key}", part) for key, part in value.items())
                if isinstance(value, dict)
                else ((name, value),)
            )

    def as_json(self) -> str:
        """One line, whose numbers are finite; what is not is null, and `not_finite` says it."""
        said = "; ".join(f"{name} is {in_words(value)}" for name, value in self.figures() if is_odd(value))
        row = self.model_copy(update={"not_finite": said}) if said else self
        return row.model_dump_json(include={*SHARED, *self.model_fields_set})


SHARED = frozenset(Row.model_fields) - {name for stage in COLUMNS.values() for some in stage.values() for name in some}
"""The columns that every row has."""

_ADDED_IN_2 = ("host_peak_bytes", "device_peak_bytes", "load_before", "load_after")


def from_version_1(row: Mapping[str, Any]) -> dict[str, Any]:
    """A line of version 1 as version 2 has it: what memory it took and how busy the machine was is null."""
    if known := [name for name in _ADDED_IN_2 if name in row]:
        raise ValueError(f"{', '.join(known)}: not of version 1")
    return {**row, **dict.fromkeys(_ADDED_IN_2)}


def is_odd(value: object) -> bool:
    """Whether this is a number that JSON has not."""
    return isinstance(value, float) and not math.isfinite(value)


def in_words(value: float) -> str:
    """What an odd number is called."""
    return "not a number" if math.isnan(value) else "infinite" if value > 0 else "minus infinity"


_PROPERTIES: Mapping[str, Any] = Row.model_json_schema()["properties"]


def unit_of(figure: str) -> str | None:
    """The unit of a column's numbers, "ttft_s.p50" included; None of what is no number."""
    unit: str | None = _PROPERTIES[figure.partition(".")[0]]["unit"]
    return unit


def describe_columns() -> dict[str, Any]:
    """columns.json: {"schema", "rows_version", "every row": {column: about}, "stages": {stage: {column: about}}}.

    about: type, unit, meaning, and of a stage's own columns "given": the statuses of the rows that have them. type: as
    JSON has it, "or null" where it may be. A number is a finite one: "not_finite" says which are null for it.
    """
    about = {
        name: {"type": _type_name(one), "unit": one["unit"], "meaning": one["description"]}
        for name, one in _PROPERTIES.items()
    }
    stages = {
        stage: {
            name: {**about[name], "given": [status for status, names in given.items() if name in names]}
            for name in dict.fromkeys(name for names in given.values() for name in names)
        }
        for stage, given in COLUMNS.items()
    }
    every = {name: one for name, one in about.items() if name in SHARED}
    return {"schema": SCHEMA, "rows_version": VERSION, "every row": every, "stages": stages}


def _type_name(schema: Mapping[str, Any]) -> str:
    """ "number or null", "array of number", "object of string" of a JSON schema."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_type_name, schema["anyOf"])))
    kind = str(schema.get("type", "any"))
    inner = schema.get("items") or schema.get("additionalProperties")
    return f"{kind} of {_type_name(inner)}" if isinstance(inner, Mapping) else kind
