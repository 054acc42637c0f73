"""From names to callables: wrong choices fail here, with alternatives, before any weight is loaded."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.tkernels.outside import write_variant
from tkernels import OPS, SelectionError, VariantError, select

AXES = {"swiglu": {"T": (1, 64), "I": 32}, "rms_norm": {"T": (1, 64), "H": 64}}


def choose(choices: dict, **keywords: object):  # type: ignore[no-untyped-def,type-arg]
    return select(choices, **{"device": "cpu", "dtype": torch.float32, "axes": AXES, **keywords})


def test_default_is_torch_on_a_cpu_and_a_name_always_wins() -> None:
    assert choose({}).arm == {"rms_norm": "torch", "swiglu": "torch"}
    kernels = choose({"swiglu": "fused"})
    assert kernels.arm == {"rms_norm": "torch", "swiglu": "fused"}
    x = torch.randn(5, 64)
    torch.testing.assert_close(kernels.swiglu(x), choose({}).swiglu(x))


def test_on_cuda_a_fusion_is_one_launch_unless_a_part_of_it_is_named() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    fusion = OPS["qk_norm_rope_scatter"]
    assert (fusion.default_on(cuda), fusion.default_on(cuda, {"swiglu": "fused"})) == ("head_tile", "head_tile")
    assert fusion.default_on(cuda, {"kv_scatter": "torch"}) == fusion.default_on(cpu) == "composed"
    assert (OPS["gate_up_swiglu"].default_on(cuda), OPS["gate_up_swiglu"].default_on(cpu)) == (
        "paired_tiles",
        "composed",
    )


def test_pins_reach_the_launch_and_the_label(tmp_path: Path) -> None:
    changes = (
        ("FACTOR=1", 'FACTOR=run.config["FACTOR"]'),
        ("Config()}, configs=(Config(), Config(num_warps=8))", "Config(FACTOR=1)}, configs=(Config(FACTOR=1),)"),
    )
    ops = OPS.with_variants_from(write_variant(tmp_path, *changes))
    x = torch.randn(5, 64)
    plain = choose({"swiglu": "doubled"}, ops=ops)
    pinned = choose({"swiglu": {"doubled": {"FACTOR": 3}}}, ops=ops)
    torch.testing.assert_close(pinned.swiglu(x), 3 * plain.swiglu(x))
    assert pinned.arm["swiglu"] == "doubled[FACTOR=3]"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"swiglu": "fuse"}, "unknown swiglu variant 'fuse': there is .*did you mean 'fused'"),
        ({"swigl": "fused"}, "unknown op 'swigl'.*did you mean 'swiglu'"),
        ({"paged_decode": "torch"}, "this model does not use that op; it uses rms_norm, swiglu"),
        ({"swiglu": {"fused": {"BLOCK_Q": 4}}}, "config has no 'BLOCK_Q'; it has"),
        ({"swiglu": {"torch": {"BLOCK": 4}}}, "has no config to pin"),
        ({"swiglu": {"fused": {}, "torch": {}}}, "names one variant"),
    ],
)
def test_a_wrong_choice_is_refused_with_the_alternatives(choices: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(SelectionError, match=message):
        choose(choices)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"num_splits": 0}, "num_splits must be from 1 to 128, got 0"),
        ({"num_splits": 100_000}, "num_splits must be from 1 to 128, got 100000"),
        ({"BLOCK_N": 3}, "BLOCK_N must be from 16 to 256, got 3"),
        ({"BLOCK_N": 48}, "BLOCK_N must be a power of two, got 48"),
        ({"num_warps": 3}, "num_warps must be a power of two, got 3"),
        ({"num_warps": 64}, "num_warps must be at most 32, got 64"),
        ({"num_stages": 0}, "num_stages must be an integer of at least 1, got 0"),
    ],
)
def test_a_pin_outside_what_it_may_be_is_refused(pins: dict[str, int], message: str) -> None:
    axes = {"Hq": 4, "Hkv": 2, "D": 32, "Dv": 32, "S": 16, "window": 0}
    with pytest.raises(SelectionError, match=f"kernels.paged_decode.split_kv: .*{message}"):
        choose({"paged_decode": {"split_kv": pins}}, axes={"paged_decode": axes})


def test_a_variant_must_support_the_whole_range(tmp_path: Path) -> None:
    changes = (
        ("VARIANT =", 'def few(axes, device):\n    return "one row only" if axes["T"] > 1 else None\n\n\nVARIANT ='),
        ('wins="never"', 'wins="never", supports=few'),
    )
    ops = OPS.with_variants_from(write_variant(tmp_path, *changes))
    narrow = {**AXES, "swiglu": {"T": (0, 1), "I": 32}}
    assert choose({"swiglu": "doubled"}, ops=ops, axes=narrow).arm["swiglu"] == "doubled"
    with pytest.raises(SelectionError, match="'doubled' is unsupported here: one row only"):
        choose({"swiglu": "doubled"}, ops=ops)
    with pytest.raises(SelectionError, match="doubled is unavailable here: one row only"):
        choose({"swiglu": "dubled"}, ops=ops)


def test_float64_is_for_the_torch_variants_only() -> None:
    assert choose({}, dtype=torch.float64).arm["swiglu"] == "torch"
    with pytest.raises(SelectionError, match="accumulate in fp32"):
        choose({"swiglu": "fused"}, dtype=torch.float64)


def test_a_kernel_set_is_frozen_and_knows_only_its_ops() -> None:
    kernels = choose({})
    assert set(kernels) == {"swiglu", "rms_norm"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernels.swiglu = None  # type: ignore[misc]
    with pytest.raises(AttributeError):
        _ = kernels.paged_decode


MODEL = {
    "matmul": {"M": (1, 8), "N": (32, 96), "K": 64, "bias": (False, True)},
    "gate_up_swiglu": {"T": (1, 8), "H": 64, "I": 128},
}


def test_a_composed_fusion_calls_the_chosen_parts() -> None:
    kernels = choose({"swiglu": "fused", "matmul": {"persistent": {"BLOCK_N": 32}}}, axes=MODEL)
    assert kernels.arm == {
        "gate_up_swiglu": "composed", "matmul": "persistent[BLOCK_N=32]", "swiglu": "fused"
    }  # fmt: skip
    assert set(kernels) == set(MODEL)
    assert kernels.gate_up_swiglu.parts[0] is kernels.matmul  # one kernel, whoever calls it
    x, weight = torch.randn(3, 64), torch.randn(256, 64)
    exact = OPS["swiglu"].variants["fused"](OPS["matmul"].variants["persistent"](x, weight))
    torch.testing.assert_close(kernels.gate_up_swiglu(x, weight), exact, rtol=1e-4, atol=1e-4)
    plain = choose({}, axes=MODEL)
    assert plain.arm == {"gate_up_swiglu": "composed", "matmul": "torch", "swiglu": "torch"}
    assert torch.equal(plain.gate_up_swiglu(x, weight), OPS["gate_up_swiglu"].variants["composed"](x, weight))


def test_a_part_that_no_call_can_reach_is_not_shown_as_if_it_ran() -> None:
    assert choose({"gate_up_swiglu": "torch"}, axes=MODEL).arm == {"gate_up_swiglu": "torch", "matmul": "torch"}


def test_a_fusion_and_a_part_that_it_does_not_call_cannot_both_be_chosen() -> None:
    both = "kernels.gate_up_swiglu: 'torch' is chosen, which does not call its part swiglu, for which 'fused' is chosen"
    with pytest.raises(SelectionError, match=both):
        choose({"gate_up_swiglu": "torch", "swiglu": "fused"}, axes=MODEL)
    # The model calls matmul itself, whatever becomes of the fusion.
    kernels = choose({"gate_up_swiglu": "torch", "matmul": "persistent"}, axes=MODEL)
    assert kernels.arm == {"gate_up_swiglu": "torch", "matmul": "persistent"}
    with pytest.raises(SelectionError, match=r"it uses gate_up_swiglu, matmul, swiglu$"):
        choose({"paged_decode": "torch"}, axes=MODEL)


def test_a_part_must_support_what_the_fusion_calls_it_at(tmp_path: Path) -> None:
    changes = (
        (
            "VARIANT =",
            'def few(axes, device):\n    return "at most 100 wide" if axes["I"] > 100 else None\n\n\nVARIANT =',
        ),
        ('wins="never"', 'wins="never", supports=few'),
    )
    ops = OPS.with_variants_from(write_variant(tmp_path, *changes))
    with pytest.raises(
        SelectionError, match=r"kernels.swiglu: variant 'doubled' is unsupported here: at most 100 wide"
    ):
        choose({"swiglu": "doubled"}, ops=ops, axes=MODEL)
    narrow = {**MODEL, "gate_up_swiglu": {"T": (1, 8), "H": 64, "I": 100}}
    assert choose({"swiglu": "doubled"}, ops=ops, axes=narrow).arm["swiglu"] == "doubled"


COMPOSED = """
from tkernels import Variant


def composed(matmul, swiglu, x, weight):
    return swiglu(matmul(x, weight))


VARIANT = Variant(
    wins="never", parts=("matmul", "swiglu"), part_axes={"matmul": {"M": "T", "N": "2*I", "K": "H"}},
    function=composed, deterministic=True, batch_invariant=False,
)
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("(matmul, swiglu, x", "(swiglu, matmul, x", r"parameters \['swiglu', 'matmul', 'x', 'weight'\] differ"),
        ('"swiglu")', '"swigloo")', r"parameters .* differ|'swigloo' is not an op"),
        ('"M": "T"', '"T": "T"', r"part_axes names no axis of matmul: \['T'\]"),
        ('{"matmul": {', '{"rms_norm": {', "'rms_norm' is not an op that it could be composed of"),
    ],
)
def test_a_composition_that_breaks_a_rule_is_refused(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in COMPOSED
    (tmp_path / "gate_up_swiglu").mkdir()
    (tmp_path / "gate_up_swiglu" / "mine.py").write_text(COMPOSED.replace(before, after))
    with pytest.raises(VariantError, match=message):
        OPS.with_variants_from(tmp_path)


def test_an_op_that_is_called_in_several_ways_must_support_each() -> None:
    way = {"M": (1, 8), "N": 64, "K": 128, "padding": 0, "bits": 4, "group_size": 32, "coding": "uniform",
           "symmetric": False, "permuted": False, "sparse": False, "bias": False}  # fmt: skip
    lookup, sparse = {**way, "group_size": 128, "coding": "lookup"}, {**way, "sparse": True}
    choices = {"dequant_gemm": "dequantize_then_matmul"}
    assert choose(choices, axes={"dequant_gemm": way}).arm == choices
    assert choose(choices, axes={"dequant_gemm": (way, {**way, "K": 256})}).arm == choices
    unsupported = r"variant 'dequantize_then_matmul' is unsupported here: it adds outliers to .* rounded already"
    with pytest.raises(SelectionError, match=unsupported):
        choose(choices, axes={"dequant_gemm": (way, sparse)})
    # No range from one way to the other is meant: of 128 inputs there is no group of 256.
    assert choose({}, axes={"dequant_gemm": (lookup, {**lookup, "K": 256, "group_size": 256})}).arm["dequant_gemm"]
