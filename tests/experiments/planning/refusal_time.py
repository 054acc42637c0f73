"""How long `tk run` takes to refuse in round one: CPU seconds of a process, over every document of the tests.

    python -m tests.experiments.planning.refusal_time

It runs the tests of documents, schema and planning, keeps what they parse, and gives each to a process of its own.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import experiments.document

ROOT = Path(__file__).parents[3]
TESTS = ("test_document.py", "test_schema.py", "planning")
REFUSED_WITHOUT_TORCH = 12
COMMAND = f"""
import sys
from experiments.cli import app
try:
    app(["run", *sys.argv[1:]])
except SystemExit as ended:
    sys.exit({REFUSED_WITHOUT_TORCH} if ended.code == 2 and "torch" not in sys.modules else 0)
"""


def parsed_in_tests() -> list[tuple[str, str, tuple[str, ...]]]:
    """The folder, text and overrides of each document that the tests parse, once."""
    seen: dict[tuple[str, str, tuple[str, ...]], None] = {}
    parse = experiments.document.parse_document

    def keep(text: str, label: str, folder: Path, overrides: Sequence[str] = ()) -> experiments.document.Document:
        seen[str(folder), text, tuple(overrides)] = None
        return parse(text, label, folder, overrides)

    experiments.document.parse_document = keep
    pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *(str(ROOT / "tests/experiments" / one) for one in TESTS)])
    return list(seen)


def cpu_seconds(folder: Path, text: str, overrides: Sequence[str]) -> float | None:
    """What a refusal takes, imports and all; None where it is none of round one."""
    file = folder / "experiment.yaml"
    file.write_text(text, encoding="utf-8")
    sets = [part for one in overrides for part in ("--set", one)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, file, *sets, "--out", folder / "out", "--executor", "none"],
        cwd=ROOT, capture_output=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    is_sound = done.stderr.startswith(b"error: --executor")  # refused next, so that nothing is run
    return taken if done.returncode == REFUSED_WITHOUT_TORCH and not is_sound else None


def main() -> None:
    documents = parsed_in_tests()
    with tempfile.TemporaryDirectory() as folder:
        taken = [cpu_seconds(Path(folder), text, overrides) for _, text, overrides in documents]
    refused = sorted(one for one in taken if one is not None)
    p95 = statistics.quantiles(refused, n=20)[-1]
    found = {"documents": len(documents), "refused": len(refused), "median_s": statistics.median(refused)}
    print(json.dumps({**found, "p95_s": p95, "most_s": refused[-1]}))


if __name__ == "__main__":
    main()
