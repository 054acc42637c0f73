"""The published traces at full length, which the tests do not need.

`python -m tests.experiments.simulation.full_size DIR`, where DIR holds azure_llm_2023_code.csv, azure_llm_2023_conv.csv
and mooncake_conversation.jsonl, checks that Mooncake's requests, served one at a time from an unbounded pool, hit what
the trace itself has to give, to the block; and prints what each trace takes of one core, with each prefix cache.
"""

import json
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from experiments.cli import app
from experiments.simulation.traces import bound_hit_rate, open_trace

TRACES = ("azure_llm_2023_code.csv", "azure_llm_2023_conv.csv", "mooncake_conversation.jsonl")


def rows_of(*arguments: Any) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)
    return rows


def main(directory: Path) -> None:
    mooncake = directory / TRACES[2]
    bound = bound_hit_rate(open_trace(str(mooncake)), 512)
    print(f"{mooncake.name}: {bound:.5f} of the prompts' blocks were there before, in whole blocks of 512 tokens")
    for row in rows_of("--trace", mooncake, "--pool-blocks", "unbounded", "--max-num-seqs", 1):
        print(f"  one at a time, {row['prefix_cache']}: {row['hit_rate']:.5f}")
        assert row["hit_rate"] == (0.0 if row["prefix_cache"] == "none" else bound)
    for name in TRACES:
        for row in rows_of("--trace", directory / name):
            speed = row["requests_per_cpu_minute"]
            print(f"{name}, {row['prefix_cache']}: {speed:,.0f} requests a minute of one core, {row['steps']:,} steps")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
