"""`tk report`."""

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from experiments.cli import app
from tests.experiments.reporting.recorded import check, everything, record


def tk(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_html_is_a_file_the_others_go_to_stdout(tmp_path: Path) -> None:
    folder = record(tmp_path / "mine", everything())
    done = tk("report", folder)
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [str(folder / "report.html")]
    assert (folder / "figures" / "roofline.svg").exists()
    assert json.loads(tk("report", folder, "--format", "json").stdout)["name"] == "test"
    assert tk("report", folder, "--format", "md").stdout.startswith("# Which of these")


def test_what_cannot_be_reported_is_refused(tmp_path: Path) -> None:
    folder = record(tmp_path / "mine", [check("swiglu", "fused")])
    wrong = tk("report", folder, "--format", "htm")
    assert wrong.exit_code == 2
    assert "--format htm: there is html, md, json; did you mean 'html'?" in wrong.stderr
    assert "no such folder; did you mean 'mine'?" in tk("report", tmp_path / "mime").stderr
    (folder / "run.json").unlink()
    refused = tk("report", folder)
    assert refused.exit_code == 2
    assert "not a run of schema 1" in refused.stderr
