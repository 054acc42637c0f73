"""`tk ops OP`: all that the author of a variant has to know, read off the contract and the variants."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from experiments.cli import app
from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.quantized.weight import QuantizedWeight


def tk(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.parametrize("op", ["step_inputs", "paged_decode", "qk_norm_rope_scatter"])
def test_the_page_says_all_that_the_contract_says(op: str) -> None:
    contract = OPS[op].contract
    page = json.loads(tk("ops", op, "--json").stdout)
    assert page["definition"] == inspect.getdoc(contract.reference)
    assert [axis["name"] for axis in page["axes"]] == list(contract.axis_by_name)
    assert page["rules"] == [str(rule) for rule in contract.constraints]
    assert set(page["points"]) == set(contract.benchmarks)
    assert (page["writes"], page["consumes"]) == (list(contract.writes), list(contract.consumes))
    assert set(page["options"]) == set(contract.options)
    assert [row["variant"] for row in page["variants"]] == list(OPS[op].variants)
    own = next(one for one in OPS[op].variants.values() if one.launch is not None and not one.left_out)
    launch = inspect.signature(own.launch)  # type: ignore[arg-type]
    taken = page["launcher"].removeprefix("launch(").rpartition(")")[0].split(", ")
    assert [one.partition(":")[0] for one in taken if one != "*"] == list(launch.parameters)


def test_people_read_what_a_variant_of_a_weight_has_to_know(tmp_path: Path) -> None:
    shown = tk("ops", "dequant_gemm").stdout
    words = " ".join(shown.split())
    for said in (
        "out[m, n] = sum over k of x[m, k] * W[n, k], plus bias[n].",
        "run: tkernels.launch.Run,",
        "bias [N] activation, or None",
        "(K + padding) % group_size == 0",
        "`prepare=` of a declaration gets this and returns the weight that its launcher is given, once, at load.",
        "the first place in the lowest bits",
        "M=1,N=6144,K=2560,g=128;",
        "gemv (triton, deterministic, batch-invariant)",
        "needs: it takes one token at a time",
        "tk new dequant_gemm NAME --in FOLDER",
    ):
        assert said in words, said
    assert all(axis in words for axis in OPS["dequant_gemm"].contract.axis_by_name)
    assert " ".join(str(inspect.getdoc(QuantizedWeight)).split()) in words


def test_outside_variants_are_on_it_the_broken_with_their_reason(tmp_path: Path) -> None:
    write_variant(tmp_path)
    write_variant(tmp_path, ("VARIANT =", "raise ValueError('mine')\nVARIANT ="), name="broken")
    page = json.loads(tk("ops", "swiglu", "--json", "--variants-from", tmp_path).stdout)
    rows = {row["variant"]: row for row in page["variants"]}
    assert rows["doubled"]["key"] == ["I"]
    assert "cannot be imported: ValueError: mine" in rows["broken"]["reason"]
    shown = " ".join(tk("ops", "swiglu", "--variants-from", tmp_path).stdout.split())
    assert "broken.py (unavailable)" in shown
    assert "ValueError: mine" in shown


def test_a_broken_file_with_the_default_variants_name_is_not_the_default(tmp_path: Path) -> None:
    write_variant(tmp_path, ("swiglu_doubled", "swiglu_fused"), name="fused")
    shown = " ".join(tk("ops", "swiglu", "--variants-from", tmp_path).stdout.split())
    assert shown.count("fused (triton, the default on CUDA") == shown.count("the default on CUDA") == 1
    assert "fused.py (unavailable)" in shown


def test_an_unknown_op_is_refused_with_the_nearest() -> None:
    refused = tk("ops", "dequant_gem")
    assert refused.exit_code == 2
    assert "did you mean 'dequant_gemm'?" in refused.stderr
