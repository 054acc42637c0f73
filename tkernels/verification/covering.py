"""Points of an op that cover: every pair of levels of its axes within a few draws (Cohen et al., AETG, 1997).

Most faults that depend on how a call looks depend on one or two things about it: a width of 3 bits and a padded weight,
a window and a page of one token. Independent draws leave the last such pairs to luck.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from typing import TypeVar

import numpy as np

from tkernels.contract import Axes, Axis, Choice, Choose, Contract, ContractError, Value

_FEW = 16  # the narrowest operand of a matrix unit, and the smallest block

Level = tuple[int, Value]
"""What counts as one value of an axis: (the axis' place in the contract, the value or the class of a size)."""
Pair = tuple[Level, Level]
"""Two levels, in the contract's order; the same twice for a level by itself."""

_Item = TypeVar("_Item")


def level_of(value: Value, axis: Axis, place: int) -> Level:
    """A choice is its own level; of sizes, 0, 1, what is below a block, powers of two, and what fills no last block.

    A batch of one is below a block like others: it is no rarer among the draws than two, and shows less.
    """
    if isinstance(axis, Choice) or int(value) == 0 or (value == 1 and not axis.batch):
        return place, value
    size = int(value)
    if size < _FEW:
        return place, "few"
    return place, "uneven" if size & (size - 1) else "power of two"


def levels_of(contract: Contract, axes: Axes) -> list[Level]:
    """The levels of a whole point, in the contract's order."""
    return [level_of(axes[axis.name], axis, place) for place, axis in enumerate(contract.axes)]


def hidden_levels(contract: Contract, axes: Axes) -> list[Level]:
    """Those beside which no other level makes a difference: nothing is computed."""
    return [
        level_of(axes[axis.name], axis, place)
        for place, axis in enumerate(contract.axes)
        if axis.hides(axes[axis.name])
    ]


def pairs_met(contract: Contract, axes: Axes) -> set[Pair]:
    """The pairs that a case at these axes shows: where a level hides what the others do, it by itself."""
    hidden = hidden_levels(contract, axes)
    levels = hidden or levels_of(contract, axes)
    return {(level, level) for level in levels} | set(() if hidden else combinations(levels, 2))


def pairs_of_draws(contract: Contract, fixed: Axes) -> list[Pair]:
    """Every pair that draws with these axes held could meet if the contract had no rules, each level by itself too."""
    pairs: list[Pair] = []
    before: list[Level] = []
    for place, axis in enumerate(contract.axes):
        values = [fixed[axis.name]] if axis.name in fixed else axis.draws
        levels = list(dict.fromkeys(level_of(value, axis, place) for value in values))
        pairs += [(level, level) for level in levels]
        seen = {level_of(value, axis, place) for value in values if not axis.hides(value)}
        shown = [level for level in levels if level in seen]
        pairs += [(one, other) for one in before for other in shown]
        before += shown
    return pairs


def chooser(seed: int) -> Choose:
    """Draws axes with a seeded generator."""
    generator = np.random.default_rng(seed)

    def choose(name: str, candidates: Sequence[Value]) -> Value:
        chosen: Value = candidates[int(generator.integers(len(candidates)))]
        return chosen

    return choose


class Cover:
    """Draws points of a contract, each to meet as many pairs as it can that none before it met.

    A draw starts from a pair that is wanted and takes, axis after axis, the candidate with the most wanted pairs beside
    what it has; the best of a few such draws is proposed. What a variant's `supports` leaves no room for is learnt from
    the proposals that it refused.
    """

    _PROPOSALS = 6
    _TRIES = 40
    _REFUSALS = 8  # of a pair that was tried for, before it is given up
    _BLAMES = 4  # of a level that is refused beside others that were all taken before

    def __init__(self, contract: Contract, seed: int, fixed: Axes | None = None) -> None:
        self._contract, self._fixed = contract, dict(fixed or {})
        self._random = np.random.default_rng(seed)
        self._wanted = dict.fromkeys(pairs_of_draws(contract, self._fixed), 0)  # pair -> times it was tried for
        self._places = {axis.name: (place, axis) for place, axis in enumerate(contract.axes)}
        self._taken: set[Level] = set()
        self._blamed: Counter[Level] = Counter()
        self._uses: Counter[tuple[str, Value]] = Counter()
        self._refused: Counter[tuple[str, Value]] = Counter()
        self._start: Pair | None = None

    def propose(self) -> dict[str, Value] | None:
        """The axes of the next point; None where nothing more is met."""
        best, most = None, 0.0
        for start, axes in islice(self._tries(), self._PROPOSALS):
            met = pairs_met(self._contract, axes)
            hope = math.prod(self._odds(name, value) for name, value in axes.items())
            if (gain := hope * len(met & self._wanted.keys())) > most:
                best, most, self._start = axes, gain, start
        return best and {name: best[name] for name in self._contract.axis_by_name}

    def note(self, axes: Axes, is_case: bool) -> None:
        """What became of the last proposal: a case, whose pairs are met now, or nothing, for the variant refuses it."""
        met = pairs_met(self._contract, axes)
        levels = [one for one, other in met if one == other]
        if is_case:
            self._taken.update(levels)
            self._uses.update(axes.items())
            for pair in met & self._wanted.keys():
                del self._wanted[pair]
            return
        if self._start is not None:
            self._give_up(self._start)
        self._refused.update(axes.items())
        new = [level for level in levels if level not in self._taken]
        if len(new) == 1:  # all others are known to be fine
            self._blamed.update(new)
            if self._blamed[new[0]] >= self._BLAMES:
                self._wanted = {pair: tries for pair, tries in self._wanted.items() if new[0] not in pair}

    def _give_up(self, pair: Pair) -> None:
        """One try less for a pair."""
        if pair in self._wanted:
            self._wanted[pair] += 1
            if self._wanted[pair] >= self._REFUSALS:
                del self._wanted[pair]

    def _odds(self, name: str, value: Value) -> float:
        """How likely the variant takes a point with this value, from what it took and refused."""
        taken = self._uses[name, value] + 1
        return taken / (taken + self._refused[name, value])

    def _tries(self) -> Iterator[tuple[Pair, dict[str, Value]]]:
        """(a pair that was tried for the least, a point within the contract's rules that starts from it)."""
        for _ in range(self._TRIES):
            if not self._wanted:
                return
            fewest = min(self._wanted.values())
            start = self._pick([pair for pair, tries in self._wanted.items() if tries == fewest])
            held = dict(self._fixed)
            for place, name in dict.fromkeys(start):
                axis = self._contract.axes[place]
                if axis.name not in held:
                    same = [value for value in axis.draws if level_of(value, axis, place) == (place, name)]
                    likely = max(self._odds(axis.name, value) for value in same) / 2
                    held[axis.name] = self._pick([value for value in same if self._odds(axis.name, value) >= likely])
            choose = self._greedy(held) if fewest % 2 == 0 else self._as_before
            try:
                yield start, self._contract.draw_axes(choose, held)
            except ContractError:  # the rules leave no room for this pair, or for these values of it
                self._give_up(start)

    def _greedy(self, held: Axes) -> Choose:
        """Picks the candidate with the most wanted pairs beside the levels so far, the least used one of several."""
        chosen = [level_of(value, self._places[name][1], self._places[name][0]) for name, value in held.items()]

        def choose(name: str, candidates: Sequence[Value]) -> Value:
            place, axis = self._places[name]
            scores: dict[Value, tuple[bool, float, float]] = {}
            for index in self._random.permutation(len(candidates)):
                value = candidates[int(index)]
                level = level_of(value, axis, place)
                pairs = (((one, level) if one[0] < place else (level, one)) for one in (*chosen, level))
                gain = (1 + sum(pair in self._wanted for pair in pairs)) * self._odds(name, value)
                scores[value] = not axis.hides(value), gain, -self._uses[name, value]
            value = max(scores, key=lambda one: scores[one])
            chosen.append(level_of(value, axis, place))
            return value

        return choose

    def _as_before(self, name: str, candidates: Sequence[Value]) -> Value:
        """A value that was in a case, where there is one: what is refused beside these alone is to blame for it."""
        return self._pick([value for value in candidates if self._uses[name, value]] or candidates)

    def _pick(self, items: Sequence[_Item]) -> _Item:
        return items[int(self._random.integers(len(items)))]
