"""Every variant on the hardware itself: drawn cases at few compile signatures, reruns, and last arrivers under load."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tkernels.config import Config
from tkernels.contract import FLOATS, Axes, Case, ContractError, Value, unpack
from tkernels.inputs import clone_inputs
from tkernels.launch import Kernel
from tkernels.measurement import CPU_SIZE, cut_axes, prepare, prepare_supported
from tkernels.tuning import NEAREST
from tkernels.variant import UnsupportedError, Variant
from tkernels.verification.calls import bits
from tkernels.verification.check import check_case
from tkernels.verification.draws import chooser, draw
from tkernels.verification.sanitizers.base import sanitized
from tkernels.verification.sanitizers.suite import SANITIZERS

_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Tried:
    """What came of some cases or runs. right: how many were, None where all are judged together. problem: "" if all."""

    runs: int
    right: int | None
    problem: str


@dataclass(frozen=True)
class Signature:
    """What decides how a kernel is compiled: the axes that do not depend on the batch, and the config."""

    axes: Mapping[str, Value]
    config: Config | None

    @property
    def text(self) -> str:
        config = ",".join(f"{k}={v}" for k, v in self.config.as_dict().items()) if self.config is not None else ""
        return ",".join(f"{name}={value}" for name, value in self.axes.items()) + (f" [{config}]" if config else "")


def signatures(variant: Variant, device: torch.device, most: int) -> list[Signature]:
    """Up to `most` different ones, of every dtype in turn; the same in every process."""
    contract = variant.contract
    fixed = [name for name in contract.axis_by_name if not contract.axis_by_name[name].batch and name != "values"]
    found: dict[str, Signature] = {}
    for seed in range(20 * most):
        dtype = {"activation": FLOATS[seed % len(FLOATS)]} if "activation" in fixed else {}
        drawn = draw(variant, chooser(seed), seed, dtype, device, _NO_LIMIT)
        if drawn is not None:
            signature = Signature({name: drawn[0].axes[name] for name in fixed}, drawn[1])
            found.setdefault(signature.text, signature)
        if len(found) == most:
            break
    return list(found.values())


def cases(variant: Variant, signature: Signature, count: int, device: torch.device) -> Iterator[Case]:
    """Cases of one signature: other batches, values and seeds. Draws that its fixed axes rule out are drawn again."""
    made = seed = 0
    while made < count:
        seed += 1
        try:
            axes = variant.contract.draw_axes(chooser(seed), signature.axes)
        except ContractError:
            if seed > 50 * (made + 1):
                return
            continue
        made += 1
        yield variant.contract.case(axes, seed, device)


def check(variant: Variant, signature: Signature, count: int, device: torch.device) -> Tried:
    """Draws cases of one signature; the problem is the first three that were not right, each with its replay."""
    results = [check_case(variant, case, signature.config) for case in cases(variant, signature, count, device)]
    judged = [result for result in results if result.status != "unsupported"]
    wrong = [str(result) for result in judged if result.status != "ok"]
    return Tried(len(judged), len(judged) - len(wrong), "\n".join(wrong[:3]))


def vary_batches(variant: Variant, count: int, device: torch.device) -> Tried:
    """Puts cases under the batch sanitizer; the problem is the first finding, with its replay.

    In its own arithmetic a device shows what an interpreter cannot: that tiles and instructions of another class's
    config add up a row's sums in the order that `sum_order` says.
    """
    findings = list(sanitized(SANITIZERS["batch"], variant, count, device=device))
    found = [finding for finding in findings if finding is not None]
    return Tried(len(findings), len(findings) - len(found), str(found[0]) if found else "")


def verify(variant: Variant, case: Case, device: torch.device) -> Tried:
    """One case, with its weight as the variant wants it; where float64 does not fit the device, a smaller batch of it.

    Raises:
        UnsupportedError: The variant does not take it.
    """
    contract = variant.contract
    try:
        ready = prepare_supported(variant, case)
        result = check_case(ready.variant, ready.case)
    except torch.OutOfMemoryError:
        smaller = cut_axes(contract, case.axes, CPU_SIZE, only_batch=True)
        if smaller is None or smaller == dict(case.axes):
            raise
        return verify(variant, contract.case(smaller, case.seed, device), device)
    if result.status == "unsupported":
        raise UnsupportedError(result.reason)
    right = result.status == "ok"
    return Tried(1, int(right), "" if right else str(result))


def _results_of(kernel: Kernel, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """What one call returns and writes, on copies of what it writes."""
    contract = kernel.variant.contract
    mine = {**arguments, **clone_inputs({n: arguments[n] for n in (*contract.writes, *contract.consumes)})}
    return [*unpack(kernel(**mine)), *(mine[name] for name in contract.writes)]


def rerun(variant: Variant, axes: Axes, device: torch.device, runs: int, *, busy: bool = False) -> Tried:
    """Runs a call again and again and compares every bit, on the device and without waiting for it in between.

    Every run must give the first one's bits where the variant is deterministic, and all must leave counters at zero.

    Args:
        busy: Another stream keeps memory busy, so that programs arrive in other orders.
    """
    case = prepare(variant, variant.contract.case(axes, 0, device)).case
    kernel, arguments = Kernel(variant, NEAREST, {}), variant.contract.bind_arguments((), case.inputs)
    first = _results_of(kernel, arguments)
    different = torch.zeros((), dtype=torch.int64, device=device)
    noise = torch.empty(2**26 if busy else 0, dtype=torch.float32, device=device)
    side = torch.cuda.Stream(device) if busy and device.type == "cuda" else None
    for run in range(runs):
        if side is not None and run % 4 == 0:
            with torch.cuda.stream(side):
                noise[: 2 ** (16 + run % 11)].mul_(1.0001)  # of lengths that fall out of step with the launches
        different += _differ(first, _results_of(kernel, arguments))
    count, left = int(different), variant.zeroed.not_zero()
    problems = {
        f"counters not at zero: {', '.join(left)}": bool(left),
        f"{count} runs gave other bits": count > 0 and variant.deterministic,
    }
    return Tried(runs, None, "; ".join(problem for problem, there_is in problems.items() if there_is))


def _differ(first: Sequence[torch.Tensor], again: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether any bit of any tensor differs, NaN's included; a tensor, so that nobody waits for it."""
    return torch.stack([(bits(a) != bits(b)).any() for a, b in zip(first, again, strict=True)]).any()
