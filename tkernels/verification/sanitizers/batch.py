"""A batch-invariant variant gives a member (a row, a sequence) the same bits whatever is in the batch beside it.

Attacked with the member alone, at other positions, repeated up to 32 times, beside the others in another order, under
wider tables and looser bounds, and a long member beside many short ones: under one config, for bits may differ between
configs, but which config a call gets must not depend on the batch either. Batches of up to 1,024 members are too many
to interpret: what a launcher would launch for them says which it treats in another way than small ones, and those are
run.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from tkernels.batching import Batching
from tkernels.config import Config
from tkernels.contract import Case
from tkernels.device import device_facts
from tkernels.inputs import clone_inputs, roughen_floats, tensors_in
from tkernels.interpreter.replaced import exact_products
from tkernels.mode import MODE
from tkernels.tuning import bucket
from tkernels.variant import Variant
from tkernels.verification.batch_growth import FEW_SIZES, SIZES, launches_by_size, odd_sizes, unseen_change
from tkernels.verification.calls import call, first_difference
from tkernels.verification.draws import chooser, count_programs, draw
from tkernels.verification.sanitizers.base import Sanitizer

BATCH_SIZES = (2, 3, 7, 16, 32)
MAX_PROGRAMS = 96
"""Of the largest batch: one that would take more has the case repeated less often."""


ODD_SIZES, ODD_PROGRAMS = 4, 2048
"""Of batches that a launcher treats in another way than small ones: how many are run, and each one's programs."""


RAGGED_DRAWS, RAGGED_FLOPS, NUM_SHORT = 24, 2_000_000, 15
"""Of batches, in search of one whose members differ in size; the cost of one; short members beside its longest one."""


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
    batches: list[tuple[str, dict[str, Any], int]] = [
        ("in the drawn batch", inputs, member),
        ("alone behind looser bounds", batching.loosen(alone), 0),
        ("in the drawn batch behind looser bounds", batching.loosen(inputs), member),
    ]
    for words, picks, position in draw_surroundings(member, count, case.seed):
        batches.append((words, *_affordable(variant, batching, inputs, picks, position, case, config)))
    fault = _surrounded_fault(variant, inputs, member, batches, config)
    if fault or config is None:
        return fault
    device = tensors_in(inputs)[0].device
    is_default = config == variant.default_config(device_facts(device).arch)
    fault = _large_batch_fault(variant, inputs, member, config, SIZES if is_default else FEW_SIZES)
    fault = fault or (_ragged_fault(variant, case, config) if is_default else None)
    if fault or not is_default:
        return fault
    drawn = draw(variant, chooser(case.seed), case.seed, None, device, ODD_PROGRAMS, config, wide=True)
    wide = contract.bind_arguments((), roughen_floats(drawn[0].inputs, case.seed)) if drawn is not None else {}
    has_members = bool(wide) and batching.count(wide) > 0
    return _large_batch_fault(variant, wide, 0, config, FEW_SIZES) if has_members else None


def _surrounded_fault(
    variant: Variant,
    inputs: dict[str, Any],
    member: int,
    batches: Sequence[tuple[str, dict[str, Any], int]],
    config: Config | None,
) -> str | None:
    """What (in words, a batch that holds the member, its position) of these changes for it; None for nothing."""
    contract, batching = variant.contract, variant.contract.batching
    assert batching is not None
    alone = batching.take(inputs, [member])
    expected, selected = _part(variant, batching, alone, 0, config), bucket(variant, contract.bind_axes(alone)[0])
    for words, batch, position in batches:
        axes, device = contract.bind_axes(batch)
        if variant.unsupported_reason(axes, device, device_facts(device)):
            continue  # not a batch that this variant could be asked for
        if (other := bucket(variant, axes)) != selected:
            return f"member {member} {words} gets the config of [{other}], alone that of [{selected}]"
        if why := first_difference(expected, _part(variant, batching, batch, position, config)):
            return f"member {member} {words}, against its bits alone: {why}"
    return None


def _ragged_fault(variant: Variant, case: Case, config: Config) -> str | None:
    """What many short members change for a long one, and it for them; None for nothing, as where all are of one size.

    What goes by the average of a batch, as by its rows over its members, is far from every one of these.
    """
    batching, found = variant.contract.batching, []
    assert batching is not None
    known, device = variant.contract.axis_by_name, tensors_in(case.inputs)[0].device
    fixed = {name: value for name, value in SANITIZER.fixed.items() if name in known}
    for seed in range(case.seed, case.seed + RAGGED_DRAWS):
        drawn = draw(variant, chooser(seed), seed, fixed, device, SANITIZER.max_programs, config)
        if drawn is None or drawn[0].flops > RAGGED_FLOPS:
            continue
        mine = variant.contract.bind_arguments((), roughen_floats(drawn[0].inputs, seed))
        alone = [batching.take(mine, [member]) for member in range(batching.count(mine))]
        rows = [sum(len(tensor) for tensor in tensors_in(one) if tensor.dim()) for one in alone]
        if rows and max(rows) > min(rows):
            found.append((max(rows) - min(rows), drawn[0].flops, mine, rows.index(max(rows)), rows.index(min(rows))))
    if not found:
        return None
    most, *_ = max(found, key=lambda one: one[0])
    # The one that computes the most shows the most: a window of one key leaves nothing to sum.
    *_, inputs, long, short = max((one for one in found if 2 * one[0] >= most), key=lambda one: one[1])
    batch = batching.take(inputs, [long, *[short] * NUM_SHORT])
    fault = _surrounded_fault(variant, inputs, long, [(f"beside {NUM_SHORT} short ones", batch, 0)], config)
    return fault or _surrounded_fault(variant, inputs, short, [("beside a long one", batch, NUM_SHORT)], config)


def _large_batch_fault(
    variant: Variant, inputs: dict[str, Any], member: int, config: Config, sizes: Sequence[int]
) -> str | None:
    """What a batch of one of these sizes, up to 1,024, changes for a member; None for nothing that is seen."""
    batching = variant.contract.batching
    assert batching is not None
    by_size = launches_by_size(variant, batching, inputs, member, config, sizes)
    if changed := unseen_change(by_size, config):
        return f"the launcher's config, which decides the order of its sums, depends on the batch: {changed}"
    programs = {size: sum(math.prod(one.grid) for one in launches) for size, launches in by_size.items()}
    odd = [size for size in odd_sizes(by_size, config) if programs[size] <= ODD_PROGRAMS][:ODD_SIZES]
    expected = _part(variant, batching, batching.take(inputs, [member]), 0, config) if odd else {}
    for size in odd:
        batch = batching.take(inputs, [member] * size)
        if why := first_difference(expected, _part(variant, batching, batch, size - 1, config)):
            return f"member {member} repeated {size} times, against its bits alone: {why}"
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
