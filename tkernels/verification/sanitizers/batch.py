"""A batch-invariant variant gives a member (a row, a sequence) the same bits whatever is in the batch beside it.

Attacked with the member alone, at other positions, repeated up to 32 times, beside the others in another order, under
wider tables and looser bounds: under one config, for bits may differ between configs, but which config a call gets must
not depend on the batch either.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from tkernels.batching import Batching
from tkernels.config import Config
from tkernels.contract import Case
from tkernels.device import device_facts
from tkernels.inputs import clone_inputs, roughen_floats
from tkernels.interpreter import exact_products
from tkernels.mode import MODE
from tkernels.tuning import bucket
from tkernels.variant import Variant
from tkernels.verification.calls import call, first_difference
from tkernels.verification.check import count_programs
from tkernels.verification.sanitizers.base import Sanitizer

BATCH_SIZES = (2, 3, 7, 16, 32)
MAX_PROGRAMS = 96
"""Of the largest batch: one that would take more has the case repeated less often."""


def _unfit(variant: Variant) -> str | None:
    if not variant.batch_invariant:
        return "it does not claim to be batch-invariant"
    return None if variant.contract.batching else "its contract has no batching"


def draw_surroundings(member: int, count: int, seed: int) -> Iterator[tuple[str, list[int], int]]:
    """(in words, picks, position): batches that hold a member at a position, among others or repeated."""
    generator = np.random.default_rng(seed)
    if count > 1:
        order = generator.permutation(count).tolist()
        yield "among the others in another order", order, order.index(member)
        others = [m for m in range(count) if m != member]
        yield "after the others", [*others, member], count - 1
        yield "before one other", [member, others[0]], 0
    size = BATCH_SIZES[int(generator.integers(len(BATCH_SIZES)))]
    yield f"repeated {size} times", [member] * size, int(generator.integers(size))


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    contract, batching = variant.contract, variant.contract.batching
    assert batching is not None
    inputs = contract.bind_arguments((), roughen_floats(case.inputs, case.seed))
    count = batching.count(inputs)
    if count == 0:
        return None
    generator = np.random.default_rng(case.seed)
    member = int(generator.integers(count))
    alone = batching.take(inputs, [member])
    expected, selected = _part(variant, batching, alone, 0, config), bucket(variant, contract.bind_axes(alone)[0])
    batches: list[tuple[str, dict[str, Any], int]] = [
        ("in the drawn batch", inputs, member),
        ("alone behind looser bounds", batching.loosen(alone), 0),
        ("in the drawn batch behind looser bounds", batching.loosen(inputs), member),
    ]
    for words, picks, position in draw_surroundings(member, count, case.seed):
        batches.append((words, *_affordable(variant, batching, inputs, picks, position, case, config)))
    for words, batch, position in batches:
        axes, device = contract.bind_axes(batch)
        if variant.unsupported_reason(axes, device, device_facts(device)):
            continue  # not a batch that this variant could be asked for
        if (other := bucket(variant, axes)) != selected:
            return f"member {member} {words} gets the config of [{other}], alone that of [{selected}]"
        if why := first_difference(expected, _part(variant, batching, batch, position, config)):
            return f"member {member} {words}, against its bits alone: {why}"
    return None


def _part(
    variant: Variant, batching: Batching, inputs: dict[str, Any], member: int, config: Config | None
) -> dict[str, torch.Tensor]:
    mine = clone_inputs(inputs)
    with exact_products() if MODE == "interpret" else nullcontext():
        results = call(variant, mine, config)
    return batching.part(mine, results, member)


def _affordable(
    variant: Variant,
    batching: Batching,
    inputs: dict[str, Any],
    picks: Sequence[int],
    position: int,
    case: Case,
    config: Config | None,
) -> tuple[dict[str, Any], int]:
    """The batch of the picks, or of fewer, where it would launch more than MAX_PROGRAMS."""
    batch = batching.take(inputs, picks)
    while config is not None and len(picks) > 1 and picks[0] == picks[-1]:
        if count_programs(variant, Case(case.contract, case.axes, case.seed, batch), config) <= MAX_PROGRAMS:
            break
        picks = picks[: len(picks) // 2]
        batch, position = batching.take(inputs, picks), position % len(picks)
    return batch, position


SANITIZER = Sanitizer(
    "batch",
    "a member's bits, or its config, that depend on the batch around it",
    _run,
    unfit=_unfit,
    draws=1,
    each_config=True,
    max_programs=12,
    # The bits of fp32 results show an order of summation that a rounding to 16 bits hides.
    fixed={"activation": "float32"},
    interpreted=False,
)
