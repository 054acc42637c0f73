"""What a file imports, told without importing it."""

import sys
from pathlib import Path

import pytest

from experiments.runs.imports import imported_files


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(place: Path, name: str, text: str = "") -> Path:
    file = place / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_what_is_imported_is_found_wherever_it_is_and_what_that_imports(place: Path) -> None:
    file = write(
        place,
        "mine.py",
        "import os, torch, near\nfrom tkernels import Variant\n\ndef later():\n    from lib.deep import THING\n",
    )
    write(place, "near.py", "import mine\nimport plain.inner\n")
    write(place, "lib/__init__.py")
    write(place, "lib/deep.py", "from . import beside\nfrom .more import name\nfrom .... import beyond\n")
    write(place, "lib/beside.py")
    write(place, "lib/more/__init__.py", "from ..broken import nothing\n")
    write(place, "lib/broken.py", "def\n")
    write(place, "lib/unused.py")
    write(place, "plain/inner.py")  # a folder without __init__.py
    found = imported_files(file)
    names = {"mine", "near", "lib", "lib.deep", "lib.beside", "lib.more", "lib.broken", "plain.inner"}
    assert set(found) == names
    assert found["lib.more"] == place / "lib" / "more" / "__init__.py"
    assert not names & set(sys.modules)


def test_what_is_installed_or_of_this_project_is_known_otherwise(place: Path) -> None:
    file = write(place, "mine.py", "import json, yaml\nimport experiments.peers, tests.tkernels\n")
    assert imported_files(file) == {}
