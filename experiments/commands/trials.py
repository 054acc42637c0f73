"""How `tk check` goes through variants: failures are said when they come, and what is done by then outlives a signal.

A variant from outside runs in a child of this process, where Triton's interpreter stands in for the GPU: one that
hangs, exits, crashes or takes all memory ends its own trial, and the next variant's goes on. A child of a process that
has used CUDA could not use it, so compiled kernels run here.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate

import torch

from experiments.commands.choices import Subject, case_size
from experiments.commands.output import name_some, progress_bar
from experiments.signals import Signals
from tkernels.config import Config
from tkernels.contract import Case, ContractError
from tkernels.isolation import Tell, free_memory, run_forked
from tkernels.mode import MODE
from tkernels.variant import Variant
from tkernels.verification.check import outside_folder

Drawn = tuple[Case, Config | None]

MOST_FAILURES = 3
"""Of one variant, or of one under one sanitizer: what they have in common shows in the first few."""

_SHOWN_LINES, _SHOWN_WIDTH = 20, 300
"""Of what an outside variant prints."""

BEGUN, LEFT_OUT = "begun", "left out"
BAD = ("wrong", "failed", "finding")
NOT_RUN, INTERRUPTION = "not run", "interrupted"
"""What becomes of a variant that a signal kept from being reached, or cut off with nothing bad by then."""


@dataclass(frozen=True)
class Result:
    """How one case ended.

    Attributes:
        part: What it counts for: "drawn", "wide" or a sanitizer's name.
        status: ok, wrong, failed, unsupported or finding. BEGUN: the case begins, and this is its result where the
            process ends in it. LEFT_OUT: no more cases of the part are run, for the reason.
        reason: In a few words, for all but ok.
        message: What is said of a failure, whole; of a case that begins, the name that it would have.
        replay: The command that runs the case again.
        seconds: That a case which begins has, in a process of its own.
    """

    part: str
    status: str
    reason: str = ""
    message: str = ""
    replay: str = ""
    max_ratio: float | None = None
    rms_ratio: float | None = None
    seconds: float = 0.0

    @property
    def is_bad(self) -> bool:
        return self.status in BAD


@dataclass(frozen=True)
class Trial:
    """What is tried on one variant. `cases` tells of each case twice, as it begins and as it ends; at most `planned`.
    first: the part that begins.
    """

    subject: Subject
    first: str
    planned: int
    cases: Callable[[], Iterator[Result]]


@dataclass
class Record:
    """What a trial has come to.

    Attributes:
        left_out: Part -> why there are no more of its cases.
        in_hand: The case that runs.
        died: The part under which a child ended before its time.
        is_reached, is_whole: It has begun; it has come to its end.
    """

    trial: Trial
    results: list[Result] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    in_hand: Result | None = None
    died: str = ""
    is_reached: bool = False
    is_whole: bool = False

    @property
    def title(self) -> str:
        return self.trial.subject.title

    def part(self, part: str) -> list[Result]:
        return [result for result in self.results if result.part == part]

    def take(self, result: Result) -> bool:
        """Takes in what a trial tells; whether a case has ended."""
        if result.status == BEGUN:
            self.in_hand = result
            return False
        self.in_hand = None
        if result.status == LEFT_OUT:
            self.left_out[result.part] = result.reason
            return False
        self.results.append(result)
        return True


def runs_apart(variant: Variant) -> bool:
    """Whether what a variant does is for a child of this process."""
    return outside_folder(variant) is not None and MODE == "interpret"


def count_apart(variant: Variant, count: Callable[[], int], seconds: float) -> int:
    """What `count` says, which asks the variant; 0 where that ends its process, as the trial will find."""
    if not runs_apart(variant):
        return count()
    told: list[int] = []

    def work(tell: Tell) -> None:
        torch.set_num_threads(1)
        tell(count())

    run_forked(work, told.append, seconds, free_memory() / 2)
    return told[0] if told else 0


def smallest_first(cases: Iterable[Drawn]) -> tuple[list[Drawn], str]:
    """Drawn cases by their size, and why there are no more of them; "" where there are as many as asked for."""
    drawn: list[Drawn] = []
    problem = ""
    try:
        drawn.extend(cases)
    except ContractError as error:  # what was drawn before stays
        problem = str(error)
    return sorted(drawn, key=lambda one: case_size(one[0].axes)), problem


def carry_out(what: str, make_trials: Callable[[], Sequence[Trial]], seconds: float, signals: Signals) -> list[Record]:
    """Runs trials, one after the other, and says each failure on stderr when it comes.

    Args:
        what: Their name beside the bar.
        make_trials: Gathers them.
        seconds: That an outside variant may take before its first case.
        signals: What has come to them cuts the trials off. It is held at the end, while the caller says what was found.

    Returns:
        A record of each trial; none where they were cut off before they were gathered.
    """
    records: list[Record] = []
    try:
        records += map(Record, make_trials())
        _run_all(what, records, seconds)
        signals.hold()
    except KeyboardInterrupt:
        signals.hold()
        signals.came = True
    return records


def _run_all(what: str, records: Sequence[Record], seconds: float) -> None:
    counts = [record.trial.planned for record in records]
    with progress_bar(what, sum(counts)) as update:
        for record, done in zip(records, accumulate(counts, initial=0), strict=False):
            update(completed=done, doing=record.title)
            record.is_reached = True
            take = partial(_take, record, partial(update, advance=1))
            if runs_apart(record.trial.subject.variant):
                _run_apart(record, take, seconds)
            else:
                for result in record.trial.cases():
                    take(result)
            record.is_whole = True


def _take(record: Record, advance: Callable[[], None], result: Result) -> None:
    if record.take(result):
        advance()
    if result.is_bad:
        sys.stdout.flush()
        print(f"\n{result.message}", file=sys.stderr, flush=True)


def _run_apart(record: Record, take: Callable[[Result], None], seconds: float) -> None:
    """Runs a trial in a child of this process, whose end is the failure of the case that it was at."""

    def work(tell: Tell) -> None:
        torch.set_num_threads(1)  # the threads of this process's pool are not in the child
        for result in record.trial.cases():
            if result.status == BEGUN:
                tell.within(result.seconds)
            tell(asdict(result))

    ending = run_forked(work, lambda message: take(Result(**message)), seconds, free_memory() / 2)
    if ending.printed:
        print(f"{record.title} printed: {_last_lines(ending.printed)}", file=sys.stderr, flush=True)
    if ending.death is not None:
        where = "after one of its cases" if record.results else "before its first case"
        begun = record.in_hand or Result(record.trial.first, BEGUN, message=f"{record.title}: {where}")
        replay = f"\n  replay: {begun.replay}" if begun.replay else ""
        record.died = begun.part
        take(replace(begun, status="failed", reason=ending.death, message=f"{begun.message}: {ending.death}{replay}"))


def _last_lines(text: str) -> str:
    """The end of what was printed; a line's own end where it is long."""
    lines = [line if len(line) <= _SHOWN_WIDTH else f"...{line[-_SHOWN_WIDTH:]}" for line in text.splitlines()]
    left_out = [f"(at its end, after {len(lines) - _SHOWN_LINES:,} lines or more)"] if lines[_SHOWN_LINES:] else []
    return "\n".join([*left_out, *lines[-_SHOWN_LINES:]])


def words_of_interruption(records: Sequence[Record]) -> str:
    """What signals left undone."""
    if not records:
        return "interrupted while variants were gathered: none was reached"
    done = sum(record.is_whole for record in records)
    partly = [record.title for record in records if record.is_reached and not record.is_whole]
    left = [record.title for record in records if not record.is_reached]
    return f"interrupted: {done} of {len(records)} variants done" + "".join(
        f"; {what}: {name_some(titles)}" for what, titles in (("partly", partly), ("not reached", left)) if titles
    )
