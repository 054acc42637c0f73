"""A bug that happened in a public project, rebuilt: what it is, its variant file, and which check finds it.

Each is a correct variant of `correct/`, written for this, with the bug put in: by a few lines of its text, so that
nothing but the bug can be what is found. None of a project's code is here.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tkernels import OPS
from tkernels.registry import Registry
from tkernels.variant import Variant
from tkernels.verification.check import CheckResult, drawn_results, wide_results
from tkernels.verification.draws import EXAMPLES
from tkernels.verification.sanitizers.base import sanitized, unfit_reason
from tkernels.verification.sanitizers.suite import SANITIZERS

CORRECT = Path(__file__).parent / "correct"
"""A folder of variants (and ops) as an outsider has it: each must pass every check."""

_PROJECTS = {
    "flash-attention": ("flash_attn", "FlashAttention"),
    "flash-linear-attention": ("fla", "flash-linear-attention"),
    "flashinfer": ("flashinfer", "FlashInfer"),
    "GPTQModel": ("gptqmodel", "GPTQModel"),
    "sglang": ("sglang", "SGLang"),
    "triton": ("triton", "Triton"),
    "vllm": ("vllm", "vLLM"),
}
"""Repository -> the project in the names of its bugs, and as it writes itself."""

FINDERS = ("check", "wide", *SANITIZERS)
"""The doors of a user in the order of a day's work: `tk check`, its wide cases, then `--sanitize all`."""


NOT_FOUND = "not found"


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One rebuilt bug.

    Attributes:
        link: Of the issue or pull request.
        title: The issue's own.
        happened: What went wrong there, in a line.
        kind: What class of bug it is.
        base: "op/variant" of the correct one.
        changes: (text of it, text in its place), each once.
        finder: Which of FINDERS finds it first; "" for none. Of this the pages tell, and a slow test and the command
            `tests.tkernels.bugs.table` measure it.
    """

    link: str
    title: str
    happened: str
    kind: str
    base: str
    changes: tuple[tuple[str, str], ...]
    finder: str

    @property
    def project(self) -> str:
        """ "vLLM", as the project writes itself."""
        return _PROJECTS[self._repository][1]

    @property
    def _repository(self) -> str:
        return self.link.split("/")[4]

    @property
    def number(self) -> int:
        return int(self.link.rsplit("/", 1)[1])

    @property
    def name(self) -> str:
        """ "vllm_12345", its variant's name and its test's."""
        return f"{_PROJECTS[self._repository][0]}_{self.number}"

    @property
    def found_by(self) -> str:
        return self.finder or NOT_FOUND

    @property
    def op(self) -> str:
        return self.base.split("/")[0]

    @property
    def is_race(self) -> bool:
        return self.kind == "race"

    def source(self) -> str:
        """The variant file that has the bug.

        Raises:
            ValueError: A text to change is not there once: the bug must be put in anew.
        """
        text = (CORRECT / f"{self.base}.py").read_text()
        for before, after in self.changes:
            if text.count(before) != 1:
                raise ValueError(f"{self.name}: {before!r} is {text.count(before)} times in {self.base}")
            text = text.replace(before, after)
        return text.replace(self.base.replace("/", "_"), f"{self.op}_{self.name}")

    def variant(self, folder: Path) -> Variant:
        """The variant, from a folder that it is written into as an outsider would."""
        (folder / self.op).mkdir(parents=True)
        contract = CORRECT / self.op / "contract.py"
        if contract.exists():
            (folder / self.op / "contract.py").write_text(contract.read_text())
        (folder / self.op / f"{self.name}.py").write_text(self.source())
        return OPS.with_variants_from(folder)[self.op].variants[self.name]


def correct_variants() -> Registry:
    """The ops with the variants that the bugs are put into."""
    return OPS.with_variants_from(CORRECT)


@dataclass(frozen=True)
class Found:
    """finder: The check that found it, "" for none. cases: looked at until then, of all finders. seconds: of CPU."""

    finder: str
    message: str
    cases: int
    seconds: float

    @property
    def found_by(self) -> str:
        return self.finder or NOT_FOUND


def faults(variant: Variant, finder: str) -> Iterator[str | None]:
    """What one finder says of each case: what is wrong, or None."""
    if finder == "check":
        yield from map(_fault, drawn_results(variant, EXAMPLES))
    elif finder == "wide":
        yield from map(_fault, wide_results(variant))
    elif unfit_reason(SANITIZERS[finder], variant) is None:
        yield from (finding and finding.message for finding in sanitized(SANITIZERS[finder], variant))


def _fault(result: CheckResult) -> str | None:
    return None if result.status == "ok" else str(result)


def first_fault(variant: Variant, finders: Sequence[str] = FINDERS) -> Found:
    """Goes through the finders until one has something to say."""
    began, cases = time.process_time(), 0
    for finder in finders:
        for message in faults(variant, finder):
            cases += 1
            if message is not None:
                return Found(finder, message, cases, time.process_time() - began)
    return Found("", "", cases, time.process_time() - began)
