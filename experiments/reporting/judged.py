"""What a run's processes say of two of its rows: the same that its arms beside each other say, wherever both do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.document import ExperimentError
from experiments.reporting.arms import processes
from experiments.runs.comparison import MIN_REPLICATES
from experiments.runs.rows import Row
from experiments.runs.table import figure_key, times_of
from experiments.runs.verdicts import Paired, beside_the_first, judge_pairs

_Keys = tuple[str, str]


@dataclass(frozen=True)
class Judged:
    """found: the keys of two figures -> the second over the first."""

    found: Mapping[_Keys, Paired]

    @staticmethod
    def of(rows: Sequence[Row], pairs: Sequence[tuple[Row, Row]]) -> "Judged":
        """Judges speeds of `pairs`. rows: those of each process; where there are too few, nothing is found.

        A pair that the comparison of the run's arms has too is judged there: an outcome depends on how many others it
        is judged with, and a report must not say two things of one pair. The others are a comparison of their own.
        """
        if processes(rows) < MIN_REPLICATES:
            return Judged({})
        try:
            figures = times_of(rows)
        except ExperimentError:  # two rows of one process that cannot be told apart: nothing can be said of them
            return Judged({})
        arms = beside_the_first(figures)
        known = set(arms)
        wanted = dict.fromkeys(map(_keys, pairs))
        rest = [keys for keys in wanted if keys[0] != keys[1] and all(key in figures for key in keys)]
        found: dict[_Keys, Paired] = {}
        for family in (arms, [keys for keys in rest if keys not in known]):
            found |= judge_pairs({(first, second): (figures[first], figures[second]) for first, second in family})[0]
        return Judged(found)

    def between(self, pairs: Sequence[tuple[Row, Row]]) -> list[Paired] | None:
        """What was found of each of them; None where that is not of all."""
        found = [self.found.get(_keys(pair)) for pair in pairs]
        known = [one for one in found if one is not None]
        return known if len(known) == len(found) else None


def _keys(pair: tuple[Row, Row]) -> _Keys:
    first, second = map(figure_key, pair)
    return first, second
