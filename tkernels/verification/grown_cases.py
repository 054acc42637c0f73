"""Cases in which more programs share a size than one: what they do to each other shows there alone.

A config may begin at blocks that are larger than all sizes that are drawn. A launch for such a size has one program
along it, whatever its kernel does for several.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from tkernels.config import Config
from tkernels.contract import Axes, Case, Choose, ContractError, Int
from tkernels.device import device_facts
from tkernels.preparation import prepared_case
from tkernels.variant import Variant
from tkernels.verification.covering import chooser
from tkernels.verification.draws import FAR_FLOPS, GROWN_SEED, RANKS, smallest_sizes
from tkernels.verification.dry_run import dry_run
from tkernels.verification.size_limits import far_sizes

_TIMES = 3
"""So that not all but one of them have a last block, which may hold a single element."""


def count_grown_cases(variant: Variant, fixed: Axes | None = None) -> int:
    """How many `grown_cases` there are at most."""
    return 2 * len(_sizes_by_axis(variant, fixed or {}))


def grown_cases(
    variant: Variant,
    most: int,
    seed: int = 0,
    fixed: Axes | None = None,
    device: torch.device | str = "cpu",
    config: Config | None = None,
) -> Iterator[tuple[Case, Config]]:
    """Of each size that a launch's grid grows with a case of the first at which it has, beside the smallest others.

    In these each choice is the contract's first; where no size that is drawn is enough, one of drawn choices follows.
    None where that takes more than `most` programs, or more arithmetic than a far case may.
    """
    where, held = torch.device(device), fixed or {}
    sizes = _sizes_by_axis(variant, held)
    for is_first in (True, False) if sizes else ():
        chosen = config if config is not None else variant.default_config(device_facts(where).arch)
        seeds = enumerate(RANKS, seed + GROWN_SEED)
        grids = (_SmallGrid(variant, held, where, chosen, number, rank, is_first) for number, rank in seeds)
        taken = ((grid, fewest) for grid in grids if (fewest := grid.count({})) is not None)
        for grid, fewest in islice(taken, 1):
            for axis, candidates in sizes.items():
                case = grid.grown(axis, candidates, fewest, most)
                if (
                    case is not None
                    and case.flops <= FAR_FLOPS
                    and (is_first or int(case.axes[axis.name]) > max(axis.draws))
                ):
                    yield case, chosen


def _sizes_by_axis(variant: Variant, fixed: Axes) -> dict[Int, list[int]]:
    """What is tried of each size that a grid may grow with, ascending; nothing for what launches nothing itself."""
    sizes = [axis for axis in variant.contract.axes if isinstance(axis, Int) and axis.name not in fixed]
    tried = {axis: {*axis.draws, *axis.wide, *far_sizes(axis)} for axis in sizes if variant.launch is not None}
    return {axis: sorted(size for size in values if not axis.hides(size)) for axis, values in tried.items()}


@dataclass(frozen=True)
class _SmallGrid:
    """How many programs a variant launches where sizes are the smallest, but for one that is held.

    Attributes:
        seed: Of the case, and of its choices where they are not the contract's first (`is_first`).
        rank: Which of the smallest.
    """

    variant: Variant
    fixed: Axes
    device: torch.device
    config: Config
    seed: int
    rank: int
    is_first: bool

    def _axes(self, held: Axes) -> Axes | None:
        """The smallest sizes beside these; None where the op's rules leave no room for them."""
        choose: Choose = (lambda name, candidates: candidates[0]) if self.is_first else chooser(self.seed)
        contract = self.variant.contract
        try:
            return contract.draw_axes(smallest_sizes(contract, choose, self.rank), {**self.fixed, **held})
        except ContractError:
            return None

    def count(self, held: Axes) -> int | None:
        """The programs beside these, seen on tensors without values; None where the variant refuses them."""
        if (axes := self._axes(held)) is None:
            return None
        contract, facts = self.variant.contract, device_facts(self.device)
        try:
            case = prepared_case(self.variant, contract.case(axes, self.seed, "meta"))
            arguments = contract.bind_arguments((), case.inputs)
            bound, _ = contract.bind_axes(arguments)
        except Exception:  # it is no case for the variant, or what makes its inputs needs values: there are none here
            return None
        if self.variant.unsupported_reason(bound, self.device, facts):
            return None
        try:
            return sum(math.prod(one.grid) for one in dry_run(self.variant, arguments, bound, self.config, facts))
        except (Exception, SystemExit):  # a launcher that raises is for an ordinary case to report
            return None

    def grown(self, axis: Int, sizes: Sequence[int], fewest: int, most: int) -> Case | None:
        """The case of the first of these sizes with `_TIMES` as many programs as `fewest`, else of the first with more;
        None where there are never more, or more than `most` at once.
        """
        found = None
        largest = next((count for size in reversed(sizes) if (count := self.count({axis.name: size})) is not None), 0)
        for size in sizes if largest > fewest else ():
            axes, count = self._axes({axis.name: size}), self.count({axis.name: size})
            if axes is None or count is None or not fewest < count <= most:
                continue
            found = axes if found is None or count >= _TIMES * fewest else found
            if count >= _TIMES * fewest:
                break
        if found is None:
            return None
        return prepared_case(self.variant, self.variant.contract.case(found, self.seed, self.device))
