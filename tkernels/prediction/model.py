"""A time for one launch on one GPU, from its code and its sizes.

    time = launch + sum over waves of max(memory, cache, issue, special, matrix, chain)

A wave is the programs that are resident at once: what registers, shared memory and warps allow a multiprocessor, times
the multiprocessors; the last wave is what is left. In a wave of p programs, b of them on the fullest multiprocessor:

- memory: the programs' share of the op's bytes over BANDWIDTH of the data sheet's; a multiprocessor takes at most
  FILL_BYTES a clock. Caches are ideal: each byte that the contract counts moves once. (Williams et al., "Roofline",
  CACM 2009.)
- cache: what the programs load and store over what the second-level cache gives: a byte that several programs want
  passes through it once for each. Tiles count whole, with what their masks leave out.
- issue: instructions over what the schedulers issue: four a clock, and one warp no more than one in DEPENDENT clocks,
  since an instruction mostly waits for the one before it. Few resident warps so issue less.
- special: exp2, rsqrt and the like, SPECIAL_LANES lanes a clock.
- matrix: FLOPs of products, padding to whole tiles included, over MATRIX of the data sheet's rate for the dtype; on
  Hopper over LEGACY_MATRIX of it where the code has the older instructions, which a warp issues and waits for.
- chain: what one program takes by itself: each trip to memory LOADED times the latency of an idle device, and its
  instructions at DEPENDENT clocks each; where copies run ahead in a pipeline, the longer of both. By Little's law this
  is also what bounds the bandwidth of few bytes in flight.

How often loops run follows from the code itself (`walk`), for up to _WALKED programs of a launch, evenly spaced;
integers that a launch hands to the next, such as whose tile is which, are known where its op's definition says them. A
branch whose condition only memory knows, such as a last arriver's, is skipped by all and then taken by one.

What is not modelled: misses of the caches and of the TLB, bank conflicts, barriers, divergence within a warp, atomics
that collide, clocks that fall under load beyond what MATRIX holds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tkernels.prediction.calls import Launch
from tkernels.prediction.gpus import Gpu
from tkernels.prediction.kept import CompiledFacts
from tkernels.prediction.walk import Counts, walk
from tkernels.verification.inspection.occupancy import LIMITS, resident_blocks

VERSION = 2
"""Of the model; a figure of another version is another figure."""

LAUNCH_US = 1.3
"""Between two kernels of a CUDA graph. Published: 1.3 us a Triton launch within a graph, H100."""

BANDWIDTH = 4.3 / 4.8
"""Of the data sheet's. Measured on an H200: a copy moves 4.3 of 4.8 TB/s."""

MATRIX = 788 / 989.5
"""Of the data sheet's. Measured on an H200: 8192^3 in bf16 at 788 of 989.5 TFLOP/s."""

LEGACY_MATRIX = 0.62 * MATRIX
"""Of the data sheet's, on Hopper. mma.sync reaches 62% of wgmma's rate: Luo et al., arXiv 2402.13499."""

DEPENDENT = 4
"""Clocks from an instruction to one that needs its result, from Volta on: Jia et al., arXiv 1804.06826; Luo et al."""

FILL_BYTES = 64
"""A clock, from the second-level cache to a multiprocessor: NVIDIA's A100 white paper."""

SPECIAL_LANES = 16
"""A clock and multiprocessor: CUDA C++ Programming Guide, throughput of arithmetic instructions."""

LOADED = 2.0
"""Latency under load over an idle device's: an assumption, for no source gives one figure."""

_SCHEDULERS, _WARP = 4, 32
_WALKED = 64


@dataclass(frozen=True)
class Prediction:
    """A modelled time, and what it is made of.

    us: of the whole launch. bound: the largest part of its largest wave. programs, resident: on a multiprocessor at
    once. waves: programs over what is resident at once. instructions: of one warp, the mean over programs.
    """

    us: float
    bound: str
    programs: int
    resident: int
    waves: float
    instructions: float


@dataclass(frozen=True)
class _Program:
    """What the mean program of a launch does. bytes_moved: of memory; passed: loaded and stored, whoever else does.
    sync_trips, ahead_trips: to memory, that its instructions wait for or that run ahead of them.
    """

    bytes_moved: float
    passed: float
    instructions: float
    special: float
    flops: dict[str, float]
    sync_trips: float
    ahead_trips: float


def predict_launch(launch: Launch, compiled: CompiledFacts | None, gpu: Gpu) -> Prediction:
    """The modelled time of a launch.

    Args:
        compiled: What its kernel was compiled to; None of torch's own product, which is taken to be at the roofline.

    Raises:
        WalkError: How often a loop runs is not known.
        ValueError: A program does not fit on a multiprocessor.
    """
    if compiled is None:
        return _predict_product(launch, gpu)
    resident = resident_blocks(LIMITS[gpu.facts.arch], compiled.warps, compiled.registers, compiled.shared_bytes)
    if not resident:
        raise ValueError(f"{compiled.kernel} does not fit on a multiprocessor of {gpu.name}")
    usual, last = _count(launch, compiled)
    slots = resident * gpu.facts.multiprocessors
    full, rest = divmod(launch.programs, slots)
    waves = [(slots, full), (rest, 1 if rest else 0)]
    parts = [(_wave(usual, compiled, gpu, programs), count) for programs, count in waves if count]
    seconds = sum(max(part.values()) * count for part, count in parts)
    seconds += max(0.0, _chain(last, gpu) - _chain(usual, gpu))
    longest = max((part for part, _ in parts), key=lambda part: max(part.values()))
    us = LAUNCH_US + seconds * 1e6
    bound = max(longest, key=lambda name: longest[name])
    return Prediction(us, bound, launch.programs, resident, launch.programs / slots, usual.instructions)


def _predict_product(launch: Launch, gpu: Gpu) -> Prediction:
    assert launch.product is not None
    dtype, flops = launch.product
    parts = {
        "memory": launch.bytes_moved / (gpu.peaks.memory_bytes_per_s * BANDWIDTH),
        "matrix": flops / (gpu.peaks.flops_per_s[dtype] * MATRIX),
    }
    bound = max(parts, key=lambda name: parts[name])
    return Prediction(LAUNCH_US + parts[bound] * 1e6, bound, 1, 1, 1.0, 0.0)


def _wave(program: _Program, compiled: CompiledFacts, gpu: Gpu, programs: int) -> dict[str, float]:
    """Seconds of each part of a wave."""
    multiprocessors, clock = gpu.facts.multiprocessors, gpu.clock_hz
    busy = min(programs, multiprocessors)
    here = math.ceil(programs / multiprocessors)  # on the fullest multiprocessor
    warps = here * compiled.warps
    filled = busy * FILL_BYTES * clock
    per_clock = min(_SCHEDULERS, warps / DEPENDENT)
    return {
        "memory": program.bytes_moved * programs / min(gpu.peaks.memory_bytes_per_s * BANDWIDTH, filled),
        "cache": program.passed * programs / min(gpu.cache_bytes_per_s, filled),
        "issue": warps * program.instructions / per_clock / clock,
        "special": warps * program.special * _WARP / SPECIAL_LANES / clock,
        "matrix": here * _matrix_seconds(program, compiled, gpu),
        "chain": _chain(program, gpu),
    }


def _matrix_seconds(program: _Program, compiled: CompiledFacts, gpu: Gpu) -> float:
    """Of one program that has its multiprocessor's matrix units to itself."""
    is_legacy = gpu.facts.arch == "sm_90" and not any(kind.endswith("GMMA") for kind in compiled.matrix)
    seconds = 0.0
    for dtype, flops in program.flops.items():
        share = 1.0 if dtype == "float32" else LEGACY_MATRIX if is_legacy else MATRIX
        rate = gpu.peaks.flops_per_s.get(dtype, gpu.peaks.flops_per_s["float32"])
        seconds += flops / (rate * share / gpu.facts.multiprocessors)
    return seconds


def _chain(program: _Program, gpu: Gpu) -> float:
    trip = gpu.latency_cycles * LOADED / gpu.clock_hz
    alone = program.instructions * DEPENDENT / gpu.clock_hz
    return program.sync_trips * trip + max(program.ahead_trips * trip, alone)


def _count(launch: Launch, compiled: CompiledFacts) -> tuple[_Program, _Program]:
    """The mean program, and the one that takes the branches that the others skip."""
    names = compiled.skeleton, _scalars(launch), launch.offsets
    counts = [walk(*names, one, launch.grid, launch.read) for one in _spaced(launch)]
    end = tuple(size - 1 for size in launch.grid)
    last = walk(*names, (end[0], end[1], end[2]), launch.grid, launch.read, unknown_branches=True)
    return _mean(counts, launch, compiled), _mean([last], launch, compiled)


def _scalars(launch: Launch) -> dict[str, int]:
    return {name: int(value) for name, value in launch.scalars.items() if isinstance(value, int)}


def _spaced(launch: Launch) -> list[tuple[int, int, int]]:
    """Up to _WALKED programs, evenly spaced."""
    columns, rows, _ = launch.grid
    count = min(launch.programs, _WALKED)
    numbers = [launch.programs * place // count for place in range(count)]
    return [(number % columns, number // columns % rows, number // columns // rows) for number in numbers]


def _mean(counts: Sequence[Counts], launch: Launch, compiled: CompiledFacts) -> _Program:
    """Code outside the numbered loops runs once, or as often as it leads into one of them."""
    passed = instructions = special = sync = ahead = 0.0
    flops: dict[str, float] = {}
    for one in counts:
        rounds = max([1, *one.entries.values()])
        instructions += rounds * compiled.instructions
        special += rounds * compiled.special
        sync += rounds
        for number, passes in one.passes.items():
            loop = compiled.loops[number]
            instructions += passes * loop.instructions
            special += passes * loop.special
            trips = passes * loop.trips
            sync, ahead = (sync, ahead + trips) if loop.is_ahead else (sync + trips, ahead)
        for what, amount in one.work.items():
            if what in ("loads", "stores"):
                passed += amount
            else:
                flops[what] = flops.get(what, 0.0) + amount / len(counts)
    count = len(counts)
    return _Program(
        launch.bytes_moved / launch.programs,
        passed / count,
        instructions / count,
        special / count,
        flops,
        sync / count,
        ahead / count,
    )
