"""Mutation testing: faults put into kernels on purpose, to see whether the checks notice.

`tk check --mutate` is the command. A fault (`faults`) is planted in a fork of a worker process (`worker`), which runs
the op's drawn cases until one of them shows it. What survives is a hole in the checks, or an equivalent (`equivalent`).
"""

from tkernels.verification.mutation.campaign import (
    VERIFIED_CASES,
    Comparison,
    Outcome,
    Score,
    Trial,
    compared,
    comparisons,
    joined,
    outcomes,
    pieces,
    sampled,
    score,
    trials,
)
from tkernels.verification.mutation.faults import KINDS, Mutant, mutants
from tkernels.verification.mutation.pool import Fate, MutationError, Pool

__all__ = [
    "KINDS",
    "VERIFIED_CASES",
    "Comparison",
    "Fate",
    "Mutant",
    "MutationError",
    "Outcome",
    "Pool",
    "Score",
    "Trial",
    "compared",
    "comparisons",
    "joined",
    "mutants",
    "outcomes",
    "pieces",
    "sampled",
    "score",
    "trials",
]
