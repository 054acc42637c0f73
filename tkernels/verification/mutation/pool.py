"""Runs mutants through worker processes and says how each of them fared."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tkernels.variant import Variant
from tkernels.verification.mutation.faults import Mutant

T = TypeVar("T")
R = TypeVar("R")
DRAWS = 60
OFFSET_DRAWS = 12
MORE_DRAWS = 240
"""For what 60 draws let live: some faults show at one pair of sizes only."""
ANOTHER_SEED = 1_000_000
COMPILED_DRAWS = 16
PROGRAMS = 8
CASE_SECONDS = 20.0
"""Of processor time, for a case that takes an honest kernel well under one."""


class MutationError(RuntimeError):
    """Mutants cannot be judged: the original is wrong, or a worker ended, which no mutant can make it do."""


@dataclass(frozen=True)
class Fate:
    """What became of a mutant.

    verdict: value or crash (killed by a wrong result; by an exception, a signal or a time-out), survived,
    does_not_compile or same_code (these two are no mutants, and do not count).
    variant: which one noticed, or the first that was asked. reason: what was noticed.
    """

    mutant: Mutant
    variant: Variant
    verdict: str
    reason: str = ""

    @property
    def counts(self) -> bool:
        return self.verdict not in ("does_not_compile", "same_code")

    @property
    def killed(self) -> bool:
        return self.verdict in ("value", "crash")


class _Worker:
    """One worker process, started when it is first asked."""

    def __init__(self, interpret: bool, folders: Sequence[Path]) -> None:
        self.command = [sys.executable, "-m", "tkernels.verification.mutation.worker", *map(str, folders)]
        self.environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
        self._process: subprocess.Popen[str] | None = None

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment
            )
            self._answer()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer will say so
            print(json.dumps(task), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MutationError(f"a mutation worker ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class Pool:
    """A number of workers. A context manager: the processes end with it."""

    def __init__(self, workers: int = 1, variants_from: Sequence[Path] = ()) -> None:
        self.workers = workers
        self.folders = variants_from
        self._local = threading.local()
        self._all: list[_Worker] = []
        self._fair: dict[str, bool] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._all:
            worker.close()

    def _worker(self, interpret: bool) -> _Worker:
        """This thread's own."""
        name = "interpreting" if interpret else "compiling"
        worker: _Worker | None = getattr(self._local, name, None)
        if worker is None:
            worker = _Worker(interpret, self.folders)
            setattr(self._local, name, worker)
            self._all.append(worker)
        return worker

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """One task for this thread's worker: see `tkernels.verification.mutation.worker`."""
        return self._worker(interpret=task["do"] != "compile").ask(task)

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """The results in order; as many at a time as there are workers, each thread asking its own."""
        with ThreadPoolExecutor(self.workers) as threads:
            try:
                yield from threads.map(function, items)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def fate(self, mutant: Mutant, variants: Sequence[Variant], seed: int, compiled: bool, thorough: bool) -> Fate:
        """What becomes of one mutant; `variants` run its function, and are tried in turn until one notices.

        Unless `compiled`, nobody asks the compiler whether it takes it. `thorough`: more draws before it has survived.
        """
        fate, case = self._checked(mutant, variants, seed, DRAWS)
        if compiled and fate.killed:
            codes, reason = self._codes(mutant, fate.variant, seed, case)
            if None in codes and None not in self._codes(None, fate.variant, seed, case)[0]:
                return replace(fate, verdict="does_not_compile", reason=reason)
        elif compiled:
            fate = self._compared(fate, variants, seed)
        if thorough and fate.verdict == "survived":
            fate, _ = self._checked(mutant, variants, seed + ANOTHER_SEED, MORE_DRAWS // len(variants))
        return fate

    def _checked(self, mutant: Mutant, variants: Sequence[Variant], seed: int, draws: int) -> tuple[Fate, list[Any]]:
        """The fate on drawn cases, and the case that decided it, if one did."""
        for variant in variants:
            unfair: list[int] = []
            while True:
                answer = self.ask({**task("check", mutant, variant, seed, draws), "skip": unfair})
                if answer["verdict"] == "original":
                    raise MutationError(f"a kernel that fails its own check has no mutants: {answer['reason']}")
                if answer["verdict"] == "survived":
                    break
                case = answer.get("case")
                if case is None or self._is_fair(variant, seed, case, answer["stage"]):
                    fate = Fate(mutant, variant, answer["verdict"], answer["reason"])
                    return fate, [case] if case is not None else []
                unfair.append(case["seed"])
        return Fate(mutant, variants[0], "survived"), []

    def _is_fair(self, variant: Variant, seed: int, case: Mapping[str, Any], stage: str) -> bool:
        """Whether the original passes this case. The error rule measures against torch's error, which is nearly none in
        one case of hundreds, by luck: what fails there has not been shown to be wrong.
        """
        key = json.dumps([variant.contract.name, variant.name, case, stage])
        if key not in self._fair:
            answer = self.ask({**task("original", None, variant, seed), "cases": [case], "stage": stage})
            if answer["verdict"] == "crash":  # which is nobody's luck
                raise MutationError(f"a kernel that fails its own check has no mutants: {answer['reason']}")
            self._fair[key] = answer["verdict"] == "survived"
        return self._fair[key]

    def _compared(self, fate: Fate, variants: Sequence[Variant], seed: int) -> Fate:
        """A survivor, unless it does not compile, or compiles to its original's code in every variant."""
        for variant in variants:
            cases = self.ask({**task("draw", None, variant, seed), "wanted": COMPILED_DRAWS})["cases"]
            before, _ = self._codes(None, variant, seed, cases)
            after, reason = self._codes(fate.mutant, variant, seed, cases)
            if any(one is not None and other is None for one, other in zip(before, after, strict=True)):
                return replace(fate, verdict="does_not_compile", reason=reason)
            if None in before or before != after:
                return fate
        return replace(fate, verdict="same_code")

    def _codes(
        self, mutant: Mutant | None, variant: Variant, seed: int, cases: Sequence[Any]
    ) -> tuple[list[str | None], str]:
        """For each case a hash of the code, None where the compiler refuses it, and why it does."""
        answer = self.ask({**task("compile", mutant, variant, seed), "cases": cases})
        if answer["verdict"] == "crash":
            return [None] * len(cases), answer["reason"]
        return answer["codes"], answer["reason"]


def task(do: str, mutant: Mutant | None, variant: Variant, seed: int, draws: int = DRAWS) -> dict[str, Any]:
    """A worker's task for a mutant, or for the variant as it is."""
    fault = {"file": str(mutant.file), "function": mutant.function, "source": mutant.source} if mutant else {}
    return {
        "do": do,
        "op": variant.contract.name,
        "variant": variant.name,
        "source": None,
        **fault,
        "seed": seed,
        "draws": draws,
        "offset_draws": OFFSET_DRAWS,
        "programs": PROGRAMS,
        "seconds": CASE_SECONDS,
        "skip": [],
        # Values show a lost 64-bit offset only where a tensor has 2**31 elements: without the 60 draws first, those
        # of paged_decode die in 9 s, where they took 38.
        "stages": ["offsets", "plain"] if mutant and mutant.kind == "cast_removed" else ["plain", "offsets"],
    }
