"""Readers of traces, on small ones of our own in each format."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from experiments.document import ExperimentError
from experiments.simulation.traces import Trace, extent_of, limited, open_trace, prefix_bound, sped_up

DATA = Path(__file__).parent / "data"
AZURE, MOONCAKE = str(DATA / "azure.csv"), str(DATA / "mooncake.jsonl")


def written(tmp_path: Path, name: str, *lines: str) -> Trace:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return open_trace(str(path))


def test_azure_times_count_from_the_first_request_and_nothing_is_shared(tmp_path: Path) -> None:
    trace = written(
        tmp_path,
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 23:59:59.9799600,5,3",
        "2023-11-17 00:00:01.0000001,5,1",
    )
    first, second = trace.requests()
    assert (first.arrival, first.input_len, first.output_len) == (0.0, 5, 3)
    assert second.arrival == pytest.approx(1.0200401, abs=1e-9)
    assert first.prompt().shape == second.prompt().shape == (5,)
    assert not set(first.prompt()) & set(second.prompt())
    assert trace.page_size == 16


def test_mooncake_prompts_agree_exactly_where_their_hash_ids_do() -> None:
    requests = list(open_trace(MOONCAKE).requests())
    assert len(requests) == 36
    compared = 0
    for a in requests:
        assert a.prompt().size == a.input_len
        for b in requests:
            n = min(a.input_len, b.input_len)
            same = (a.prompt()[:n] == b.prompt()[:n]).reshape(-1)
            blocks = [same[i : i + 512].all() for i in range(0, n, 512)]
            assert blocks == [x == y for x, y in zip(a.contents, b.contents, strict=False)][: len(blocks)]
            compared += 1
    assert compared == 36 * 36


def test_the_bound_counts_full_blocks_whose_prefix_was_there(tmp_path: Path) -> None:
    trace = written(
        tmp_path,
        "m.jsonl",
        '{"timestamp": 0, "input_length": 1300, "output_length": 1, "hash_ids": [0, 1, 2]}',
        '{"timestamp": 0, "input_length": 1300, "output_length": 1, "hash_ids": [0, 1, 2]}',  # 2 of 3: the last is part
        '{"timestamp": 9, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]}',  # 1 of 2: the last token runs
        '{"timestamp": 9, "input_length": 1500, "output_length": 1, "hash_ids": [7, 1, 2]}',  # 0 of 3: another prefix
    )
    assert prefix_bound(trace, 512) == 3 / 11


def test_an_extent_is_what_the_requests_add_up_to() -> None:
    trace = open_trace(AZURE)
    requests = list(trace.requests())
    totals = np.array([r.input_len + r.output_len for r in requests])
    extent = extent_of(trace, [16, 512])
    assert extent.num_requests == 30 == len({r.id for r in requests})
    assert extent.last_arrival == requests[-1].arrival > 0
    assert extent.longest == totals.max()
    assert extent.num_blocks == {16: int(np.ceil(totals / 16).sum()), 512: int(np.ceil(totals / 512).sum())}


def test_limit_and_speed() -> None:
    trace = open_trace(AZURE)
    plain, fast = list(limited(trace, 7).requests()), list(sped_up(limited(trace, 7), 4.0).requests())
    assert len(plain) == len(fast) == 7
    assert [r.arrival / 4 for r in plain] == [r.arrival for r in fast]
    assert [r.output_len for r in plain] == [r.output_len for r in fast]


def test_synthetic_requests_are_the_same_each_time_and_some_share_a_beginning() -> None:
    first, again = (list(open_trace("synthetic:5000").requests()) for _ in range(2))
    assert first == again
    assert first[:100] == list(open_trace("synthetic:100").requests())
    assert all(a.arrival <= b.arrival for a, b in pairwise(first))
    assert all(r.prompt().size == r.input_len >= 1 and r.output_len >= 1 for r in first[:200])
    assert 0.2 < prefix_bound(open_trace("synthetic:2000"), 16) < 0.6


GOOD = '{"timestamp": 5, "input_length": 3, "output_length": 1, "hash_ids": [0]}'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("x.jsonl", [GOOD, "{"], "x.jsonl, line 2: Expecting"),
        ("x.jsonl", [GOOD.replace("input_length", "inputs")], "line 1: has no 'input_length'"),
        ("x.jsonl", [GOOD.replace("[0]", "[0, 1]")], "line 1: 3 tokens are not 2 blocks of 512"),
        ("x.jsonl", [GOOD.replace("[0]", "[-1]")], "hash_ids must be"),
        ("x.jsonl", [GOOD.replace('"output_length": 1', '"output_length": 1.5')], "output_length must be a whole"),
        ("x.jsonl", [GOOD.replace('"output_length": 1', '"output_length": 0')], "at least one token in and one out"),
        ("x.jsonl", [GOOD.replace('"timestamp": 5', '"timestamp": true')], "timestamp must be a finite number"),
        ("x.jsonl", [GOOD.replace("5", "NaN", 1)], "timestamp must be a finite number, got nan"),
        ("x.csv", [HEADER, "2023-11-16 18:17:03.9,100000000,5"], "line 2: a request may have 16,777,216 tokens"),
        ("x.jsonl", [GOOD, GOOD.replace('"timestamp": 5', '"timestamp": 4')], "line 2: arrives before"),
        ("x.jsonl", ["[1]"], "line 1: "),
        ("x.csv", ["a,b"], "x.csv, line 1: has no column TIMESTAMP"),
        ("x.csv", [HEADER, "2023-11-16 18:17:03.9,5"], "line 2: not a time and two numbers"),
        ("x.csv", [HEADER, "yesterday,5,5"], "line 2: not a time and two numbers"),
        ("x.csv", [HEADER], "holds no request"),
    ],
)
def test_a_damaged_trace_names_its_line(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    trace = written(tmp_path, name, *lines)
    with pytest.raises(ExperimentError, match=message.replace("[", r"\[")):
        extent_of(trace, [16])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (lambda d: str(d / "no.csv"), "no such file"),
        (lambda d: str(d / "x.txt"), "the format follows from the suffix"),
        (lambda d: "synthetic:0", "a number of requests N >= 1"),
        (lambda d: "synthetic:", "a number of requests N >= 1"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: Callable[[Path], str], message: str) -> None:
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ExperimentError, match=message):
        open_trace(name(tmp_path))
