"""What a server does with mutants: it keeps what the mutants of a variant share, and each lives and dies in a child.

An interpreting server checks mutants; a compiling one says whether the compiler takes them, and makes other code of
them. A child answers in parts, each a mapping, of which later ones add to or replace the earlier.
"""

import gc
import resource
import signal
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tkernels import isolation
from tkernels.config import Config
from tkernels.contract import Case
from tkernels.device import INTERPRETER
from tkernels.inputs import clone_inputs, whole_storage
from tkernels.isolation import Prepare
from tkernels.preparation import prepared_case
from tkernels.registry import Registry, registry_of
from tkernels.variant import Variant, as_it_is
from tkernels.verification.ahead_of_time import activate
from tkernels.verification.calls import call
from tkernels.verification.check import check_case
from tkernels.verification.draws import drawn_cases, wide_cases
from tkernels.verification.inspection import hosts
from tkernels.verification.inspection.points import Point
from tkernels.verification.mutation.inspected import Asked, asked_for, inspected_points, worse_compiled
from tkernels.verification.mutation.launcher_targets import replanted
from tkernels.verification.mutation.launches import Tried, broken_claim, described_launches, supports_case, tried
from tkernels.verification.mutation.targets import plant
from tkernels.verification.mutation.ttir import CodeReader
from tkernels.verification.offsets import check_offsets
from tkernels.verification.races import check_races

WARM_CASES = 6
MAX_BYTES = 24 * 2**30
"""Of address space: a mutant that allocates without end must not take the machine's memory. Faked strides need hundreds
of GiB of it, none of which are memory, and are tried without the limit."""

Answer = dict[str, Any]
Drawn = tuple[Case, Config]
Tell = Callable[[Answer], None]
"""Sends a part of the answer at once: what a process that dies has told is known."""
Work = Callable[[Tell], Answer]
CPU = torch.device("cpu")
_CLAIMS_SECONDS = 240.0
_RULE = "error beyond the rule"
_WITHOUT_LIMIT = resource.getrlimit(resource.RLIMIT_AS)
_LIMITED = (MAX_BYTES, _WITHOUT_LIMIT[1])


class Cases:
    """The drawn cases of each variant, kept: every mutant of it starts from the same ones, already made."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._kept: dict[tuple[Any, ...], list[Drawn]] = {}
        self._wide: dict[tuple[Any, ...], list[Drawn]] = {}
        self._points: dict[tuple[str, str], list[Point]] = {}
        self._tried: dict[tuple[Any, ...], list[Tried]] = {}
        self._warm: dict[tuple[str, str], str] = {}
        self._asked: dict[tuple[str, str, str], Asked] = {}
        self._inspected: dict[tuple[str, str], list[Point]] = {}
        self._originals: tuple[tuple[Any, ...], list[tuple[Case, Config, list[torch.Tensor]]]] = ((), [])

    def variant(self, task: Mapping[str, Any]) -> Variant:
        return self.registry[task["op"]].variants[task["variant"]]

    def of(self, task: Mapping[str, Any], count: int, max_programs: int) -> list[Drawn]:
        key = (task["op"], task["variant"], task["seed"], count, max_programs)
        if key not in self._kept:
            cases = drawn_cases(self.variant(task), count, task["seed"], max_programs=max_programs)
            self._kept[key] = [(case, config) for case, config in cases if config is not None]
        return self._kept[key]

    def wide(self, task: Mapping[str, Any]) -> list[Drawn]:
        """The wide cases of the variant with its own default config; a fault shows in it as well as in another's."""
        key = (task["op"], task["variant"], task["seed"])
        if key not in self._wide:
            variant = self.variant(task)
            own = variant.default_config(INTERPRETER.arch)
            self._wide[key] = [(case, own) for case, _ in wide_cases(variant, task["seed"], config=own)]
        return self._wide[key]

    def tried(self, task: Mapping[str, Any], drawn: Sequence[Drawn]) -> list[Tried]:
        """These cases, and as many that the variant as it is refuses, each with what it launches there."""
        key = (task["op"], task["variant"], task["seed"], task["draws"], *task["skip"])
        if key not in self._tried:
            variant = self.variant(task)
            self._tried[key] = [
                tried(variant, case, config) for case, config in (*drawn, *self.refused(task, len(drawn)))
            ]
        return self._tried[key]

    def points(self, task: Mapping[str, Any]) -> list[Point] | None:
        """The benchmark points of the variant; None where a fault may be in what makes them, of a weight."""
        key, variant = (task["op"], task["variant"]), self.variant(task)
        if variant.prepare is not as_it_is:
            return None
        if key not in self._points:
            self._points[key] = hosts.benchmark_points(variant)
        return self._points[key]

    def asked_for(self, task: Mapping[str, Any]) -> tuple[Asked, list[Point]]:
        """What the variant has compiled for the task's architecture, and at which points."""
        variant, name = self.variant(task), (task["op"], task["variant"])
        if name not in self._inspected:
            self._inspected[name] = inspected_points(variant)
        key = (*name, task["arch"])
        if key not in self._asked:
            self._asked[key] = asked_for(variant, self._inspected[name], task["arch"])
        return self._asked[key], self._inspected[name]

    def refused(self, task: Mapping[str, Any], count: int) -> list[Drawn]:
        """Drawn cases that the variant does not support: one with a fault in what it refuses may take them."""
        variant = self.variant(task)
        taking_all = replace(variant, supports=lambda axes, device: None)
        found = drawn_cases(taking_all, count, task["seed"], max_programs=task["programs"])
        kept = [(case, config) for case, config in found if config is not None]
        return [one for one in kept if not supports_case(variant, one[0])]

    def originals(self, task: Mapping[str, Any]) -> list[tuple[Case, Config, list[torch.Tensor]]]:
        """The task's cases, each with the bytes that the variant as it is writes there. The last task's alone are kept:
        a thousand cases with their inputs do not fit into the memory that a worker may have.
        """
        key = tuple(task[name] for name in ("op", "variant", "seed", "draws", "programs"))
        if self._originals[0] != key:
            variant = self.variant(task)
            drawn = drawn_cases(variant, task["draws"], task["seed"], max_programs=task["programs"])
            kept = [(case, config) for case, config in drawn if config is not None]
            self._originals = (key, [(*one, _written_bytes(variant, *one)) for one in kept])
        return self._originals[1]

    def warm(self, variant: Variant, drawn: Sequence[Drawn]) -> str:
        """Runs the original once, so that a fork need not: Triton's own functions are rewritten for the interpreter
        when they are first called, which takes 0.4 s. Returns what is wrong with it and no luck, "" where nothing is.
        """
        name = (variant.contract.name, variant.name)
        if name not in self._warm:
            results = [check_case(variant, case, config) for case, config in drawn[:WARM_CASES]]
            wrong = (str(result) for result in results if result.status != "ok" and not result.may_be_luck)
            self._warm[name] = next(wrong, "")
            gc.freeze()  # else every fork would write to, and so copy, all objects at its first collection
        return self._warm[name]


def _written_bytes(variant: Variant, case: Case, config: Config) -> list[torch.Tensor]:
    """Every output, and the whole storage of every written argument, as a variant leaves them: bytes."""
    results = call(variant, clone_inputs(case.inputs), config).values()
    return [whole_storage(tensor, torch.uint8).clone() for tensor in results]


def _limited(seconds: float) -> None:
    """From now on so much processor time, then SIGPROF ends the process, whatever it is doing."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _killed(variant: Variant, stages: Mapping[str, Sequence[Drawn]], seconds: float, tell: Tell) -> Answer:
    """Who noticed: a wrong value or a crash; or that nobody did. The case is told before it is tried.

    stages: "plain", "offsets" and "races", with the cases of each, in the order in which they are tried.
    """
    for stage, drawn in stages.items():
        resource.setrlimit(resource.RLIMIT_AS, _LIMITED if stage == "plain" else _WITHOUT_LIMIT)
        for case, config in drawn:
            tell({"case": _named(case, config), "stage": stage})
            _limited(seconds)
            if stage == "plain":
                result = check_case(variant, case, config, offsets=False)
                if result.status != "ok":
                    verdict = "value" if result.status == "wrong" else "crash"
                    return {"verdict": verdict, "reason": result.reason or _RULE, "luck": result.may_be_luck}
            else:
                try:
                    (check_offsets if stage == "offsets" else check_races)(variant, case, config)
                except Exception as error:
                    return {"verdict": "crash", "reason": f"{stage}: {error}"}
    return {"verdict": "survived"}


def _named(case: Case, config: Config) -> Answer:
    return {"axes": dict(case.axes), "seed": case.seed, "config": config.as_dict()}


def _draw(task: Mapping[str, Any], cases: Cases) -> Work:
    """The first drawn cases, by name: a compiling worker cannot draw, since the variant does not run there."""
    drawn = cases.of(task, task["draws"], task["programs"])
    return lambda tell: {"cases": [_named(case, config) for case, config in drawn[: task["wanted"]]]}


def _check(task: Mapping[str, Any], cases: Cases) -> Work:
    """Prepares what every mutant of the variant shares, here, so that the fork has it."""
    variant = cases.variant(task)

    def kept(found: Sequence[Drawn]) -> list[Drawn]:
        return [one for one in found if one[0].seed not in task["skip"]]

    drawn = kept(cases.of(task, task["draws"], task["programs"]))
    plain = [*drawn, *kept(cases.wide(task))]
    # Faked strides need sizes of 3 and more in every dim, so these draws may have more programs.
    for_offsets = kept(cases.of(task, task["offset_draws"], 64))
    if wrong := cases.warm(variant, plain):
        return lambda tell: {"verdict": "original", "reason": wrong}

    if task["part"] == "launcher":
        tried, points = cases.tried(task, plain), cases.points(task)
        return lambda tell: _check_launcher(task, variant, tried, points, tell)

    def run(tell: Tell) -> Answer:
        if task["source"] is not None:
            _plant(task, variant)
        # The accesses of a wide case are many: to keep them all costs 2 to 4 times what the case does.
        cases_of = {"plain": plain, "offsets": for_offsets, "races": drawn}
        return _killed(variant, {stage: cases_of[stage] for stage in task["stages"]}, task["seconds"], tell)

    return run


def _check_launcher(
    task: Mapping[str, Any], variant: Variant, tried: Sequence[Tried], points: Sequence[Point] | None, tell: Tell
) -> Answer:
    """What notices a fault in host code. A case at which the launches are the original's can show nothing."""
    _limited(task["seconds"])
    mutant = _plant(task, variant)
    taken = [one for one in tried if mutant.unsupported_reason(one.axes, CPU, INTERPRETER) is None]
    if not taken:
        return {"verdict": "crash", "reason": "it refuses every case"}
    changed = [one for one in taken if described_launches(mutant, one.case, one.config) != one.launches]
    changed.sort(key=lambda one: one.programs)
    drawn = [(one.case, one.config) for one in changed]
    answer = _killed(mutant, {"plain": drawn}, task["seconds"], tell)
    if answer["verdict"] == "survived":
        answer["reason"] = f"{len(changed)} of {len(taken)} cases launch something else, and all are right"
        tell({"case": None, "stage": "table"})
        answer = _tabled(mutant, points) or answer
    if answer["verdict"] == "survived" and (changed or _claims(mutant) != _claims(variant)):
        tell({"case": None, "stage": "claims"})
        _limited(_CLAIMS_SECONDS)
        answer = broken_claim(mutant, task["seed"]) or answer
    return answer


def _tabled(variant: Variant, points: Sequence[Point] | None) -> Answer | None:
    """What the recorded table of launches has against a variant."""
    reason = hosts.difference(variant, hosts.read(), points)
    return {"verdict": "table", "reason": reason} if reason else None


def _claims(variant: Variant) -> tuple[bool, bool]:
    return variant.deterministic, variant.batch_invariant


def _original(task: Mapping[str, Any], cases: Cases) -> Work:
    """The variant as it is, on the cases that the task names, in the stage that it names."""
    variant, survived = cases.variant(task), {"verdict": "survived"}
    if task["stage"] == "table":
        points = cases.points(task)
        return lambda tell: _tabled(variant, points) or survived
    if task["stage"] == "claims":
        return lambda tell: broken_claim(variant, task["seed"]) or survived
    cases_named = (variant.contract.case(one["axes"], one["seed"]) for one in task["cases"])
    configs = (Config.of(one["config"]) for one in task["cases"])
    named = [(prepared_case(variant, case), config) for case, config in zip(cases_named, configs, strict=True)]
    return lambda tell: _killed(variant, {task["stage"]: named}, task["seconds"], tell)


def _same_bits(task: Mapping[str, Any], cases: Cases) -> Work:
    """Whether a declared equivalent is its original, bit for bit: the first case where a bit differs, or it raises.

    The original runs here, once for all of a variant's equivalents that ask for the same cases one after another.
    """
    variant, wanted = cases.variant(task), cases.originals(task)

    def run(tell: Tell) -> Answer:
        mutant = _plant(task, variant)
        for case, config, written in wanted:
            _limited(task["seconds"])
            try:
                got = _written_bytes(mutant, case, config)
            except Exception as error:
                return {"verdict": "different", "reason": f"{type(error).__name__}: {error} at {dict(case.axes)}"}
            if not all(torch.equal(one, other) for one, other in zip(written, got, strict=True)):
                return {"verdict": "different", "reason": f"at {dict(case.axes)}, seed {case.seed}"}
        return {"verdict": "same", "reason": ""}

    return run


def _compile(task: Mapping[str, Any], cases: Cases) -> Work:
    """What the compiler makes of each of the task's cases: a hash of the code, or None where it refuses, and why."""
    variant, reader = cases.variant(task), CodeReader()

    def run(tell: Tell) -> Answer:
        if task["source"] is not None:
            _plant(task, variant)
        codes: list[str | None] = []
        reason = ""
        for named in task["cases"]:
            case = prepared_case(variant, variant.contract.case(named["axes"], named["seed"]))
            try:
                codes.append(reader.read(variant, case, Config.of(named["config"])))
            except Exception as error:
                codes.append(None)
                reason = f"{type(error).__name__}: {error}"
        return {"verdict": "compiled", "codes": codes, "reason": reason}

    return run


def _plant(task: Mapping[str, Any], variant: Variant) -> Variant:
    """The variant with the task's fault, which is there for the whole process."""
    if task["part"] == "launcher":
        return replanted(variant, Path(task["file"]), task["source"])
    with tempfile.TemporaryDirectory() as folder:
        mutated = Path(folder) / "mutant.py"
        mutated.write_text(task["source"])
        plant(variant, task["function"], Path(task["file"]), mutated)
    return variant


def _inspect(task: Mapping[str, Any], cases: Cases) -> Work:
    """Whether inspection, for the task's architecture, has something against a fault in host code."""
    variant, arch = cases.variant(task), task["arch"]
    before, points = cases.asked_for(task)

    def run(tell: Tell) -> Answer:
        try:
            activate(arch)
        except RuntimeError as error:  # a tool is missing
            return {"broken": str(error)}
        mutant = _plant(task, variant)
        own = points if variant.prepare is as_it_is else inspected_points(mutant)
        reason = worse_compiled(variant, mutant, before, own, arch)
        return {"verdict": "inspection", "reason": reason} if reason else {"verdict": "survived"}

    return run


_TASKS = {
    "draw": _draw, "check": _check, "original": _original, "same_bits": _same_bits, "compile": _compile,
    "inspect": _inspect,
}  # fmt: skip


def prepare_mutants(outside: Mapping[str, Any]) -> Prepare:
    """In a server: `outside` is a registry's; a task is what `tkernels.verification.mutation.pool.task` makes."""
    cases = Cases(registry_of(outside))
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, of kernels that are wrong on purpose

    def prepare(task: Mapping[str, Any]) -> isolation.Work:
        try:
            work = _TASKS[task["do"]](task, cases)
        except Exception as error:  # which no mutant can have done
            complaint = {"broken": f"{type(error).__name__}: {error}"}
            return lambda tell: tell(complaint)
        return lambda tell: _answer(work, tell)

    return prepare


def _answer(work: Work, tell: Tell) -> None:
    """In a mutant's own process: what it does, or what it raises."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, _LIMITED)
    try:
        answer = work(tell)
    except BaseException as error:
        answer = {"verdict": "crash", "reason": f"{type(error).__name__}: {error}"}
    tell(answer)
