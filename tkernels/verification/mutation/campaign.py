"""A campaign: which mutants of a registry are tried, and what it comes to."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tkernels.registry import builtin_ops
from tkernels.variant import Variant
from tkernels.verification.mutation.equivalent import EQUIVALENT, Equivalent
from tkernels.verification.mutation.faults import KERNEL_KINDS, Mutant, Part, mutants
from tkernels.verification.mutation.launcher_faults import LAUNCHER_KINDS, launcher_mutants
from tkernels.verification.mutation.launcher_targets import launcher_targets
from tkernels.verification.mutation.pool import Fate, Pool, task
from tkernels.verification.mutation.targets import Target, targets

KINDS: Mapping[Part, tuple[str, ...]] = {"kernel": KERNEL_KINDS, "launcher": LAUNCHER_KINDS}
"""The kinds of faults of each part of a variant."""
SHARED = "shared"
"""Stands for the op of a function that several ops call."""
VERIFIED_CASES = 1000
COMPARED_AT_ONCE = 100
"""Cases, so that their inputs fit into a worker's memory, and a progress bar moves."""
_APART = 1000
"""Times as many seeds as cases: of two draws next to each other, the first must end before the second begins."""


@dataclass(frozen=True)
class Trial:
    """A mutant, the op that it belongs to, the variants that run it, and why it changes nothing where that is known."""

    op: str
    mutant: Mutant
    variants: tuple[Variant, ...]
    equivalent: Equivalent | None = None


@dataclass(frozen=True)
class Outcome:
    """A trial's end. column: the fate's verdict, or equivalent; does_not_compile and same_code do not count.
    wrong: it was declared equivalent, and was killed.
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
    variants: Iterable[Variant], kinds: Sequence[str] | None = None, declared: Sequence[Equivalent] = EQUIVALENT
) -> Iterator[Trial]:
    """Every mutant of every device function, and then of all host code, that the Triton variants among these run: but
    none of what stands in the folder of an op that is not among them, which is judged with it.

    Args:
        kinds: Those wanted; None is all.
    """
    chosen = list(variants)
    found: list[tuple[Target, Part]] = [(target, "kernel") for target in targets(chosen)]
    found += [(target, "launcher") for target in launcher_targets(chosen)]
    others = builtin_ops().keys() - {variant.contract.name for variant in chosen}
    for target, part in found:
        if target.file.parent.name in others:
            continue
        ops = {variant.contract.name for variant in target.variants}
        op = ops.pop() if len(ops) == 1 else SHARED
        # Of what ops share, also what the op in whose folder it is declares.
        owners = (op, target.file.parent.name, SHARED)
        wanted = tuple(kind for kind in KINDS[part] if kinds is None or kind in kinds)
        plant = mutants if part == "kernel" else launcher_mutants
        for mutant in plant(target.file, target.functions, wanted):
            known = next((entry for entry in declared if any(entry.is_of(owner, mutant) for owner in owners)), None)
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


def compared(pool: Pool, declared: Sequence[Trial], cases: int, seed: int) -> Iterator[Comparison]:
    """Runs original and mutant on drawn cases, in every variant that has the function, and compares all bits: one
    answer for each trial, variant and COMPARED_AT_ONCE cases, `pieces` in all.

    The original runs once for all trials of a variant.
    """
    by_variant: dict[tuple[str, str], tuple[Variant, list[Trial]]] = {}
    for trial in declared:
        for variant in trial.variants:
            by_variant.setdefault((variant.contract.name, variant.name), (variant, []))[1].append(trial)
    batches = [(*mine, first) for mine in by_variant.values() for first in range(0, cases, COMPARED_AT_ONCE)]

    def compare(batch: tuple[Variant, list[Trial], int]) -> list[Comparison]:
        variant, trials, first = batch
        count = min(COMPARED_AT_ONCE, cases - first)
        found = []
        for trial in trials:
            answer = pool.ask(task("same_bits", trial.mutant, variant, seed + first * _APART, count))
            found.append(Comparison(trial, count, "" if answer["verdict"] == "same" else answer["reason"]))
        return found

    for found in pool.map(compare, batches):
        yield from found


def pieces(declared: Sequence[Trial], cases: int) -> int:
    """How many answers `compared` gives."""
    return sum(len(trial.variants) for trial in declared) * -(-cases // COMPARED_AT_ONCE)


def joined(declared: Sequence[Trial], parts: Sequence[Comparison]) -> list[Comparison]:
    """One comparison for each trial, in order: the cases of all its parts that are the same, the first difference."""

    def whole(trial: Trial) -> Comparison:
        mine = [part for part in parts if part.trial is trial]
        reason = next((part.reason for part in mine if part.reason), "")
        return Comparison(trial, sum(part.cases for part in mine if not part.reason), reason)

    return [whole(trial) for trial in declared]
