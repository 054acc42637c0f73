"""The whole of an experiment's YAML."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)

from experiments.document import Document, PathParts, as_mapping, entries
from experiments.schema.faults import A_MODEL, explain
from experiments.schema.names import Device, File, Folder, KnownNames, Peer, preset_names, unknown_name
from experiments.schema.values import Count, Strict, Swept, as_list
from experiments.schema.workload import Workload
from tsched.options import SCHEDULER_OPTIONS, DtypeName
from tsched.serving.limits import LIMITS
from tsched.torch_free import load_from_file

if TYPE_CHECKING:
    from tkernels.tuning_mode import TuningMode
else:
    TuningMode = load_from_file("tuning_mode").TuningMode

Batching = Literal["continuous", "static"]


class VariantChoice(Strict):
    """One variant of an op, and the values that its config is pinned to; a list of values is an axis."""

    variant: str
    pins: Mapping[str, list[int]] = {}


def _as_choice(value: Any) -> Any:
    """A name, or {name: {config value: number or list}}, in the one form that VariantChoice has."""
    if isinstance(value, str):
        return {"variant": value}
    if isinstance(value, dict) and len(value) == 1:
        ((name, pins),) = value.items()
        if pins is None or isinstance(pins, dict):
            return {"variant": name, "pins": {pin: _as_numbers(f"{name}.{pin}", v) for pin, v in (pins or {}).items()}}
    raise ValueError(f"a variant is a name or {{name: {{config value: number}}}}, got {value!r}")


def _as_numbers(pin: str, value: Any) -> list[int]:
    numbers: list[int] = as_list(value)
    if not numbers or not all(type(number) is int for number in numbers):
        raise ValueError(f"{pin} must be a number or a list of numbers, got {value!r}")
    return numbers


def _as_yaml(choice: VariantChoice) -> Any:
    return {choice.variant: dict(choice.pins)} if choice.pins else choice.variant


Choice = Annotated[VariantChoice, BeforeValidator(_as_choice), PlainSerializer(_as_yaml)]
_CHOICE: TypeAdapter[VariantChoice] = TypeAdapter(Choice)


def _check_size(value: Any) -> int | str:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int | str):
        raise ValueError(f"must be a whole number, true, false or a name, got {value!r}")
    return value


Size = Annotated[int | bool | str, PlainValidator(_check_size)]
"""A value of an axis of an op's contract."""


if TYPE_CHECKING:

    class SchedulerOptions(Strict):
        def __getattr__(self, option: str) -> list[Any] | None: ...

    class ServingLimits(Strict): ...

else:
    SchedulerOptions = create_model(
        "SchedulerOptions",
        __base__=Strict,
        __doc__="The options of tsched's engine. A key that is absent has its default, a list is an axis.",
        **{
            name: (Swept[Annotated[Any, PlainValidator(option.check_value)]] | None, None)
            for name, option in SCHEDULER_OPTIONS.items()
        },
    )

    ServingLimits = create_model(
        "ServingLimits",
        __base__=Strict,
        __doc__="The limits of `tk serve`. A key that is absent has its default; none is an axis.",
        **{name: (Annotated[Any, PlainValidator(limit.check_value)], limit.default) for name, limit in LIMITS.items()},
    )


class ModelSource(Strict):
    """Exactly one of: a preset's name, a directory (relative to the YAML file), a Hugging Face hub id."""

    preset: str | None = None
    path: Path | None = None
    hub: str | None = None

    @model_validator(mode="after")
    def _check_source(self, info: ValidationInfo[KnownNames]) -> "ModelSource":
        if sum(value is not None for value in (self.preset, self.path, self.hub)) != 1:
            raise ValueError(A_MODEL)
        if self.preset is not None and self.preset not in preset_names():
            raise ValueError(unknown_name("preset", self.preset, preset_names()))
        if self.path is not None and info.context is not None and not os.path.isdir(info.context.folder / self.path):
            raise ValueError(f"{info.context.folder / self.path} is not a directory")
        return self


class QuantizationSettings(Strict):
    """One checkpoint for every number of bits with every group size and every value of each option.

    group_size: -1 is all inputs. options: what else the method is told, by name, as `tk quantize --option` takes it.
    """

    bits: Swept[Count]
    group_size: Swept[Annotated[int, Field(strict=True, ge=-1)]] = [-1]
    options: Mapping[str, Swept[Any]] = {}


class Quantization(Strict):
    """The model quantized by `methods`, each judged beside the dense one on a text.

    text, calibration: files; by default Python's own sources, of which those for calibration are others. window: tokens
    that are read at once, in both. max_tokens: of the text, those that are predicted, in whole windows.
    """

    methods: Annotated[Mapping[str, QuantizationSettings], Field(min_length=1)]
    window: Count = 512
    text: File | None = None
    calibration: File | None = None
    max_tokens: Count = 50_000


class Experiment(Strict):
    """The whole file. Every key but `name` has a default; see DESIGN, "The experiment".

    Lists of models, of dtypes, of scheduler options, of pins and of sizes in `shapes` are axes, as they were written;
    of a workload whose fields are lists there is one entry for each of its points.

    scheduler: a list is of sets of options, each with arms of its own, for options that only go together.
    batching: continuous, or static: as many requests as the engine has rows, and no other before the last of them ends.
    serving: what `tk serve` bounds; a run serves without a server, and says that it leaves them out.
    kernels: op -> variants. shapes: op -> points of its contract to check and time, besides those of the workload.
    repeats: timed rounds of an engine or a peer in its process. replicates: of what is timed, each in processes of its
    own, those of arms and peers in turns. timeout: seconds that one task may take; None is for ever. seed: of the
    inputs of the check and kernels stages.
    zip: groups of axes that vary together. exclude: axis -> value or values; points that match all of one rule are
    left out. full: dotted key -> value, as `--set` has them, where the sizes are those of a GPU.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]
    model: Swept[ModelSource] | None = None
    dtype: Swept[DtypeName] | None = None
    device: Device | None = None
    variants_from: list[Folder] = []
    architectures_from: list[Folder] = []
    kernels: Mapping[str, Swept[Choice]] = {}
    shapes: Mapping[str, list[Mapping[str, Swept[Size]]]] = {}
    tuning: TuningMode = "nearest"
    scheduler: Swept[SchedulerOptions] = [SchedulerOptions()]
    batching: Swept[Batching] = ["continuous"]
    workload: Annotated[list[Workload], BeforeValidator(as_list)] = []
    peers: list[Peer] = []
    quantization: Quantization | None = None
    serving: ServingLimits | None = None
    repeats: Count = 3
    replicates: Count = 1
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**64)] = 0
    zip: list[Annotated[list[str], Field(min_length=2)]] = []
    exclude: list[Annotated[Mapping[str, Any], Field(min_length=1)]] = []
    full: Mapping[str, Any] = {}


def written_choices(document: Document, op: str) -> list[VariantChoice | str]:
    """The op's choices; as a text where one has not the form of a choice."""
    choices: list[VariantChoice | str] = []
    for choice in entries(as_mapping(document.data.get("kernels")).get(op)):
        try:
            choices.append(_CHOICE.validate_python(choice))
        except ValidationError:
            choices.append(str(choice))
    return choices


def read_experiment(
    document: Document, data: Mapping[str, Any], names: KnownNames, written: Callable[[PathParts], PathParts]
) -> tuple[Experiment | None, list[str]]:
    """An experiment of `data`, or everything that is wrong with its types and names.

    Args:
        data: The document's, with one entry of `workload` for each point of it.
        written: The path in the document of a path in `data`.
    """
    try:
        return Experiment.model_validate(data, context=names), []
    except ValidationError as error:
        return None, [explain(document, Experiment, dict(one), written) for one in error.errors()]
