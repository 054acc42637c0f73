"""Every built-in variant, compiled for every architecture: the gates hold, and nothing is worse than the table says."""

import pytest
import triton

from tkernels import OPS
from tkernels.device import TARGETS
from tkernels.verification.ahead_of_time import compile_for
from tkernels.verification.inspection import expected, gates
from tkernels.verification.inspection.rows import CompiledKernel

TRITON = {(op.name, v.name) for op in OPS.values() for v in op.variants.values() if v.kind == "triton"}
TABLE = expected.read(expected.table_path(triton.__version__))


def worse(rows: list[CompiledKernel]) -> list[str]:
    keyed = {expected.key(row): row for row in rows}
    both = [(TABLE[key], row) for key, row in keyed.items() if key in TABLE]
    return [f"{now.name}: {'; '.join(found)}" for was, now in both if (found := expected.regressions(was, now))]


# One of each family that is compiled in a way of its own: mma, wgmma and TMA, AMD's. An architecture takes half a
# minute; all of them, at all points, are a command of their own in .ci/run: `tk inspect`.
# The unaligned point for two architectures: NVIDIA's with the most shared memory and AMD's take different paths there.
# Of the weights that have points of their own, two.
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_every_default_config_passes_the_gates_and_is_no_worse_than_expected(arch: str) -> None:
    points = ("engine", "fp8", "unaligned") if arch in ("sm_90", "gfx942") else ("engine", "fp8", "fp32")
    own = ("bits3", "lookup4") if arch == "sm_90" else ()
    rows = compile_for([arch], [], points=(*points, *own))
    assert {(row.op, row.variant) for row in rows} == TRITON
    assert gates.failing(rows) == []
    assert worse(rows) == []


@pytest.mark.skipif(not TABLE, reason=f"no table for Triton {triton.__version__}: the gates alone are tested")
def test_the_expected_table_covers_every_variant_and_architecture() -> None:
    known = {(row.op, row.variant, row.arch) for row in TABLE.values()}
    wanted = {(*names, arch) for names in TRITON for arch in TARGETS}
    assert known == wanted, "tk inspect --update-expected [--op OP] writes what is missing"
