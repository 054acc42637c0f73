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


BOTH = """
import sys
from experiments.cli import app
one = ["--json", "--variants-from", sys.argv[1]]
point = "T=2,I=8,activation=float32,layout=contiguous,values=ordinary"
for command in (["ops", "swiglu"], ["check", "swiglu", "--variant", "doubled", "--axes", point]):
    app([*command, *one], standalone_mode=False)
"""


def test_a_list_of_ops_has_none_of_it_and_a_check_the_end(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", BOTH, str(folder)], capture_output=True, text=True)
    page, end = json.JSONDecoder().raw_decode(done.stdout)
    assert (page["variants"][-1]["variant"], page["variants"][-1]["supported"]) == ("doubled", True)
    (checked,) = json.loads(done.stdout[end:])
    assert checked["status"] == "ok"
    assert done.stderr.startswith("swiglu.doubled printed: (at its end, after ")
    assert "flood\n" in done.stderr
    assert len(done.stderr) < 10_000


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
from tsched.torch_free import load_from_file
print("before")
with suppress(ValueError), load_from_file("silence").silenced():
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
