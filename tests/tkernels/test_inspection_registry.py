"""The table of expected rows has every built-in variant; `tk inspect` compiles them all and compares."""

import pytest
import triton

from tkernels import OPS
from tkernels.device import TARGETS
from tkernels.verification.inspection import expected

TRITON = {(op.name, v.name) for op in OPS.values() for v in op.variants.values() if v.kind == "triton"}
TABLE = expected.read(expected.table_path(triton.__version__))


@pytest.mark.skipif(not TABLE, reason=f"no table for Triton {triton.__version__}")
def test_the_expected_table_covers_every_variant_and_architecture() -> None:
    known = {(row.op, row.variant, row.arch) for row in TABLE.values()}
    wanted = {(*names, arch) for names in TRITON for arch in TARGETS}
    assert known == wanted, "tk inspect --update-expected [--op OP] writes what is missing"
