"""Zeroed workspaces: kept, zero before every launch; a launch that leaves one otherwise fails its check."""

from pathlib import Path

import pytest
import torch
from triton.runtime.errors import InterpreterError

from tests.tkernels.outside import write_variant
from tkernels import OPS, Buffer
from tkernels.variant import Variant
from tkernels.verification.check import check_case
from tkernels.workspace import ZeroedBuffers

CPU = torch.device("cpu")
COUNTS = Buffer((4,), torch.int32, zeroed=True)

# Counts its programs in a zeroed workspace; the last one takes the count away again.
COUNTING = (
    ("from tkernels import Config, Run, Variant", "from tkernels import Buffer, Config, Run, Variant"),
    ("out_ptr, gate_up_ptr,", "out_ptr, count_ptr, programs, gate_up_ptr,"),
    (
        "    offs = tl.arange(0, BLOCK)\n",
        "    if tl.atomic_add(count_ptr, 1) == programs - 1:\n        tl.store(count_ptr, 0)\n"
        "    offs = tl.arange(0, BLOCK)\n",
    ),
    ("out_ptr=out,", 'out_ptr=out, count_ptr=run.workspace["count"], programs=tokens,'),
    (
        "deterministic=True,",
        'workspace=lambda axes, config, device: {"count": Buffer((1,), torch.int32, zeroed=True)}, deterministic=True,',
    ),
)


def counting(folder: Path, *changes: tuple[str, str]) -> Variant:
    write_variant(folder, *COUNTING, *changes)
    return OPS.with_variants_from(folder)["swiglu"].variants["doubled"]


def test_a_zeroed_buffer_is_kept_at_one_address_for_each_name_shape_and_dtype() -> None:
    buffers = ZeroedBuffers()
    first = buffers.take("counts", COUNTS, CPU)
    assert first.tolist() == [0, 0, 0, 0]
    assert buffers.take("counts", COUNTS, CPU) is first
    others = [
        buffers.take("others", COUNTS, CPU),
        buffers.take("counts", Buffer((5,), torch.int32, zeroed=True), CPU),
        buffers.take("counts", Buffer((4,), torch.int64, zeroed=True), CPU),
    ]
    assert len({tensor.data_ptr() for tensor in (first, *others)}) == 4


def test_what_a_launch_left_behind_is_named_and_cleared() -> None:
    buffers = ZeroedBuffers()
    buffers.take("counts", COUNTS, CPU)[2] = 1
    buffers.take("others", COUNTS, CPU)
    assert buffers.not_zero() == ["counts"]
    buffers.clear()
    assert buffers.not_zero() == []


def test_a_launch_that_leaves_its_zeroed_workspace_at_zero_passes_every_time(tmp_path: Path) -> None:
    variant = counting(tmp_path)
    case = variant.contract.case({"T": 3, "I": 5, "activation": "float32", "layout": "contiguous", "values": "tiny"}, 0)
    config = variant.default_config("interpreter")
    assert [check_case(variant, case, config).status for _ in range(3)] == ["ok"] * 3


def test_a_launch_that_leaves_a_count_behind_is_wrong_and_spoils_no_later_check(tmp_path: Path) -> None:
    variant = counting(tmp_path, ("tl.store(count_ptr, 0)", "tl.store(count_ptr, 1)"))
    case = variant.contract.case({"T": 3, "I": 5, "activation": "float32", "layout": "contiguous", "values": "tiny"}, 0)
    result = check_case(variant, case, variant.default_config("interpreter"))
    assert (result.status, "at zero: count" in result.reason) == ("wrong", True)
    assert variant.zeroed.not_zero() == []


def test_a_launch_that_raises_half_way_leaves_zeros(tmp_path: Path) -> None:
    variant = counting(tmp_path, ("tl.exp(-gate)", "tl.no_such_function(-gate)"))
    with pytest.raises(InterpreterError):
        variant(torch.ones(3, 10))
    assert variant.zeroed.not_zero() == []


def test_a_buffer_that_inference_made_is_cleared_outside_of_it() -> None:
    buffers = ZeroedBuffers()
    with torch.inference_mode():
        counts = buffers.take("counts", COUNTS, CPU)
        counts.fill_(3)
    buffers.clear()
    assert not counts.any()
