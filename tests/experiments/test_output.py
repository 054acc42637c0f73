"""What the commands' tables and bars look like."""

import io

import pytest
from rich.console import Console
from rich.table import Table

from experiments.commands.output import progress_bar
from experiments.reporting.table_style import make_table


def lines(table: Table) -> list[list[str]]:
    shown = io.StringIO()
    Console(width=80, file=shown).print(table)
    return [line.split() for line in shown.getvalue().splitlines() if line.strip(" ─")]


def test_first_cells_are_blank_as_far_as_they_are_those_of_the_row_above() -> None:
    rows = [("a", "x", "1"), ("a", "x", "2"), ("b", "x", "3"), ("b", "y", "4")]
    shown = lines(make_table("", ["op", "variant", "n"], rows, right=["n"], once=2))
    assert shown == [["op", "variant", "n"], ["a", "x", "1"], ["2"], ["b", "x", "3"], ["y", "4"]]


def test_a_heading_is_shown_where_it_changes() -> None:
    rows = [("norm", "a", "[x]"), ("norm", "b", "2"), ("gemm", "a", "3")]
    shown = lines(make_table("", ["variant", "n"], rows, headed=True, caption="Sizes."))
    assert shown == [["variant", "n"], ["norm"], ["a", "[x]"], ["b", "2"], ["gemm"], ["a", "3"], ["Sizes."]]


def test_a_bar_leaves_nothing_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("check", 2, stays=True) as update:
        update(advance=1, doing="something")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
