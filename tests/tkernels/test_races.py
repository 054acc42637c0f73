"""The race check finds races that no order of whole programs shows, and is silent where something orders them."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tkernels import OPS
from tkernels.config import Config
from tkernels.verification.mutation.campaign import outcomes, trials
from tkernels.verification.mutation.faults import ORDER_WEAKENED
from tkernels.verification.mutation.pool import Pool
from tkernels.verification.races import ORDERS, RaceError, racing_door
from tkernels.verification.sites import kernel_site, launcher_site

PROGRAMS, BLOCK = 4, 8


@triton.jit
def last_arriver(
    out_ptr, parts_ptr, count_ptr, x_ptr, BLOCK: tl.constexpr, EARLY: tl.constexpr, BARRIER: tl.constexpr,
    SEM: tl.constexpr, SCOPE: tl.constexpr,
):  # fmt: skip
    """The sum of all programs' parts, by whoever comes last. EARLY: it is counted before its part is there."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    offs = tl.arange(0, BLOCK)
    part = tl.load(x_ptr + program * BLOCK + offs)
    arrived = 0
    if EARLY:
        arrived = tl.atomic_add(count_ptr, 1, sem=SEM, scope=SCOPE)
    tl.store(parts_ptr + program * BLOCK + offs, part)
    if BARRIER:
        tl.debug_barrier()
    if not EARLY:
        arrived = tl.atomic_add(count_ptr, 1, sem=SEM, scope=SCOPE)
    if arrived == programs - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for other in range(programs):
            total += tl.load(parts_ptr + other * BLOCK + offs)
        tl.store(out_ptr + offs, total)


@triton.jit
def first_clears(out_ptr, count_ptr, x_ptr, BLOCK: tl.constexpr):
    """The first ticket clears what the others then add to: some may have added by then."""
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + offs)
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") == 0:
        tl.store(out_ptr + offs, tl.zeros((BLOCK,), tl.float32))
    tl.debug_barrier()
    tl.atomic_add(out_ptr + offs, x, sem="relaxed")


@triton.jit
def plain_flag(out_ptr, parts_ptr, count_ptr, x_ptr, BLOCK: tl.constexpr):
    """A flag that is stored and loaded, without any atomic."""
    program = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    tl.store(parts_ptr + program * BLOCK + offs, tl.load(x_ptr + program * BLOCK + offs))
    tl.debug_barrier()
    arrived = tl.load(count_ptr)
    tl.store(count_ptr, arrived + 1)
    if arrived == tl.num_programs(0) - 1:
        tl.store(out_ptr + offs, tl.load(parts_ptr + offs))


@triton.jit
def shifts_in_place(x_ptr, BLOCK: tl.constexpr):
    """Each program overwrites what its neighbour reads."""
    program = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    after = tl.minimum(program + 1, tl.num_programs(0) - 1)
    tl.store(x_ptr + program * BLOCK + offs, tl.load(x_ptr + after * BLOCK + offs) + 1.0)


@triton.jit
def one_element(out_ptr, x_ptr, BLOCK: tl.constexpr, SAME: tl.constexpr):
    """Every program stores to one row: the same bits, or its own."""
    program = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + (0 if SAME else program) * BLOCK + offs))


@triton.jit
def sums_with_atomics(out_ptr, total_ptr, count_ptr, x_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """Atomics add the parts up; the last one reads what they left."""
    offs = tl.arange(0, BLOCK)
    tl.atomic_add(total_ptr + offs, tl.load(x_ptr + tl.program_id(0) * BLOCK + offs), sem="relaxed")
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1) == tl.num_programs(0) - 1:  # acq_rel by default
        tl.store(out_ptr + offs, tl.load(total_ptr + offs))


@triton.jit
def locked(total_ptr, count_ptr, x_ptr, BLOCK: tl.constexpr, UNLOCK: tl.constexpr):
    """Adds to a row under a lock; UNLOCK is the semantics of giving it back."""
    offs = tl.arange(0, BLOCK)
    while tl.atomic_cas(count_ptr, 0, 1, sem="acquire") == 1:
        pass
    tl.store(total_ptr + offs, tl.load(total_ptr + offs) + tl.load(x_ptr + tl.program_id(0) * BLOCK + offs))
    tl.debug_barrier()
    tl.atomic_xchg(count_ptr, 0, sem=UNLOCK)


@triton.jit
def chained(out_ptr, parts_ptr, count_ptr, x_ptr, BLOCK: tl.constexpr, MIDDLE: tl.constexpr):
    """Every program reads what those before it left, which it knows through its own atomic."""
    program = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    tl.store(parts_ptr + program * BLOCK + offs, tl.load(x_ptr + program * BLOCK + offs))
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release")
    tl.atomic_add(count_ptr, 0, sem=MIDDLE)  # a relaxed one leaves what was released before it readable behind it
    before = tl.atomic_add(count_ptr, 0, sem="acquire")
    if before == tl.num_programs(0):
        tl.store(
            out_ptr + offs, tl.load(parts_ptr + offs) + tl.load(parts_ptr + (tl.num_programs(0) - 1) * BLOCK + offs)
        )


@triton.jit
def lanes_signal(out_ptr, parts_ptr, flags_ptr, count_ptr, x_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """One atomic for each lane: what a lane acquires, the others know from a barrier on."""
    program = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    tl.store(parts_ptr + program * BLOCK + offs, tl.load(x_ptr + program * BLOCK + offs))
    tl.debug_barrier()
    seen = tl.atomic_add(flags_ptr + offs, 1, sem="acq_rel")
    if BARRIER:
        tl.debug_barrier()
    if tl.max(seen, axis=0) == tl.num_programs(0) - 1:
        tl.store(out_ptr + offs, tl.load(parts_ptr + (BLOCK - 1 - offs)))


@triton.jit
def reads_back(out_ptr, x_ptr, BLOCK: tl.constexpr, HOW: tl.constexpr):
    """A program's threads store a row; HOW says what then touches it."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(0) * BLOCK
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, x)
    if HOW == "barrier":
        tl.debug_barrier()
    if HOW == "own":  # each thread what it stored itself
        tl.store(out_ptr + offs, tl.load(out_ptr + offs) * 2.0)
    elif HOW == "others" or HOW == "barrier":
        x = tl.load(out_ptr + first + (BLOCK - 1 - tl.arange(0, BLOCK)))
        tl.debug_barrier()
        tl.store(out_ptr + offs, x)
    elif HOW == "one":
        tl.store(x_ptr + first, tl.load(out_ptr + first + BLOCK - 1))
    elif HOW == "half":
        tl.store(out_ptr + first + tl.arange(0, BLOCK // 2), tl.zeros((BLOCK // 2,), tl.float32))
    elif HOW == "same":  # the same bits
        tl.store(out_ptr + first + tl.arange(0, BLOCK // 2), tl.load(x_ptr + first + tl.arange(0, BLOCK // 2)))


@triton.jit
def back_to_front(out_ptr, x_ptr, BLOCK: tl.constexpr, HOW: tl.constexpr):
    """A row is loaded and stored back to front in its place; HOW says what stands between."""
    row, offs = out_ptr + tl.program_id(0) * BLOCK, tl.arange(0, BLOCK)
    tl.store(row + offs, tl.load(x_ptr + tl.program_id(0) * BLOCK + offs))
    tl.debug_barrier()
    x = tl.load(row + offs)
    if HOW == "barrier":
        tl.debug_barrier()
    elif HOW == "a sum":
        x += tl.sum(x)
    elif HOW == "a sum under a name nobody reads":
        unread = tl.sum(x)  # noqa: F841  what is meant
    elif HOW == "a scan":
        x = tl.cumsum(x, axis=0)
    elif HOW == "a sum of something else":
        x += tl.sum(tl.load(x_ptr + offs))
    elif HOW == "a dot":
        x = tl.sum(
            tl.dot(x[:, None] + tl.zeros((BLOCK, BLOCK), tl.float32), tl.zeros((BLOCK, BLOCK), tl.float32)), axis=1
        )
    elif HOW == "nothing new":
        x = tl.load(row + (BLOCK - 1 - offs))
    elif HOW == "added":
        tl.atomic_add(row + (BLOCK - 1 - offs), x)
    if HOW != "added":
        tl.store(row + (BLOCK - 1 - offs), x)


@triton.jit
def turned_in_registers(out_ptr, parts_ptr, x_ptr, BLOCK: tl.constexpr, HOW: tl.constexpr):
    """A row that is loaded in one shape and stored in another, made of what was there: pairs are swapped."""
    row, offs = out_ptr + tl.program_id(0) * BLOCK, tl.arange(0, BLOCK)
    half = tl.arange(0, BLOCK // 2)
    tl.store(row + offs, tl.load(x_ptr + tl.program_id(0) * BLOCK + offs))
    tl.debug_barrier()
    if HOW == "split":
        first, second = tl.split(tl.reshape(tl.load(row + offs), (BLOCK // 2, 2)))
        tl.store(row + 2 * half, first + 1.0)
        tl.store(row + 2 * half + 1, second + 2.0)
    elif HOW == "joined":
        tl.store(row + offs, tl.interleave(tl.load(row + 2 * half) + 1.0, tl.load(row + 2 * half + 1) + 2.0))
    elif HOW == "gathered":
        tl.store(row + offs, tl.gather(tl.load(row + offs), BLOCK - 1 - offs, axis=0))
    elif HOW == "halves":  # another shape, without a word to say why
        x = tl.load(row + offs)
        tl.store(row + half, tl.load(x_ptr + half) + 3.0)
        tl.store(parts_ptr + tl.program_id(0) * BLOCK + offs, x)
    elif HOW == "one for all":
        x = tl.load(row)
        tl.store(row + offs, x + tl.load(x_ptr + offs))


@triton.jit
def scratch_again(out_ptr, parts_ptr, x_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """Rows go through one row of scratch, in which threads load what others stored."""
    offs = tl.arange(0, BLOCK)
    scratch = parts_ptr + tl.program_id(0) * BLOCK
    for row in range(2):
        tl.store(scratch + offs, tl.load(x_ptr + ((tl.program_id(0) + row) % 4) * BLOCK + offs))
        tl.debug_barrier()
        turned = tl.load(scratch + (BLOCK - 1 - offs))
        if BARRIER:
            tl.debug_barrier()
        tl.store(out_ptr + tl.program_id(0) * BLOCK + offs, turned)


@triton.jit
def clears_and_adds(out_ptr, x_ptr, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    """A program clears a row and adds to it, with other threads."""
    row, offs = out_ptr + tl.program_id(0) * BLOCK, tl.arange(0, BLOCK)
    tl.store(row + offs, tl.zeros((BLOCK,), tl.float32))
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_add(row + offs // 2, tl.load(x_ptr + offs))


@triton.jit
def arrive(count_ptr):
    """One more; how many there were."""
    return tl.atomic_add(count_ptr, 1)


@triton.jit
def reads_others_behind_an_atomic(out_ptr, parts_ptr, flags_ptr, x_ptr, BLOCK: tl.constexpr, RESULT: tl.constexpr):
    """An atomic between what threads store and others load; RESULT says what becomes of its result."""
    first, offs = tl.program_id(0) * BLOCK, tl.arange(0, BLOCK)
    tl.store(parts_ptr + first + offs, tl.load(x_ptr + first + offs))
    if RESULT == "dropped":
        tl.atomic_add(flags_ptr + tl.program_id(0), 1)
    elif RESULT == "dropped by the caller":
        arrive(flags_ptr + tl.program_id(0))
    elif RESULT == "only named":
        unread = tl.atomic_add(flags_ptr + tl.program_id(0), 1)  # noqa: F841  what is meant
    elif RESULT == "read":
        seen = tl.atomic_add(flags_ptr + tl.program_id(0), 1, sem="relaxed")
        tl.store(flags_ptr + BLOCK - 1 - tl.program_id(0), seen)
    elif RESULT == "read by the caller":
        tl.store(flags_ptr + BLOCK - 1 - tl.program_id(0), arrive(flags_ptr + tl.program_id(0)))
    tl.store(out_ptr + first + offs, tl.load(parts_ptr + first + (BLOCK - 1 - offs)))


@triton.jit
def acquires_aside(out_ptr, parts_ptr, count_ptr, x_ptr, BLOCK: tl.constexpr, READ: tl.constexpr):
    """The last to arrive acquires by an atomic of its own, READ or not."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    offs = tl.arange(0, BLOCK)
    tl.store(parts_ptr + program * BLOCK + offs, tl.load(x_ptr + program * BLOCK + offs))
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr, 1, sem="release")
    if READ:
        arrived = tl.atomic_add(count_ptr, 0, sem="acquire")
        if arrived == programs:
            tl.store(out_ptr + offs, tl.load(parts_ptr + offs) + tl.load(parts_ptr + (programs - 1) * BLOCK + offs))
    else:
        tl.atomic_add(count_ptr, 0, sem="acquire")
        if arrived == programs - 1:
            tl.store(out_ptr + offs, tl.load(parts_ptr + offs) + tl.load(parts_ptr + (programs - 1) * BLOCK + offs))


@triton.jit
def exchanges(out_ptr, parts_ptr, flags_ptr, count_ptr, x_ptr, BLOCK: tl.constexpr, EXPECTED: tl.constexpr):
    """Counts are relaxed: only a flag's exchange releases, and only if the flag is what was EXPECTED."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    offs = tl.arange(0, BLOCK)
    tl.store(parts_ptr + program * BLOCK + offs, tl.load(x_ptr + program * BLOCK + offs))
    tl.debug_barrier()
    tl.atomic_cas(flags_ptr, EXPECTED, 0, sem="acq_rel")
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1, sem="relaxed") == programs - 1:
        tl.store(out_ptr + offs, tl.load(parts_ptr + offs) + tl.load(parts_ptr + (programs - 1) * BLOCK + offs))


@triton.jit
def persistent(out_ptr, x_ptr, rows, BLOCK: tl.constexpr):
    """Fewer programs than rows, each with every so many."""
    offs = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        tl.store(out_ptr + row * BLOCK + offs, tl.load(x_ptr + row * BLOCK + offs) * 2.0)


def launch(kernel: Any, order: str | None, grid: int = PROGRAMS, **constexprs: Any) -> dict[str, torch.Tensor]:
    """Runs a kernel of this file under the race check, on fresh tensors."""
    tensors = {
        "out_ptr": torch.zeros(PROGRAMS, BLOCK),
        "parts_ptr": torch.full((PROGRAMS, BLOCK), float("nan")),
        "total_ptr": torch.zeros(BLOCK),
        "flags_ptr": torch.zeros(BLOCK, dtype=torch.int32),
        "count_ptr": torch.zeros(1, dtype=torch.int32),
        "x_ptr": torch.randn(PROGRAMS, BLOCK, generator=torch.Generator().manual_seed(0)),
    }
    given = {name: value for name, value in tensors.items() if name in kernel.arg_names}
    racing_door(order)(kernel, (grid,), {**given, "BLOCK": BLOCK, **constexprs}, Config())
    return tensors


def launch_in_all_orders(kernel: Any, options: Mapping[str, Any]) -> None:
    for order in ORDERS:
        launch(kernel, order, **options)


SOUND: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "last arriver": (last_arriver, {"EARLY": False, "BARRIER": True, "SEM": "acq_rel", "SCOPE": "gpu"}),
    "last arriver over the system": (last_arriver, {"EARLY": False, "BARRIER": True, "SEM": "acq_rel", "SCOPE": "sys"}),
    "the same bits from all": (one_element, {"SAME": True}),
    "sums with atomics": (sums_with_atomics, {"BARRIER": True}),
    "a lock": (locked, {"UNLOCK": "release"}),
    "a release, a relaxed update, an acquire": (chained, {"MIDDLE": "relaxed"}),
    "a release, another, an acquire": (chained, {"MIDDLE": "acq_rel"}),
    "an atomic for each lane": (lanes_signal, {"BARRIER": True}),
    "threads read their own": (reads_back, {"HOW": "own"}),
    "threads read others' behind a barrier": (reads_back, {"HOW": "barrier"}),
    "threads store the same bits": (reads_back, {"HOW": "same"}),
    "an atomic whose result is read": (reads_others_behind_an_atomic, {"RESULT": "read"}),
    "an atomic whose caller reads its result": (reads_others_behind_an_atomic, {"RESULT": "read by the caller"}),
    "an acquire for all": (acquires_aside, {"READ": True}),
    "an exchange that succeeds": (exchanges, {"EXPECTED": 0}),
    "back to front behind a barrier": (back_to_front, {"HOW": "barrier"}),
    "back to front behind a sum": (back_to_front, {"HOW": "a sum"}),
    "back to front behind a sum of something else": (back_to_front, {"HOW": "a sum of something else"}),
    "back to front behind a scan": (back_to_front, {"HOW": "a scan"}),
    "back to front behind a dot": (back_to_front, {"HOW": "a dot"}),
    "back to front what is there": (back_to_front, {"HOW": "nothing new"}),
    "pairs split in registers": (turned_in_registers, {"HOW": "split"}),
    "pairs joined in registers": (turned_in_registers, {"HOW": "joined"}),
    "a row gathered in registers": (turned_in_registers, {"HOW": "gathered"}),
    "scratch again behind a barrier": (scratch_again, {"BARRIER": True}),
    "cleared, a barrier, added": (clears_and_adds, {"BARRIER": True}),
    "a persistent grid": (persistent, {"rows": PROGRAMS, "grid": 3}),
    "a persistent grid of one": (persistent, {"rows": PROGRAMS, "grid": 1}),
}

_ARRIVER = {"EARLY": False, "BARRIER": True, "SEM": "acq_rel", "SCOPE": "gpu"}
RACING: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "counted before the part is stored": (last_arriver, {**_ARRIVER, "EARLY": True}),
    "no barrier before the count": (last_arriver, {**_ARRIVER, "BARRIER": False}),
    "a relaxed count": (last_arriver, {**_ARRIVER, "SEM": "relaxed"}),
    "a count that only releases": (last_arriver, {**_ARRIVER, "SEM": "release"}),
    "a count that only acquires": (last_arriver, {**_ARRIVER, "SEM": "acquire"}),
    "a count for its own program's threads": (last_arriver, {**_ARRIVER, "SCOPE": "cta"}),
    "the first ticket clears": (first_clears, {}),
    "a flag without atomics": (plain_flag, {}),
    "what a neighbour reads is overwritten": (shifts_in_place, {}),
    "each its own value to one row": (one_element, {"SAME": False}),
    "no barrier behind the added parts": (sums_with_atomics, {"BARRIER": False}),
    "a lock that is given back relaxed": (locked, {"UNLOCK": "relaxed"}),
    "threads read others'": (reads_back, {"HOW": "others"}),
    "all threads read one's": (reads_back, {"HOW": "one"}),
    "threads store over others'": (reads_back, {"HOW": "half"}),
    "an atomic as a statement": (reads_others_behind_an_atomic, {"RESULT": "dropped"}),
    "an atomic as a function's statement": (reads_others_behind_an_atomic, {"RESULT": "dropped by the caller"}),
    "an atomic under a name nobody reads": (reads_others_behind_an_atomic, {"RESULT": "only named"}),
    "back to front": (back_to_front, {"HOW": "nothing"}),
    "back to front behind a sum that nobody reads": (back_to_front, {"HOW": "a sum under a name nobody reads"}),
    "added back to front": (back_to_front, {"HOW": "added"}),
    "half of what was loaded stored over": (turned_in_registers, {"HOW": "halves"}),
    "one's that all threads load stored over": (turned_in_registers, {"HOW": "one for all"}),
    "scratch again": (scratch_again, {"BARRIER": False}),
    "cleared and added": (clears_and_adds, {"BARRIER": False}),
    "an acquire for one thread": (acquires_aside, {"READ": False}),
    "an exchange that fails": (exchanges, {"EXPECTED": 99}),
    "lanes read what others acquired": (lanes_signal, {"BARRIER": False}),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("order", ORDERS)
def test_programs_that_something_orders_do_not_race(name: str, order: str | None) -> None:
    kernel, options = SOUND[name]
    launch(kernel, order, **options)


@pytest.mark.parametrize("name", RACING)
def test_programs_that_nothing_orders_race(name: str) -> None:
    kernel, options = RACING[name]
    with pytest.raises(RaceError, match="nothing orders two accesses"):
        launch_in_all_orders(kernel, options)


def test_a_race_names_both_lines_programs_and_the_element() -> None:
    with pytest.raises(RaceError) as raised:
        launch(last_arriver, None, **{**_ARRIVER, "EARLY": True})
    message = str(raised.value)
    assert "last_arriver: nothing orders two accesses to byte 0 of 'parts_ptr': program (0, 0, 0) stores it" in message
    assert "; program (3, 0, 0) loads it" in message
    source = Path(__file__).read_text().splitlines()
    places = re.findall(rf"{re.escape(__file__)}:(\d+) in last_arriver", message)
    lines = [source[int(place) - 1].strip() for place in places]
    assert lines == [
        "tl.store(parts_ptr + program * BLOCK + offs, part)",
        "total += tl.load(parts_ptr + other * BLOCK + offs)",
    ]


def test_a_race_of_threads_names_both_lines_and_what_each_does() -> None:
    with pytest.raises(RaceError) as raised:
        launch(scratch_again, None, BARRIER=False)
    message = str(raised.value)
    assert "of threads of program (0, 0, 0), which need a tl.debug_barrier(): one loads it at " in message
    assert "; another stores it at " in message
    source = Path(__file__).read_text().splitlines()
    lines = [source[int(place) - 1].strip() for place in re.findall(r"py:(\d+) in scratch_again", message)]
    assert [line.partition("(")[0] for line in lines] == ["turned = tl.load", "tl.store"]


def test_a_race_in_a_shared_function_names_its_caller_too() -> None:
    variant = OPS["scaled_matmul"].variants["split_k"]
    trial = next(one for one in trials([variant], (ORDER_WEAKENED,)) if "barrier" in one.mutant.before)
    with Pool() as pool:
        fate = pool.fate(trial.mutant, [variant], seed=0, compiled=False, thorough=False)
    assert fate.verdict == "crash"
    assert "in summed_by_the_last, called from" in fate.reason
    assert "in scaled_matmul_split_k;" in fate.reason


@pytest.mark.parametrize("package", [triton, torch])
def test_a_package_whose_name_begins_like_anothers_keeps_its_lines(package: ModuleType) -> None:
    file = f"{Path(package.__file__ or '').parent}_kernels/kernel.py"
    namespace = {"kernel_site": kernel_site, "launcher_site": launcher_site}
    exec(compile("def kernel():\n    return kernel_site(), launcher_site()", file, "exec"), namespace)
    for site in namespace["kernel"]():
        assert site[0] == f"{file}:2 in kernel"


@pytest.mark.slow
def test_whatever_orders_less_in_a_kernel_of_the_tree_is_noticed() -> None:
    variants = [variant for op in OPS.values() for variant in op.variants.values()]
    chosen = list(trials(variants, (ORDER_WEAKENED,)))
    with Pool() as pool:
        ended = list(outcomes(pool, chosen, seed=0, compiled=False))
    assert len(ended) >= 15  # a barrier and four weaker atomics in each of the three protocols
    judged = [outcome for outcome in ended if outcome.column != "equivalent"]
    assert [outcome.trial.mutant.name for outcome in judged if not outcome.fate.reason.startswith("races: ")] == []
