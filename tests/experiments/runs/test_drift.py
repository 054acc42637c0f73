"""The slope with which a figure follows the yardstick."""

import numpy as np
import pytest

from experiments.runs.comparison import LEVEL
from experiments.runs.drift import Slope, slope_of, slope_spread, trimmed_share
from tests.experiments.runs.test_comparison import between_runs, paired

GROUPS, SPREAD = 4, slope_spread()


def series(slope: float, moved: float, noise: float) -> list[tuple[list[float], list[float]]]:
    """Groups of 20 processes at levels of their own, whose yardsticks spread by `moved`."""
    generator = np.random.default_rng(5)
    found = []
    for level in range(GROUPS):
        yardsticks = level / 3 + moved * generator.standard_normal(20)
        figures = 7.0 * level + slope * yardsticks + noise * generator.standard_normal(20)
        found.append((figures.tolist(), yardsticks.tolist()))
    return found


@pytest.mark.parametrize("true", [0.0, 1.0, 2.4])
def test_the_slope_is_found_whatever_the_levels_are(true: float) -> None:
    slope = slope_of(series(true, moved=0.1, noise=0.02), SPREAD)
    assert slope.value == pytest.approx(true, abs=0.15)
    assert slope.variance < 0.1**2


def test_what_the_slope_took_of_the_processes_is_counted() -> None:
    steep, flat = (
        slope_of(series(2.4, moved=0.1, noise=0.02), SPREAD),
        slope_of(series(2.4, moved=0.0001, noise=0.02), SPREAD),
    )
    assert steep.spent == pytest.approx(1.0, abs=0.02)
    assert flat.spent == pytest.approx(0.0, abs=0.02)
    values = [1.0, 1.1, 0.9, 1.0, 1.05]
    whole, less = paired(values, 0.0), paired(values, 0.0, spent=1.0)
    assert (less.df, less.variance) == (pytest.approx(whole.df - 1), pytest.approx(whole.variance * 4 / 3))
    between = between_runs(values, values[::-1], 0.0, spent=1.0)
    assert between.variance > between_runs(values, values[::-1], 0.0).variance


def test_where_the_yardstick_hardly_moves_it_is_one_and_hardly_known() -> None:
    slope = slope_of(series(2.4, moved=0.0001, noise=0.02), SPREAD)
    assert slope.value == pytest.approx(1.0, abs=0.05)
    assert slope.variance == pytest.approx(SPREAD**2, rel=0.05)
    for spread in (slope_spread(1), SPREAD):
        still = slope_of([([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])], spread)
        assert (still.value, still.variance) == (1.0, pytest.approx(spread**2))


def test_one_disturbed_process_does_not_decide() -> None:
    (figures, yardsticks), *others = series(1.0, moved=0.05, noise=0.01)
    figures[3], yardsticks[3] = figures[3] + 5.0, yardsticks[3] + 1.0
    assert slope_of([(figures, yardsticks), *others], SPREAD).value == pytest.approx(1.0, abs=0.15)


def ahead(residuals: list[float]) -> float:
    """The slope less 2 of figures so far from twice a yardstick that is known all but exactly; no prior to speak of."""
    yardsticks = [-400.0, -200.0, -100.0, 0.0, 100.0, 200.0, 400.0]
    figures = [2 * yardstick + residual for yardstick, residual in zip(yardsticks, residuals, strict=True)]
    return slope_of([(figures, yardsticks)], spread=1e6).value - 2


def test_what_lies_seven_times_the_usual_distance_from_the_slope_is_left_out() -> None:
    usual = [1.0, -1.0, 1.0, 0.0, -1.0, 1.0]
    assert ahead([*usual, 7.5]) == pytest.approx(ahead([*usual, 1000.0]), abs=1e-9)
    assert ahead([*usual, 6.5]) > ahead([*usual, 1000.0]) + 1e-6


def test_what_is_left_out_does_not_depend_on_how_large_the_noise_is() -> None:
    residuals = [3.0, -1.0, 1.0, 0.0, -1.0, 2.0, 4.0]
    small, large = ahead([one / 1000 for one in residuals]), ahead(residuals)
    assert small == pytest.approx(large / 1000, rel=1e-2)


def test_where_nothing_was_expected_slope_and_variance_are_those_of_least_squares() -> None:
    yardsticks = [-200.0, -100.0, 0.0, 100.0, 200.0]
    figures = [2 * yardstick + rest for yardstick, rest in zip(yardsticks, [1.0, -1.0, 0.0, -1.0, 1.0], strict=True)]
    slope = slope_of([(figures, yardsticks)], spread=1e6)
    assert slope.value == pytest.approx(2.0, rel=1e-6)
    assert slope.variance == pytest.approx(4.0 / (5 - 2) / (2 * 200.0**2 + 2 * 100.0**2), rel=1e-6)
    assert slope.spent == pytest.approx(1.0)


def test_the_yardsticks_own_noise_draws_no_slope_to_zero() -> None:
    generator = np.random.default_rng(8)
    moved = 0.015 * generator.standard_normal((20, 20))
    noisy = moved + 0.01 * generator.standard_normal(moved.shape)
    slope = slope_of(list(zip(moved.tolist(), noisy.tolist(), strict=True)), SPREAD)
    assert slope.value == pytest.approx(1.0, abs=0.15)


def test_slopes_on_one_thread_are_known_better() -> None:
    still = [([1.0, 1.0, 1.0], [0.0, 0.0, 0.0])]
    assert slope_of(still, slope_spread(1)).variance < slope_of(still, slope_spread(2)).variance


def test_what_follows_exactly_leaves_nothing() -> None:
    slope = slope_of([([0.0, 2.0, 4.0, 8.0, 6.0], [0.0, 1.0, 2.0, 4.0, 3.0])], SPREAD)
    assert slope.take_off([2.0, 4.0], [1.0, 2.0]) == pytest.approx([0.0, 0.0], abs=1e-3)


def test_what_is_not_known_of_the_slope_counts_where_the_yardstick_moved() -> None:
    values = [1.0, 1.1, 0.9, 1.0, 1.05]
    assert between_runs(values, values, 0.0, 0.5).variance == pytest.approx(
        between_runs(values, values, 0.0).variance + 0.5
    )
    assert paired(values, 0.0, 0.5).variance == pytest.approx(paired(values, 0.0).variance + 0.5)


def test_a_machine_that_is_another_one_between_two_steady_runs_proves_nothing() -> None:
    """Its yardstick is 10% slower, a figure 24%, and nothing within the runs tells that slope; of four figures."""
    generator = np.random.default_rng(7)
    found = 0
    for _ in range(50):
        yardsticks, figures = (
            level + 0.01 * generator.standard_normal((2, 10)) for level in ([[0], [0.1]], [[0], [0.24]])
        )
        slope = slope_of(list(zip(figures.tolist(), yardsticks.tolist(), strict=True)), SPREAD)
        first, second = (slope.take_off(*one) for one in zip(figures.tolist(), yardsticks.tolist(), strict=True))
        found += between_runs(first, second, 0.0, slope.variance_between_runs(*yardsticks.tolist())).p < LEVEL / 4
    assert found == 0
    steady = slope_of([(figures[0].tolist(), yardsticks[0].tolist())], SPREAD)
    near = [*yardsticks[0].tolist()], [*yardsticks[0].tolist()]
    assert steady.variance_between_runs(*near) == 0.0
    assert steady.variance_between_runs(near[0], [one + 0.1 for one in near[1]]) > 0.045**2


def test_levels_of_runs_that_are_three_standard_errors_apart_say_nothing_of_the_slope_within_them() -> None:
    slope = Slope(value=1.0, variance=0.04, spread=0.5, spent=0.0)
    steady = [0.0, 0.1, 0.2]  # a variance of 0.01, and of the difference of two means so far apart 2 / 3 of that
    assert slope.variance_between_runs(steady, [one + 0.1 for one in steady]) == pytest.approx(0.1**2 * 0.04)
    far = [one - 1.0 for one in steady]
    assert slope.variance_between_runs(steady, far) == pytest.approx(0.04 + (1 - 9 * 0.02 / 3) * 0.25)


def test_of_eight_processes_a_fifth_is_left_out_at_either_end_and_of_fewer_none() -> None:
    assert [trimmed_share(count) for count in (7, 8)] == [0.0, 0.2]


def test_each_figure_needs_its_yardstick() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Slope(1.0, 0.1, 0.1, 0.0).take_off([1.0, 2.0], [1.0])
