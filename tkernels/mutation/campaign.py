"""A campaign: which mutants of a registry are tried, and what it comes to."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tkernels.mutation.equivalent import EQUIVALENT, Equivalent
from tkernels.mutation.faults import KINDS, Mutant, mutants
from tkernels.mutation.pool import Fate, Pool, task
from tkernels.mutation.targets import targets
from tkernels.variant import Variant

SHARED = "shared"
"""Stands for the op of a function that several ops call."""
VERIFIED_CASES = 1000


@dataclass(frozen=True)
class Trial:
    """A mutant, the op that it belongs to, the variants that run it, and why it changes nothing where that is known."""

    op: str
    mutant: Mutant
    variants: tuple[Variant, ...]
    equivalent: Equivalent | None = None


@dataclass(frozen=True)
class Outcome:
    """A trial's end. column: value, crash, equivalent, survived, does_not_compile or same_code; the last two do not
    count. wrong: it was declared equivalent, and was killed.
    """

    trial: Trial
    fate: Fate

    @property
    def column(self) -> str:
        return "equivalent" if self.trial.equivalent and self.fate.verdict == "survived" else self.fate.verdict

    @property
    def wrong(self) -> bool:
        return self.trial.equivalent is not None and self.fate.killed


@dataclass(frozen=True)
class Score:
    """killed / (counted - equivalent) is the score; counted leaves out what does not compile or is the same code."""

    counted: int
    killed: int
    equivalent: int

    @property
    def share(self) -> float:
        judged = self.counted - self.equivalent
        return self.killed / judged if judged else 0.0

    @property
    def equivalent_share(self) -> float:
        return self.equivalent / self.counted if self.counted else 0.0


def trials(
    variants: Iterable[Variant], kinds: tuple[str, ...] = KINDS, declared: Sequence[Equivalent] = EQUIVALENT
) -> Iterator[Trial]:
    """Every mutant of every device function that the Triton variants among these run."""
    for target in targets(variants):
        ops = {variant.contract.name for variant in target.variants}
        op = ops.pop() if len(ops) == 1 else SHARED
        for mutant in mutants(target.file, target.functions, kinds):
            known = next((entry for entry in declared if entry.is_of(op, mutant)), None)
            yield Trial(op, mutant, target.variants, known)


def sampled(everything: Iterable[Trial], quota: int, seed: int) -> list[Trial]:
    """At most `quota` trials of each op and kind of fault, drawn by the seed; in their first order."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in everything:
        groups.setdefault((trial.op, trial.mutant.kind), []).append(trial)
    chosen: list[Trial] = []
    for (op, kind), group in groups.items():
        picks = random.Random(f"{seed} {op} {kind}").sample(range(len(group)), min(quota, len(group)))
        chosen += [group[index] for index in sorted(picks)]
    return chosen


def outcomes(pool: Pool, chosen: Sequence[Trial], seed: int, compiled: bool = True) -> Iterator[Outcome]:
    """The end of each trial, in order. Unless `compiled`, nobody asks whether the mutants compile."""

    def end(trial: Trial) -> Outcome:
        thorough = trial.equivalent is None
        return Outcome(trial, pool.fate(trial.mutant, trial.variants, seed, compiled, thorough))

    yield from pool.map(end, chosen)


def score(ended: Sequence[Outcome]) -> Score:
    """What a campaign comes to."""
    counted = [outcome for outcome in ended if outcome.fate.counts]
    killed = sum(outcome.fate.killed for outcome in counted)
    return Score(len(counted), killed, sum(outcome.column == "equivalent" for outcome in counted))


@dataclass(frozen=True)
class Comparison:
    """A declared equivalent's bits beside its original's. reason: where they differ; empty where they do not."""

    trial: Trial
    cases: int
    reason: str


def comparisons(pool: Pool, declared: Sequence[Trial], cases: int, seed: int) -> Iterator[Comparison]:
    """Runs original and mutant on drawn cases, in every variant that has the function, and compares all bits."""

    def compare(trial: Trial) -> Comparison:
        for variant in trial.variants:
            answer = pool.ask(task("same_bits", trial.mutant, variant, seed, cases))
            if answer["verdict"] != "same":
                return Comparison(trial, 0, answer["reason"])
        return Comparison(trial, cases * len(trial.variants), "")

    yield from pool.map(compare, declared)
