"""Percentiles and levels over time, against numpy and against sums by hand."""

import numpy as np
import pytest

from experiments.simulation.metrics import OverTime, Percentiles, sparkline


def test_percentiles_are_right_to_a_thousandth() -> None:
    values = np.random.default_rng(3).lognormal(-2, 2.5, 5001)
    percentiles = Percentiles()
    for value in values.tolist():
        percentiles.add(value)
    summary = percentiles.summary()
    assert summary["mean"] == pytest.approx(values.mean(), rel=1e-9)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert summary[name] == pytest.approx(np.quantile(values, share, method="inverted_cdf"), rel=1.01e-3)


def test_percentiles_of_nothing_and_of_extremes() -> None:
    assert Percentiles().summary() == {"mean": None, "p50": None, "p90": None, "p99": None}
    percentiles = Percentiles()
    percentiles.add(0.0)
    percentiles.add(1e12)
    assert percentiles.quantile(0.5) == pytest.approx(1e-6, rel=2e-3)
    assert percentiles.quantile(1.0) == pytest.approx(1e9, rel=2e-3)


def test_levels_over_time_keep_their_area_in_few_bins() -> None:
    rng = np.random.default_rng(5)
    level, area, now = OverTime(8), 0.0, 0.0
    for _ in range(500):
        seconds, height = float(rng.exponential(1.0)), float(rng.integers(0, 9))
        level.add(now, now + seconds, height)
        area += seconds * height
        now += seconds
    assert level.mean == pytest.approx(area / now)
    means = level.means()
    assert 4 <= len(means) <= 8
    widths = [min((i + 1) * level.bin_seconds, now) - i * level.bin_seconds for i in range(len(means))]
    assert sum(mean * width for mean, width in zip(means, widths, strict=True)) == pytest.approx(area)


def test_each_bin_has_its_own_mean() -> None:
    level = OverTime(4)
    level.add(0.0, 0.0015, 2.0)
    level.add(0.0015, 0.003, 4.0)
    assert level.means() == pytest.approx([2.0, 3.0, 4.0])
    level.add(0.003, 0.008, 0.0)
    assert level.bin_seconds == 0.002
    assert level.means() == pytest.approx([2.5, 2.0, 0.0, 0.0])
    assert OverTime().mean == 0.0


def test_a_sparkline_is_full_at_the_top() -> None:
    assert sparkline([0.0, 0.5, 1.0], 1.0, 40) == "▁▅█"
    assert len(sparkline([0.5] * 64, 1.0, 40)) == 40
    assert sparkline([], 1.0, 40) == ""
