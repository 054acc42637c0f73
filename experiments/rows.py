"""The rows of results.jsonl: one per fact, and its status decides which figures it may carry.

A figure that is known not to exist is null, with its reason beside it; one that the status does not allow is absent, so
that no speed of a wrong kernel can be written down.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

Status = Literal["ok", "wrong", "unsupported", "failed"]


class _Row(BaseModel):
    """What every row says. arm: op -> variant, with pinned values in brackets; settings: swept scheduler options.

    task: the key of the task that wrote it, which wrote task_rows rows in one go: fewer were cut off. replicate: of a
    task that is repeated in processes of their own, which time it was, from 0.
    """

    # An error without bound is "Infinity": null would say that there was none.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")
    required: ClassVar[Mapping[str, frozenset[str]]]
    """status -> the figures that a row of it has; every other figure is forbidden."""

    run_id: str
    task: str = ""
    replicate: int = 0
    task_rows: int = 1
    stage: str
    arm: dict[str, str]
    settings: dict[str, Any] = {}
    op: str | None = None
    variant: str | None = None
    axes: dict[str, Any] | None = None
    dtype: str
    device: str
    status: Status
    reason: str | None = None

    @model_validator(mode="after")
    def _figures_fit_the_status(self) -> "_Row":
        if (self.status == "ok") != (self.reason is None):
            raise ValueError(f"a row that is {self.status} {'has no' if self.status == 'ok' else 'needs its'} reason")
        given = self.model_fields_set - set(_Row.model_fields)
        wanted = self.required.get(self.status, frozenset())
        if given != wanted:
            raise ValueError(f"a {self.stage} row that is {self.status} has {sorted(wanted)}, got {sorted(given)}")
        for figure, reason in (
            ("median_us", "speed_reason"),
            ("tokens_per_s", "speed_reason"),
            ("roofline_fraction", "roofline_reason"),
        ):
            if figure in given and (getattr(self, figure) is None) != (getattr(self, reason) is not None):
                raise ValueError(f"{figure} is either given or null with its {reason}")
        return self

    def as_json(self) -> str:
        """One line."""
        return self.model_dump_json(include=set(_Row.model_fields) | self.model_fields_set)


class CheckRow(_Row):
    """A variant at one point against the float64 oracle. Ratios are error over allowance: at most 1 is right."""

    stage: Literal["check"] = "check"
    point: str | None = None
    seed: int | None = None
    max_error_ratio: float | None = None
    rms_error_ratio: float | None = None
    replay: str | None = None

    required = {
        "ok": frozenset({"point", "seed", "max_error_ratio", "rms_error_ratio"}),
        "wrong": frozenset({"point", "seed", "max_error_ratio", "rms_error_ratio", "replay"}),
        "unsupported": frozenset({"point"}),
        "failed": frozenset({"point", "seed", "replay"}),
    }


class KernelRow(_Row):
    """A variant's time at one point where its check was ok."""

    stage: Literal["kernels"] = "kernels"
    point: str | None = None
    bytes_moved: int | None = None
    flops: int | None = None
    config: dict[str, int] | None = None
    median_us: float | None = None
    iqr_us: float | None = None
    min_us: float | None = None
    max_us: float | None = None
    samples_us: list[float] | None = None
    timer: str | None = None
    speed_reason: str | None = None
    roofline_fraction: float | None = None
    roofline_bound: str | None = None
    roofline_reason: str | None = None

    required = {
        "ok": frozenset(
            {
                "point", "bytes_moved", "flops", "config", "median_us", "iqr_us", "min_us", "max_us", "samples_us",
                "timer", "speed_reason", "roofline_fraction", "roofline_bound", "roofline_reason",
            }
        ),
        "failed": frozenset({"point"}),
    }  # fmt: skip


_SERVED = frozenset(
    {
        "workload", "requests", "requests_failed", "prompt_tokens", "output_tokens", "tokens_per_s",
        "tokens_per_s_iqr", "seconds", "speed_reason", "ttft_s", "tpot_s", "gap_s",
    }
)  # fmt: skip


class EngineRow(_Row):
    """A workload served by one arm; a request of n completions counts as n. tokens_per_s: of output tokens, the median
    over the rounds in `seconds`.

    group: the arms of one group had their rounds in turns; another's came before or after, when the machine may have
    been slower. ttft_s, tpot_s, gap_s: p50, p90 and p99, over all rounds, of the requests' times to their first token,
    of their mean times between tokens, and of all times between two tokens of a request; with late requests, the first
    is of them alone, the others of those that were there before. texts: what each prompt was continued with, null for
    token ids. peak_running: the most sequences in a step. hit_tokens: prompt tokens found in the prefix cache;
    saved_bytes: of keys and values, that these did not have to compute; evicted_blocks: what it gave up for others.
    peak_occupancy: of the KV cache's blocks, the fraction lent at the peak; last_page_waste: of the slots lent then,
    the fraction past their sequences' ends. weight_bytes: of the model's weights as they are kept; prepare_s: what it
    took to bring quantized ones into that layout.
    """

    stage: Literal["engine"] = "engine"
    workload: str | None = None
    group: int | None = None
    requests: int | None = None
    requests_failed: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_iqr: float | None = None
    seconds: list[float] | None = None
    ttft_s: dict[str, float] | None = None
    tpot_s: dict[str, float] | None = None
    gap_s: dict[str, float] | None = None
    speed_reason: str | None = None
    texts: list[str] | None = None
    steps: int | None = None
    preemptions: int | None = None
    peak_occupancy: float | None = None
    last_page_waste: float | None = None
    peak_running: int | None = None
    hit_tokens: int | None = None
    saved_bytes: int | None = None
    evicted_blocks: int | None = None
    weight_bytes: int | None = None
    prepare_s: float | None = None

    required = {
        "ok": _SERVED
        | {"group", "texts", "steps", "preemptions", "peak_running", "peak_occupancy", "last_page_waste"}
        | {"hit_tokens", "saved_bytes", "evicted_blocks", "weight_bytes", "prepare_s"},
        "wrong": frozenset({"workload"}),
        "unsupported": frozenset({"workload"}),
        "failed": frozenset({"workload"}),
    }


class ParityRow(_Row):
    """An arm's tokens and log-probabilities beside the first arm's.

    first_divergence: request and place of the first output token that differs, and the first arm's log-probability
    margin there between its own token and this arm's, where it reported both. logprob_drift: the largest difference of
    any log-probability that both report, up to and including the first place where tokens differ.
    """

    stage: Literal["parity"] = "parity"
    workload: str | None = None
    first_arm: dict[str, str] | None = None
    tokens_equal: bool | None = None
    requests_equal: int | None = None
    requests: int | None = None
    first_divergence: dict[str, float | int | None] | None = None
    logprob_drift: float | None = None

    required = {
        status: frozenset(
            {
                "workload", "first_arm", "tokens_equal", "requests_equal", "requests", "first_divergence",
                "logprob_drift",
            }
        )
        for status in ("ok", "wrong")
    }  # fmt: skip


class PeerRow(_Row):
    """A workload served by another engine, in rounds interleaved with the arms'. `arm` is the arm it is compared with.

    speedup: the arm's tokens per second over the peer's, the median over rounds; speedups: each round's.
    """

    stage: Literal["peers"] = "peers"
    peer: str | None = None
    peer_settings: dict[str, Any] | None = None
    workload: str | None = None
    requests: int | None = None
    requests_failed: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_iqr: float | None = None
    seconds: list[float] | None = None
    ttft_s: dict[str, float] | None = None
    tpot_s: dict[str, float] | None = None
    gap_s: dict[str, float] | None = None
    speed_reason: str | None = None
    speedup: float | None = None
    speedup_iqr: float | None = None
    speedups: list[float] | None = None
    tokens_equal: bool | None = None
    requests_equal: int | None = None

    required = {
        "ok": _SERVED
        | {"peer", "peer_settings", "speedup", "speedup_iqr", "speedups", "tokens_equal", "requests_equal"},
        "failed": frozenset({"peer", "workload"}),
        "unsupported": frozenset({"peer", "workload"}),
    }


class QuantizationRow(_Row):
    """The model as one method leaves it, beside the dense one, whose own row has method "dense" and no bits.

    num_tokens, window, nats, kl, top1_agreement: as in evaluation.Evaluation; of the dense one's own row the last two
    are null. disk_bytes: of its safetensors. memory_bytes: of all its weights as they are served. tokens_per_s: of
    output tokens of the first workload, the median over rounds that it and the dense model take in turns; speedup: over
    the dense model's in the same turn, the median.
    """

    stage: Literal["quantization"] = "quantization"
    method: str | None = None
    bits: int | None = None
    group_size: int | None = None
    num_tokens: int | None = None
    window: int | None = None
    nats: float | None = None
    perplexity: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    disk_bytes: int | None = None
    memory_bytes: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_iqr: float | None = None
    speedup: float | None = None
    speed_reason: str | None = None

    required = {
        "ok": frozenset(
            {
                "method", "bits", "group_size", "num_tokens", "window", "nats", "perplexity", "kl", "top1_agreement",
                "disk_bytes", "memory_bytes", "tokens_per_s", "tokens_per_s_iqr", "speedup", "speed_reason",
            }
        ),
        "unsupported": frozenset({"method", "bits", "group_size"}),
        "failed": frozenset({"method", "bits", "group_size"}),
    }  # fmt: skip


Row = Annotated[CheckRow | KernelRow | EngineRow | ParityRow | PeerRow | QuantizationRow, Field(discriminator="stage")]
ROW: TypeAdapter[Row] = TypeAdapter(Row)
"""Reads a line of results.jsonl: `ROW.validate_json(line)`."""
