"""Every variant is checked, and can be timed, at the sizes that it is for; a fault that begins there is found."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.contract import Axes, Int
from tkernels.variant import Variant, VariantError
from tkernels.verification.check import check_case
from tkernels.verification.covering import hidden_levels
from tkernels.verification.draws import CUT_SEED, FAR_SEED, drawn_cases, wide_cases
from tkernels.verification.sanitizers.base import sanitizer_cases
from tkernels.verification.sanitizers.suite import SANITIZERS
from tkernels.verification.size_limits import far_sizes, last_alike, last_sizes, sizes_to_reach

CPU = torch.device("cpu")
VARIANTS = [(op.name, v.name) for op in OPS.values() for v in op.variants.values() if v.kind != "torch"]


def parameters(op: str, name: str) -> Any:
    """Drawing weights of codes takes the most time."""
    return pytest.param(op, name, marks=[pytest.mark.slow] if op == "dequant_gemm" else [])


def is_inside(axes: Axes, variant: Variant) -> bool:
    return all(low <= int(axes[name]) <= high for name, (low, high) in variant.region.items())


@pytest.mark.parametrize(("op", "name"), [parameters(*one) for one in VARIANTS if OPS[one[0]].variants[one[1]].region])
def test_cases_and_benchmark_points_are_inside_the_region_that_a_variant_is_for(op: str, name: str) -> None:
    variant = OPS[op].variants[name]
    cases = [case for case, _ in (*drawn_cases(variant, 20), *wide_cases(variant))]
    assert any(is_inside(case.axes, variant) and not hidden_levels(case.contract, case.axes) for case in cases)
    assert any(is_inside(point, variant) for point in variant.contract.benchmarks.values())


@pytest.mark.parametrize(("op", "name"), [parameters(*names) for names in VARIANTS])
def test_cases_are_past_every_limit_of_the_other_variants_and_at_its_own(op: str, name: str) -> None:
    variant = OPS[op].variants[name]
    drawn = {axis: max(axis.draws) for axis in variant.contract.axes if isinstance(axis, Int)}
    own = last_sizes(variant, CPU)
    held = dict(sizes_to_reach(variant, CPU)[::-1])
    for axis, last in own.items():
        if drawn[axis] <= last <= 2**17:
            assert (axis.name, last) in sizes_to_reach(variant, CPU)
    for other in OPS[op].variants.values():
        for axis, last in last_sizes(other, CPU).items():
            if other.name != name and drawn[axis] <= last < min(own.get(axis, 2**17), 2**17):
                assert axis.name in held
                assert any(at == axis.name and size > last for at, size in sizes_to_reach(variant, CPU))
    if held:
        reached = [case.axes for case, _ in wide_cases(variant)]
        assert all(any(axes[axis] == size for axes in reached) for axis, size in sizes_to_reach(variant, CPU))


def planted(folder: Path, op: str, original: str, before: str, after: str) -> Variant:
    source = OPS[op].variants[original].file.read_text().replace(original, "planted")
    assert before in source
    (folder / op).mkdir()
    (folder / op / "planted.py").write_text(source.replace(before, after))
    return OPS.with_variants_from(folder)[op].variants["planted"]


FAULTS = {
    "rows_beyond_8192": ("rms_norm", "two_pass", "/ hidden +", "/ tl.minimum(hidden, 8192) +"),
    "its_own_widest_rows": ("rms_norm", "row_per_program", "/ hidden +", "/ tl.minimum(hidden, 12000) +"),
    "rows_as_wide_as_the_op_takes": ("rms_norm", "two_pass", "/ hidden +", "/ tl.minimum(hidden, 65000) +"),
    "the_last_element_of_a_widest_row": (
        "quantize_tokens",
        "row_per_program",
        "offs < inputs",
        "offs < (inputs & 32767)",
    ),
    "many_rows": ("rms_norm", "rows_per_program", "(rows < tokens)", "(rows < tl.minimum(tokens, 300))"),
    "many_tiles": ("swiglu", "grid_stride", "tiles=tiles,", "tiles=min(tiles, 250),"),
    "long_contexts": ("paged_decode", "one_pass", "    first = 0\n", "    first = tl.maximum(length - 4000, 0)\n"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_begins_where_a_variant_is_for_is_found(fault: str, tmp_path: Path) -> None:
    wrong = planted(tmp_path, *FAULTS[fault])
    known = {axis.name: max(axis.draws + axis.wide) for axis in wrong.contract.axes if isinstance(axis, Int)}
    large = [
        (case, config)
        for case, config in wide_cases(wrong)
        if case.axes.get("lengths") == "full" or any(case.axes[name] > most for name, most in known.items())
    ]
    assert "wrong" in {check_case(wrong, *drawn, offsets=False).status for drawn in large}


FAR_FAULTS = {
    "a grid of at most 1,024 rows": (
        "rms_norm",
        "row_per_program",
        'launch_rows(run, rms_norm_planted, pointers("out[t] x[t] weight", out, x, weight), x.shape, eps)',
        'launch_rows(run, rms_norm_planted, pointers("out[t] x[t] weight", out, x, weight), '
        "(min(x.shape[0], 1024), x.shape[1]), eps)",
    ),
    "a grid of at most 4,096 rows": (
        "rms_norm",
        "row_per_program",
        'launch_rows(run, rms_norm_planted, pointers("out[t] x[t] weight", out, x, weight), x.shape, eps)',
        'launch_rows(run, rms_norm_planted, pointers("out[t] x[t] weight", out, x, weight), '
        "(min(x.shape[0], 4096), x.shape[1]), eps)",
    ),
    "tiles of a loop that ends": ("swiglu", "grid_stride", "tiles=tiles,", "tiles=min(tiles, 1000),"),
    "heads wider than all that are drawn": (
        "kv_scatter",
        "token_per_program",
        "BLOCK_K=triton.next_power_of_2(head_dim_k)",
        "BLOCK_K=min(triton.next_power_of_2(head_dim_k), 128)",
    ),
    "columns of 16 bits": (
        "gelu",
        "tile_per_program",
        "tl.arange(0, BLOCK_I)\n",
        "tl.arange(0, BLOCK_I)\n    columns = columns.to(tl.int16).to(tl.int32)\n",
    ),
    "outputs of 16 bits": (
        "matmul_gelu",
        "tiled",
        "offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N",
        "offs_n = (tl.program_id(1) * BLOCK_N).to(tl.int16).to(tl.int64)",
    ),
    "a depth that ends": (
        "matmul_gelu",
        "tiled",
        "in range(0, inputs, BLOCK_K)",
        "in range(0, min(inputs, 8192), BLOCK_K)",
    ),
    "a depth that wraps": ("scaled_matmul", "tiled", "offs_k = start +", "offs_k = start % 8192 +"),
    "words of a depth that ends": (
        "dequant_gemm",
        "gemv",
        "tl.range(first, end, BLOCK_W",
        "tl.range(first, tl.minimum(end, 1024), BLOCK_W",
    ),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.slow if "words" in f or "4,096" in f else []) for f in FAR_FAULTS]
)
def test_a_fault_far_beyond_the_draws_is_found_in_a_variant_that_declares_no_region(fault: str, tmp_path: Path) -> None:
    wrong = planted(tmp_path, *FAR_FAULTS[fault])
    far = [drawn for drawn in wide_cases(wrong) if drawn[0].seed >= FAR_SEED]
    bad = [case.axes for case, config in far if check_case(wrong, case, config, offsets=False).status != "ok"]
    assert 1 <= len(bad) < len(far)


@pytest.mark.parametrize("op", OPS)
def test_sizes_far_beyond_the_draws_come_one_at_a_time_and_cost_little(op: str) -> None:
    contract = OPS[op].contract
    reached = set()
    for variant in OPS[op].variants.values():
        for case, _ in wide_cases(variant):
            if not FAR_SEED <= case.seed < CUT_SEED:
                continue
            large = [
                axis.name for axis in contract.axes if isinstance(axis, Int) and case.axes[axis.name] in far_sizes(axis)
            ]
            assert len(large) == 1
            assert case.flops < 10**6
            reached.update(large)
    assert reached, "no size of this op is ever large"


def test_a_fault_past_a_siblings_limit_is_found_in_a_variant_that_declares_no_region(tmp_path: Path) -> None:
    """The builtin row_per_program refuses rows wider than 16,384; an outside variant takes them, and is wrong there."""
    wrong = planted(tmp_path, "layer_norm", "row_per_program", "    return too_wide", "    return None  # ")
    assert wrong.region == {}
    assert last_sizes(wrong, CPU) == {}
    assert ("H", 16385) in sizes_to_reach(wrong, CPU)


def test_the_last_size_of_a_variant_that_takes_whole_groups_alone_is_reached_and_so_is_what_its_siblings_refuse(
    tmp_path: Path,
) -> None:
    """Half of a search's questions would meet no multiple of 8, and end thousands short of the limit."""
    source = OPS["layer_norm"].variants["row_per_program"].file.read_text().replace("row_per_program", "groups")
    (tmp_path / "layer_norm").mkdir()
    for limit, name in ((16384, "groups"), (40000, "wider")):
        ruled = source.replace(
            "    return too_wide", f"    return 'no' if axes['H'] % 8 or axes['H'] > {limit} else None  # "
        )
        (tmp_path / "layer_norm" / f"{name}.py").write_text(ruled.replace("groups", name))
    groups, wider = (OPS.with_variants_from(tmp_path)["layer_norm"].variants[name] for name in ("groups", "wider"))
    hidden = groups.contract.axis_by_name["H"]
    assert last_sizes(groups, CPU)[hidden] == 16384  # type: ignore[index]  # a size
    assert ("H", 16384) in sizes_to_reach(groups, CPU)
    assert {("H", 16392), ("H", 40000)} <= set(sizes_to_reach(wider, CPU))


@pytest.mark.parametrize(("end", "expected"), [(10**6, 4096), (0, 48)])
def test_a_last_size_is_found_upwards_and_downwards_among_multiples(end: int, expected: int) -> None:
    assert last_alike(lambda size: size % 16 == 0 and 48 <= size <= 4096, 64, end) == expected
    assert last_alike(lambda size: size % 8 == 0, 64, end) is None


def test_a_variant_that_takes_nothing_outside_its_region_is_checked_inside(tmp_path: Path) -> None:
    wide = (
        """region={"I": (8193, 20000)}, supports=lambda axes, device: None if axes["I"] > 8192 else "wide rows only"""
    )
    folder = write_variant(tmp_path, ('wins="never"', f'wins="never", {wide}"'))
    variant = OPS.with_variants_from(folder)["swiglu"].variants["doubled"]
    drawn = [case.axes["I"] for case, _ in drawn_cases(variant, 20)]
    assert len(drawn) == 4
    assert 2 <= len({8193, 8320, 20000}.intersection(drawn)) == len(set(drawn))
    assert {case.axes["I"] for case, _ in sanitizer_cases(SANITIZERS["order"], variant)} <= {8193, 8320, 20000}
    assert len(list(sanitizer_cases(SANITIZERS["order"], variant))) == SANITIZERS["order"].draws
    assert ("I", 20000) in sizes_to_reach(variant, CPU)


@pytest.mark.parametrize(
    ("region", "reason"),
    [
        ('{"Z": (1, 2)}', "region names no size of swiglu: Z"),
        ('{"activation": (1, 2)}', "region names no size of swiglu: activation"),
        ('{"T": (5, 2)}', "region of T must be"),
        ('{"I": (0, 2)}', "region of I must be"),
        ('{"I": 7}', "region must be"),
    ],
)
def test_a_region_that_is_none_is_refused(region: str, reason: str, tmp_path: Path) -> None:
    folder = write_variant(tmp_path, ('wins="never"', f'wins="never", region={region}'))
    with pytest.raises(VariantError, match=reason):
        OPS.with_variants_from(folder)


@pytest.mark.parametrize(
    ("op", "variant", "axis", "beyond"),
    [
        ("dequant_gemm", "lookup_gemv", "N", 2**15),
        ("dequant_gemm", "lookup_gemv", "K", 2**13),
        ("paged_decode", "split_kv", "N", 2**10),
        ("paged_prefill", "packed_gqa", "N", 2**10),
    ],
)
def test_what_is_large_with_another_size_alone_is_reached_too(op: str, variant: str, axis: str, beyond: int) -> None:
    cases = wide_cases(OPS[op].variants[variant])
    assert max(int(case.axes[axis]) for case, _ in cases) > beyond
