"""The statistics of comparisons: known values, and their size and power by simulation."""

import math
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from experiments.reporting.comparison_tables import OUTCOMES
from experiments.runs.comparison import LEVEL, RUN_SPREAD, Difference, Effect, Sample, judge, two_sided_quantile
from experiments.runs.drift import carried_drift, drift_of, slow_share


def between_runs(
    first: Sequence[float], second: Sequence[float], drift: float, correction: float = 0.0, spent: float = 0.0
) -> Difference:
    return Sample((first, second), correction, spent).difference(drift)


def paired(differences: Sequence[float], drift: float, correction: float = 0.0, spent: float = 0.0) -> Difference:
    return Sample((differences,), correction, spent).difference(drift)


@pytest.mark.parametrize(
    ("level", "df", "t"),  # of printed tables
    [(0.05, 4, 2.776445), (0.05, 8, 2.306004), (0.01, 30, 2.749996), (0.05, 1, 12.706205), (0.001, 9, 4.780913)],
)
def test_students_t_is_that_of_the_tables_on_both_sides(level: float, df: float, t: float) -> None:
    assert two_sided_quantile(level, df) == pytest.approx(t, abs=1e-6)
    assert Difference(t, 1.0, df).p == pytest.approx(level, rel=1e-5)
    assert Difference(-2 * t, 4.0, df).p == Difference(t, 1.0, df).p


def test_without_drift_the_difference_is_welchs_and_what_a_run_has_of_its_own() -> None:
    first, second = [1.0, 2.0, 4.0, 5.0, 3.0], [2.0, 6.0, 4.0, 10.0, 8.0]
    found = between_runs(first, second, 0.0)
    assert found.mean == 3.0
    own = 2 * RUN_SPREAD**2
    assert found.variance == pytest.approx(2.5 / 5 + 10 / 5 + own)
    assert found.df == pytest.approx((2.5 + own) ** 2 / (0.5**2 / 4 + 2**2 / 4))


def test_drift_is_carried_from_one_run_into_the_next() -> None:
    walk, wave = 2 / 3 * 2, (1 / 2 + 1 / 4) / 2  # of two processes each, in steps: their means, and their slow waves
    assert carried_drift(2) == pytest.approx(walk / (2 * wave / 2))
    first, second = [1.0, 2.0, 4.0, 5.0, 3.0], [2.0, 6.0, 4.0, 10.0, 8.0]
    still, drifting = (between_runs(first, second, drift) for drift in (0.0, 0.5))
    slow = 2.5 * 0.5 * carried_drift(5)
    assert drifting.variance == pytest.approx(still.variance + slow)
    assert drifting.df == pytest.approx(drifting.variance**2 / (0.5**2 / 4 + 2**2 / 4 + slow**2 / 4))
    paired_still, paired_drifting = (paired(first, drift) for drift in (0.0, 0.5))
    assert paired_drifting.variance == pytest.approx(1.5 * paired_still.variance)  # of one series, there is no next


def test_what_is_paired_is_judged_by_its_differences() -> None:
    found = paired([0.1, 0.2, 0.3, 0.2, 0.2], 0.0)
    assert (found.mean, found.df) == (pytest.approx(0.2), pytest.approx(4))
    assert found.variance == pytest.approx(0.005 / 5)


def test_of_eight_processes_or_more_those_at_either_end_do_not_count() -> None:
    steady = [1.0, 1.1, 0.9, 1.05, 0.95, 1.02, 0.98, 1.0, 1.01, 0.99]
    found = paired(steady, 0.0)
    kept = [1.0, 1.02, 0.98, 1.02, 0.98, 1.02, 0.98, 1.0, 1.01, 0.99]  # what is left out, as the nearest that is not
    assert found.mean == pytest.approx((0.98 + 0.99 + 1.0 + 1.0 + 1.01 + 1.02) / 6)
    assert found.variance == pytest.approx(statistics.variance(kept) * 9 / (6 * 5))
    assert found.df == pytest.approx(5)
    disturbed = [9.0 if value == 1.1 else 8.0 if value == 1.05 else value for value in steady]
    assert paired(disturbed, 0.0) == found
    assert between_runs(steady, disturbed, 0.0).p == 1
    assert paired([*steady[:4], 9.0], 0.0).mean == pytest.approx((1.0 + 1.1 + 0.9 + 1.05 + 9) / 5)


def test_a_trend_is_slow_and_what_alternates_is_not() -> None:
    assert slow_share([0, 1, 2, 3, 4, 5, 6, 7]) > 3
    assert slow_share([0, 1, 0, 1, 0, 1, 0, 1]) < 0.2
    assert slow_share([3.0] * 8) == slow_share([1.0, 2.0, 5.0]) == 1.0
    first_wave = [math.cos(math.pi * (place + 0.5) / 7) for place in range(7)]
    assert slow_share(first_wave) == pytest.approx((7 - 1) / 2)  # all that there is, in one of the two slow waves
    assert slow_share([math.cos(3 * math.pi * (place + 0.5) / 7) for place in range(7)]) == pytest.approx(0, abs=1e-9)
    assert drift_of([[0, 1, 0, 1, 0, 1, 0, 1]]) == 0
    assert drift_of([]) == 0


def test_the_worst_figure_is_judged_first_and_holm_raises_the_level_for_the_next() -> None:
    df, variance = 20.0, 1.0
    sizes = [
        two_sided_quantile(LEVEL / 3, df) + 0.01,
        two_sided_quantile(LEVEL / 2, df) + 0.01,
        two_sided_quantile(LEVEL, df) - 0.01,
    ]
    differences = {str(index): Difference(-size, variance, df) for index, size in enumerate(sizes)}
    effects = judge(differences, {"0": "lower", "1": "higher", "2": "lower"})
    assert [effects[name].outcome for name in "012"] == ["better", "worse", "within noise"]
    assert [*(effects[name].outcome for name in "012"), "cannot tell"] == [*OUTCOMES]
    for effect in effects.values():  # the interval says what the verdict says
        assert effect.low is not None
        assert effect.high is not None
        assert (effect.low < 1 < effect.high) == (effect.outcome == "within noise")
        assert effect.smallest is not None
        assert effect.smallest > 0


def test_values_without_any_spread() -> None:
    same = {"a": paired([0.0] * 5, 0.0), "b": paired([0.5] * 5, 0.0)}
    assert same["a"].df == 1
    effects = judge(same, {"a": "lower", "b": "lower"})
    assert effects["a"].outcome == "within noise"
    assert (effects["b"].outcome, effects["b"].low) == ("worse", pytest.approx(math.exp(0.5)))


def test_of_what_cannot_be_told_there_is_a_ratio_and_nothing_else() -> None:
    found = Effect("cannot tell", 2.0)
    assert (found.low, found.high, found.smallest) == (None, None, None)


def series(kind: str, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """[..., n] of unit spread or so."""
    white = generator.standard_normal(shape)
    if kind == "heavy tails":
        return generator.standard_t(3, shape)
    if kind == "bursts":
        return white + (generator.random(shape) < 0.1) * 6 * np.abs(generator.standard_normal(shape))
    if kind == "random walk":
        return np.cumsum(white, -1)
    if kind == "1/f":
        parts = []
        for phi in (0.0, 0.5, 0.75, 0.88, 0.94, 0.97, 0.985):
            noise = generator.standard_normal(shape) * math.sqrt(1 - phi**2)
            noise[..., 0] /= math.sqrt(1 - phi**2)
            for place in range(1, shape[-1]):
                noise[..., place] += phi * noise[..., place - 1]
            parts.append(noise)
        return np.sum(parts, 0) / math.sqrt(len(parts))
    return white


def alarms(
    kind: str, processes: int, figures: int, *, change: float = 0.0, allow: bool = True, tries: int = 150
) -> float:
    """The share of `tries` in which any figure of two runs is found to differ; one follows the other."""
    generator = np.random.default_rng(7)
    found = 0
    for _ in range(tries):
        values = series(kind, generator, (figures, 2 * processes))
        pairs = [(list(row[:processes]), list(row[processes:] + change)) for row in values]
        drift = drift_of([half for pair in pairs for half in pair]) if allow else 0.0
        effects = judge(
            {str(index): between_runs(*pair, drift) for index, pair in enumerate(pairs)},
            {str(index): "lower" for index in range(figures)},
        )
        found += any(effect.outcome != "within noise" for effect in effects.values())
    return found / tries


@pytest.mark.parametrize("processes", [5, 10])
@pytest.mark.parametrize("kind", ["white", "heavy tails", "bursts"])
def test_equal_runs_seldom_differ_whatever_the_noise_is(kind: str, processes: int) -> None:
    assert alarms(kind, processes, 4) <= 0.03


@pytest.mark.parametrize("kind", ["1/f", "random walk"])
def test_a_machine_that_drifts_is_allowed_for_where_a_plain_test_is_fooled(kind: str) -> None:
    assert alarms(kind, 10, 4, allow=False) > 0.15
    assert alarms(kind, 10, 4) <= 0.05


def test_a_real_change_is_found_and_the_smallest_one_is_what_it_says() -> None:
    assert alarms("white", 10, 4, change=5.0) > 0.95
    generator = np.random.default_rng(3)
    smallest = []
    for _ in range(400):
        first, second = generator.standard_normal((2, 10))
        (effect,) = judge({"a": between_runs(first, second, 0.0)}, {"a": "lower"}).values()
        assert effect.smallest is not None
        smallest.append(math.log1p(effect.smallest))
    found = alarms("white", 10, 1, change=statistics.fmean(smallest), allow=False, tries=600)
    assert 0.88 < found <= 1
