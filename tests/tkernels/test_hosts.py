"""What launchers decide, on every architecture, is what the table says: a change of it is seen, and written down."""

import pytest

from tkernels import OPS
from tkernels.variant import Variant
from tkernels.verification.inspection import hosts

LAUNCHING = [one for op in OPS.values() for one in op.variants.values() if one.launch is not None]
TABLE = hosts.read()
SLOW = "paged_decode"
"""Its benchmark points have tables of many thousands of pages, which are drawn."""


@pytest.mark.parametrize(
    "variant",
    [pytest.param(one, marks=pytest.mark.slow if one.contract.name == SLOW else ()) for one in LAUNCHING],
    ids=lambda one: f"{one.contract.name}-{one.name}",
)
def test_what_a_launcher_decides_is_in_the_table(variant: Variant) -> None:
    assert f"{variant.contract.name}.{variant.name}" in TABLE
    assert hosts.difference(variant, TABLE) is None, "python -m tkernels.verification.inspection.hosts writes the table"


def test_the_table_says_what_each_variant_refuses() -> None:
    assert TABLE["rms_norm.row_per_program"]["refuses"] == {"H > 16384": "all"}
    assert TABLE["dequant_gemm.lookup_gemv"]["refuses"]["M > 1"] == "all"
    assert "sm_80" in TABLE["paged_prefill.tensor_descriptor"]["refuses"]["as it is"]
