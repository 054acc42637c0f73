"""How soon `tk check` says that a variant is wrong: CPU seconds beyond the imports, until its first failure.

    python -m tests.experiments.first_failure [OP ...]

Every op's variants run as they are, and then one element of each result is off (torch's are the measure itself, and are
left out). Each is checked in a process of its own. The status is 1 where one takes longer than 5 s, or has no failure.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import tkernels
from experiments.commands.check import make_trial
from experiments.commands.choices import Subject
from experiments.commands.output import end_with, name_some
from experiments.commands.requests import CheckRequest
from tkernels import Run
from tkernels.isolation import Tell, run_forked
from tkernels.variant import Variant

SECONDS = 5.0


def make_wrong(variant: Variant) -> Variant:
    """The variant with an element of each of its results changed after its own launch or call, and nothing else."""
    if variant.launch is None:
        return replace(variant, function=partial(_call_wrongly, variant.function, variant.contract.writes))
    names = (len(variant.contract.outputs), variant.contract.writes)
    return replace(variant, launch=partial(_launch_wrongly, variant.launch, *names))


def _launch_wrongly(
    launch: Callable[..., None], outputs: int, writes: tuple[str, ...], run: Run, *arguments: Any, **options: Any
) -> None:
    launch(run, *arguments, **options)
    _spoil((*arguments[:outputs], *(options[name] for name in writes)))


def _call_wrongly(function: Callable[..., Any], writes: tuple[str, ...], *arguments: Any, **options: Any) -> Any:
    results = function(*arguments, **options)
    returned = results if type(results) is tuple else (results,)
    _spoil((*returned, *(options[name] for name in writes)))
    return results


def _spoil(results: tuple[Any, ...]) -> None:
    """Makes the first element of each tensor larger than all others, an integer one larger by 1."""
    for tensor in results:
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            first = tensor[(0,) * tensor.dim()]
            if tensor.is_floating_point():
                first.copy_(2 * torch.nan_to_num(tensor.float(), 0, 0, 0).abs().max() + 1)
            else:
                first.add_(1)


def seconds_to_failure(variant: Variant) -> tuple[float, int] | None:
    """CPU seconds and cases until the first failure; None where there is none."""

    def work(tell: Tell) -> None:
        torch.set_num_threads(1)
        begin, cases = time.process_time(), 0
        for result in make_trial(CheckRequest(), Subject(make_wrong(variant), {}, None)).cases():
            cases += result.status == "begun"
            if result.is_bad:
                return tell([time.process_time() - begin, cases])

    told: list[Any] = []
    ending = run_forked(work, told.append)
    assert ending.death is None, ending.death
    return (told[0][0], told[0][1]) if told else None


def main() -> int:
    late = []
    for op in tkernels.OPS.values():
        for variant in op.variants.values():
            if variant.name == "torch" or (sys.argv[1:] and op.name not in sys.argv):
                continue
            found = seconds_to_failure(variant)
            said = "no failure" if found is None else f"{found[0]:5.2f} s, {found[1]} cases"
            print(f"{op.name}.{variant.name}: {said}", flush=True)
            if found is None or found[0] > SECONDS:
                late.append(f"{op.name}.{variant.name}")
    return end_with(1, f"later than {SECONDS:g} s: {name_some(late)}") if late else 0


if __name__ == "__main__":
    sys.exit(main())
