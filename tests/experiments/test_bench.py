"""`tk bench`, and that other projects' kernels stand beside ours without being installed."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.cli import app
from experiments.peers import with_peers
from tests.tkernels.outside import write_variant
from tkernels import OPS, UnsupportedError
from tkernels.contract import Axes
from tkernels.device import INTERPRETER, TARGETS

RUNNER = CliRunner()


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    done = RUNNER.invoke(app, ["bench", "--json", *arguments])
    assert done.exit_code == 0, done.output
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_torch_is_timed_and_triton_is_not(tmp_path: Path) -> None:
    folder = str(write_variant(tmp_path))
    rows = {r["variant"]: r for r in rows_of("--op", "swiglu", "--axes", "T=4,I=64", "--variants-from", folder)}
    assert rows["torch"]["status"] == "ok"
    assert rows["torch"]["median_us"] > 0
    assert rows["torch"]["axes"]["activation"] == "bfloat16"  # what is open is a realistic point's
    for name in ("fused", "doubled"):
        assert rows[name]["status"] == "not measured"
        assert rows[name]["median_us"] is None
        assert rows[name]["config_source"] == "default"
    assert rows["liger"]["reason"] in ("liger_kernel is not installed", "it is for NVIDIA GPUs")


@pytest.mark.parametrize(
    ("op", "held"), [("moe_mlp", "T=4,K=2,E=8,H=64,I=32"), ("grouped_matmul", "T=4,K=2,E=8,N=64,C=32")]
)
def test_experts_that_are_not_said_to_be_quantized_are_dense(op: str, held: str) -> None:
    (row,) = rows_of("--op", op, "--variant", "torch", "--axes", held)
    assert row["axes"]["bits"] == 0
    assert row["axes"]["coding"] == "uniform"
    assert not row["axes"].get("limit")
    assert not any(value for axis, value in row["axes"].items() if axis.endswith("bias"))
    (coded,) = rows_of("--op", op, "--variant", "torch", "--axes", f"{held},bits=4")
    assert all(value for axis, value in coded["axes"].items() if axis.endswith("group_size"))


def test_what_filled_open_axes_is_said_and_is_small_on_a_cpu() -> None:
    done = RUNNER.invoke(app, ["bench", "--op", "swiglu", "--variant", "torch", "--axes", "T=4"])
    said = " ".join(done.stdout.split())
    assert "The other axes are I=1024, activation=bfloat16, limit=0, layout=" in said
    everything = "T=4,I=64,activation=bfloat16,limit=0,layout=contiguous,values=ordinary"
    done = RUNNER.invoke(app, ["bench", "--op", "swiglu", "--variant", "torch", "--axes", everything])
    assert "other axes" not in done.stdout


def test_people_read_that_an_interpreted_time_means_nothing() -> None:
    done = RUNNER.invoke(app, ["bench", "--op", "swiglu", "--axes", "T=4,I=64"])
    assert "means nothing" in " ".join(done.stdout.split())
    assert "swiglu.fused" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--axes", "T=4"], "name it with --op"),
        (["--op", "swiglu", "--axes", "X=4"], "no axis 'X'"),
        (["--op", "swiglu", "--launch", "grap"], "did you mean 'graph'"),
        (["--op", "swiglu", "--l2", "hot"], "there is cold, warm"),
        (["--op", "swigl"], "did you mean 'swiglu'"),
    ],
)
def test_what_cannot_be_timed_is_said(arguments: list[str], said: str) -> None:
    done = RUNNER.invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert said in done.stderr


PEERS = [
    (op.name, name)
    for op in with_peers(OPS).values()
    for name, variant in op.variants.items()
    if variant.kind == "library" and name not in OPS[op.name].variants and name != "torch_compile"
]  # torch.compile is no other project, and runs here


def test_the_peers_are_there() -> None:
    assert {name for _, name in PEERS} >= {"liger", "flashinfer", "gemlite", "torch_int4", "cublas_16bit", "sdpa_flash"}


@pytest.mark.parametrize(("op", "peer"), PEERS)
def test_a_peer_is_unavailable_with_a_reason(op: str, peer: str) -> None:
    variant = with_peers(OPS)[op].variants[peer]
    contract = variant.contract
    axes: Axes = dict(next(iter(contract.benchmarks.values())))
    assert variant.supports(axes, INTERPRETER) is not None
    assert variant.supports({**axes, "activation": "float32"}, TARGETS["sm_90"]) is not None
    role = "activation" if "activation" in contract.axis_by_name else "out"
    point = contract.draw_axes(lambda name, candidates: candidates[-1], {role: "bfloat16"})
    inputs = contract.case(point, 0).inputs
    with pytest.raises(UnsupportedError, match="does not support this call"):
        variant(**inputs)
