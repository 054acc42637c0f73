"""Percentiles and levels over time, against numpy and against sums by hand."""

import numpy as np
import pytest

from experiments.simulation.metrics import OverTime, sparkline, summarize_times


def test_percentiles_are_times_that_came() -> None:
    values = np.random.default_rng(3).lognormal(-2, 2.5, 5001)
    summary = summarize_times(values.tolist())
    assert summary["mean"] == pytest.approx(values.mean(), rel=1e-9)
    ordered = np.sort(values)
    assert [summary[name] for name in ("p50", "p90", "p99")] == [ordered[2500], ordered[4500], ordered[4950]]


def test_percentiles_of_nothing_and_of_extremes() -> None:
    assert summarize_times([]) == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert summarize_times([1e12, 0.0]) == {"mean": 5e11, "p50": 0.0, "p90": 1e12, "p99": 1e12}


def test_levels_over_time_keep_their_area_in_few_bins() -> None:
    rng = np.random.default_rng(5)
    level, area, now = OverTime(), 0.0, 0.0
    for _ in range(500):
        seconds, height = float(rng.exponential(1.0)), float(rng.integers(0, 9))
        now += seconds
        level.add(now, seconds * height)
        area += seconds * height
    assert level.mean == pytest.approx(area / now)
    means = level.means(8)
    assert len(means) == 8
    assert sum(means) * now / 8 == pytest.approx(area)
    assert len(level.means()) == 64


def test_each_bin_has_its_own_mean() -> None:
    level = OverTime()
    level.add(0.0015, 0.0015 * 2.0)
    level.add(0.003, 0.0015 * 4.0)
    assert level.means(3) == pytest.approx([2.0, 3.0, 4.0])
    level.add(0.008, 0.0)
    assert level.means(4) == pytest.approx([2.5, 2.0, 0.0, 0.0])
    assert OverTime().mean == 0.0
    assert OverTime().means() == []


def test_a_sparkline_is_full_at_the_top() -> None:
    assert sparkline([0.0, 0.5, 1.0], 1.0, 40) == "▁▅█"
    assert len(sparkline([0.5] * 64, 1.0, 40)) == 40
    assert sparkline([], 1.0, 40) == ""
