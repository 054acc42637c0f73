"""What a report knows of its steps from the commands before: which are done, which failed, and how long each kind took.

It is kept in the report's run.json, so that what is brought home says it.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.gpu_report.estimates import Pace
from experiments.gpu_report.steps import Step
from experiments.runs.rows import Row

OUT_OF_TIME = "out of time: "
"""How the reason of a step begins that its command's end cut off: no fault of its own."""


@dataclass
class Journal:
    """done, failures: by the key of a step. spent: as `Pace` has it."""

    done: set[str] = field(default_factory=set)
    failures: dict[str, int] = field(default_factory=dict)
    spent: dict[str, tuple[float, float]] = field(default_factory=dict)

    @staticmethod
    def of(meta: Mapping[str, Any], rows: Iterable[Row]) -> "Journal":
        """From a report's run.json and rows.

        Raises:
            ValueError: run.json does not have it as `as_meta` writes it; says what is wrong.
        """
        spent, failures = meta.get("spent", {}), meta.get("failures", {})
        if not isinstance(spent, dict) or not all(map(_is_spent, spent.values())):
            raise ValueError(
                f'"spent" must be an object of two numbers of seconds for each kind of step, got {spent!r}'
            )
        if not isinstance(failures, dict) or not all(map(_is_count, failures.values())):
            raise ValueError(f'"failures" must be an object of a count for each step, got {failures!r}')
        return Journal(
            finished_keys(rows), dict(failures), {kind: (float(a), float(b)) for kind, (a, b) in spent.items()}
        )

    def as_meta(self) -> dict[str, Any]:
        """For run.json; what is done the rows say."""
        return {"failures": self.failures, "spent": self.spent}

    def note(self, step: Step, seconds: float, reason: str | None) -> None:
        """A step has ended after so many seconds. reason: why it did not come to its end."""
        if reason is None:
            self.done.add(step.key)
            # A step that goes on where it was cut off took longer than what is measured now.
            if step.least is None:
                reckoned, took = self.spent.get(step.kind, (0.0, 0.0))
                self.spent[step.kind] = (reckoned + step.seconds, took + seconds)
        elif not reason.startswith(OUT_OF_TIME):
            self.failures[step.key] = self.failures.get(step.key, 0) + 1

    @property
    def pace(self) -> Pace:
        return Pace(self.spent)

    def left(self, steps: Sequence[Step]) -> list[Step]:
        """The steps that did not come to their end, the most valuable first; of equal worth, those that failed last:
        what hangs must not take every command's time again before the others had theirs.
        """
        undone = [step for step in steps if step.key not in self.done]
        return sorted(undone, key=lambda step: (step.worth, self.failures.get(step.key, 0)))


def _is_spent(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_seconds, value))


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def finished_keys(rows: Iterable[Row]) -> set[str]:
    """The steps that came to their end, whatever they found: the others are tried again."""
    rows = list(rows)
    return {row.task for row in rows} - {row.task for row in rows if row.stage == "report" and row.status == "failed"}
