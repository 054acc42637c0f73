"""What an experiment's YAML may say. Structure only: `plan` checks the names of ops, variants and policies, live."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    ValidationError,
    field_validator,
    model_validator,
)

from experiments.document import Document, ExperimentError, PathParts, nearest
from tsched.refusal import MAX_PRIORITY
from tsched.sampling_params import SamplingParams

Dtype = Literal["float32", "float16", "bfloat16", "float64"]
Batching = Literal["continuous", "static"]
Count = Annotated[int, Field(strict=True, ge=1, lt=2**31)]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class Strict(BaseModel):
    """Frozen, and a key that it does not have is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class VariantChoice(Strict):
    """One variant of an op, and the values that its config is pinned to; a list of values is an axis."""

    variant: str
    pins: Mapping[str, list[int]] = {}

    def as_yaml(self) -> Any:
        return {self.variant: {name: list(values) for name, values in self.pins.items()}} if self.pins else self.variant


def _as_choice(value: Any) -> Any:
    """A name, or {name: {config value: number or list}}, in the one form that VariantChoice has."""
    if isinstance(value, str):
        return {"variant": value}
    if isinstance(value, dict) and len(value) == 1:
        ((name, pins),) = value.items()
        if pins is None or isinstance(pins, dict):
            for pin, values in (pins or {}).items():
                if not _as_list(values) or not all(type(number) is int for number in _as_list(values)):
                    raise ValueError(f"{name}.{pin} must be a number or a list of numbers, got {values!r}")
            return {"variant": name, "pins": {pin: _as_list(values) for pin, values in (pins or {}).items()}}
    raise ValueError(f"a variant is a name or {{name: {{config value: number}}}}, got {value!r}")


Choice = Annotated[VariantChoice, BeforeValidator(_as_choice), PlainSerializer(lambda choice: choice.as_yaml())]
Choices = Annotated[list[Choice], BeforeValidator(_as_list), Field(min_length=1)]
Counts = Annotated[list[Count], BeforeValidator(_as_list), Field(min_length=1)]
Bytes = Annotated[
    list[Annotated[int, Field(strict=True, ge=1, lt=2**63)]], BeforeValidator(_as_list), Field(min_length=1)
]
Policies = Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)]
Fractions = Annotated[
    list[Annotated[float, Field(strict=True, ge=0, le=1)]], BeforeValidator(_as_list), Field(min_length=1)
]
Shares = Annotated[
    list[Annotated[float, Field(strict=True, gt=0, le=1)]], BeforeValidator(_as_list), Field(min_length=1)
]
Flags = Annotated[list[StrictBool], BeforeValidator(_as_list), Field(min_length=1)]


class ModelSource(Strict):
    """Exactly one of: a preset's name, a directory (relative to the YAML file), a Hugging Face hub id."""

    preset: str | None = None
    path: Path | None = None
    hub: str | None = None

    @model_validator(mode="after")
    def _one(self) -> "ModelSource":
        if sum(value is not None for value in (self.preset, self.path, self.hub)) != 1:
            raise ValueError(_A_MODEL)
        return self


class Length(Strict):
    """A number of tokens: fixed (low = high), or drawn uniformly from low to high, both included."""

    uniform: Annotated[list[Count], Field(min_length=2, max_length=2)]

    @field_validator("uniform")
    @classmethod
    def _ordered(cls, value: list[int]) -> list[int]:
        if value[0] > value[1]:
            raise ValueError(f"the first bound is above the second: {value}")
        return value


def _as_length(value: Any) -> Any:
    return {"uniform": [value, value]} if isinstance(value, int) and not isinstance(value, bool) else value


LengthField = Annotated[Length, BeforeValidator(_as_length)]

Rank = Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class Priorities(Strict):
    """Of requests, lower going first with `order: priority`: one each, or drawn uniformly from low to high, both
    included.
    """

    each: list[Rank] = []
    uniform: list[Rank] = []

    @model_validator(mode="after")
    def _one_form(self) -> "Priorities":
        if not self.each and (len(self.uniform) != 2 or self.uniform[0] > self.uniform[1]):
            raise ValueError(_A_PRIORITY)
        return self

    def check(self, num_requests: int) -> None:
        if self.each and len(self.each) != num_requests:
            raise ValueError(
                f"priority is a list of {len(self.each)} for {num_requests} requests: give one, or one each"
            )

    def as_yaml(self) -> Any:
        return list(self.each) or {"uniform": list(self.uniform)}


def _as_priorities(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"uniform": [value, value]}
    if isinstance(value, dict) and set(value) != {"uniform"}:
        raise ValueError(_A_PRIORITY)
    return {"each": value} if isinstance(value, list) and value else value


PriorityField = Annotated[Priorities, BeforeValidator(_as_priorities), PlainSerializer(lambda some: some.as_yaml())]

# Set elsewhere in the experiment (n, max_tokens, output_len), by the stages themselves (logprobs), or code.
_NOT_SAMPLING = frozenset({"n", "max_tokens", "logprobs", "logits_processors", "stopping_criteria"})
SAMPLING_KEYS = tuple(f.name for f in fields(SamplingParams) if f.name not in _NOT_SAMPLING)


class _Workload(Strict):
    """`name` labels its rows. `sampling`: keys of SamplingParams, greedy where temperature is not given.

    n: completions of each request, which share its prompt's pages; they need a temperature above 0.
    priority: of the requests, lower going first with `order: priority`; 0 where it is not given.
    tenants: the requests are dealt to so many in turn, and share cached prefixes with their own tenant's alone.
    """

    name: str = ""
    sampling: Mapping[str, Any] = {}
    n: Count = 1
    priority: PriorityField | None = None
    tenants: Count = 1

    @field_validator("sampling")
    @classmethod
    def _valid_sampling(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for key in value:
            if key not in SAMPLING_KEYS:
                raise ValueError(
                    f"unknown key {key!r}: there is {', '.join(SAMPLING_KEYS)}{nearest(key, SAMPLING_KEYS)}"
                )
        SamplingParams(**{"temperature": 0.0, "max_tokens": None, **value})
        return value

    @model_validator(mode="after")
    def _valid_samples(self) -> Self:
        SamplingParams(**{"temperature": 0.0, "max_tokens": None, **self.sampling, "n": self.n})
        return self


class LateRequests(Strict):
    """Requests that come while the others decode: the i-th, from 1, once those have i * every output tokens each, in
    the mean.
    """

    num_requests: Count
    input_len: LengthField
    output_len: LengthField
    every: Count
    priority: PriorityField | None = None

    @model_validator(mode="after")
    def _one_priority_each(self) -> Self:
        if self.priority is not None:
            self.priority.check(self.num_requests)
        return self


class SyntheticWorkload(_Workload):
    """Requests of random token ids; every request runs to its drawn length, whatever the model's end token is.

    shared_prefix: of each prompt, the share that is the beginning of one text, the same for all; the rest is its own.
    late: more requests, which share nothing. Where there are some, times to the first token are theirs, and times
    between tokens are those of the requests that came at once.
    """

    kind: Literal["synthetic"]
    num_requests: Count
    input_len: LengthField
    output_len: LengthField
    shared_prefix: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    late: LateRequests | None = None
    seed: Annotated[int, Field(strict=True, ge=0)] = 0

    @model_validator(mode="after")
    def _one_priority_each(self) -> Self:
        if self.priority is not None:
            self.priority.check(self.num_requests)
        return self

    @model_validator(mode="after")
    def _late_ones_meet_others(self) -> "SyntheticWorkload":
        if self.late is not None and self.late.num_requests * self.late.every >= self.output_len.uniform[0]:
            last, shortest = self.late.num_requests * self.late.every, self.output_len.uniform[0]
            raise ValueError(
                f"the last late request comes after {last} output tokens of the others (num_requests * every), when "
                f"some of them may have ended: output_len begins at {shortest}"
            )
        return self

    @property
    def longest(self) -> int:
        """The most tokens, in and out, that a request may have."""
        drawn: list[SyntheticWorkload | LateRequests] = [self] if self.late is None else [self, self.late]
        return max(one.input_len.uniform[1] + one.output_len.uniform[1] for one in drawn)


class PromptsWorkload(_Workload):
    """Texts, each continued by up to max_tokens tokens."""

    kind: Literal["prompts"]
    prompts: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    max_tokens: Count = 16

    @model_validator(mode="after")
    def _one_priority_each(self) -> Self:
        if self.priority is not None:
            self.priority.check(len(self.prompts))
        return self


Workload = Annotated[SyntheticWorkload | PromptsWorkload, Field(discriminator="kind")]


class SchedulerOptions(Strict):
    """What tsched.LLM takes besides the model; a key that is absent has LLM's default, a list is an axis."""

    max_num_batched_tokens: Counts | None = None
    max_num_seqs: Counts | None = None
    max_model_len: Counts | None = None
    max_chunk_tokens: Counts | None = None
    decode_share: Fractions | None = None
    chunked_prefill: Flags | None = None
    block_size: Counts | None = None
    kv_cache_bytes: Bytes | None = None
    kv_cache_fraction: Shares | None = None
    swap_bytes: Bytes | None = None
    order: Policies | None = None
    preemption: Policies | None = None
    prefix_cache: Policies | None = None
    overlap: Flags | None = None
    cuda_graphs: Flags | None = None


GroupSizes = Annotated[list[Annotated[int, Field(strict=True, ge=-1)]], BeforeValidator(_as_list), Field(min_length=1)]


class QuantizationSettings(Strict):
    """One checkpoint for every number of bits with every group size; -1 is all inputs."""

    bits: Counts
    group_size: GroupSizes = [-1]


class Quantization(Strict):
    """The model quantized by `methods`, each judged beside the dense one on a text.

    text, calibration: files; by default Python's own sources, of which those for calibration are others. window: tokens
    that are read at once, in both. max_tokens: of the text, those that are predicted, in whole windows.
    """

    methods: Annotated[Mapping[str, QuantizationSettings], Field(min_length=1)]
    window: Count = 512
    text: Path | None = None
    calibration: Path | None = None
    max_tokens: Count = 50_000


class Experiment(Strict):
    """The whole file. Every key but `name` has a default; see DESIGN, "The experiment".

    scheduler: a list is of sets of options, each with arms of its own, for options that only go together.
    batching: continuous, or static: as many requests as the engine has rows, and no other before the last of them ends.
    kernels: op -> variants. shapes: op -> points of its contract to check and time, besides those of the workload.
    repeats: timed rounds of the engine and of each peer. seed: of the inputs of the check and kernels stages.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
    model: ModelSource | None = None
    dtype: Dtype | None = None
    device: str | None = None
    variants_from: list[Path] = []
    kernels: Mapping[str, Choices] = {}
    shapes: Mapping[str, list[Mapping[str, int | bool | str]]] = {}
    tuning: Literal["nearest", "frozen", "search"] = "nearest"
    scheduler: Annotated[list[SchedulerOptions], BeforeValidator(_as_list), Field(min_length=1)] = [SchedulerOptions()]
    batching: Annotated[list[Batching], BeforeValidator(_as_list), Field(min_length=1)] = ["continuous"]
    workload: Annotated[list[Workload], BeforeValidator(_as_list)] = []
    peers: list[str] = []
    quantization: Quantization | None = None
    repeats: Count = 3
    seed: Annotated[int, Field(strict=True, ge=0)] = 0

    @model_validator(mode="after")
    def _fits_together(self) -> "Experiment":
        if self.workload and self.model is None:
            raise ValueError("a workload needs a model")
        if self.quantization is not None and self.model is None:
            raise ValueError("quantization needs a model")
        if self.peers and not self.workload:
            raise ValueError("peers serve a workload; there is none")
        if self.model is None and not self.kernels:
            raise ValueError("there is nothing to do: neither a model nor kernels are given")
        if "static" in self.batching and any(getattr(workload, "late", None) for workload in self.workload):
            raise ValueError("static batching is of requests that are all there: it goes with no late ones")
        names = [workload.name for workload in self.workload]
        if len(set(names)) != len(names):
            raise ValueError("each workload of a list needs a name of its own")
        return self


def validate(document: Document) -> Experiment:
    """The document as an Experiment; ExperimentError lists everything that is wrong with its structure."""
    try:
        return Experiment.model_validate(document.data)
    except ValidationError as error:
        # A value of a union is reported once for each of its types.
        problems = dict.fromkeys(_explain(document, dict(e)) for e in error.errors())
        raise ExperimentError(list(problems)) from None


_WORKLOAD_KINDS = ("synthetic", "prompts")
_A_MODEL = "a model is exactly one of {preset: NAME}, {path: DIRECTORY} and {hub: ORG/NAME}"
_A_PRIORITY = f"a priority is a whole number to +-{MAX_PRIORITY}, a list of one each, or {{uniform: [LOW, HIGH]}}"
_A_LENGTH = "a length is a number of tokens, or {uniform: [LOW, HIGH]}"
_WORDING: Mapping[str, str] = {
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "mapping_type": "must be a mapping of keys to values",
    "list_type": "must be a list",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "string_type": "must be a text",
    "path_type": "must be a path",
    "too_short": "must be a list of at least {min_length}",
    "too_long": "must be a list of at most {max_length}",
}
"""Pydantic's error types in the words of the YAML."""


def _written(loc: PathParts) -> PathParts:
    """The path as the user wrote it: pydantic puts a workload's kind, and a union's type, in between and behind."""
    if loc[:1] == ("workload",) and len(loc) > 2 and loc[2] in _WORKLOAD_KINDS:
        return (*loc[:2], *loc[3:])
    return loc[:4] if loc[:1] == ("shapes",) else loc


def _explain(document: Document, error: dict[str, Any]) -> str:
    parts = _written(error["loc"])
    if error["type"] == "extra_forbidden":
        known = _keys_beside(Experiment, error["loc"])
        return document.problem(parts, f"unknown key: there is {', '.join(known)}{nearest(parts[-1], known)}")
    if error["type"] == "missing":
        return document.problem(parts, "is required")
    if error["type"] == "union_tag_invalid":
        tag, known_tags = error["ctx"]["tag"], error["ctx"]["expected_tags"].replace("'", "")
        return document.problem(
            (*parts, "kind"), f"unknown kind {tag!r}: there is {known_tags}{nearest(tag, known_tags.split(', '))}"
        )
    if error["type"] == "literal_error":
        known_values = [text.strip("' ") for text in error["ctx"]["expected"].replace(" or ", ", ").split(",")]
        value = error["input"]
        return document.problem(
            parts, f"unknown value {value!r}: there is {', '.join(known_values)}{nearest(value, known_values)}"
        )
    if error["type"] == "union_tag_not_found":
        return document.problem((*parts, "kind"), f"is required: there is {', '.join(_WORKLOAD_KINDS)}")
    if parts[:1] == ("shapes",) and len(parts) == 4:
        return document.problem(parts, f"must be a whole number, true, false or a name, got {error['input']!r}")
    if error["type"] in _WORDING:
        wording = _WORDING[error["type"]].format(**error.get("ctx", {}))
        if error["type"] in ("model_type", "model_attributes_type"):
            wordings = {"model": _A_MODEL, "priority": _A_PRIORITY}
            wordings |= {"input_len": _A_LENGTH, "output_len": _A_LENGTH}
            wording = wordings.get(str(parts[-1]), wording)
        return document.problem(parts, f"{wording}, got {error['input']!r}")
    message = (
        error["msg"]
        .replace("Input should be", "must be")
        .removeprefix("Value error, ")
        .removeprefix("Assertion failed, ")
    )
    got = "" if error["type"] == "value_error" else f", got {error['input']!r}"
    return document.problem(parts, message[:1].lower() + message[1:] + got)


def _keys_beside(model: type[BaseModel], loc: PathParts) -> list[str]:
    """The keys that the mapping which holds the last of `loc` may have."""
    candidates = [model]
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        tagged = [
            c for c in candidates if "kind" in c.model_fields and part in get_args(c.model_fields["kind"].annotation)
        ]
        if tagged:
            candidates = tagged
            continue
        found = [m for c in candidates if part in c.model_fields for m in _models(c.model_fields[str(part)].annotation)]
        candidates = found or candidates
    return list(dict.fromkeys(name for candidate in candidates for name in candidate.model_fields))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not get_origin(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated, list) or get_args(annotation):
        for argument in get_args(annotation):
            yield from _models(argument)
