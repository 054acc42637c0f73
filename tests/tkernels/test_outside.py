"""An outside file that is broken, exits, crashes or hangs harms itself alone, and is known by its reason."""

import json
import os
import re
import socket
from pathlib import Path

import pytest

from tests.tkernels.outside import write_variant
from tkernels import OPS, UnknownNameError, outside
from tkernels.folders import why_unreadable
from tkernels.registry import registry_of

FAULTS = {
    "raises": "raise ValueError('mine')",
    "exits": "raise SystemExit(3)",
    "leaves": "import os; os._exit(0)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "hangs": "import time; time.sleep(60)",
    **{f"hangs_{number}": "import time; time.sleep(60)" for number in range(4)},
    "ends_its_parent": "import os, time; os.kill(os.getppid(), 9); time.sleep(60)",
    "forks": "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)\nraise ValueError('forked')",
    "spawns": "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
    "doubles": "import os; os.fork()",
    "waits": "import threading, time; threading.Thread(target=time.sleep, args=(60,), name='waiter').start()",
}
CHANGES = {
    "adds": ("torch.add = lambda a, b: a", "torch.add"),
    "wraps": ("import functools; torch.relu = functools.wraps(torch.relu)(lambda x: x)", "torch.relu"),
    "swaps": ("tl.sum = tl.max", "triton.language.sum"),
    "inherits": ("torch.Tensor.sum = torch.Tensor.mean", "torch.Tensor.sum"),
    "property": ("torch.Tensor.T = property(lambda self: self)", "torch.Tensor.T"),
    "rounds": ("triton.cdiv = lambda a, b: a // b", "triton.cdiv"),
    "allows": (
        "import tkernels.config as c; c.Config.pinned = lambda self, pins: self",
        "tkernels.config.Config.pinned",
    ),
    "deletes": ("del torch.nn.functional.gelu", "torch.nn.functional.gelu"),
    "forgets": ("import sys; del sys.modules['torch.nn']", "torch.nn, "),
    "forgets_itself": ("import sys; del sys.modules['triton.language'], sys.modules[__name__]", "triton.language, "),
    "moves": ("import os; os.chdir('/')", "the working directory"),
    "ignores": ("import signal; signal.signal(2, signal.SIG_IGN)", "what SIGINT does"),
    "widens": ("torch.set_default_dtype(torch.float64)", "torch's default dtype, torch.Storage"),
    "captures": ("import io, sys; sys.stdout = io.StringIO()", "sys.stdout"),
    "compiles": ("import os; os.environ['TRITON_INTERPRET'] = '0'", "TRITON_INTERPRET"),
}
"""What a file does at its import to all others, and what is named."""
UNUSUAL = """
import logging, os, sys, threading, time, warnings
import torch._dynamo, numpy.random
logging.basicConfig(level=logging.INFO)
logging.info("imported")
print("imported")
warnings.simplefilter("ignore")
sys.path.insert(0, os.path.dirname(__file__))
sys.setrecursionlimit(5000)
os.environ["TRITON_PRINT_AUTOTUNING"] = "1"
torch.backends.cuda.matmul.allow_tf32 = True
torch.Tensor.in_rows = lambda self: self.flatten(0, -2)
torch._dynamo.disable(lambda x: x)
triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8))
@torch.library.custom_op("tkernels_unusual::same", mutates_args=())
def same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
class Wide(torch.Tensor):
    def sum(self, *_: object) -> torch.Tensor:
        return self
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""
"""What a file may do: it adds, and changes nothing of the others'."""
HANGING = ("hangs", "hangs_0", "hangs_1", "hangs_2", "hangs_3")
LAUNCHES = {
    "forking": "import os; os.fork()",
    "endless": "while True: pass",
    "ending": "import os; os._exit(0)",
}
"""What a launcher begins with."""
NASTY = {
    "deep": "def deeper(n): return deeper(n + 1)\ndeeper(0)",
    "bottomless": "import sys; sys.setrecursionlimit(10**9)\ndef deeper(n): return [*map(deeper, [n])]\ndeeper(0)",
    "exits_well": "import sys; sys.exit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "closes": "import os; os.closerange(3, 100)",
    "imports_itself": "import importlib.util as u; s = u.spec_from_file_location('x', __file__)\n"
    "s.loader.exec_module(u.module_from_spec(s))",
}
NASTY_REASONS = {
    "deep": "cannot be imported: RecursionError: maximum recursion depth exceeded",
    "bottomless": "cannot be imported: killed by SIGSEGV",
    "exits_well": "cannot be imported: SystemExit: 0",
    "closes": "cannot be imported: its process left with exit status 1; last printed: ",
    "interrupts": "cannot be imported: it raised KeyboardInterrupt",
    "imports_itself": "cannot be imported: RecursionError",
}
TRIAL = "a trial call of its supports, prepare, workspace and launch does not come to its end"
REASONS = {
    "raises": "cannot be imported: ValueError: mine",
    "exits": "cannot be imported: SystemExit: 3",
    "leaves": "cannot be imported: its process left with exit status 0 before its end",
    "crashes": "cannot be imported: killed by SIGSEGV; last printed: Fatal Python error: Segmentation fault",
    **dict.fromkeys(HANGING, "cannot be imported: timeout: it took longer than 3 s"),
    "ends_its_parent": "cannot be imported: killed by SIGKILL",
    "forks": "cannot be imported: ValueError: forked",
    "spawns": "cannot be imported: it starts processes that go on after the import",
    "doubles": "cannot be imported: it starts processes that go on after the import",
    "waits": "cannot be imported: it starts threads that a process waits for: waiter",
    "endless": f"{TRIAL}: timeout: it took longer than 3 s",
    **{name: f"it changes what all variants share: {said}" for name, (_, said) in CHANGES.items()},
    **NASTY_REASONS,
    "forking": "cannot be imported: it starts processes that go on after the import or a trial call",
    "ending": f"{TRIAL}: its process left with exit status 0 before its end",
    "empty": "must define VARIANT, a tkernels.Variant",
    "torch": "swiglu already has a variant 'torch'",
}
NO_FILES = {
    "fifo": "is a FIFO, not a file",
    "socket": "is a socket, not a file",
    "device": "is a device, not a file",
    "folder": "is a folder, not a file",
    "dangling": "is a link to nothing, ",
    "round": "cannot be read: Too many levels of symbolic links",
    "latin": "is not UTF-8: byte 2 is 0xe9",
    "huge": "has 4,194,305 bytes; 4,194,304 are the most that is read",
}
"""What is named like a variant and cannot be read, or not without waiting for ever."""


def make_no_files(folder: Path) -> None:
    os.mkfifo(folder / "fifo.py")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket.py"))
    (folder / "device.py").symlink_to("/dev/zero")
    (folder / "folder.py").mkdir()
    (folder / "dangling.py").symlink_to(folder / "nowhere.py")
    (folder / "round.py").symlink_to("round.py")
    (folder / "latin.py").write_bytes("# é".encode("latin-1"))
    (folder / "huge.py").write_text("#" * (4 * 2**20 + 1))
    (folder / ".#doubled.py").symlink_to("editor@host.123")  # which an editor leaves there


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_variant(tmp_path_factory.mktemp("outside").resolve())
    for name, code in {**FAULTS, **NASTY}.items():
        write_variant(folder, ("swiglu_doubled", f"swiglu_{name}"), ("VARIANT =", f"{code}\nVARIANT ="), name=name)
    for name, (code, _) in CHANGES.items():
        write_variant(folder, ("swiglu_doubled", f"swiglu_{name}"), ("VARIANT =", f"{code}\nVARIANT ="), name=name)
    for name, code in LAUNCHES.items():
        begins = "    tokens, width = out.shape\n"
        write_variant(folder, ("swiglu_doubled", f"swiglu_{name}"), (begins, f"    {code}\n{begins}"), name=name)
    (folder / "swiglu" / "empty.py").write_text("")
    make_no_files(folder / "swiglu")
    write_variant(folder, name="torch")
    write_variant(folder, op="no_such_op", name="lost")
    broken_op = folder / "half_made"
    broken_op.mkdir()
    (broken_op / "contract.py").write_text("raise ValueError('half')")
    (broken_op / "fast.py").write_text("raise AssertionError('its contract is imported first')")
    return folder


@pytest.fixture(scope="module")
def broken(folder: Path) -> dict[Path, str]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(outside, "IMPORT_SECONDS", 3.0)
        return outside.broken_files([folder])


def test_each_broken_file_has_its_reason_and_a_sound_one_none(folder: Path, broken: dict[Path, str]) -> None:
    found = {file.stem: reason for file, reason in broken.items() if file.parent.name == "swiglu"}
    reasons = {**REASONS, **NO_FILES}
    assert set(found) == set(reasons)
    for name, reason in reasons.items():
        said = found[name].removeprefix(f"{folder / 'swiglu' / name}.py:")
        assert re.sub(r"^\d+: ", " ", said).startswith(f" {reason}"), name
    assert "unknown op 'no_such_op'" in broken[folder / "no_such_op" / "lost.py"]
    contract = folder / "half_made" / "contract.py"
    assert broken[contract] == f"{contract}:1: cannot be imported: ValueError: half"
    assert broken[folder / "half_made" / "fast.py"] == broken[contract]
    assert len(broken) == len(reasons) + 3
    assert outside.broken_files([]) == {}


def test_a_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    assert why_unreadable(Path(__file__)) == "cannot be read: Permission denied"


def test_the_others_join_and_a_broken_name_says_why(folder: Path, broken: dict[Path, str]) -> None:
    ops = OPS.with_variants_from(folder, broken)
    assert set(ops["swiglu"].variants) == {*OPS["swiglu"].variants, "doubled"}
    assert set(ops["swiglu"].variants.unavailable) == {*REASONS, *NO_FILES}
    with pytest.raises(UnknownNameError, match=r"swiglu variant 'exits' is not available: .*SystemExit: 3; there is "):
        ops["swiglu"].variants["exits"]
    with pytest.raises(UnknownNameError, match=r"op 'half_made' is not available: .*ValueError: half; there is "):
        ops["half_made"]
    again = registry_of(json.loads(json.dumps(ops.outside())))
    assert {name: list(op.variants) for name, op in again.items()} == {
        name: list(op.variants) for name, op in ops.items()
    }
    assert again.broken == ops.broken


def test_an_unusual_file_changes_nothing_of_the_others(tmp_path: Path) -> None:
    folder = write_variant(tmp_path, ("VARIANT =", f"{UNUSUAL}\nVARIANT ="))
    assert outside.broken_files([folder]) == {}
