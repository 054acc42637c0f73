"""A run that was recorded before rows had a version: what reads it, and what does not."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.document import ExperimentError
from experiments.runs.reading import read_run
from experiments.runs.rows import VERSION

RECORDED = Path(__file__).parent / "data" / "version_1"
"""Of `tk run experiments/quickstart.yaml`, less the rows of some ops, and all but five samples of each time."""


def test_its_rows_are_those_that_were_written_and_what_was_not_recorded_is_null() -> None:
    run = read_run(RECORDED)
    assert (run.meta.get("rows_version"), run.repairs, run.finished) == (None, (), True)
    lines = [json.loads(line) for line in (RECORDED / "results.jsonl").read_text().splitlines()]
    added = dict.fromkeys(("host_peak_bytes", "device_peak_bytes", "load_before", "load_after"))
    assert [json.loads(row.as_json()) for row in run.rows] == [{**line, **added} for line in lines]
    assert len(lines) == 55


@pytest.mark.parametrize("arguments", [("report", "--format", "json"), ("compare",), ("runs", "--json")])
def test_it_is_reported_compared_and_listed(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    folder = shutil.copytree(RECORDED, tmp_path / "old")
    command, *options = arguments
    folders = {"report": [folder], "compare": [folder, folder], "runs": [tmp_path]}[command]
    done = CliRunner().invoke(app, [command, *map(str, folders), *options], catch_exceptions=False)
    assert done.exit_code == 0
    said = {
        "report": "All 5 variants were right at the 3 points of this run and all 6 arms gave the same tokens.",
        "compare": "old beside old",
        "runs": '"rows": 55',
    }
    assert said[command] in done.stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [(("repeat", "RUN"), "repeated"), (("run", "RUN/resolved.yaml", "--resume", "RUN"), "resumed")],
)
def test_it_is_neither_resumed_nor_repeated(tmp_path: Path, arguments: tuple[str, ...], what: str) -> None:
    folder = shutil.copytree(RECORDED, tmp_path / "old")
    before = (folder / "results.jsonl").read_bytes()
    done = CliRunner().invoke(app, [one.replace("RUN", str(folder)) for one in arguments])
    assert done.exit_code == 2
    assert f"cannot be {what}: its rows are of version 1, not {VERSION}; tk report, tk compare and" in done.stderr
    assert (folder / "results.jsonl").read_bytes() == before


def test_a_version_that_is_none_or_newer_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(RECORDED, tmp_path / "old")
    meta = json.loads((folder / "run.json").read_text())
    for version in (0, VERSION + 1, "2", True):
        (folder / "run.json").write_text(json.dumps({**meta, "rows_version": version}))
        with pytest.raises(ExperimentError, match='"rows_version" must be a number from 1 to 2, got'):
            read_run(folder)
    (folder / "run.json").write_text(json.dumps({**meta, "rows_version": 2}))
    (folder / "results.jsonl").write_text('{"run_id": "a"}\n')
    with pytest.raises(ExperimentError, match="line 1 is no row: stage: Field required"):
        read_run(folder)


def test_a_line_that_is_not_of_version_1_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(RECORDED, tmp_path / "old")
    line = json.loads((RECORDED / "results.jsonl").read_text().splitlines()[0])
    (folder / "results.jsonl").write_text(json.dumps({**line, "load_after": 1.0}) + "\n")
    with pytest.raises(ExperimentError, match="line 1 is no row of version 1: load_after: not of version 1"):
        read_run(folder)
