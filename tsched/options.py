"""Every option of an engine: type, default, range, unit and meaning. The one place where these are said.

`LLM` and `AsyncLLM` take EngineOptions as keywords, an experiment's YAML takes those of its section `scheduler`, and
commands take some as flags; all of them read OPTIONS. A new option is one more field of EngineOptions: its annotation
is its type, and None is a value where it is the default. `tsched.resolved_options` says what they mean for one
model.
Nothing here loads torch.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from pathlib import PurePath
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, Literal, get_args

from tsched.requests.errors import ArgumentTypeError
from tsched.requests.vllm_names import ENGINE_NAMES, drop_unused
from tsched.scheduling.policies import ORDERS, PREEMPTIONS, PREFIX_CACHES
from tsched.torch_free import TKernelsError, suggest_name

if TYPE_CHECKING:
    import torch

    from tkernels import Ranges, Registry, Tuning
    from tkernels.selection import Choices
    from tkernels.tuning_mode import TuningMode

COUNT_END = 2**31  # the kernels count tokens, rows and pages in int32
BYTES_END = 2**63
GPU_FRACTION = 0.9  # the rest of a GPU's memory is for activations, logits and the allocator's slack
CPU_CACHE_BYTES = 2**30
DtypeName = Literal["float32", "float16", "bfloat16", "float64"]
DTYPES: tuple[str, ...] = get_args(DtypeName)
SAMPLINGS = ("gumbel", "inverse_cdf")
DEVICE = re.compile(r"(cpu|cuda)(:\d+)?")

Section = Literal["scheduler", "experiment", "program"]
"""Who may say an option: an experiment's section `scheduler`; an experiment in a key of its own; a program alone."""


class OptionError(TKernelsError, ValueError):
    """An option has a value that it cannot have, alone or here.

    Args:
        option: The option's name.
        message: Names it too, and says what is allowed and what was given.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def _is_instance_of(value: Any, name: str) -> bool:
    """Whether `value` is a `name`, as in "torch.dtype", told without importing it."""
    return any(f"{base.__module__}.{base.__qualname__}" == name for base in type(value).__mro__)


def _checked_dtype(value: Any) -> str | None:
    """The dtype's name."""
    if not isinstance(value, str) and not _is_instance_of(value, "torch.dtype"):
        return None
    name = str(value).removeprefix("torch.")
    return name if name in ("auto", *DTYPES) else None


def _checked_device(value: Any) -> str | None:
    """The device's name; `tsched.execution.placement` asks whether it is there."""
    if not isinstance(value, str) and not _is_instance_of(value, "torch.device"):
        return None
    return str(value) if DEVICE.fullmatch(str(value)) else None


def _checked_kernels(value: Any) -> Any:
    """`tkernels.select` checks what is in it."""
    return value if isinstance(value, Mapping) else None


def _checked_folders(value: Any) -> tuple[str, ...] | None:
    """The folders' names; `tmodel.architectures_with` looks into them."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, str | PurePath) for one in value):
        return None
    return tuple(map(str, value))


def _checked_tuning(value: Any) -> Any:
    """`tkernels.select` checks a mode's name."""
    return value if isinstance(value, str) or _is_instance_of(value, "tkernels.tuning.Tuning") else None


def _checked_ops(value: Any) -> Any:
    return value if _is_instance_of(value, "tkernels.registry.Registry") else None


def _checked_ranges(value: Any) -> Any:
    return value if all(hasattr(value, name) for name in ("listening", "named", "captured")) else None


@dataclass(frozen=True)
class Option:
    """What is known of one option.

    none      what None means, where it is the default
    unit      what a number counts, "" for a share or a seed
    section   who may say it, of an engine's option
    ge .. lt  the ends of a number's range, by pydantic's names
    choices   the words that a str may be
    check     of an option that is no plain number, flag or word: its value in one spelling, None where it is none
    words     the allowed values of such an option
    name, annotation, default   those of the field that declares it
    """

    meaning: str
    none: str = ""
    unit: str = ""
    section: Section = "scheduler"
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    power_of_two: bool = False
    choices: tuple[str, ...] = ()
    check: Callable[[Any], Any] | None = None
    words: str = ""
    name: str = ""
    annotation: Any = None
    default: Any = None

    @property
    def kind(self) -> type:
        """int, float, bool or str; object where `check` knows."""
        if self.check is not None:
            return object
        kinds = [kind for kind in get_args(self.annotation) if kind is not NoneType]
        return kinds[0] if kinds else self.annotation

    @property
    def is_optional(self) -> bool:
        """Whether None is a value of it."""
        return self.default is None

    @property
    def bounds(self) -> dict[str, Any]:
        """The ends of the range that there are, as pydantic.Field takes them."""
        ends = {name: getattr(self, name) for name in _COMPARISONS}
        return {name: end for name, end in ends.items() if end is not None}

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        if self.words:
            return self.words
        if self.kind is bool:
            return "None, True or False" if self.is_optional else "True or False"
        if self.kind is str:
            words = f"one of {', '.join(map(repr, sorted(self.choices)))}"
        else:
            ends = " and ".join(f"{_COMPARISONS[name][1]} {_format_end(end)}" for name, end in self.bounds.items())
            words = f"{'an integer' if self.kind is int else 'a number'} {ends}"
        if self.power_of_two:
            words += " that is a power of two"
        return f"None or {words}" if self.is_optional else words

    @property
    def usual(self) -> str:
        """What holds where the option is not given, in words."""
        return self.none or str(self.default)

    def check_value(self, value: Any) -> Any:
        """`value` in the one spelling that it has from here on.

        Raises:
            OptionError: It is not allowed. The message says what is.
        """
        if value is None and self.is_optional:
            return None
        checked = self.check(value) if self.check is not None else self._check_plain(value)
        if checked is None:
            hint = suggest_name(value, self.choices) if isinstance(value, str) else ""
            raise OptionError(self.name, f"{self.name} must be {self.allowed}, got {value!r}{hint}")
        return checked

    def _check_plain(self, value: Any) -> Any:
        """A flag, word or number of this kind, None where `value` is none that is allowed."""
        if self.kind is bool:
            return value if isinstance(value, bool) else None
        if self.kind is str:
            return value if isinstance(value, str) and value in self.choices else None
        number = _as_integer(value) if self.kind is int else _as_float(value)
        return number if number is not None and self._is_in_range(number) else None

    def _is_in_range(self, number: float) -> bool:
        is_within = all(_COMPARISONS[name][0](number, end) for name, end in self.bounds.items())
        return is_within and (not self.power_of_two or int(number).bit_count() == 1)


_COMPARISONS: Mapping[str, tuple[Callable[[float, float], bool], str]] = {
    "ge": (operator.ge, "of at least"),
    "gt": (operator.gt, "above"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "below"),
}


def _format_end(end: float) -> str:
    """2147483648 -> "2**31"."""
    is_large_power = isinstance(end, int) and end > 2**20 and end.bit_count() == 1
    return f"2**{int(end).bit_length() - 1}" if is_large_power else f"{end:g}"


def _as_integer(value: Any) -> int | None:
    """numpy's integers are integers, True is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _as_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an int that no float reaches
        return None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of one engine. Each is checked when the record is made, and has one spelling from then on.

    Raises:
        OptionError: A value has another type or is outside its range. The message names the option, what is allowed
            and what was given.
    """

    kernels: Annotated[
        "Choices | None",
        Option(
            "{op: variant} or {op: {variant: {config value: number}}}",
            none="every op's default",
            section="experiment",
            check=_checked_kernels,
            words="None or a mapping of ops to variants",
        ),
    ] = None
    dtype: Annotated[
        "torch.dtype | str",
        Option(
            "type of the activations, weights and KV cache; 'auto' is the checkpoint's",
            section="experiment",
            check=_checked_dtype,
            words=f"'auto', one of {', '.join(DTYPES)}, or such a torch.dtype",
        ),
    ] = "auto"
    device: Annotated[
        "torch.device | str | None",
        Option(
            "where the model runs",
            none="CUDA where there is one, else the CPU",
            section="experiment",
            check=_checked_device,
            words="None, 'cpu' or 'cuda', with a number as in 'cuda:1' or without, or such a torch.device",
        ),
    ] = None
    max_num_batched_tokens: Annotated[int, Option("most tokens in one step", unit="tokens", ge=1, lt=COUNT_END)] = 2048
    max_num_seqs: Annotated[int, Option("most requests in one step", unit="requests", ge=1, lt=COUNT_END)] = 256
    max_model_len: Annotated[
        int | None,
        Option(
            "most tokens of a request, prompt and output together",
            none="the model's max_position_embeddings, which are the most,",
            unit="tokens",
            ge=1,
            lt=COUNT_END,
        ),
    ] = None
    max_chunk_tokens: Annotated[
        int | None,
        Option("most tokens of one prompt in one step", none="no bound of its own", unit="tokens", ge=1, lt=COUNT_END),
    ] = None
    decode_share: Annotated[
        float,
        Option("share of max_num_batched_tokens that prompts may not take while other requests decode", ge=0, lt=1),
    ] = 0.0
    chunked_prefill: Annotated[bool, Option("whether a prompt may be computed in several steps")] = True
    block_size: Annotated[
        int | None,
        Option(
            "tokens in a block of the KV cache",
            none="64 on NVIDIA GPUs from sm_90 on, 16 elsewhere",
            unit="tokens",
            ge=1,
            lt=COUNT_END,
            power_of_two=True,
        ),
    ] = None
    kv_cache_bytes: Annotated[
        int | None,
        Option("size of the KV cache in bytes", none="what kv_cache_fraction gives", unit="bytes", ge=1, lt=BYTES_END),
    ] = None
    kv_cache_fraction: Annotated[
        float | None,
        Option(
            "share of the device's memory for all that is on it: weights, cache, other programs",
            none=f"{GPU_FRACTION} of a GPU's, or up to {CPU_CACHE_BYTES >> 30} GiB of a CPU's for the cache alone",
            gt=0,
            le=1,
        ),
    ] = None
    expected_len: Annotated[
        int | None,
        Option(
            "tokens of a typical request, prompt and output together, by which the cache's bytes are shared out where "
            "some layers keep pages and others states; None is half of max_model_len",
            unit="tokens",
            ge=1,
            lt=COUNT_END,
        ),
    ] = None
    swap_bytes: Annotated[
        int,
        Option(
            "bytes of host memory for the caches of preempted requests, with preemption 'swap'",
            unit="bytes",
            ge=0,
            lt=BYTES_END,
        ),
    ] = 0
    seed: Annotated[
        int, Option("where the random numbers of requests without a seed come from", ge=0, lt=2**64, section="program")
    ] = 0
    sampling: Annotated[
        str,
        Option(
            "how a token is drawn: by Gumbel's noise, a random number a token, or by one number a row",
            choices=SAMPLINGS,
        ),
    ] = "gumbel"
    order: Annotated[str, Option("who is admitted first and gives way last", choices=tuple(ORDERS))] = "fcfs"
    preemption: Annotated[str, Option("what becomes of a request that gives way", choices=tuple(PREEMPTIONS))] = (
        "recompute"
    )
    prefix_cache: Annotated[
        str, Option("how requests find the blocks of prefixes that they share", choices=tuple(PREFIX_CACHES))
    ] = "none"
    shared_prefixes: Annotated[
        bool,
        Option("whether decodes that begin with the same blocks read these together, by the op cascade_decode"),
    ] = False
    overlap: Annotated[
        bool | None,
        Option("whether a step is planned while the one before runs, with the same tokens", none="on a GPU alone"),
    ] = None
    cuda_graphs: Annotated[
        bool | None,
        Option("whether steps are recorded and replayed, with the same tokens", none="on a GPU alone"),
    ] = None
    tuning: Annotated[
        "TuningMode | Tuning",
        Option(
            "how tuned configs are found, see tkernels.Tuning",
            section="experiment",
            check=_checked_tuning,
            words="a mode's name or a tkernels.Tuning",
        ),
    ] = "nearest"
    architectures_from: Annotated[
        "Sequence[str | PurePath]",
        Option(
            "folders of more architectures, <name>.py each, that the model may be of",
            section="experiment",
            check=_checked_folders,
            words="a list of folders",
        ),
    ] = ()
    ops: Annotated[
        "Registry | None",
        Option(
            "the registry of variants",
            none="tkernels.OPS",
            section="program",
            check=_checked_ops,
            words="None or a tkernels.Registry",
        ),
    ] = None
    ranges: Annotated[
        "Ranges | None",
        Option(
            "where steps, phases, layers and kernels are named while they run",
            none="tkernels.NVTX",
            section="program",
            check=_checked_ranges,
            words="None or a tkernels.Ranges",
        ),
    ] = None

    def __post_init__(self) -> None:
        for one in OPTIONS.values():
            object.__setattr__(self, one.name, one.check_value(getattr(self, one.name)))
        if self.kv_cache_bytes is not None and self.kv_cache_fraction is not None:
            message = "kv_cache_bytes and kv_cache_fraction are two ways to say one thing: give one"
            raise OptionError("kv_cache_fraction", message)


def describe_options(record: type[Any]) -> dict[str, Option]:
    """The options that the fields of a dataclass declare, by name, in its order."""
    return {one.name: _describe(one) for one in fields(record)}


def _describe(one: Field[Any]) -> Option:
    annotation, option = get_args(one.type)
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    return replace(option, name=one.name, annotation=annotation, default=one.default)


OPTIONS: Mapping[str, Option] = describe_options(EngineOptions)
"""Every option by name, in the record's order."""

SCHEDULER_OPTIONS: Mapping[str, Option] = {name: one for name, one in OPTIONS.items() if one.section == "scheduler"}
"""The options that an experiment's section `scheduler` has: plain numbers, flags and words."""


def read_options(given: Mapping[str, Any]) -> EngineOptions:
    """The record of the options `given` by name; the others have their defaults.

    Raises:
        ArgumentTypeError: There is no option of such a name. The message has the nearest one, or what vLLM's is here.
        OptionError: As EngineOptions.
    """
    given = drop_unused(given, ENGINE_NAMES, "an engine has no option")
    for name in given:
        if name not in OPTIONS:
            hint = suggest_name(name, OPTIONS)
            raise ArgumentTypeError(f"an engine has no option {name!r}: there is {', '.join(OPTIONS)}{hint}")
    return EngineOptions(**given)
