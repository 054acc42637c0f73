"""`tk simulate`, as a user meets it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from experiments.cli import app, find_derived_flags
from experiments.commands.requests import SimulateRequest
from experiments.simulation.shapes import find_shape
from experiments.simulation.traces import bound_hit_rate, open_trace
from tsched.options import EngineOptions
from tsched.resolved_options import resolve_options
from tsched.scheduling.policies import PREFIX_CACHES

DATA = Path(__file__).parent / "data"
AZURE, MOONCAKE = DATA / "azure.csv", DATA / "mooncake.jsonl"
ALL = ",".join(PREFIX_CACHES)


def tk(*arguments: Any, columns: int = 80) -> Result:
    words = [str(argument) for argument in arguments]
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["simulate", *words], catch_exceptions=False)


def rows_of(*arguments: Any) -> list[dict[str, Any]]:
    result = tk(*arguments, "--json")
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def test_policies_side_by_side_as_json() -> None:
    """Without --policy: all of them."""
    rows = rows_of("--trace", MOONCAKE, "--pool-blocks", "unbounded")
    assert [row["prefix_cache"] for row in rows] == list(PREFIX_CACHES)
    for row in rows:
        assert (row["page_size"], row["finished"], row["requests"], row["refused"]) == (512, 36, 36, 0)
        assert row["hit_rate"] == row["hit_blocks"] / row["prompt_blocks"]
        assert row["time_to_first_token_s"]["p50"] <= row["time_to_first_token_s"]["p99"]
        assert 0 < row["pool_used_peak"] <= 1
        assert row["evictions"] == 0
    assert rows[0]["hit_rate"] == 0


def test_tables_fit_80_columns_and_name_each_arm() -> None:
    result = tk("--trace", MOONCAKE, "--policy", ALL, "--pool-blocks", "40,400,unbounded", "--page-size", "256,512")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in result.stdout
    assert sum(line.split()[-3:] == list(PREFIX_CACHES) for line in lines) == 6 + 1  # a table for each pool, the curve
    assert "Hit rate by pool size" in result.stdout


def test_one_request_at_a_time_finds_all_that_the_trace_has_to_give() -> None:
    """With a pool that evicts nothing, hash and radix reach the trace's own bound; requests that run side by side miss
    what the other is still computing.
    """
    bound = bound_hit_rate(open_trace(str(MOONCAKE)), 512)
    assert 0.3 < bound < 0.7
    one = rows_of("--trace", MOONCAKE, "--pool-blocks", "unbounded", "--max-num-seqs", 1)
    assert {row["prefix_cache"]: row["hit_rate"] for row in one} == {"none": 0.0, "hash": bound, "radix": bound}
    assert {row["hit_rate_bound"] for row in one} == {bound}
    many = rows_of("--trace", MOONCAKE, "--pool-blocks", "unbounded", "--speedup", 1000)
    assert all(row["hit_rate"] <= bound for row in many)


def test_the_traces_own_bound_is_shown_where_the_pool_is_unbounded() -> None:
    words = ("--trace", MOONCAKE, "--policy", "hash")
    shown = tk(*words, "--pool-blocks", "unbounded")
    assert "hits, at most" in shown.stdout
    assert f"{bound_hit_rate(open_trace(str(MOONCAKE)), 512):.1%}" in shown.stdout
    assert "hits, at most" not in tk(*words, "--pool-blocks", 400).stdout
    bounded, unbounded = rows_of(*words, "--pool-blocks", "400,unbounded")
    assert bounded["hit_rate_bound"] is None
    assert unbounded["hit_rate_bound"] >= unbounded["hit_rate"] > 0


def test_a_share_of_time_is_never_above_all_of_it(tmp_path: Path) -> None:
    """All there at once, so that the GPU never rests: thousands of steps, added up in another order than the clock."""
    line = '{"timestamp": 0, "input_length": %d, "output_length": %d, "hash_ids": [%d]}'
    lines = [line % (7 + 61 * i % 500, 3 + 97 * i % 900, i) for i in range(300)]
    (tmp_path / "busy.jsonl").write_text("\n".join(lines))
    for num_rows in (1, 3, 16, 64):
        (row,) = rows_of("--trace", tmp_path / "busy.jsonl", "--policy", "none", "--max-num-seqs", num_rows)
        assert row["busy_share"] == 1.0


def test_priorities_of_a_synthetic_trace_reach_the_scheduler() -> None:
    """Of two levels, with one row and all there at once."""
    words = ("--trace", "synthetic:200:2", "--policy", "none", "--speedup", 1e6, "--max-num-seqs", 1)
    first_come, urgent = (rows_of(*words, "--order", order)[0] for order in ("fcfs", "priority"))
    assert first_come["seconds"] == pytest.approx(urgent["seconds"], rel=0.01)
    assert first_come["time_to_first_token_s"] != urgent["time_to_first_token_s"]
    help_text = " ".join(tk("--help", columns=200).stdout.replace("│", " ").split())
    assert "Priorities are a .jsonl line's key 'priority'" in help_text


def test_a_larger_pool_finds_no_less() -> None:
    rows = rows_of("--trace", MOONCAKE, "--policy", "hash,radix", "--pool-blocks", "12,24,48,96", "--max-num-seqs", 1)
    for policy in ("hash", "radix"):
        rates = [row["hit_rate"] for row in rows if row["prefix_cache"] == policy]
        assert rates == sorted(rates)
        assert rates[0] < rates[-1]
    assert all(row["evictions"] > 0 for row in rows if row["pool_blocks"] == 12)


def test_swapping_takes_the_place_of_computing_again() -> None:
    arguments = ["--trace", "synthetic:60", "--policy", "none", "--pool-blocks", 700, "--speedup", 100]
    (recompute,) = rows_of(*arguments)
    (swap,) = rows_of(*arguments, "--preemption", "swap")
    assert recompute["preemptions"] > 0
    assert recompute["swapped_blocks"] == 0 == recompute["host_blocks"]
    assert swap["host_blocks"] == 700
    assert swap["swapped_blocks"] > 0
    assert swap["finished"] == recompute["finished"] == 60


def test_pages_against_contiguous_reservation() -> None:
    """The same bytes hold more sequences in pages."""
    paged, reserved = rows_of(
        "--policy", "none", "--trace", AZURE, "--page-size", "16,contiguous", "--kv-bytes", "2GB", "--speedup", 100
    )  # fmt: skip
    assert reserved["page_size"] == reserved["max_model_len"] == paged["max_model_len"]
    assert reserved["pool_bytes"] <= 2e9
    assert paged["running_peak"] > 1.5 * reserved["running_peak"]
    assert reserved["empty_slots"] > 10 * paged["empty_slots"]


def test_the_pool_is_what_the_gpu_has_left() -> None:
    (row,) = rows_of("--policy", "none", "--trace", AZURE, "--gpu", "A100-40GB", "--model", "Qwen3-4B", "--limit", 5)
    assert row["requests"] == 5
    assert row["pool_bytes"] <= 36e9 - 8.04e9 < row["pool_bytes"] + 17 * 16 * 147_456


def test_rate_and_speedup_say_the_same() -> None:
    (plain,) = rows_of("--policy", "none", "--trace", AZURE)
    (fast,) = rows_of("--policy", "none", "--trace", AZURE, "--rate", 10)
    (same,) = rows_of("--policy", "none", "--trace", AZURE, "--speedup", fast["speedup"])
    assert fast["speedup"] > 1 == plain["speedup"]
    assert same["seconds"] == fast["seconds"] < plain["seconds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "radiks"], "--policy radiks: there is "),
        (["--gpu", "H10"], "did you mean 'H100'"),
        (["--model", "Qwen3-4"], "did you mean 'Qwen3-4B'"),
        (["--model", ""], "--model : there is tiny"),
        (["--order", "lifo"], "order must be one of 'fcfs', 'priority', got 'lifo'"),
        (["--preemption", "drop"], "preemption must be one of 'recompute', 'swap', got 'drop'"),
        (["--pool-blocks", "10,x"], "--pool-blocks x: there is whole numbers from 1, or unbounded"),
        (["--pool-blocks", "unbound"], "did you mean 'unbounded'"),
        (["--page-size", "0"], "--page-size 0: there is whole numbers from 1, or contiguous"),
        (["--kv-bytes", "3XB"], "must be a number of bytes from 1"),
        (["--kv-bytes", "nan"], "must be a number of bytes from 1"),
        (["--kv-bytes", "10"], "kv_cache_bytes is 10, a block of 16 tokens takes"),
        (["--kv-bytes", "1GB", "--pool-blocks", "5"], "give one"),
        (["--rate", "3", "--speedup", "2"], "give one"),
        (["--rate", "inf"], "--rate inf: must be a finite number above 0"),
        (["--model", "Qwen3-32B", "--gpu", "A100-40GB"], "its weights take 65.5 GB, A100-40GB has 40 GB"),
        (["--trace", "no.csv"], "no such file"),
        (["--host-bytes", "1GB"], "give both"),
        (
            ["--host-bytes", "1", "--preemption", "swap"],
            "for a block at least: one of 16 tokens takes",
        ),
        (["--expected-len", "8"], "expected_len must be None: no layer of the model keeps states; got 8"),
        (["--expected-len", "8", "--pool-blocks", "99"], "expected_len must be None"),
        (["--pool-blocks", "9" * 5000], "there is whole numbers from 1"),
    ],
)
def test_a_wrong_option_is_refused_with_what_there_is(arguments: list[str], message: str) -> None:
    result = tk("--trace", AZURE, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_windows_need_few_blocks_and_say_what_layers_without_one_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all layers have a window, requests that are longer than the pool are served; where some have, all is kept
    for the others, and a line says how many bytes.
    """
    words = ("--trace", AZURE, "--pool-blocks", 40, "--page-size", 16, "--max-num-seqs", 8)
    shape = find_shape("Qwen3-8B")
    whole = rows_of(*words)[0]
    windowed = replace(shape, window=64)
    monkeypatch.setattr("experiments.commands.simulate.find_shape", lambda *arguments: windowed)
    for row in rows_of(*words, "--max-num-batched-tokens", 64):
        assert row["refused"] == row["unread_bytes"] == 0 < whole["refused"]
        assert (row["window"], row["finished"]) == (64, row["requests"])
        assert 0 < row["empty_slots"] < 1
    assert "that nobody reads" not in tk(*words).stdout
    some = replace(shape, layer_windows=(64,) * 9)
    monkeypatch.setattr("experiments.commands.simulate.find_shape", lambda *arguments: some)
    row = rows_of(*words)[0]
    unread = 9 * (row["max_model_len"] - 63) * shape.kv_bytes_per_token // 36
    assert (row["window"], row["unread_bytes"], row["refused"]) == (None, unread, whole["refused"])
    said = " ".join(tk(*words).stdout.split())
    assert f"9 of 36 layers have a window: a sequence of {row['max_model_len']:,} tokens keeps" in said


def test_a_mixture_says_what_verifying_tokens_costs() -> None:
    words = ("--trace", "synthetic:3", "--policy", "none", "--gpu", "H200")
    (row,) = rows_of(*words, "--model", "Qwen3-30B-A3B")
    assert list(row["weight_traffic"]) == ["2", "3", "5", "9"]
    assert [round(times, 2) for times in row["weight_traffic"].values()][:3] == [1.56, 2.08, 3.03]
    said = " ".join(tk(*words, "--model", "Qwen3-30B-A3B").stdout.split())
    assert "verifies 2/3/5/9 tokens of one sequence reads 1.56/2.08/3.03/" in said
    assert "Weights: 61.1 GB, bfloat16." in said
    (dense,) = rows_of(*words, "--model", "Qwen3-4B")
    assert (dense["weight_bytes"], dense["quantization"]) == (8_044_936_192, None)
    assert set(dense["weight_traffic"].values()) == {1.0}
    assert "verifies" not in tk(*words, "--model", "Qwen3-4B").stdout


def test_states_take_memory_and_bound_the_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model some of whose layers keep states: a hit ends where one is kept, and blocks have what states leave."""
    words = ("--trace", MOONCAKE, "--kv-cache-bytes", 40 * 10**9, "--max-num-seqs", 4)
    pages = {row["prefix_cache"]: row for row in rows_of(*words)}
    shape = find_shape("Qwen3-8B")
    hybrid = replace(shape, kv_bytes_per_token=shape.kv_bytes_per_token // 4, state_bytes=60 * 10**6, state_interval=4)
    monkeypatch.setattr("experiments.commands.simulate.find_shape", lambda *arguments: hybrid)
    mixed = {row["prefix_cache"]: row for row in rows_of(*words)}
    for policy, row in mixed.items():
        assert row["finished"] == 36
        assert 40e9 * 0.99 < row["pool_bytes"] + row["states"] * row["state_bytes"] <= 40e9
        assert row["hit_rate"] <= pages[policy]["hit_rate"]
        assert pages[policy]["states"] == 0
    assert 0 < mixed["hash"]["hit_rate"] == mixed["radix"]["hit_rate"]


@pytest.mark.parametrize("policy", PREFIX_CACHES)
def test_bytes_hold_what_they_hold_in_an_engine(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = find_shape("Qwen3-8B")
    hybrid = replace(shape, kv_bytes_per_token=shape.kv_bytes_per_token // 4, state_bytes=6 * 10**6, state_interval=4)
    monkeypatch.setattr("experiments.commands.simulate.find_shape", lambda *arguments: hybrid)
    given = {"kv_cache_bytes": 10**9, "swap_bytes": 10**8, "preemption": "swap", "expected_len": 100}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    (row,) = rows_of("--trace", AZURE, "--limit", 2, "--policy", policy, *flags)
    options = EngineOptions(prefix_cache=policy, **given)
    engine = resolve_options(
        options, max_position_embeddings=row["max_model_len"], block_size=16, sizes=hybrid.unit_sizes(16),
        cache_bytes=10**9,
    )  # fmt: skip
    assert (row["page_size"], row["expected_len"], row["chunked_prefill"]) == (16, 100, True)
    assert (row["pool_blocks"], row["states"]) == (engine.num_blocks, engine.num_states)
    assert row["host_blocks"] == engine.num_host_blocks


def test_a_row_says_every_option_that_is_no_number_of_bytes() -> None:
    """The pool's bytes and blocks are there as they came out."""
    (row,) = rows_of("--trace", AZURE, "--limit", 2, "--policy", "none")
    given = {name for flags in find_derived_flags(SimulateRequest).values() for name in flags.names}
    assert {name for name in given if not name.startswith("kv_cache_")} - {"swap_bytes"} <= row.keys()
