"""What a sanitizer is: a question asked of one variant at one case, which answers with a finding or with nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tkernels.config import Config
from tkernels.contract import Axes, Case, Value
from tkernels.device import INTERPRETER
from tkernels.mode import MODE
from tkernels.tuning import candidates
from tkernels.variant import Variant
from tkernels.verification.check import chooser, draw, outside_folder, replay_command


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
        draws: How many cases a run over the registry takes; with `each_config`, for each config of the variant.
        max_programs: Of a drawn case.
        fixed: Axes that every other draw holds, where the op has them.
        interpreted: It watches the interpreter; otherwise it also runs where kernels are compiled.
    """

    name: str
    finds: str
    run: Callable[[Variant, Case, Config | None], str | None]
    unfit: Callable[[Variant], str | None] = lambda variant: None
    draws: int = 6
    max_programs: int = 16
    each_config: bool = False
    fixed: Mapping[str, Value] = field(default_factory=dict)
    interpreted: bool = True


@dataclass(frozen=True)
class Finding:
    """What a sanitizer found in a variant at a case."""

    sanitizer: str
    variant: Variant
    case: Case
    config: Config | None
    message: str

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
        message = f"{type(error).__name__}: {error}"
    return None if message is None else Finding(sanitizer.name, variant, case, config, message)


def planned_draws(
    sanitizer: Sanitizer, variant: Variant, examples: int | None = None, config: Config | None = None
) -> int:
    """How many cases a variant is to get: as many as asked for, else the sanitizer's own number."""
    if examples is not None:
        return examples
    return sanitizer.draws * max(1, len(_configs(sanitizer, variant, config)))


def _configs(sanitizer: Sanitizer, variant: Variant, config: Config | None) -> tuple[Config, ...]:
    """The configs that are each to have draws of their own."""
    if not sanitizer.each_config or variant.launch is None:
        return ()
    return (config,) if config is not None else candidates(variant, INTERPRETER.arch)


_TRIES = 100
_APART = 1009
_MORE = 8
"""Times as many programs where no case was found: a config of 64 splits launches that many however small a case is."""


def sanitized(
    sanitizer: Sanitizer,
    variant: Variant,
    examples: int | None = None,
    seed: int = 0,
    fixed: Axes | None = None,
    device: torch.device | str = "cpu",
    config: Config | None = None,
) -> Iterator[Finding | None]:
    """Draws cases and puts each under the sanitizer. Fewer than planned where the variant supports next to none.

    `fixed` axes are held, and so is `config` where one is given.
    """
    known = variant.contract.axis_by_name
    narrowed = {name: value for name, value in sanitizer.fixed.items() if name in known}
    configs: Sequence[Config | None] = _configs(sanitizer, variant, config) or (config,)
    for index in range(planned_draws(sanitizer, variant, examples, config)):
        held = {**(narrowed if index % 2 == 0 else {}), **(fixed or {})}
        wanted = configs[index % len(configs)]
        for attempt in range(_TRIES):
            number = seed + index + _APART * attempt
            most = sanitizer.max_programs * (_MORE if attempt >= _TRIES // 2 else 1)
            drawn = draw(variant, chooser(number), number, held, device, most, wanted)
            if drawn is not None:
                yield inspect_case(sanitizer, variant, *drawn)
                break
