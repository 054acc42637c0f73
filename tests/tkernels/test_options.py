"""An option added to an op breaks no variant: one that does not take it refuses it by name, and runs on without it."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tkernels
from tests.tkernels.outside import write_variant
from tkernels import OPS, ContractError, Kernel, SelectionError, UnsupportedError, Variant, VariantError, select
from tkernels.buckets import bucket
from tkernels.contract import Choice, Contract, Output, Scalar
from tkernels.device import INTERPRETER
from tkernels.tuning import NEAREST
from tkernels.verification.check import check_case

PACKAGE = Path(tkernels.__file__).parent

ADDED = (  # paged_decode's contract gains a factor of its logits; whatever it does not say here stays as it is
    ("Output, Tensor\n", "Output, Scalar, Tensor\n"),
    ("    return_lse: bool = False,\n) -> Any:\n    \"\"\"softmax",
     "    return_lse: bool = False,\n    boost: float | None = None,\n) -> Any:\n    \"\"\"softmax"),
    ("        weights, lse[sequence] = softmax_and_lse(",
     "        if boost is not None:\n            logits = boost * logits\n"
     "        weights, lse[sequence] = softmax_and_lse("),
    ("        **OPTION_ARGUMENTS,\n",
     '        **OPTION_ARGUMENTS,\n        "boost": Scalar(float, optional=True, low=0, axis=True),\n'),
    ("        *OPTION_AXES,\n", '        *OPTION_AXES,\n        Int("boost", 0, 1000, (0, 30), "0 is off"),\n'),
    ('"return_lse": axes["return_lse"]}',
     '"return_lse": axes["return_lse"], "boost": float(axes["boost"]) or None}'),
    ('"v_scale": scaled}', '"v_scale": scaled, "boost": 0}'),
)  # fmt: skip

BOOSTED = """
from tkernels import OPS, Variant


def boosted(q, k_cache, v_cache, block_tables, context_lens, scale, *, max_context_len=None, window=None, k_scale=None,
           v_scale=None, soft_cap=None, sinks=None, return_lse=False, boost=None):
    contract = OPS["paged_decode"].contract
    function, more = (contract.baseline, {}) if boost is None else (contract.reference, {"boost": boost})
    return function(
        q, k_cache, v_cache, block_tables, context_lens, scale, max_context_len=max_context_len, window=window,
        k_scale=k_scale, v_scale=v_scale, soft_cap=soft_cap, sinks=sinks, return_lse=return_lse, **more,
    )


VARIANT = Variant(wins="never", function=boosted, deterministic=True, batch_invariant=True)
"""

SCRATCH = """
import json, sys
import torch
import tkernels
from tkernels.verification.check import check_case, drawn_results
from tkernels.verification.sanitizers.base import sanitized
from tkernels.verification.sanitizers.suite import SANITIZERS

mine, boosted = sys.argv[1:]
ops = tkernels.OPS.with_variants_from(mine).with_variants_from(boosted)
decode = ops["paged_decode"]
told = {"package": tkernels.__file__, "variants": list(decode.variants), "calls": {}, "selects": {}, "checks": {}}
told["ops"] = {name: list(op.variants) for name, op in ops.items()}
held = {"D": 16, "Dv": 16, "activation": "float32", "kv": "float32", "values": "ordinary"}
point = decode.contract.draw_axes(lambda name, candidates: candidates[0], held)
inputs = decode.contract.case({**point, "boost": 0}, 3).inputs
old = {name: value for name, value in inputs.items() if name != "boost"}
used = ("S", "Hkv", "Hq", "D", "Dv", "kv", "window", "k_scale", "v_scale", "return_lse")
model = {name: point[name] for name in used}


def said(call):
    try:
        return call()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def chosen(name, axes):
    axes = {"paged_decode": {**model, **axes}}
    return tkernels.select({"paged_decode": name}, device="cpu", dtype=torch.float32, axes=axes, ops=ops).arm


for name, variant in decode.variants.items():
    plain = variant(**old)
    same = torch.equal(plain, variant(**old, boost=None))
    told["calls"][name] = [same, said(lambda: variant(**old, boost=30.0).shape == plain.shape)]
    told["selects"][name] = [said(lambda: chosen(name, axes)) for axes in ({}, {"boost": 0}, {"boost": (0, 30)})]
    told["checks"][name] = sorted({result.status for result in drawn_results(variant, 4, fixed={"boost": 0})})
boosted_case = decode.contract.case({**point, "boost": 30}, 3)
told["boosted"] = check_case(decode.variants["boosted"], boosted_case).reason
told["unsupported"] = str(check_case(decode.variants["mine"], boosted_case))
told["findings"] = [str(found) for sanitizer in SANITIZERS.values()
                    for found in sanitized(sanitizer, decode.variants["mine"], 1) if found is not None]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a copy of the package says whose paged_decode gained an option after `mine` and before `boosted`."""
    root = tmp_path_factory.mktemp("scratch")
    shutil.copytree(PACKAGE, root / "tkernels", ignore=shutil.ignore_patterns("__pycache__"))
    contract = root / "tkernels" / "ops" / "paged_decode" / "contract.py"
    source = contract.read_text()
    for before, after in ADDED:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    contract.write_text(source)
    one_pass = (PACKAGE / "ops" / "paged_decode" / "one_pass.py").read_text()
    for folder, name, text in (
        ("before", "mine", one_pass.replace("paged_decode_one_pass", "paged_decode_mine")),
        ("after", "boosted", BOOSTED),
    ):
        (root / folder / "paged_decode").mkdir(parents=True)
        (root / folder / "paged_decode" / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", SCRATCH, str(root / "before"), str(root / "after")],
        cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["package"].startswith(str(root))
    return told


OLD = ["torch", "last_arriver", "one_pass", "split_kv", "mine"]


def test_every_variant_joins_an_op_that_has_gained_an_option(scratch: dict[str, Any]) -> None:
    assert set(scratch["variants"]) == {*OLD, "boosted"}
    ours = {name: list(op.variants) for name, op in OPS.items()}
    assert {**scratch["ops"], "paged_decode": ours["paged_decode"]} == ours


@pytest.mark.parametrize("name", OLD)
def test_a_variant_written_before_runs_as_it_did_and_refuses_the_option_by_name(
    scratch: dict[str, Any], name: str
) -> None:
    same, refusal = scratch["calls"][name]
    assert same
    message = f"variant '{name}' does not support this call: {name} does not take boost"
    assert refusal == f"UnsupportedError: paged_decode: {message}"
    assert scratch["checks"][name] == ["ok"]


@pytest.mark.parametrize("name", OLD)
def test_select_refuses_the_option_where_the_axes_set_it(scratch: dict[str, Any], name: str) -> None:
    unnamed, off, on = scratch["selects"][name]
    assert unnamed == off == {"paged_decode": name}
    assert on.startswith("SelectionError: kernels.paged_decode")
    assert f"{name} does not take boost" in on


def test_a_variant_that_takes_the_option_has_it(scratch: dict[str, Any]) -> None:
    assert scratch["calls"]["boosted"] == [True, True]
    assert scratch["selects"]["boosted"] == [{"paged_decode": "boosted"}] * 3
    assert scratch["checks"]["boosted"] == ["ok"]
    nothing = "nothing measures the natural error: paged_decode's baseline does not take boost"
    assert scratch["boosted"] == nothing


def test_checks_and_sanitizers_pass_over_the_option(scratch: dict[str, Any]) -> None:
    assert "paged_decode.mine: unsupported: mine does not take boost" in scratch["unsupported"]
    assert scratch["findings"] == []


def silu_times(gate_up: torch.Tensor, *, limit: float | None = None, total: bool = False) -> Any:
    """swiglu with two options more: an upper bound that no axis shows, and an output that only an option asks for."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.nn.functional.silu(gate) * up
    out = out if limit is None else out.clamp(max=limit)
    return (out, out.sum(-1)) if total else out


def grown_swiglu() -> Contract:
    """swiglu's contract with `limit`, which binds no axis, and `total`, without which there is no output `sums`."""
    contract = OPS["swiglu"].contract
    outputs = {**contract.outputs, "sums": Output("T", "activation", when="total")}
    more = {"limit": Scalar(float, optional=True), "total": Scalar(bool, axis=True)}
    return replace(
        contract, reference=silu_times, baseline=silu_times, outputs=outputs,
        arguments={**contract.arguments, **more}, axes=(*contract.axes, Choice("total", (False, True))),
        make_inputs=lambda *given: {**contract.make_inputs(*given), "limit": None, "total": bool(given[0]["total"])},
    )  # fmt: skip


def joined(folder: Path, *changes: tuple[str, str]) -> Kernel:
    variant = OPS.with_variants_from(write_variant(folder, *changes))["swiglu"].variants["doubled"]
    return Kernel(replace(variant).joined(grown_swiglu(), "doubled", variant.file, variant.module), NEAREST, {})


def test_an_option_without_an_axis_and_the_output_of_one_may_be_left_out(tmp_path: Path) -> None:
    kernel, x = joined(tmp_path), torch.randn(3, 8)
    assert kernel.variant.left_out == ("limit", "total")
    plain = kernel(x)
    assert torch.equal(plain, kernel(x, limit=None, total=False))
    for name, value in {"limit": 0.5, "total": True}.items():
        with pytest.raises(UnsupportedError, match=f"doubled does not take {name}$"):
            kernel(x, **{name: value})
    with pytest.raises(UnsupportedError, match="does not take limit, total$"):
        kernel(x, limit=0.0, total=True)
    statuses = [
        check_case(kernel.variant, case).status
        for total in (False, True)
        for case in [grown_swiglu().case({"T": 2, "I": 8, "activation": "float32", "values": "ordinary",
                                          "layout": "contiguous", "total": total}, 0)]
    ]  # fmt: skip
    assert statuses == ["ok", "unsupported"]


def test_tuned_configs_are_found_as_before_the_option(tmp_path: Path) -> None:
    """A left-out option never decides a launch, so its axis is no part of the bucket; one that is taken may be."""
    kernel = joined(tmp_path)
    axes = {"T": 2, "I": 8, "activation": "float32"}
    assert bucket(kernel.variant, {**axes, "total": 0}) == bucket(OPS["swiglu"].variants["fused"], axes)
    assert kernel.config({**axes, "total": 0}, torch.device("cpu")) == kernel.variant.default_config(INTERPRETER.arch)


def test_a_parameter_that_is_no_option_cannot_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(VariantError, match=r"parameters \['run', 'out'\] differ from the reference's.*'gate_up'"):
        joined(tmp_path, ("out: torch.Tensor, gate_up: torch.Tensor)", "out: torch.Tensor)"))


def test_a_misspelt_option_lists_what_there_is() -> None:
    def misspelt(gate_up: torch.Tensor, *, limits: float | None = None) -> torch.Tensor:
        return gate_up

    variant = Variant(wins="never", function=misspelt, deterministic=True, batch_invariant=True)
    with pytest.raises(VariantError, match="'limit', 'total'.*, of which it may leave out limit, total"):
        variant.joined(grown_swiglu(), "misspelt", Path(__file__), None)


def test_a_default_that_its_own_rule_refuses_is_an_error_of_the_contract() -> None:
    def broken(gate_up: torch.Tensor, *, limit: float = -1.0) -> torch.Tensor:
        return gate_up

    contract = OPS["swiglu"].contract
    arguments = {**contract.arguments, "limit": Scalar(float, low=0)}
    with pytest.raises(ContractError, match=r"swiglu: argument 'limit' must be at least 0, got -1.0"):
        replace(contract, reference=broken, baseline=broken, arguments=arguments)


PART = """
from tkernels import OPS, Variant


def kept(k, v, k_cache, v_cache, slots{options}):
    return OPS["kv_scatter"].contract.baseline(k, v, k_cache, v_cache, slots{passed})


VARIANT = Variant(wins="never", function=kept, deterministic=True, batch_invariant=True)
"""


def scatter_inputs(k_scale: bool) -> dict[str, Any]:
    contract = OPS["qk_norm_rope_scatter"].contract
    axes = contract.draw_axes(
        lambda name, candidates: candidates[0], {"k_scale": k_scale, "v_scale": False, "activation": "float32"}
    )
    return contract.case(axes, 0).inputs


def test_a_part_that_does_not_take_what_its_fusion_sets_is_the_reason(tmp_path: Path) -> None:
    (tmp_path / "kv_scatter").mkdir()
    file = tmp_path / "kv_scatter" / "kept.py"
    file.write_text(PART.format(options=", *, v_scale=None", passed=", v_scale=v_scale"))
    ops = OPS.with_variants_from(tmp_path)
    choices = {"qk_norm_rope_scatter": "composed", "kv_scatter": "kept"}

    def chosen(k_scale: bool | tuple[bool, bool]) -> Any:
        inputs = scatter_inputs(bool(k_scale))
        axes, _ = OPS["qk_norm_rope_scatter"].contract.bind_axes(inputs)
        sizes = {"qk_norm_rope_scatter": {**axes, "k_scale": k_scale}}
        return select(choices, device="cpu", dtype=torch.float32, axes=sizes, ops=ops)

    kernels = chosen(False)
    kernels.qk_norm_rope_scatter(**scatter_inputs(False))
    with pytest.raises(UnsupportedError, match=r"its part kv_scatter.kept: kept does not take k_scale$"):
        kernels.qk_norm_rope_scatter(**scatter_inputs(True))
    with pytest.raises(SelectionError, match=r"kernels.kv_scatter: variant 'kept' .*: kept does not take k_scale$"):
        chosen((False, True))


def test_a_composed_fusion_refuses_what_it_does_not_take_itself(tmp_path: Path) -> None:
    source = (PACKAGE / "ops" / "qk_norm_rope_scatter" / "composed.py").read_text()
    for line in ("    interleaved: bool = False,\n", ", interleaved=interleaved"):
        assert line in source
        source = source.replace(line, "")
    (tmp_path / "qk_norm_rope_scatter").mkdir()
    (tmp_path / "qk_norm_rope_scatter" / "plain.py").write_text(source)
    ops = OPS.with_variants_from(tmp_path)
    inputs = {**scatter_inputs(False), "interleaved": False}
    axes, _ = OPS["qk_norm_rope_scatter"].contract.bind_axes(inputs)
    choices = {"qk_norm_rope_scatter": "plain"}
    kernels = select(choices, device="cpu", dtype=torch.float32, axes={"qk_norm_rope_scatter": axes}, ops=ops)
    kernels.qk_norm_rope_scatter(**inputs)
    message = "plain does not take interleaved$"
    with pytest.raises(UnsupportedError, match=message):
        kernels.qk_norm_rope_scatter(**{**inputs, "interleaved": True})
    ranges = {"qk_norm_rope_scatter": {**axes, "interleaved": True}}
    with pytest.raises(SelectionError, match=message):
        select(choices, device="cpu", dtype=torch.float32, axes=ranges, ops=ops)
