"""Every op at its realistic points: variants and peers beside each other, each timed where it is right.

The samples are the project's own timer's, put in place of pytest-benchmark's: events on a GPU, where a host clock would
time launches. So its tables, JSON and `--benchmark-compare` all speak of the kernel. On a CPU the `torch` variants are
timed, at small sizes: an interpreted kernel's time means nothing, and there is none of it here.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from experiments.peers import slack_of, with_peers
from tests.conftest import DEVICE
from tkernels import OPS
from tkernels.contract import Value
from tkernels.device import device_facts
from tkernels.measurement import Method, benchmark_points, measure
from tkernels.variant import Variant

METHOD = Method("graph", "cold", 50) if DEVICE.type == "cuda" else Method(samples=10)


def subjects() -> list[Any]:
    """A parameter set for each op, point and variant that can be timed on this device."""
    found = []
    for op in with_peers(OPS).values():
        for point, axes in benchmark_points(op.contract, DEVICE, op.variants.values()).items():
            for variant in op.variants.values():
                if _can_be_timed(variant, axes):
                    dtype = str(axes.get("activation", ""))
                    found.append(pytest.param(variant, point, axes, id=f"{op.name}-{point}-{dtype}-{variant.name}"))
    return found


def _can_be_timed(variant: Variant, axes: Mapping[str, Value]) -> bool:
    # A GPU's point can be gigabytes, too much to make while tests are collected: there, `measure` says what is
    # unsupported. On a CPU there is nothing but `torch`.
    return DEVICE.type == "cuda" or variant.kind == "torch"


@pytest.mark.parametrize(("variant", "point", "axes"), subjects())
def test_variant(benchmark: Any, variant: Variant, point: str, axes: Mapping[str, Value]) -> None:
    dtype = str(axes.get("activation", ""))
    benchmark.group = f"{variant.contract.name} {point} {dtype}"
    if benchmark.disabled:  # a plain test run: the point can be made and computed
        case = variant.contract.case(axes, 0, DEVICE)
        benchmark(lambda: variant(**case.inputs))
        return
    settings = {"method": METHOD, "slack": slack_of(variant)}
    row = benchmark.pedantic(measure, (variant, point, axes, DEVICE), settings, rounds=1)
    if row.status == "unsupported":
        pytest.skip(row.reason)
    assert row.status == "ok", row.reason
    benchmark.stats.stats.data = [us / 1e6 for us in row.timing.samples_us]
    benchmark.extra_info.update(device=device_facts(DEVICE).name, **_extra(row.as_dict()))


def _extra(row: dict[str, Any]) -> dict[str, Any]:
    """What pytest-benchmark does not keep itself."""
    return {name: value for name, value in row.items() if name not in ("samples_us", "status", "reason")}


def test_a_cpu_has_no_roofline_and_says_why() -> None:
    variant = OPS["rms_norm"].variants["torch"]
    point, axes = next(iter(benchmark_points(variant.contract, torch.device("cpu")).items()))
    row = measure(variant, point, axes, torch.device("cpu"), method=Method(samples=2)).as_dict()
    assert row["bytes_moved"] == (2 * axes["T"] * axes["H"] + axes["H"]) * 2
    assert row["bytes_per_s"] == pytest.approx(row["bytes_moved"] / row["median_us"] * 1e6)
    assert row["roofline_fraction"] is None
    assert "CPU" in row["roofline_reason"]
