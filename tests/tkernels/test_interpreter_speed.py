"""What the interpreter does once is what Triton does each time."""

import subprocess
import sys
from pathlib import Path

import triton.language as tl

from tests.tkernels.described_types import describe
from tkernels.interpreter import once


def test_types_and_tensors_are_as_tritons_own() -> None:
    code = f"import sys; from {describe.__module__} import describe; print(describe()); assert 'tkernels' not in "
    code += "sys.modules"
    root = Path(__file__).parents[2]
    unpatched = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert unpatched.returncode == 0, unpatched.stderr
    assert tl.tensor.__init__.__module__ == once.__name__
    for _ in range(2):
        assert str(describe()) == unpatched.stdout.strip()
