"""What a sanitizer is: a question asked of one variant at one case, which answers with a finding or with nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tkernels.config import Config
from tkernels.contract import Axes, Case, Value
from tkernels.device import INTERPRETER, device_facts
from tkernels.inputs import clone_inputs
from tkernels.mode import MODE
from tkernels.tuning import candidates
from tkernels.variant import Variant
from tkernels.verification.calls import call
from tkernels.verification.check import outside_folder, replay_command
from tkernels.verification.draws import chooser, draw
from tkernels.verification.grown_cases import count_grown_cases, grown_cases
from tkernels.verification.kernel_errors import describe_error
from tkernels.verification.size_limits import first_supported


def without_launches(variant: Variant) -> str | None:
    """A sanitizer that watches launches, which only Triton variants make."""
    if variant.launch is not None:
        return None
    return "its parts are put under it themselves" if variant.parts else "it launches no kernel of ours"


@dataclass(frozen=True)
class Sanitizer:
    """A way to look at a variant that its results alone do not give.

    Attributes:
        finds: What it would find, in a few words.
        run: (variant, case, config) -> what is wrong, or None. An exception is a finding too.
        unfit: Variant -> why it cannot be put under this sanitizer, or None.
        takes: Whether a case is one that it can try; another is drawn in the place of one that is not.
        draws: How many cases a run over the registry takes; with `each_config`, for each config of the variant.
        max_programs: Of a drawn case.
        fixed: Axes that every other draw holds, where the op has them.
        grows: It looks at what programs do to each other, and so takes the `grown_cases` of a variant beside its draws.
        interpreted: It watches the interpreter; otherwise it also runs where kernels are compiled.
    """

    name: str
    finds: str
    run: Callable[[Variant, Case, Config | None], str | None]
    unfit: Callable[[Variant], str | None] = lambda variant: None
    takes: Callable[[Case], bool] = lambda case: True
    draws: int = 6
    max_programs: int = 16
    each_config: bool = False
    fixed: Mapping[str, Value] = field(default_factory=dict)
    grows: bool = False
    interpreted: bool = True


@dataclass(frozen=True)
class Finding:
    """What a sanitizer found in a variant at a case. is_raised: the message is that of an exception."""

    sanitizer: str
    variant: Variant
    case: Case
    config: Config | None
    message: str
    is_raised: bool = False

    @property
    def replay(self) -> str:
        """The one command that finds it again."""
        op, outside = self.case.contract.name, outside_folder(self.variant)
        axes, seed = self.case.axes, self.case.seed
        return replay_command(op, self.variant.name, axes, seed, self.config, outside, self.sanitizer)

    def __str__(self) -> str:
        name = f"{self.variant.contract.name}.{self.variant.name}"
        return f"{name}: {self.sanitizer}: {self.message}\n  replay: {self.replay}"


def unfit_reason(sanitizer: Sanitizer, variant: Variant) -> str | None:
    """Why a variant is not put under a sanitizer in this process, or None where it is."""
    if sanitizer.interpreted and MODE != "interpret":
        return "it watches the interpreter, and this process compiles"
    return sanitizer.unfit(variant)


def inspect_case(sanitizer: Sanitizer, variant: Variant, case: Case, config: Config | None) -> Finding | None:
    """Puts one case under a sanitizer."""
    try:
        message = sanitizer.run(variant, case, config)
    except (Exception, SystemExit) as error:
        return Finding(sanitizer.name, variant, case, config, describe_error(error), is_raised=True)
    return None if message is None else Finding(sanitizer.name, variant, case, config, message)


def find_plain_fault(variant: Variant, case: Case, config: Config | None) -> str | None:
    """What a call without a sanitizer raises; every sanitizer that calls the variant raises the same."""
    try:
        call(variant, clone_inputs(case.inputs), config)
    except (Exception, SystemExit) as error:
        return describe_error(error)
    return None


def planned_cases(
    sanitizer: Sanitizer,
    variant: Variant,
    examples: int | None = None,
    fixed: Axes | None = None,
    config: Config | None = None,
) -> int:
    """How many cases a variant is to get at most: its draws, and what the sanitizer takes beside them."""
    grown = count_grown_cases(variant, fixed) if sanitizer.grows else 0
    return _planned_draws(sanitizer, variant, examples, config) + grown


def _planned_draws(sanitizer: Sanitizer, variant: Variant, examples: int | None, config: Config | None) -> int:
    """As many as asked for, else the sanitizer's own number."""
    if examples is not None:
        return examples
    return sanitizer.draws * max(1, len(_configs(sanitizer, variant, config)))


def _configs(
    sanitizer: Sanitizer, variant: Variant, config: Config | None, arch: str = INTERPRETER.arch
) -> tuple[Config, ...]:
    """The configs that are each to have draws of their own. Interpreted, those with the same constants are one: warps,
    stages and the other options of a launch are a compiler's.
    """
    if not sanitizer.each_config or variant.launch is None:
        return ()
    if config is not None:
        return (config,)
    found = candidates(variant, arch)
    if MODE != "interpret":
        return found
    unique: dict[tuple[tuple[str, int], ...], Config] = {}
    for one in found:
        unique.setdefault(one.constants, one)
    return tuple(unique.values())


_TRIES = 100
_APART = 1009
_MORE = 8
"""Times as many programs where no case was found: a config of 64 splits launches that many however small a case is."""


def sanitizer_cases(
    sanitizer: Sanitizer,
    variant: Variant,
    examples: int | None = None,
    seed: int = 0,
    fixed: Axes | None = None,
    device: torch.device | str = "cpu",
    config: Config | None = None,
) -> Iterator[tuple[Case, Config | None]]:
    """Draws the cases that a sanitizer takes, and then its `grown_cases` where it looks at these. Fewer than planned
    where the variant supports, or the sanitizer takes, next to none. One that takes nothing but in its region is drawn
    there.

    `fixed` axes are held, and so is `config` where one is given.
    """
    known = variant.contract.axis_by_name
    narrowed = {name: value for name, value in sanitizer.fixed.items() if name in known}
    arch = device_facts(torch.device(device)).arch
    configs: Sequence[Config | None] = _configs(sanitizer, variant, config, arch) or (config,)
    inside = bool(variant.region) and first_supported(variant, torch.device(device)) is None
    for index in range(_planned_draws(sanitizer, variant, examples, config)):
        held = {**(narrowed if index % 2 == 0 else {}), **(fixed or {})}
        wanted = configs[index % len(configs)]
        for attempt in range(_TRIES):
            number = seed + index + _APART * attempt
            most = sanitizer.max_programs * (_MORE if attempt >= _TRIES // 2 else 1)
            drawn = draw(variant, chooser(number), number, held, device, most, wanted, inside=inside)
            if drawn is not None and sanitizer.takes(drawn[0]):
                yield drawn
                break
    if sanitizer.grows:
        for case, chosen in grown_cases(variant, sanitizer.max_programs, seed, fixed, device, config):
            if sanitizer.takes(case):
                yield case, chosen


def sanitized(
    sanitizer: Sanitizer,
    variant: Variant,
    examples: int | None = None,
    seed: int = 0,
    fixed: Axes | None = None,
    device: torch.device | str = "cpu",
    config: Config | None = None,
) -> Iterator[Finding | None]:
    """Puts each case of `sanitizer_cases` under the sanitizer."""
    for case, chosen in sanitizer_cases(sanitizer, variant, examples, seed, fixed, device, config):
        yield inspect_case(sanitizer, variant, case, chosen)
