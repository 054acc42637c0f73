"""The Python modules that are mutated, and the tests that are theirs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Package:
    """Modules that are mutated together.

    name      of the package
    sources   its modules and folders of modules, from the repository's root, the highest floor's first
    tests     likewise the tests that are run against them
    """

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def floor(self) -> str:
        """The lowest folder that any of its modules is in."""
        return self.sources[-1].partition("/")[0]

    def files(self) -> list[str]:
        """Its modules, from the repository's root, in order."""
        found = set[Path]()
        for source in self.sources:
            path = ROOT / source
            found |= {path} if path.is_file() else set(path.rglob("*.py"))
        return sorted(file.relative_to(ROOT).as_posix() for file in found if file.stat().st_size)

    def read(self) -> str:
        """The text of all its modules."""
        return "".join((ROOT / file).read_text() for file in self.files())


PACKAGES = {
    one.name: one
    for one in (
        Package("tsched", ("tsched",), ("tests/tsched",)),
        Package("tmodel", ("tmodel",), ("tests/tmodel",)),
        Package(
            "report",
            (
                "experiments/reporting/effects.py", "experiments/reporting/verdict.py",
                "experiments/runs/comparison.py", "experiments/runs/differences.py", "experiments/runs/drift.py",
                "experiments/runs/verdicts.py",
            ),
            ("tests/experiments/reporting", "tests/experiments/runs"),
        ),
    )
}  # fmt: skip
"""Those of the report are its statistics and its verdict."""
