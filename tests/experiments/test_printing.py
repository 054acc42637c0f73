"""What an outside file prints floods nobody, and is never mixed into a command's JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tkernels.outside import write_variant

FLOOD = "print('flood\\n' * 20_000); import os; os.system('yes flood | head -n 1000')"
PLACES = {
    "import": ("VARIANT =", FLOOD),
    "launcher": ("    tokens, width = out.shape\n", f"    {FLOOD}"),
    "kernel": ("    offs = tl.arange(0, BLOCK)\n", "    print('flood\\n' * 20_000, 'flood ' * 1000)"),
    "supports": ('wins="never"', f"supports=lambda axes, device: exec({FLOOD!r}),"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_variant(tmp_path, *((place, f"{code}\n{place}") for place, code in PLACES.values()))


def tk(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "experiments.cli", *arguments], capture_output=True, text=True)


def test_a_list_of_ops_has_none_of_it(folder: Path) -> None:
    listed = tk("ops", "swiglu", "--json", "--variants-from", str(folder))
    assert (listed.returncode, listed.stderr) == (0, "")
    rows = json.loads(listed.stdout)["variants"]
    assert [row["variant"] for row in rows][-1] == "doubled"
    assert rows[-1]["supported"]


def test_a_check_shows_the_end_of_what_its_cases_print(folder: Path) -> None:
    one = ["--op", "swiglu", "--variant", "doubled", "--variants-from", str(folder), "--axes"]
    point = "T=2,I=8,activation=float32,layout=contiguous,values=ordinary"
    checked = tk("check", *one, point, "--json")
    assert checked.returncode == 0, checked.stderr[-1000:]
    assert json.loads(checked.stdout)[0]["status"] == "ok"
    assert checked.stderr.startswith("swiglu.doubled printed: (at its end, after ")
    assert "flood\n" in checked.stderr
    assert len(checked.stderr) < 10_000


ALONE = """
import subprocess
from experiments.commands.output import print_json
from experiments.json_alone import json_alone
with json_alone():
    print("of Python's")
    subprocess.run(["echo", "of another process"], check=True)
    print_json({"a": 1})
print("and on")
"""
SILENCED = """
import subprocess
from contextlib import suppress
from tkernels.silence import silenced
print("before")
with suppress(ValueError), silenced():
    print("of Python's")
    subprocess.run(["echo", "of another process"], check=True)
    raise ValueError
print("after")
"""


@pytest.mark.parametrize(
    ("code", "out", "err"),
    [
        (ALONE, '{\n "a": 1\n}\nand on\n', "of Python's\nof another process\n"),
        (SILENCED, "before\nafter\n", ""),
    ],
)
def test_stdout_is_kept_from_others(code: str, out: str, err: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (out, err)
