"""What the README shows works as it stands there."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

README = Path(__file__).parent.parent / "README.md"


def block(language: str, containing: str) -> str:
    """The README's one code block of a language that contains a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return found


def test_the_two_commands_are_at_the_top() -> None:
    top = README.read_text()[:1500]
    assert "\n    pip install -e '.[dev]' && tk run experiments/quickstart.yaml\n" in top
    assert "\n    pip install -e '.[dev]' && pytest\n" in top


def test_ci_runs_exactly_the_readmes_test_command() -> None:
    assert "\npip install -e '.[dev]' && pytest\n" in (README.parent / ".ci" / "run").read_text()


@pytest.mark.parametrize("status", ["ok", "wrong"])
def test_the_outside_variant_is_checked_by_its_yaml_alone(status: str, tmp_path: Path) -> None:
    source = block("python", "VARIANT = ")
    assert len(source.splitlines()) < 25
    if status == "wrong":
        source = source.replace("gate * tl.sigmoid(gate) * up", "gate * tl.sigmoid(up) * up")
    (tmp_path / "mine" / "swiglu").mkdir(parents=True)
    (tmp_path / "mine" / "swiglu" / "one_row.py").write_text(source)
    experiment = yaml.safe_load(block("yaml", "variants_from"))
    del experiment["model"], experiment["workload"]  # serving it takes a trained model, which this test does without
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(experiment))
    command = [sys.executable, "-c", "from experiments.cli import main; main()", "run", "mine.yaml", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (results,) = (tmp_path / "out").rglob("results.jsonl")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    checked = [row["status"] for row in rows if row["stage"] == "check" and row["variant"] == "one_row"]
    assert checked == [status] * len(checked)
    assert checked
    assert done.returncode == (0 if status == "ok" else 1), done.stderr


def test_the_kernels_called_alone_agree() -> None:
    source = block("python", "tkernels.prepared")
    source = source.replace("return_lse=True)\n", "return_lse=True)\n    outs[name] = out, lse\n")
    names: dict[str, Any] = {"outs": {}}
    exec(source, names)
    expected = names["outs"].pop("torch")
    assert len(names["outs"]) == 3
    for out, lse in names["outs"].values():
        torch.testing.assert_close(out, expected[0], atol=2e-3, rtol=1e-2)
        torch.testing.assert_close(lse, expected[1], atol=1e-3, rtol=1e-3)
