"""Makes the pieces that steps need, from many processes at once: kernels compiled into Triton's cache.

What was made is noted in Triton's cache itself. So a machine that is not the one of the command before, or has lost its
cache, knows nothing and has all made again, side by side, and not one after the other in the middle of the steps.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton

from experiments.gpu_report.correctness import cases, signatures
from experiments.gpu_report.pieces import Piece
from tkernels.config import Config
from tkernels.device import device_facts
from tkernels.inputs import map_tensors
from tkernels.launch import Kernel, launch_options
from tkernels.measurement import cut_axes, prepare, prepare_supported, timed_call
from tkernels.registry import Registry
from tkernels.tuning import NEAREST
from tkernels.variant import Variant
from tkernels.verification.check import check_case

MOST_PROCESSES = 16

STRAGGLER_S = 60.0
"""How long the last pieces may take after the others are made. What is not made by then its step makes, or hangs at."""

# Sizes of the batch at which candidates are compiled: a multiple of every alignment that Triton specializes on.
_BATCH = 64

_POLL_S = 0.05


def processes() -> int:
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 2) - 1))


def notes() -> Path:
    """The folder, in Triton's cache, of a file for each piece that was made, empty or with what went wrong."""
    return Path(triton.knobs.cache.dir) / "gpu-report"


def made() -> set[str]:
    """The keys of the pieces that this machine has, or has failed to make."""
    return {file.name for file in notes().iterdir()} if notes().is_dir() else set()


def fault_of(pieces: Sequence[Piece]) -> str | None:
    """Why one of the pieces could not be made here; None where nothing is known against them."""
    for piece in pieces:
        with suppress(FileNotFoundError):
            if reason := (notes() / piece.key).read_text(encoding="utf-8"):
                return f"{piece.title}: {reason}"
    return None


def make_all(pieces: Sequence[Piece], make: Callable[[Piece], None], count: int, straggler_s: float) -> None:
    """Makes the pieces in `count` forks of this process, the longest first, and notes how each ended.

    This process must not have used CUDA. A piece that ends its process costs one of them; one that hangs is given up.

    Args:
        make: Makes one; what it raises is noted and printed, for the step that needs the piece to report.
        straggler_s: How long to wait for the last ones.
    """
    notes().mkdir(parents=True, exist_ok=True)
    ordered = sorted(pieces, key=lambda piece: -piece.seconds)
    with TemporaryDirectory() as claims:
        running = {_fork(ordered, make, Path(claims)) for _ in range(min(count, len(ordered)))}
        last_claim = time.monotonic()
        while running:
            for pid in [pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]]:
                running.remove(pid)
            if len(os.listdir(claims)) < len(ordered):
                last_claim = time.monotonic()
            elif time.monotonic() - last_claim > straggler_s:
                break
            time.sleep(_POLL_S)
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for number, piece in enumerate(ordered):
            if (Path(claims) / str(number)).exists() and not (notes() / piece.key).exists():
                _note(piece, "making it did not come to an end: its process hung or died")


def _fork(pieces: Sequence[Piece], make: Callable[[Piece], None], claims: Path) -> int:
    """A process that makes whatever piece no other has claimed, until there is none."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        for number, piece in enumerate(pieces):
            if _claim(claims / str(number)):
                reason = ""
                try:
                    make(piece)
                except Exception as error:
                    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    print(f"{piece.title}: {reason}", file=sys.stderr, flush=True)
                _note(piece, reason)
        status = 0
    finally:
        os._exit(status)  # what runs at exit is the starter's


def _claim(file: Path) -> bool:
    """Whether nobody had it before."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _note(piece: Piece, reason: str) -> None:
    (notes() / piece.key).write_text(reason, encoding="utf-8")


def maker(ops: Registry, device: torch.device) -> Callable[[Piece], None]:
    """What makes a piece, in a fork that has not used the device yet."""

    def make(piece: Piece) -> None:
        torch.cuda.set_device(device)
        variant = ops[piece.op].variants[piece.variant]
        if piece.what == "config":
            _compile_config(variant, piece.axes, Config.of(piece.config), device)
        elif piece.what == "signature":
            _compile_signature(variant, piece.number, device)
        else:
            _call_once(variant, piece.axes, device)

    return make


def _call_once(variant: Variant, axes: Mapping[str, Any], device: torch.device) -> None:
    """A peer's first call at a point, which builds what it runs there."""
    ready = prepare_supported(variant, variant.contract.case(axes, 0, device))
    timed_call(Kernel(ready.variant, NEAREST, {}), ready.arguments)()
    torch.cuda.synchronize(device)


def _compile_signature(variant: Variant, place: int, device: torch.device) -> None:
    found = signatures(variant, device, place + 1)
    if len(found) > place:
        for case in cases(variant, found[place], 1, device):
            check_case(variant, case, found[place].config)


def _compile_config(variant: Variant, axes: Mapping[str, Any], config: Config, device: torch.device) -> None:
    """Compiles what the launcher would launch at a small batch of the point, without running it."""
    contract, facts = variant.contract, device_facts(device)
    small = cut_axes(contract, axes, _BATCH, only_batch=True) or axes
    case = prepare(variant, contract.case(small, 0, device)).case
    arguments = contract.bind_arguments((), case.inputs)
    bound, _ = contract.bind_axes(arguments)
    meta = torch.device("meta")

    def to_meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=meta)

    def compiling(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        kernel.warmup(grid=grid, **arguments, **launch_options(config))

    shapes = map_tensors(arguments, to_meta)
    outputs = contract.allocate_outputs(bound, shapes, meta)
    Kernel(variant, NEAREST, {}, compiling).launch_into(outputs, shapes, bound, meta, facts, config)
