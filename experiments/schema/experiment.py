"""The whole of an experiment's YAML."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationError, model_validator

from experiments.document import Document, PathParts
from experiments.schema.faults import A_MODEL, explain
from experiments.schema.scheduler import SchedulerOptions
from experiments.schema.values import Count, Counts, Strict, as_list
from experiments.schema.workload import Workload

Dtype = Literal["float32", "float16", "bfloat16", "float64"]
Batching = Literal["continuous", "static"]


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
                if not as_list(values) or not all(type(number) is int for number in as_list(values)):
                    raise ValueError(f"{name}.{pin} must be a number or a list of numbers, got {values!r}")
            return {"variant": name, "pins": {pin: as_list(values) for pin, values in (pins or {}).items()}}
    raise ValueError(f"a variant is a name or {{name: {{config value: number}}}}, got {value!r}")


Choice = Annotated[VariantChoice, BeforeValidator(_as_choice), PlainSerializer(lambda choice: choice.as_yaml())]
Choices = Annotated[list[Choice], BeforeValidator(as_list), Field(min_length=1)]


class ModelSource(Strict):
    """Exactly one of: a preset's name, a directory (relative to the YAML file), a Hugging Face hub id."""

    preset: str | None = None
    path: Path | None = None
    hub: str | None = None

    @model_validator(mode="after")
    def _one(self) -> "ModelSource":
        if sum(value is not None for value in (self.preset, self.path, self.hub)) != 1:
            raise ValueError(A_MODEL)
        return self


GroupSizes = Annotated[list[Annotated[int, Field(strict=True, ge=-1)]], BeforeValidator(as_list), Field(min_length=1)]


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
    repeats: timed rounds of an engine or a peer in its process. replicates: of what is timed, each in processes of its
    own, those of arms and peers in turns. timeout: seconds that one task may take; None is for ever. seed: of the
    inputs of the check and kernels stages.
    zip: groups of axes that vary together. exclude: axis -> value or values; points that match all of one rule are
    left out. full: dotted key -> value, as `--set` has them, where the sizes are those of a GPU.

    Lists of models, of dtypes, of a workload's sizes and of those in `shapes` are axes too, and single values by the
    time that they are here.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
    model: ModelSource | None = None
    dtype: Dtype | None = None
    device: str | None = None
    variants_from: list[Path] = []
    kernels: Mapping[str, Choices] = {}
    shapes: Mapping[str, list[Mapping[str, int | bool | str]]] = {}
    tuning: Literal["nearest", "frozen", "search"] = "nearest"
    scheduler: Annotated[list[SchedulerOptions], BeforeValidator(as_list), Field(min_length=1)] = [SchedulerOptions()]
    batching: Annotated[list[Batching], BeforeValidator(as_list), Field(min_length=1)] = ["continuous"]
    workload: Annotated[list[Workload], BeforeValidator(as_list)] = []
    peers: list[str] = []
    quantization: Quantization | None = None
    repeats: Count = 3
    replicates: Count = 1
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    zip: list[Annotated[list[str], Field(min_length=2)]] = []
    exclude: list[Annotated[Mapping[str, Any], Field(min_length=1)]] = []
    full: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Validated:
    """What the schema makes of a document: an Experiment, or what is wrong, and where."""

    experiment: Experiment | None
    problems: tuple[str, ...] = ()
    faulty: tuple[PathParts, ...] = ()


def validate(document: Document) -> Validated:
    """The document as an Experiment; everything that is wrong with its structure."""
    try:
        return Validated(Experiment.model_validate(document.data))
    except ValidationError as error:
        # A value of a union is reported once for each of its types.
        problems = dict.fromkeys(explain(document, Experiment, dict(e)) for e in error.errors())
        return Validated(None, tuple(problems), tuple(e["loc"] for e in error.errors()))


def fit_problems(document: Document) -> list[str]:
    """Sections that do not go together, told from what is written, be it as it should be or not."""
    given = document.data
    workloads = _listed(given.get("workload"))
    messages = []
    if not given.keys() - Experiment.model_fields.keys():  # else what is missing may be there by a wrong name
        if workloads and not given.get("model"):
            messages.append("a workload needs a model")
        if given.get("quantization") and not given.get("model"):
            messages.append("quantization needs a model")
        if given.get("peers") and not workloads:
            messages.append("peers serve a workload; there is none")
        if not given.get("model") and not given.get("kernels"):
            messages.append("there is nothing to do: neither a model nor kernels are given")
    is_late = any(isinstance(workload, dict) and workload.get("late") for workload in workloads)
    if "static" in _listed(given.get("batching")) and is_late:
        messages.append("static batching is of requests that are all there: it goes with no late ones")
    return [document.problem((), message) for message in messages]


def _listed(value: Any) -> list[Any]:
    return [one for one in as_list(value) if one is not None]
