"""Every variant of every op against the float64 oracle. A new variant file is tested here with no new code.

Poisoned outputs, tails, unused pages and padding, the address check on every access and the int32-overflow check are
part of `check_case`; `tk check --examples N` runs the same with as many draws as asked. `pytest --device cuda` runs
them on a GPU as they are.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import tkernels
from tests.conftest import DEVICE
from tkernels.config import Config
from tkernels.contract import FLOATS, Axes, Case, Choose, Value
from tkernels.variant import Variant
from tkernels.verification import draws
from tkernels.verification.check import check_case

VARIANTS = [(op.name, name) for op in tkernels.OPS.values() for name in op.variants]


def draw(
    variant: Variant, choose: Choose, seed: int, fixed: Axes, device: torch.device
) -> tuple[Case, Config | None] | None:
    """`draws.draw` with an activation's dtype held; in an op without one it is the cache's, and integers have none."""
    roles = [role for role in ("activation", "kv") if role in variant.contract.axis_by_name]
    return draws.draw(variant, choose, seed, dict.fromkeys(roles[:1], fixed["activation"]), device)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("op", "variant"), VARIANTS)
def test_variant_is_right(op: str, variant: str, dtype: str) -> None:
    subject = tkernels.OPS[op].variants[variant]

    @settings(
        max_examples=6,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(data=st.data())
    def check_draw(data: st.DataObject) -> None:
        def choose(name: str, candidates: Sequence[Value]) -> Value:
            return data.draw(st.sampled_from(list(candidates)), label=name)

        seed = data.draw(st.integers(0, 2**31 - 1), label="seed")
        drawn = draw(subject, choose, seed, {"activation": dtype}, DEVICE)
        assume(drawn is not None)
        assert drawn is not None
        result = check_case(subject, *drawn)
        assert result.status == "ok", f"\n{result}"

    check_draw()


def test_every_ops_default_is_a_triton_variant_or_composed_of_such() -> None:
    for op in tkernels.OPS.values():
        default = op.variants[op.contract.default]
        parts = [part.variants[part.contract.default] for part in default.part_ops]
        assert all(variant.kind == "triton" for variant in parts or [default])
