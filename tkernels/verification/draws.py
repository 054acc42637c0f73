"""Which cases a variant is checked on: seeded draws of axes, values and a config, and the wide cases after them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from tkernels.config import Config
from tkernels.contract import Axes, Case, Choose, Contract, ContractError, Int, Value
from tkernels.device import INTERPRETER, device_facts
from tkernels.inputs import clone_inputs, tensors_in
from tkernels.preparation import prepared_case
from tkernels.tuning import candidates
from tkernels.variant import UnsupportedError, Variant
from tkernels.verification.calls import call
from tkernels.verification.covering import Cover, chooser, hidden_levels
from tkernels.verification.size_limits import draw_inside, far_sizes, sizes_to_reach


def count_programs(variant: Variant, case: Case, config: Config) -> int:
    """How many programs a case would launch, without running any: the launcher sees a door that only counts. It works
    on copies, for what it does to its tensors itself is done.
    """
    total = 0

    def counting_door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        nonlocal total
        total += math.prod(grid)

    call(variant, clone_inputs(case.inputs), config, door=counting_door)
    return total


EXAMPLES = 20
"""Drawn cases that a variant is checked on before it counts as right."""
MAX_PROGRAMS = 8
"""Of a drawn case: the interpreter's cost follows the number of programs, a fault shows itself in the first few."""


def draw(
    variant: Variant,
    choose: Choose,
    seed: int,
    fixed: Axes | None = None,
    device: torch.device | str = "cpu",
    max_programs: int = MAX_PROGRAMS,
    config: Config | None = None,
    wide: bool = False,
    inside: bool = False,
) -> tuple[Case, Config | None] | None:
    """A case within the contract and a config of the variant (None for torch); None where the draw gives no such pair.

    `wide`: as the contract's wide draws. `inside`: at sizes that the variant's region names, with a GPU's config, whose
    blocks are as large as these. `config` replaces the drawn one. A drawn config that would launch more than
    `max_programs` gives way to the default; a case that the variant does not support, or that is too large even so, to
    another draw.
    """
    contract, fixed = variant.contract, {**variant.axes_left_out, **(fixed or {})}
    try:
        held = {**draw_inside(variant, choose), **fixed} if inside else fixed
        axes = contract.draw_axes(choose, held, wide)
    except ContractError:
        if not inside:
            raise
        return None  # the op's rules leave no room beside these sizes
    try:
        case = prepared_case(variant, contract.case(axes, seed, device))
    except UnsupportedError:
        return None
    bound, where = contract.bind_axes(contract.bind_arguments((), case.inputs))
    facts = device_facts(where)
    if variant.unsupported_reason(bound, where, facts):
        return None
    if variant.kind != "triton":
        return case, None
    usual = (variant.default[""],) if inside else candidates(variant, facts.arch)
    configs = (config,) if config is not None else usual
    chosen = configs[int(choose("config", range(len(configs))))]
    for one in dict.fromkeys((chosen, configs[0])):
        try:
            count = count_programs(variant, case, one)
        except (Exception, SystemExit):  # a launcher that raises is for `check_case` to report
            return case, one
        if count <= max_programs:
            return case, one
    return None


def drawn_cases(
    variant: Variant,
    examples: int,
    seed: int = 0,
    fixed: Axes | None = None,
    device: torch.device | str = "cpu",
    max_programs: int = MAX_PROGRAMS,
) -> Iterator[tuple[Case, Config | None]]:
    """Seeded draws, exactly as many as asked; a ContractError where the variant supports next to none. One that takes
    none but in its region is drawn there, up to 4 times: such cases may be large.

    The first some 20 to 40 meet every pair of levels of the axes that the variant takes (see `covering`), the others
    are independent of each other. So is the draw after one that the variant refuses: where it takes little, chance
    finds the first cases, and what goes with them is learnt from these.
    """
    found = tries = 0
    fixed = {**variant.axes_left_out, **(fixed or {})}
    cover, is_refused = Cover(variant.contract, seed, fixed), False
    while found < examples:
        proposed = None if is_refused else cover.propose()
        drawn = draw(variant, chooser(seed + tries), seed + tries, proposed or fixed, device, max_programs)
        is_refused = proposed is not None and drawn is None  # an independent draw is next
        if drawn is not None:
            cover.note(drawn[0].axes, True)
        elif proposed is not None:
            cover.note(proposed, False)
        tries += 1
        if drawn is not None:
            found += 1
            yield drawn
        elif tries >= 200 and tries > 100 * (found + 1):
            inside = [] if found else list(islice(_cases_inside(variant, seed, fixed, device), min(examples, _INSIDE)))
            if not inside:
                raise ContractError(f"{found} of {tries} draws are supported; fix axes that it supports")
            yield from inside
            return


_INSIDE, _INSIDE_TRIES = 4, 40
"""Cases drawn in the region of a variant that takes nothing outside of it, and the draws for all of them."""


def _cases_inside(
    variant: Variant, seed: int, fixed: Axes | None, device: torch.device | str
) -> Iterator[tuple[Case, Config | None]]:
    """Draws at sizes that a variant's region names; none where it names none."""
    for number in range(seed, seed + _INSIDE_TRIES if variant.region else seed):
        drawn = draw(variant, chooser(number), number, fixed, device, _WIDE_PROGRAMS, inside=True)
        if drawn is not None:
            yield drawn


WIDE_SEED, FAR_SEED, CUT_SEED, GROWN_SEED = 500_000, 600_000, 650_000, 700_000
"""Added to the seed of wide, far and grown cases, so that no drawn case has the same."""
_FEWEST_WIDE = 2
_WIDE_PROGRAMS = 512
"""The sizes bound the cost: a thousand keys or features in the interpreter's small blocks."""
_WIDE_TRIES = 40


RANKS = (0,) * 8 + (1, 2, 3, 4)
"""Of each try at a case of small sizes: the smallest several times first, for a variant may take one coding of four."""
_CUT_POWERS, _CUT_PROGRAMS = (8, 10, 12, 13), 5000
"""Of batches at which a grid may end, and of the programs there that are run."""
_FAR_PROGRAMS, FAR_FLOPS = 260, 600_000
"""Of a far case: the latter, also of a grown one, bounds the loops within a program."""


_Plan = tuple[Axes, Config | None, bool]


def _wide_plans(variant: Variant, fixed: Axes, config: Config | None, device: torch.device) -> list[_Plan]:
    """(held axes, config, whether the rest is drawn wide) of each wide case."""
    configs: list[Config | None] = [config]
    if config is None and variant.kind == "triton":
        arch = device_facts(device).arch
        distinct = {variant.default_config(arch).constants: variant.default_config(arch)}
        for other in variant.default.values() if arch == INTERPRETER.arch else ():
            distinct.setdefault(other.constants, other)  # an interpreter has neither warps nor stages
        configs = list(distinct.values())
    corners = variant.contract.corners.values()
    fitting = [corner for corner in corners if all(fixed.get(name, value) == value for name, value in corner.items())]
    # With a GPU's config, whose blocks are large: the interpreter's would take a row of 65,536 in a thousand steps.
    fast = variant.default[""] if config is None and variant.kind == "triton" else configs[0]
    plans: list[_Plan] = [
        ({**corner, **fixed}, fast if _is_beyond_draws(variant.contract, corner) else configs[0], False)
        for corner in fitting
    ]
    # Of what is wrong in wide rows, other values may show nothing: an epsilon hides the sum of faint ones.
    axis = variant.contract.axis_by_name.get("values")
    ordinary = {"values": "ordinary"} if axis is not None and axis.allows("ordinary") else {}
    wide_configs = configs * (_FEWEST_WIDE if len(configs) == 1 else 1)
    plans += [(fixed if index else {**ordinary, **fixed}, one, True) for index, one in enumerate(wide_configs)]
    reached = [(name, size) for name, size in sizes_to_reach(variant, device) if name not in fixed]
    return plans + [({**fixed, name: size}, fast, False) for name, size in reached]


def _is_beyond_draws(contract: Contract, axes: Axes) -> bool:
    """Whether some size is larger than all that are drawn."""
    sizes = ((contract.axis_by_name[name], value) for name, value in axes.items())
    return any(isinstance(axis, Int) and int(value) > max(axis.draws) for axis, value in sizes)


def count_wide_cases(
    variant: Variant, fixed: Axes | None = None, config: Config | None = None, device: torch.device | str = "cpu"
) -> int:
    """How many `wide_cases` there are at most."""
    held = fixed or {}
    far = _far_axes(variant, held, config)
    cut = sum(axis.batch for axis in far)
    return len(_wide_plans(variant, held, config, torch.device(device))) + len(far) + cut


def wide_cases(
    variant: Variant,
    seed: int = 0,
    fixed: Axes | None = None,
    config: Config | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[Case, Config | None]]:
    """What ordinary draws leave out, the same for a seed: the contract's corners, sizes as large as a model's, and what
    `sizes_to_reach` finds: where the op's variants begin and end.

    All of these with the variant's default config; and, since the interpreter stands for every architecture, sizes as
    large as a model's with each other one's default too. `config` replaces all of them. A case that the variant does
    not support, or that the `fixed` axes leave no room for, is left out.
    """
    where = torch.device(device)
    for index, (held, chosen, wide) in enumerate(_wide_plans(variant, fixed or {}, config, where)):
        for attempt in range(_WIDE_TRIES):
            number = seed + WIDE_SEED + index * _WIDE_TRIES + attempt
            try:
                drawn = draw(variant, chooser(number), number, held, where, _WIDE_PROGRAMS, chosen, wide)
            except ContractError:  # the held axes leave no room beside what was drawn before them
                continue
            if drawn is not None and not hidden_levels(variant.contract, drawn[0].axes):
                yield drawn
                break
    for axis in _far_axes(variant, fixed or {}, config):
        if (drawn := _far_case(variant, axis, seed + FAR_SEED, fixed or {}, where)) is not None:
            yield drawn
        if axis.batch and (drawn := _cut_case(variant, axis, seed + CUT_SEED, fixed or {}, where)) is not None:
            yield drawn


def _far_axes(variant: Variant, fixed: Axes, config: Config | None) -> list[Int]:
    """The sizes that are put far beyond the draws; none where a config is given, whose blocks may be small."""
    if config is not None or variant.kind == "torch":
        return []
    sizes = [axis for axis in variant.contract.axes if isinstance(axis, Int) and axis.name not in fixed]
    return [axis for axis in sizes if far_sizes(axis)]


def _far_case(
    variant: Variant, axis: Int, seed: int, fixed: Axes, device: torch.device
) -> tuple[Case, Config | None] | None:
    """One size as large as an interpreter bears beside the smallest others, with the config of the fewest programs."""
    for size in far_sizes(axis):
        for attempt, rank in enumerate(RANKS):
            smallest = smallest_sizes(variant.contract, chooser(seed + attempt), rank)
            try:
                axes = variant.contract.draw_axes(smallest, {**fixed, axis.name: size})
            except ContractError:
                continue
            try:
                case = prepared_case(variant, variant.contract.case(axes, seed + attempt, device))
            except UnsupportedError:
                continue
            if case.flops > FAR_FLOPS:
                break
            bound, _ = variant.contract.bind_axes(variant.contract.bind_arguments((), case.inputs))
            if variant.unsupported_reason(bound, device, device_facts(device)):
                continue
            try:
                config, programs = _fewest_programs(variant, case, device)
            except (Exception, SystemExit):  # a launcher that raises is for `check_case` to report
                return case, variant.default[""]
            if programs <= _FAR_PROGRAMS or not _is_more(variant, case, axis, config, programs):
                return case, config
            break
    return None


def _cut_case(
    variant: Variant, axis: Int, seed: int, fixed: Axes, device: torch.device
) -> tuple[Case, Config | None] | None:
    """The first batch at which a grid that has grown with it grows no more: its programs walk what is cut off, or leave
    it out. None where it grows on, as far as the batches are cheap, or never did.
    """
    config, counts = None, [0, 0]
    for size in (2**power + 1 for power in _CUT_POWERS):
        try:
            axes = variant.contract.draw_axes(
                smallest_sizes(variant.contract, chooser(seed), 0), {**fixed, axis.name: size}
            )
            case = prepared_case(variant, variant.contract.case(axes, seed, device))
        except (ContractError, UnsupportedError):
            return None
        bound, _ = variant.contract.bind_axes(variant.contract.bind_arguments((), case.inputs))
        if case.flops > FAR_FLOPS or variant.unsupported_reason(bound, device, device_facts(device)):
            return None
        try:
            config = config or _fewest_programs(variant, case, device)[0]
            counts.append(count_programs(variant, case, config) if config is not None else 0)
        except (Exception, SystemExit):  # a launcher that raises is for `check_case` to report
            return None
        if counts[-3] < counts[-2] == counts[-1] and counts[-3]:
            return (case, config) if counts[-1] <= _CUT_PROGRAMS else None
    return None


def _is_more(variant: Variant, case: Case, axis: Int, config: Config | None, programs: int) -> bool:
    """Whether these are more programs than at the power of two below: no grid is cut off, so none of them need run."""
    power = 1 << (int(case.axes[axis.name]).bit_length() - 1)
    try:
        smaller = case.contract.case({**case.axes, axis.name: power}, case.seed, tensors_in(case.inputs)[0].device)
        before = prepared_case(variant, smaller)
    except ContractError:  # a rule of the op leaves no room for it
        return True
    return config is None or count_programs(variant, before, config) < programs


def _fewest_programs(variant: Variant, case: Case, device: torch.device) -> tuple[Config | None, int]:
    """The config with which a case launches the fewest programs, and how many; an interpreter may have any of them."""
    if variant.kind != "triton":
        return None, 0
    tuned = variant.configs or () if device_facts(device).arch == INTERPRETER.arch else ()
    counts = {config: count_programs(variant, case, config) for config in (variant.default[""], *tuned)}
    best = min(counts, key=lambda config: counts[config])
    return best, counts[best]


def smallest_sizes(contract: Contract, choose_one: Choose, rank: int) -> Choose:
    """Takes the smallest sizes, or the next ones by `rank`, and nothing that hides what the others do; `choose_one`
    takes what is no size.
    """

    def choose(name: str, candidates: Sequence[Value]) -> Value:
        axis = contract.axis_by_name[name]
        shown = [value for value in candidates if not axis.hides(value)] or list(candidates)
        return sorted(shown, key=int)[min(rank, len(shown) - 1)] if isinstance(axis, Int) else choose_one(name, shown)

    return choose
