"""Readers of traces, on small ones of our own in each format."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.document import ExperimentError
from experiments.simulation.traces import Trace, bound_hit_rate, limit_requests, measure_extent, open_trace, speed_up

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
    assert bound_hit_rate(trace, 512) == 3 / 11


def test_an_extent_is_what_the_requests_add_up_to() -> None:
    trace = open_trace(AZURE)
    requests = list(trace.requests())
    totals = np.array([r.input_len + r.output_len for r in requests])
    extent = measure_extent(trace, [16, 512])
    assert extent.num_requests == 30 == len({r.id for r in requests})
    assert extent.last_arrival == requests[-1].arrival > 0
    assert extent.longest == totals.max()
    assert extent.num_blocks == {16: int(np.ceil(totals / 16).sum()), 512: int(np.ceil(totals / 512).sum())}


def test_limit_and_speed() -> None:
    trace = open_trace(AZURE)
    plain, fast = list(limit_requests(trace, 7).requests()), list(speed_up(limit_requests(trace, 7), 4.0).requests())
    assert len(plain) == len(fast) == 7
    assert [r.arrival / 4 for r in plain] == [r.arrival for r in fast]
    assert [r.output_len for r in plain] == [r.output_len for r in fast]


def test_synthetic_requests_are_the_same_each_time_and_some_share_a_beginning() -> None:
    first, again = (list(open_trace("synthetic:5000").requests()) for _ in range(2))
    assert first == again
    assert first[:100] == list(open_trace("synthetic:100").requests())
    assert all(a.arrival <= b.arrival for a, b in pairwise(first))
    assert all(r.prompt().size == r.input_len >= 1 and r.output_len >= 1 for r in first[:200])
    assert 0.2 < bound_hit_rate(open_trace("synthetic:2000"), 16) < 0.6


GOOD = '{"timestamp": 5, "input_length": 3, "output_length": 1, "hash_ids": [0]}'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("x.jsonl", [GOOD, "{"], "x.jsonl, line 2: EOF while parsing an object at column 1"),
        ("x.jsonl", [GOOD.replace("input_length", "inputs")], "line 1: has no 'input_length'"),
        ("x.jsonl", [GOOD.replace("[0]", "[0, 1]")], "line 1: 3 tokens are not 2 blocks of 512"),
        ("x.jsonl", [GOOD.replace("[0]", "[-1]")], "hash_ids[0] must be greater than or equal to 0, got -1"),
        ("x.jsonl", [GOOD.replace(": 1", ": 1.5")], "output_length must be a valid integer, got 1.5"),
        ("x.jsonl", [GOOD.replace(": 1", ": 0")], "output_length must be greater than or equal to 1, got 0"),
        ("x.jsonl", [GOOD.replace("5", "true")], "timestamp must be a valid number, got True"),
        ("x.jsonl", [GOOD.replace("5", "NaN", 1)], "timestamp must be a finite number, got nan"),
        ("x.csv", [HEADER, "2023-11-16 18:17:03.9,16777216,5"], "line 2: a request may have 16,777,216 tokens"),
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
        measure_extent(trace, [16])


ROW = "2023-11-16 18:17:03.9799600,5,3"
DIGITS = "1" + "0" * 400
TOO_MANY, LONG = "must be less than or equal to 16777216, got", "a number of more than 30 digits"
ALLOWED = "; a line is an object of timestamp (ms), input_length, output_length, hash_ids"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", [HEADER, b"\xff\xfe\x00\x01,3,4"], "line 2: byte 1 is 0xff, which is not UTF-8"),
        ("x.jsonl", [GOOD, b'{"\xc3'], "line 2: byte 3 is 0xc3, which is not UTF-8"),
        ("x.csv", [HEADER, '"' + "x" * 200_000 + '",5,3'], "line 2: not a time and two numbers of tokens: field"),
        ("x.jsonl", [GOOD, "[" * 5_000_000], "line 2: is longer than the 4,194,304 bytes that a line may have"),
        ("x.csv", [HEADER, ROW, "2023-11-16T18:17:04+00:00,5,3"], "line 3: this time has an offset from UTC and the"),
        ("x.csv", [HEADER, ROW.replace("9600", "9600Z"), ROW], "line 3: this time has no offset from UTC and the"),
        ("x.csv", [HEADER, "2023-11-16 18:17:04.5e9,5,3"], "TIMESTAMP is '2023-11-16 18:17:04.5e9'; a time is YYYY"),
        ("x.csv", [HEADER, "2023-13-16 18:17:04.5,5,3"], "TIMESTAMP is '2023-13-16 18:17:04.5'; a time is YYYY"),
        ("x.csv", [HEADER, ROW + ",7,8"], "line 2: not a time and two numbers of tokens: 5 fields, where the header"),
        ("x.csv", [HEADER, '"' + ROW], "line 2: not a time and two numbers of tokens: unexpected end"),
        ("x.csv", [HEADER, ROW.replace(",5,", ",5\0,")], "an integer, got '5\\x00'; a row has TIMESTAMP"),
        ("x.csv", [HEADER, ROW.replace(",5,", ",\u0665,")], "ContextTokens must be a valid integer"),
        ("x.csv", [HEADER, ROW.replace(",5,", f",{DIGITS},")], f"ContextTokens {TOO_MANY} '1000000"),
        ("x.csv", [HEADER, ROW, "2123-11-16 18:17:03,5,3"], "line 3: arrives 3,155,673,599 s after the first"),
        ("x.csv", ['"' + HEADER], "line 1: not a time and two numbers of tokens: unexpected end"),
        ("x.jsonl", [GOOD.replace("5", DIGITS, 1)], f"timestamp must be a finite number, got {LONG}"),
        ("x.jsonl", [GOOD.replace("5", "1e300", 1)], "timestamp must be less than or equal to 1000000000000000, got"),
        ("x.jsonl", [GOOD.replace("5", "-1", 1)], "timestamp must be greater than or equal to 0, got -1"),
        ("x.jsonl", [GOOD, GOOD.replace("5", "1e14", 1)], "line 2: arrives 100,000,000,000 s after the first request"),
        ("x.jsonl", [GOOD.replace("3", DIGITS)], f"input_length {TOO_MANY} {LONG}"),
        ("x.jsonl", [GOOD.replace("3", "1e300")], f"input_length {TOO_MANY} 1e+300"),
        ("x.jsonl", [GOOD.replace("3", "-600")], "input_length must be greater than or equal to 1, got -600"),
        ("x.jsonl", [GOOD.replace("3", "true")], "input_length must be a valid integer, got True; a line is"),
        ("x.jsonl", [GOOD.replace("3", "9" * 5000)], f"line 1: number out of range at column 4335{ALLOWED}"),
        ("x.jsonl", ["[" * 100_000], f"line 1: recursion limit exceeded at column 202{ALLOWED}"),
        ("x.jsonl", ["[1, 2]"], f"line 1: is [1, 2]{ALLOWED}"),
        ("x.jsonl", ['"abc"'], f"line 1: is 'abc'{ALLOWED}"),
        ("x.jsonl", ["null"], f"line 1: is None{ALLOWED}"),
        ("x.jsonl", ["5"], f"line 1: is 5{ALLOWED}"),
        ("x.jsonl", ['{"time'], f"line 1: EOF while parsing a string at column 6{ALLOWED}"),
        ("x.jsonl", [GOOD.replace("[0]", "[" + "7," * 999 + "7]")], "3 tokens are not 1,000 blocks of 512: hash_"),
        ("x.jsonl", [GOOD.replace("[0]", f"[{DIGITS}]")], "hash_ids[0] must be less than 4294967296, got a number"),
        ("x.jsonl", [GOOD.replace("}", ', "priority": 1e10}')], f"priority must be less than or equal to {2**31}"),
        ("x.jsonl", [GOOD.replace("}", ', "priority": 1e300}')], f"priority must be less than or equal to {2**31}"),
        ("x.jsonl", [GOOD.replace("}", ', "priority": "high"}')], "priority must be a valid integer, got 'high'"),
        ("x.jsonl", [GOOD.replace("}", ', "priority": 0.5}')], "priority must be a valid integer, got 0.5"),
    ],
)  # fmt: skip
def test_every_field_is_bounded_and_its_fault_is_one_line(
    tmp_path: Path, name: str, content: list[str | bytes], message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in content))
    result = CliRunner().invoke(app, ["simulate", "--trace", str(path), "--policy", "none"], catch_exceptions=False)
    assert result.exit_code == 2
    (problem,) = result.stderr.splitlines()
    assert problem.startswith(f"error: {path}, line ")
    assert message in problem
    assert len(problem) < 300 + len(str(path))


def test_what_is_no_fault(tmp_path: Path) -> None:
    """A byte order mark, Windows' line ends, empty lines, offsets from UTC that all have, and any case of priority."""
    offsets = ["2023-11-16T18:17:03.5+00:00,5,3", "", "2023-11-16 20:17:04.5+02:00,6,4", "2023-11-16 18:17:05Z,7,5"]
    (tmp_path / "x.csv").write_bytes("\ufeff".encode() + "\r\n".join([HEADER, *offsets, ""]).encode())
    requests = list(open_trace(str(tmp_path / "x.csv")).requests())
    assert [(r.arrival, r.input_len, r.output_len) for r in requests] == [(0.0, 5, 3), (1.0, 6, 4), (1.5, 7, 5)]
    urgent = GOOD.replace("3", "3.0").replace("}", ', "priority": -2147483648}')
    (tmp_path / "x.jsonl").write_bytes("\ufeff".encode() + f"{GOOD}\n\n{urgent}\n\n".encode())
    assert [r.priority for r in open_trace(str(tmp_path / "x.jsonl")).requests()] == [0, -(2**31)]


def test_synthetic_priorities_change_nothing_else() -> None:
    plain, ranked = (list(open_trace(name).requests()) for name in ("synthetic:5000", "synthetic:5000:3"))
    assert {r.priority for r in ranked} == {0, 1, 2}
    assert [replace(r, priority=0) for r in ranked] == plain
    assert ranked[:100] == list(open_trace("synthetic:100:3").requests())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (lambda d: "synthetic:" + "9" * 5000, "a number of requests N >= 1, at most 1,000,000,000, got '999"),
        (lambda d: "synthetic:5:0", "a number of priorities P >= 1, at most 1,000,000, got '0'"),
        (lambda d: "synthetic:5:", "a number of priorities P >= 1"),
        (lambda d: "synthetic:\u0665", "a number of requests N >= 1"),
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
