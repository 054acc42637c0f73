"""A kernel is compiled once for every batch: what says how many tokens or sequences there are does not specialize it.

Triton compiles a kernel again for an integer that is 1 and for one that is a multiple of 16: seconds, in the middle of
a served step. Counted are the keys under which its JIT keeps what it compiled; nothing is compiled here, and tensors
have no values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

from tests.tkernels.stub_driver import compiling, jit_function
from tkernels import OPS, Config, Run
from tkernels.contract import ContractError, Int, Value
from tkernels.device import TARGETS, DeviceFacts
from tkernels.launch import jit_door
from tkernels.variant import Variant
from tkernels.verification.inspection.points import Point, point

DEVICES = (TARGETS["sm_90"], TARGETS["sm_100"])
META = torch.device("meta")
TRITON = [(op.name, v.name) for op in OPS.values() for v in op.variants.values() if v.launch is not None]

SIZES: Mapping[str, tuple[int, ...]] = {
    "T": (1, 2, 16, 17),
    "M": (1, 2, 16, 17),
    "B": (1, 2, 16),
    "N": (32, 128),  # pages of a table: 512 and 2048 keys, which are read in one part and in more
    "pairs": (1, 2, 16, 17),
    "R": (1, 16),
    "G": (1, 2, 16),
    "shared": (0, 16),
}
"""Axes of a batch -> sizes of it."""

SMALL: Mapping[str, Value] = {
    "H": 512, "I": 512, "K": 512, "N": 256, "Hq": 4, "Hkv": 1, "D": 64, "Dv": 64, "R": 64, "L": 64, "S": 16,
    "P": 2048, "lengths": "full", "bound": "none",
}  # fmt: skip
"""What does not change from batch to batch, where the op has it: multiples of 16, as models have."""

WIDTHS: Mapping[str, int] = {"dequant_gemm_gemv": 2, "dequant_gemm_split_k": 2}
"""Kernels whose tiles are as wide as the batch -> the widths of these batches: 1 and 8 tokens, 16 and 32. Each is that
of a batch of which an engine records a graph before it serves.
"""

WEIGHTS: tuple[Mapping[str, Value], ...] = (
    {},
    {"coding": "lookup", "symmetric": False, "group_size": 512},
    {"K": 8, "E": 128},  # a token's experts, of all
    {"K": 8, "E": 128, "bits": 4, "group_size": 128, "gate_up_group_size": 128, "down_group_size": 128},
    {
        "K": 8, "E": 128, "bits": 8, "coding": "e4m3", "group_size": 128, "gate_up_group_size": 128,
        "down_group_size": 128,
    },
)  # fmt: skip
"""What else is tried where a variant does not take the first."""


def supported_point(variant: Variant, batch: Mapping[str, Value], facts: DeviceFacts) -> Point | None:
    """A call of this batch; None where there is none that the variant takes, as of more sequences than tokens."""
    known = variant.contract.axis_by_name
    for weight in WEIGHTS:
        held = {axis: value for axis, value in {**SMALL, **weight, **batch}.items() if axis in known}
        with suppress(ContractError):
            here = point(variant, "engine", facts, held)
            if here is not None and here.reason is None:
                return here
    return None


@pytest.mark.parametrize(("op", "name"), TRITON)
def test_a_kernel_is_compiled_once_for_every_batch(op: str, name: str) -> None:
    variant, num_calls = OPS[op].variants[name], 0
    axes = [axis.name for axis in variant.contract.axes if isinstance(axis, Int) and axis.batch]
    launched: dict[tuple[str, Config], Any] = defaultdict(set)

    def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        jit_door(kernel, grid, arguments, config)
        launched[kernel.__name__, config].add(kernel)

    with compiling(), mock.patch("tkernels.variant.unavailable_reason", return_value=None):
        batches = [dict(zip(axes, sizes, strict=True)) for sizes in product(*(SIZES[axis] for axis in axes))]
        facts = next(one for one in DEVICES if any(supported_point(variant, batch, one) for batch in batches))
        for batch in batches:
            here = supported_point(variant, batch, facts)
            if here is None:
                continue
            config = variant.default_config(facts.arch)
            buffers = variant.workspace(here.axes, config, facts)
            workspace = {key: torch.empty(one.shape, dtype=one.dtype, device=META) for key, one in buffers.items()}
            outputs = variant.contract.allocate_outputs(here.axes, here.arguments, META)
            variant.run_launcher(Run(facts, here.axes, config, workspace, door), outputs, here.arguments)
            num_calls += 1
        kernels = {kernel for found in launched.values() for kernel in found}
        keys = {one.__name__: len(jit_function(one).device_caches[0][0]) for one in kernels}
    assert num_calls >= (1 if name in ("gemv", "lookup_gemv") else 3)
    configs = {kernel: WIDTHS.get(kernel, 1) * sum(1 for named, _ in launched if named == kernel) for kernel in keys}
    assert keys == configs
