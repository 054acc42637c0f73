"""A batch-invariant variant gives a member (a row, a sequence) the same bits whatever is in the batch beside it.

Attacked with the member alone, at other positions, repeated up to 32 times, beside the others in another order, under
wider tables and looser bounds, and a long member beside many short ones: under one config, for bits may differ between
configs, and under one that another class of batches may get. Batches of up to 1,024 members are too many
to interpret: what a launcher would launch for them says which it treats in another way than small ones, and those are
run. What a kernel does by itself with a batch that it finds large is seen in those of its programs that compute the
first member and the last.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from tkernels.batching import Batching
from tkernels.buckets import bucket, family
from tkernels.config import Config
from tkernels.contract import Case
from tkernels.device import device_facts
from tkernels.inputs import clone_inputs, poison, roughen_floats, tensors_in
from tkernels.interpreter.replaced import exact_products
from tkernels.launch import Door
from tkernels.mode import MODE
from tkernels.variant import Variant
from tkernels.verification.batch_growth import FEW_SIZES, SIZES, launches_by_size, odd_sizes, unseen_change
from tkernels.verification.calls import bits, call, first_difference
from tkernels.verification.crossed_configs import crossed_config
from tkernels.verification.draws import chooser, count_programs, draw
from tkernels.verification.dry_run import Launch
from tkernels.verification.sanitizers.base import Sanitizer
from tkernels.verification.some_programs import door_of_ends

BATCH_SIZES = (2, 3, 7, 16, 32)
MAX_PROGRAMS = 96
"""Of the largest batch: one that would take more has the case repeated less often."""


ODD_SIZES, ODD_PROGRAMS = 4, 2048
"""Of batches that a launcher treats in another way than small ones: how many are run, and each one's programs."""


RAGGED_DRAWS, RAGGED_FLOPS, NUM_SHORT = 24, 2_000_000, 15
"""Of batches, in search of one whose members differ in size; the cost of one; short members beside its longest one."""


MANY = (17, 33, 64, 130, 1025)
"""Members of the batches of which a few programs are run, the two largest that a variant takes: past powers of two, and
what gemvs are for."""

DISTINCT, DISTINCT_FLOPS = 32, 100_000
"""Programs of members of these that differ, at most, and their operations: another order of a sum of 257 squares
changes the last bit of one norm of ten (of 400), and where there are more programs or operations there are more sums.
"""


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
    if fault := _crossed_fault(variant, inputs, member, config):
        return fault
    device = tensors_in(inputs)[0].device
    is_default = config == variant.default_config(device_facts(device).arch)
    fault = _large_batch_fault(variant, inputs, member, config, SIZES if is_default else FEW_SIZES)
    if fault or not is_default:
        return fault
    batches_drawn = _drawn_batches(variant, case, config)
    if fault := _ragged_fault(variant, batches_drawn, config) or _many_fault(variant, batches_drawn, config):
        return fault
    drawn = draw(variant, chooser(case.seed), case.seed, None, device, ODD_PROGRAMS, config, wide=True)
    wide = contract.bind_arguments((), roughen_floats(drawn[0].inputs, case.seed)) if drawn is not None else {}
    has_members = bool(wide) and batching.count(wide) > 0
    return _large_batch_fault(variant, wide, 0, config, FEW_SIZES) if has_members else None


def _crossed_fault(variant: Variant, inputs: dict[str, Any], member: int, config: Config) -> str | None:
    """What changes for a member whose batch gets the config of another class; None for nothing."""
    crossed, batching = crossed_config(variant, config), variant.contract.batching
    assert batching is not None
    if crossed is None:
        return None
    alone = _part(variant, batching, batching.take(inputs, [member]), 0, config)
    if why := first_difference(alone, _part(variant, batching, inputs, member, crossed)):
        return f"member {member} in the drawn batch with {crossed.as_dict()}, against its bits alone: {why}"
    return None


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
    expected = _part(variant, batching, alone, 0, config)
    selected = family(variant, bucket(variant, contract.bind_axes(alone)[0]))
    for words, batch, position in batches:
        axes, device = contract.bind_axes(batch)
        if variant.unsupported_reason(axes, device, device_facts(device)):
            continue  # not a batch that this variant could be asked for
        if (other := family(variant, bucket(variant, axes))) != selected:
            return f"member {member} {words} gets the config of [{other}], alone that of [{selected}]"
        if why := first_difference(expected, _part(variant, batching, batch, position, config)):
            return f"member {member} {words}, against its bits alone: {why}"
    return None


_Drawn = tuple[Case, dict[str, Any]]
"""(a case, its inputs with all their digits)."""


def _drawn_batches(variant: Variant, case: Case, config: Config) -> list[_Drawn]:
    """Batches in search of one that shows more than the case's: of members of several sizes, or of large ones. Their
    values are ordinary: beside an outlier or an epsilon the order of a sum is not seen.
    """
    known, device = variant.contract.axis_by_name, tensors_in(case.inputs)[0].device
    wanted = {**SANITIZER.fixed, "values": "ordinary"}
    fixed = {name: value for name, value in wanted.items() if name in known and known[name].allows(value)}
    found = []
    for seed in range(case.seed, case.seed + RAGGED_DRAWS):
        drawn = draw(variant, chooser(seed), seed, fixed, device, SANITIZER.max_programs, config)
        if drawn is not None and drawn[0].flops <= RAGGED_FLOPS:
            inputs = variant.contract.bind_arguments((), roughen_floats(drawn[0].inputs, seed))
            found.append((drawn[0], inputs))
    return found


def _ragged_fault(variant: Variant, drawn: Sequence[_Drawn], config: Config) -> str | None:
    """What many short members change for a long one, and it for them; None for nothing, as where all are of one size.

    What goes by the average of a batch, as by its rows over its members, is far from every one of these.
    """
    batching, found = variant.contract.batching, []
    assert batching is not None
    for case, mine in drawn:
        alone = [batching.take(mine, [member]) for member in range(batching.count(mine))]
        rows = [sum(len(tensor) for tensor in tensors_in(one) if tensor.dim()) for one in alone]
        if rows and max(rows) > min(rows):
            found.append((max(rows) - min(rows), case.flops, mine, rows.index(max(rows)), rows.index(min(rows))))
    if not found:
        return None
    most, *_ = max(found, key=lambda one: one[0])
    # The one that computes the most shows the most: a window of one key leaves nothing to sum.
    *_, inputs, long, short = max((one for one in found if 2 * one[0] >= most), key=lambda one: one[1])
    batch = batching.take(inputs, [long, *[short] * NUM_SHORT])
    fault = _surrounded_fault(variant, inputs, long, [(f"beside {NUM_SHORT} short ones", batch, 0)], config)
    return fault or _surrounded_fault(variant, inputs, short, [("beside a long one", batch, NUM_SHORT)], config)


def _many_fault(variant: Variant, drawn: Sequence[_Drawn], config: Config) -> str | None:
    """What batches of MANY members change for one of these that computes the most; None for nothing that is seen.

    In an interpreter, where programs can be run one by one: as many as a few members have alone, at both ends of the
    grid. Whether those are these members' in a large batch too is seen in the smaller of two: where all of its programs
    say something else, or these say nothing, a variant has an order of its own, and the larger one is left out.
    """
    if MODE != "interpret" or (found := _alike_members(variant, drawn, config)) is None:
        return None
    members, few, by_size = found
    batching = variant.contract.batching
    assert batching is not None
    expected = [_part(variant, batching, batching.take(members, [one]), 0, config) for one in range(few)]
    grids = [one.grid for one in by_size[few]]
    known: list[int] | None = None  # positions from either end that the programs there compute
    for size in [size for size in by_size if size > few and len(by_size[size]) == len(grids)][-2:]:
        batch = batching.take(members, [one % few for one in range(size)])
        ends = dict.fromkeys((*range(few), *range(size - few, size)))
        changes = _changes(variant, batch, expected, config, ends, door_of_ends(grids))
        if known is None:
            if any(changes.values()) or None in [changes[one] for one in range(few)]:
                whole = _changes(variant, batch, expected, config, range(size))
                return _first_change(whole, range(size), few)
            known = [one - size * (one >= few) for one in ends if changes[one] is not None]
        elif fault := _first_change(changes, [one % size for one in known], few):
            return fault
    return None


def _first_change(changes: Mapping[int, str | None], positions: Sequence[int], few: int) -> str | None:
    """The first of some positions' changes in words."""
    one = next((one for one in positions if changes[one]), None)
    return (
        None if one is None else f"at {one} of a large batch of {few} repeated, against its bits alone: {changes[one]}"
    )


def _changes(
    variant: Variant,
    batch: dict[str, Any],
    expected: Sequence[Mapping[str, torch.Tensor]],
    config: Config,
    positions: Iterable[int],
    door: Door | None = None,
) -> dict[int, str | None]:
    """How the members at these positions of a batch that repeats a few differ from these: "" for not at all, None where
    `door` left programs out that compute them.

    Outputs and scratch memory begin as NaN: what is still so, or as it was before the call, was not computed.
    """
    batching = variant.contract.batching
    assert batching is not None
    mine, results = _call(variant, batch, config, door)
    before = {name: batch.get(name, torch.full_like(one, poison(one.dtype))) for name, one in results.items()}
    found: dict[int, str | None] = {}
    for one in positions:
        wanted = expected[one % len(expected)]
        got, begun = batching.part(mine, results, one), batching.part(mine, before, one)
        found[one] = first_difference(wanted, got) or ""
        if found[one] and door is not None:
            left = (_is_left(wanted[name], got[name], begun[name]) for name in wanted)
            found[one] = None if any(left) else found[one]
    return found


def _is_left(wanted: torch.Tensor, got: torch.Tensor, begun: torch.Tensor) -> bool:
    """Whether some element that is not as wanted is NaN, or as it was."""
    other = bits(got) != bits(wanted)
    return bool((other & ((bits(got) == bits(begun)) | (got.double().isnan() & ~wanted.double().isnan()))).any())


def _alike_members(
    variant: Variant, drawn: Sequence[_Drawn], config: Config
) -> tuple[dict[str, Any], int, Mapping[int, Sequence[Launch]]] | None:
    """(a batch of a few members of one size, how many, what is launched for each number of them), or None."""
    contract, batching = variant.contract, variant.contract.batching
    assert batching is not None
    found = []
    for index, (case, inputs) in enumerate(drawn):
        for member in range(batching.count(inputs)):
            alone = batching.take(inputs, [member])
            found.append((Case(contract, case.axes, case.seed, alone).flops, index, inputs, member))
    if not found:
        return None
    flops, index, inputs, member = max(found, key=lambda one: one[:2])
    one = launches_by_size(variant, batching, inputs, member, config, (1,)).get(1, ())
    programs = sum(math.prod(launch.grid) for launch in one)
    # What computes nothing has no order of sums.
    few = max(1, min(DISTINCT // max(1, programs), DISTINCT_FLOPS // flops)) if flops else 1
    by_size = launches_by_size(variant, batching, inputs, member, config, (few, *(size for size in MANY if size > few)))
    if few not in by_size:
        return None
    return roughen_floats(batching.take(inputs, [member] * few), index), few, by_size


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
    return batching.part(*_call(variant, inputs, config), member)


def _call(
    variant: Variant, inputs: dict[str, Any], config: Config | None, door: Door | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(the arguments after a call on copies of them, its results)."""
    mine = clone_inputs(inputs)
    with exact_products() if MODE == "interpret" else nullcontext():
        return mine, call(variant, mine, config, door=door)


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
