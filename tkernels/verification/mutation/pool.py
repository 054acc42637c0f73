"""Runs mutants through worker processes and says how each of them fared."""

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from tkernels.device import TARGETS
from tkernels.errors import TKernelsError
from tkernels.isolation import Server, ServerError
from tkernels.registry import Registry, builtin_ops
from tkernels.variant import Variant
from tkernels.verification.mutation.faults import ORDER_WEAKENED, Mutant

T = TypeVar("T")
R = TypeVar("R")
DRAWS = 60
OFFSET_DRAWS = 12
MORE_DRAWS = 240
"""For what 60 draws let live: some faults show at one pair of sizes only."""
ANOTHER_SEED = 1_000_000
COMPILED_DRAWS = 16
PROGRAMS = 8
WALL_SECONDS = 1200.0
"""Of one task."""
_TIMED_OUT = "time-out: a case took too much time"
_COMPILING = ("compile", "inspect")
"""Tasks whose process compiles: each has one of its own, for what stops at an intermediate form compiles no further."""
_INTERPRETED = {"TRITON_INTERPRET": "1"}
CASE_SECONDS = 20.0
"""Of processor time, for a case that takes an honest kernel well under one."""
KILLED = ("value", "crash", "claim", "table", "inspection")
"""How a mutant is noticed: by a wrong result; by an exception, a signal or a time-out; by a claim that it breaks (other
bits in another batch or order, a race); by the recorded table of launches alone; by what its kernels compile to."""


class MutationError(TKernelsError, RuntimeError):
    """Mutants cannot be judged: the original is wrong, or a worker ended, which no mutant can make it do."""


@dataclass(frozen=True)
class Fate:
    """What became of a mutant.

    verdict: one of KILLED, survived, does_not_compile or same_code (these two are no mutants, and do not count).
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
        return self.verdict in KILLED


class Pool:
    """A number of workers. A context manager: the processes end with it."""

    def __init__(self, workers: int = 1, ops: Registry | None = None) -> None:
        """ops: what the mutants' variants are of; None is the built-in ones."""
        self.workers = workers
        self._outside = (ops or builtin_ops()).outside()
        self._local = threading.local()
        self._servers: list[Server] = []
        self._fair: dict[str, bool] = {}

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.end()

    def _server(self, do: str) -> Server:
        """This thread's own for such tasks, started when it is first asked."""
        name = do if do in _COMPILING else "interpreting"
        server: Server | None = getattr(self._local, name, None)
        if server is None:
            # Of a kernel that comes out of Triton's cache nobody says what it spills.
            mode = {"TRITON_INTERPRET": "0", "TRITON_ALWAYS_COMPILE": "1"} if do in _COMPILING else _INTERPRETED
            server = Server({**mode, "OMP_NUM_THREADS": "1"})
            server.load("tkernels.verification.mutation.worker:prepare_mutants", self._outside)
            setattr(self._local, name, server)
            self._servers.append(server)
        return server

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of this thread's server to one task: see `tkernels.verification.mutation.worker`.

        Raises MutationError where it has none, which no mutant can bring about.
        """
        answer: dict[str, Any] = {}
        try:
            ending = self._server(task["do"]).run(task, answer.update, WALL_SECONDS)
        except ServerError as error:
            raise MutationError(f"a mutation worker {error}") from None
        if "broken" in answer:
            raise MutationError(f"a mutation worker cannot {task['do'].replace('_', ' ')}: {answer['broken']}")
        if "verdict" in answer or "cases" in answer:
            return answer
        if ending.timed_out or ending.signal == signal.SIGPROF:
            reason = _TIMED_OUT
        else:
            reason = f"signal {signal.Signals(ending.signal).name}" if ending.signal else "the process ended"
        return {**answer, "verdict": "crash", "reason": reason}

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
        compiled = compiled and mutant.part == "kernel"  # a fault in host code launches the kernels as they are
        if compiled and fate.killed:
            codes, reason = self._codes(mutant, fate.variant, seed, case)
            if None in codes and None not in self._codes(None, fate.variant, seed, case)[0]:
                return replace(fate, verdict="does_not_compile", reason=reason)
        elif compiled:
            fate = self._compared(fate, variants, seed)
        if thorough and fate.verdict == "survived" and mutant.part == "launcher":
            fate = self._inspected(fate, variants, seed)
        elif thorough and fate.verdict == "survived":
            fate, _ = self._checked(mutant, variants, seed + ANOTHER_SEED, MORE_DRAWS // len(variants))
        return fate

    def _checked(self, mutant: Mutant, variants: Sequence[Variant], seed: int, draws: int) -> tuple[Fate, list[Any]]:
        """The fate on drawn cases, and the case that decided it, if one did."""
        reason = ""
        for variant in variants:
            unfair: list[int] = []
            while True:
                answer = self.ask({**task("check", mutant, variant, seed, draws), "skip": unfair})
                if answer["verdict"] == "original":
                    raise MutationError(f"a kernel that fails its own check has no mutants: {answer['reason']}")
                if answer["verdict"] == "survived":
                    reason = reason or answer.get("reason", "")
                    break
                case = answer.get("case")
                if "stage" not in answer or self._is_fair(variant, seed, case, answer["stage"]):
                    fate = Fate(mutant, variant, answer["verdict"], answer["reason"])
                    return fate, [case] if case is not None else []
                unfair.append(answer["case"]["seed"])
        return Fate(mutant, variants[0], "survived", reason), []

    def _inspected(self, fate: Fate, variants: Sequence[Variant], seed: int) -> Fate:
        """A survivor in host code, unless inspection has something against it on some architecture."""
        for variant in variants:
            for arch in TARGETS:
                answer = self.ask({**task("inspect", fate.mutant, variant, seed), "arch": arch})
                if answer["verdict"] != "survived":
                    return Fate(fate.mutant, variant, answer["verdict"], answer["reason"])
        return fate

    def _is_fair(self, variant: Variant, seed: int, case: Mapping[str, Any] | None, stage: str) -> bool:
        """Whether the original passes this case, or this stage where it has no cases: what fails where the original
        does, by the error rule's bad luck (see `LUCK`) or on a machine that is too slow for both, has not been shown
        to be wrong.
        """
        key = json.dumps([variant.contract.name, variant.name, case, stage])
        if key not in self._fair:
            answer = self.ask(
                {**task("original", None, variant, seed), "cases": [case] if case else [], "stage": stage}
            )
            excused = answer.get("luck") or answer.get("reason") == _TIMED_OUT
            if answer["verdict"] != "survived" and not excused:
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
        "part": mutant.part if mutant else "kernel",
        **fault,
        "seed": seed,
        "draws": draws,
        "offset_draws": OFFSET_DRAWS,
        "programs": PROGRAMS,
        "seconds": CASE_SECONDS,
        "skip": [],
        "stages": _STAGES.get(mutant.kind if mutant else "", ("plain", "offsets", "races")),
    }


_STAGES = {
    # Values show a lost 64-bit offset only where a tensor has 2**31 elements: without the 60 draws first, those of
    # paged_decode die in 9 s, where they took 38.
    "cast_removed": ("offsets", "plain"),
    # No value shows what orders programs that run one after the other.
    ORDER_WEAKENED: ("races",),
}
