"""Each sanitizer fires on a planted bug and stays silent on a clean kernel."""

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels.config import Config
from tkernels.inputs import poisoned_views
from tkernels.sanitizers.address import sanitizing_door


@triton.jit
def copy_kernel(out_ptr, x_ptr, n, stride_t, extra, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_t + offs + extra, mask=offs < n, other=0.0)
    tl.store(out_ptr + row * n + offs, x, mask=offs < n)


@triton.jit
def gather_kernel(out_ptr, x_ptr, index_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + tl.load(index_ptr + offs)))


@triton.jit
def box_kernel(out_ptr, box, row, BLOCK: tl.constexpr):
    offs = tl.arange(0, 2)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + offs, box.load([row, 0]))


@triton.jit
def multiply_kernel(out_ptr, factor, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, (offs + 1) * factor)


@triton.jit
def endless_kernel(out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    low = tl.full((), 0, tl.int32)
    while low < 1:
        low = tl.minimum(low + tl.sum(tl.load(out_ptr + offs)), 0)


def run_copy(rows: int, columns: int, extra: int) -> torch.Tensor:
    x, _ = poisoned_views([torch.ones(rows, columns), torch.full((rows, 2), float("nan"))], dim=1)
    out = torch.zeros(rows, columns)
    arguments = {"out_ptr": out, "x_ptr": x, "n": columns, "stride_t": x.stride(0), "extra": extra, "BLOCK": 8}
    sanitizing_door(copy_kernel, (rows,), arguments, Config())
    return out


def test_a_clean_kernel_is_silent_and_runs() -> None:
    assert torch.equal(run_copy(3, 5, extra=0), torch.ones(3, 5))


def test_the_gap_between_the_rows_of_a_view_is_outside_it() -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match=r"copy_kernel: load of 4 bytes outside"):
        run_copy(3, 5, extra=1)  # one element past a row, still inside the allocation


@pytest.mark.parametrize("extra", [-1, 7, 10**9])
def test_an_access_before_or_far_past_a_tensor_is_caught_before_it_is_made(extra: int) -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match="outside every argument"):
        run_copy(3, 5, extra)


def test_a_bad_index_in_an_indirect_load_is_caught() -> None:
    index = torch.arange(8)
    index[3] = 1_000_000
    arguments = {"out_ptr": torch.empty(8), "x_ptr": torch.ones(8), "index_ptr": index, "BLOCK": 8}
    with pytest.raises(triton.runtime.errors.InterpreterError, match="load of 4 bytes outside every argument, 1 lanes"):
        sanitizing_door(gather_kernel, (1,), arguments, Config())


@pytest.mark.parametrize(
    ("rows", "row", "message"),
    [
        (4, 0, ""),
        (4, 3, ""),  # the second row of the box leaves the shape, and is not read
        (4, 4, "box load wholly outside its descriptor's shape"),
        (4, -2, "box load wholly outside its descriptor's shape"),
        (6, 3, "load of 4 bytes outside every argument"),  # a descriptor of more rows than there are
    ],
)
def test_what_a_descriptor_reads_is_checked_against_the_tensor_under_it(rows: int, row: int, message: str) -> None:
    x, _ = poisoned_views([torch.ones(4, 8), torch.full((4, 4), float("nan"))], dim=1)
    descriptor = TensorDescriptor(x, [rows, 8], [x.stride(0), 1], [2, 8])
    out = torch.full((2, 8), 5.0)
    arguments = {"out_ptr": out, "box": descriptor, "row": row, "BLOCK": 8}
    if message:
        with pytest.raises(triton.runtime.errors.InterpreterError, match=message):
            sanitizing_door(box_kernel, (1,), arguments, Config())
    else:
        sanitizing_door(box_kernel, (1,), arguments, Config())
        assert torch.equal(out[:, 0], torch.tensor([1.0, 1.0 if row < 3 else 0.0]))


def test_a_loop_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tkernels.interpreter.MAX_ACCESSES", 100)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="its loop does not end"):
        sanitizing_door(endless_kernel, (1,), {"out_ptr": torch.zeros(8, dtype=torch.int32), "BLOCK": 8}, Config())


def test_int32_overflow_is_caught_and_int64_is_not() -> None:
    def run(factor: int, dtype: torch.dtype) -> None:
        out = torch.zeros(8, dtype=dtype)
        sanitizing_door(multiply_kernel, (1,), {"out_ptr": out, "factor": factor, "BLOCK": 8}, Config())

    run(2**27, torch.int32)
    run(2**33, torch.int64)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="int32 overflow"):
        run(2**30, torch.int32)
