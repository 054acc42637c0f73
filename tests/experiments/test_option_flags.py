"""Options as flags, the engine's and the server's limits: those of their records, with their words and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from experiments.cli import app
from experiments.commands import generate, simulate
from tests.tsched.test_options import NUMBERS
from tsched.options import OPTIONS, SCHEDULER_OPTIONS, Option
from tsched.serving.limits import LIMITS

TRACE = Path(__file__).parent / "simulation" / "data" / "azure.csv"
COMMANDS: dict[str, tuple[list[str], set[str]]] = {
    "generate": (["--model", "nowhere", "--prompt", "a"], {"dtype", "device", *SCHEDULER_OPTIONS}),
    # A simulation has no device, computes nothing, and takes lists of prefix caches and block sizes as axes.
    "simulate": (
        ["--trace", str(TRACE), "--limit", "1"],
        {*SCHEDULER_OPTIONS} - {"overlap", "cuda_graphs", "sampling", "shared_prefixes", "prefix_cache", "block_size"},
    ),
}
FLAGS = [(command, OPTIONS[name]) for command, (_, names) in COMMANDS.items() for name in sorted(names)]
COMMANDS["serve"] = (["nowhere"], COMMANDS["generate"][1])
FLAGS += [("serve", one) for one in LIMITS.values()]


def tk(command: str, *arguments: Any) -> Result:
    words = [command, *COMMANDS[command][0], *map(str, arguments)]
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, words, catch_exceptions=False)


def flag(one: Option) -> str:
    return "--" + one.name.replace("_", "-")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_are_the_records_with_its_words(command: str) -> None:
    shown = [one for one in typer.main.get_command(app).commands[command].params if not one.hidden]  # type: ignore[attr-defined]
    limits = {"Limits": (LIMITS, {*LIMITS})} if command == "serve" else {}
    for heading, (known, names) in {"Engine": (OPTIONS, COMMANDS[command][1]), **limits}.items():
        panel = {one.name: one for one in shown if getattr(one, "rich_help_panel", None) == heading}
        assert panel.keys() == names
        for name, one in panel.items():
            meaning = known[name].meaning
            assert one.opts == [flag(known[name])]
            assert one.help.startswith(f"{meaning[0].upper()}{meaning[1:]}; ")


def wrong_words(one: Option) -> st.SearchStrategy[str]:
    """What is neither a number nor a word of the option, and numbers outside its range."""
    strange = st.from_regex(r"[h-mo-z]{1,8}", fullmatch=True).filter(lambda word: word not in one.choices)
    outside = [st.just(str(NUMBERS[name](end))) for name, end in one.bounds.items()]
    return st.one_of(strange, *outside, *([st.just("nan")] if one.kind in (int, float) else []))


@pytest.mark.parametrize(("command", "one"), FLAGS)
def test_every_wrong_value_of_a_flag_is_refused_by_its_name(command: str, one: Option) -> None:
    @settings(max_examples=3 if command == "serve" else 20, deadline=None)  # the first call imports the command
    @given(wrong_words(one))
    def check(word: str) -> None:
        result = tk(command, f"{flag(one)}={word}")
        assert result.exit_code == 2
        assert f"{one.name} must be" in result.stderr or f"Invalid value for '{flag(one)}'" in result.stderr
        assert result.stdout == ""

    check()


def test_what_is_given_and_nothing_else_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    for module in (generate, simulate):
        monkeypatch.setattr(module, "run", lambda request, *_: asked.append(request.engine) or 0)
    tk("generate", "--max-num-seqs", 4, "--overlap", "true", "--kv-cache-bytes", "2GiB", "--dtype", "float16")
    tk("simulate", "--budget", 64, "--kv-bytes", "1KB", "--host-bytes", "2KB", "--chunked-prefill", "false")
    tk("simulate", "--max-num-batched-tokens", 64)
    tk("generate")
    assert asked == [
        {"max_num_seqs": 4, "overlap": True, "kv_cache_bytes": 2**31, "dtype": "float16"},
        {"max_num_batched_tokens": 64, "kv_cache_bytes": 1000, "swap_bytes": 2000, "chunked_prefill": False},
        {"max_num_batched_tokens": 64},
        {},
    ]
