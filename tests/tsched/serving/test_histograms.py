"""What the histograms say is what the clients' own clocks say."""

from pathlib import Path

import pytest

from tests.tsched.serving.histograms import MEASURED, compare, run
from tests.tsched.serving.tk_serve import serving


@pytest.mark.slow
def test_quantiles_are_within_one_bucket_of_the_clients(tmp_path: Path) -> None:
    with serving("tiny", tmp_path) as served:
        lines, wrong = run(served, 200, 16)
    assert not wrong, lines


def test_a_quantile_two_buckets_away_is_noticed() -> None:
    bounds = [0.01, 0.02, 0.04, 0.08, float("inf")]
    times = dict.fromkeys(MEASURED, [0.015] * 9 + [0.03])
    for counts, is_right in (([0, 9, 10, 10, 10], True), ([0, 0, 9, 10, 10], True), ([0, 0, 0, 9, 10], False)):
        after = {key: list(zip(bounds, counts, strict=True)) for key in MEASURED}
        assert (compare(dict.fromkeys(MEASURED, ()), after, times)[1] == []) == is_right
    late = {key: list(zip(bounds, [0, 8, 9, 9, 9], strict=True)) for key in MEASURED}
    assert "9 observed, and 10" in compare(dict.fromkeys(MEASURED, ()), late, times)[1][0]
