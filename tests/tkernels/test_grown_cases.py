"""Races between the blocks of a row are found where blocks are larger than every size that is drawn."""

from pathlib import Path

import pytest

from tkernels import OPS
from tkernels.contract import Int
from tkernels.variant import Variant
from tkernels.verification.draws import count_programs
from tkernels.verification.grown_cases import count_grown_cases, grown_cases
from tkernels.verification.sanitizers.base import planned_cases, sanitized, sanitizer_cases
from tkernels.verification.sanitizers.suite import SANITIZERS

BLOCKS_OF_ROWS = """
import torch
import triton
import triton.language as tl

from tkernels import Buffer, Config, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.quantized.row_codes import codes_of, reciprocal_of, scale_of, unsupported_codes


@triton.jit
def quantize_tokens_in_blocks_clear(largest_ptr):
    tl.store(largest_ptr + tl.program_id(0), 0.0)


@triton.jit
def quantize_tokens_in_blocks_max(largest_ptr, x_ptr, stride_x_m, inputs, BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    # CLEARING
    x = tl.load(x_ptr + row * stride_x_m + offs, mask=offs < inputs, other=0.0).to(tl.float32)
    tl.atomic_max(largest_ptr + row, tl.max(tl.abs(x), axis=0))


@triton.jit
def quantize_tokens_in_blocks(
    q_ptr, scale_ptr, x_ptr, static_scale_ptr, largest_ptr, stride_q_m, stride_x_m, inputs, reciprocal,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row * stride_x_m + offs, mask=offs < inputs, other=0.0).to(tl.float32)
    if static_scale_ptr is None:
        scale = scale_of(tl.load(largest_ptr + row), reciprocal)
    else:
        scale = tl.load(static_scale_ptr)
    tl.store(scale_ptr + row, scale)
    codes = codes_of(x, scale, q_ptr.dtype.element_ty, static_scale_ptr is not None)
    tl.store(q_ptr + row * stride_q_m + offs, codes, mask=offs < inputs)


def launch(run: Run, q, scale, x, dtype, static_scale) -> None:
    (tokens, inputs), largest = x.shape, run.workspace["largest"]
    given = pointers("q[m] scale x[m] static_scale", q, scale, x, static_scale)
    grid = (tokens, triton.cdiv(inputs, run.config["BLOCK_K"]))
    sizes = {"inputs": inputs, "BLOCK_K": run.config["BLOCK_K"]}
    if static_scale is None:
        run.launch(quantize_tokens_in_blocks_clear, (tokens,), largest_ptr=largest)
        run.launch(
            quantize_tokens_in_blocks_max, grid, largest_ptr=largest, x_ptr=x, stride_x_m=x.stride(0), **sizes
        )
    run.launch(quantize_tokens_in_blocks, grid, **given, largest_ptr=largest, reciprocal=reciprocal_of(dtype), **sizes)


VARIANT = Variant(
    wins="never", launch=launch, default={"": Config(BLOCK_K=1024)},
    configs=tuple(Config(BLOCK_K=block) for block in (1024, 2048)), supports=unsupported_codes,
    workspace=lambda axes, config, device: {"largest": Buffer((axes["M"],), torch.float32)},
    deterministic=True, batch_invariant=True,
)
"""

# The first block of a row clears what all of them then raise: right where rows have one block.
CLEARED_BY_THE_FIRST = (
    ("        run.launch(quantize_tokens_in_blocks_clear, (tokens,), largest_ptr=largest)\n", ""),
    (
        "    # CLEARING\n",
        "    if tl.program_id(1) == 0:\n        tl.store(largest_ptr + row, 0.0)\n    tl.debug_barrier()\n",
    ),
)


def in_blocks(folder: Path, *changes: tuple[str, str]) -> Variant:
    source = BLOCKS_OF_ROWS
    for before, after in changes:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    (folder / "quantize_tokens").mkdir()
    (folder / "quantize_tokens" / "in_blocks.py").write_text(source)
    return OPS.with_variants_from(folder)["quantize_tokens"].variants["in_blocks"]


@pytest.mark.parametrize("name", ["race", "order"])
def test_what_blocks_of_a_row_do_to_each_other_is_seen_where_blocks_are_beyond_all_draws(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "right").mkdir()
    assert not any(sanitized(SANITIZERS[name], in_blocks(tmp_path / "right")))
    (tmp_path / "wrong").mkdir()
    found = [one for one in sanitized(SANITIZERS[name], in_blocks(tmp_path / "wrong", *CLEARED_BY_THE_FIRST)) if one]
    assert {finding.case.axes["K"] for finding in found} == {4100}
    assert all("BLOCK_K=1024" in finding.replay for finding in found)


def test_a_grown_case_is_the_first_with_more_programs_along_its_size(tmp_path: Path) -> None:
    variant = in_blocks(tmp_path)
    cases = list(grown_cases(variant, 32))
    assert [(case.axes["M"], case.axes["K"]) for case, _ in cases] == [(3, 1), (1, 4100), (1, 4100)]
    assert [case.axes["static_scale"] for case, _ in cases[:2]] == [False, False]
    assert [(case.axes["M"], case.axes["K"]) for case, _ in grown_cases(variant, 8)] == [(2, 1), (1, 1025), (1, 1025)]
    assert list(grown_cases(variant, 4)) == []
    assert list(grown_cases(variant, 32, fixed={"M": 1, "K": 31})) == []
    assert count_grown_cases(variant) == 4
    assert count_grown_cases(OPS["quantize_tokens"].variants["torch"]) == 0


def test_planned_are_the_draws_and_what_grows_beside_them(tmp_path: Path) -> None:
    variant = in_blocks(tmp_path)
    assert planned_cases(SANITIZERS["race"], variant, 2) == 2 + 4
    assert len(list(sanitizer_cases(SANITIZERS["race"], variant, 2))) == 2 + 3
    assert planned_cases(SANITIZERS["poison"], variant, 2) == 2


@pytest.mark.parametrize("op", ["swiglu", "scaled_matmul", "copy_pages", "qk_norm_rope"])
def test_each_size_by_which_a_grid_grows_has_a_case_with_more_programs(op: str) -> None:
    for variant in OPS[op].variants.values():
        cases = list(grown_cases(variant, 64))
        assert bool(cases) == (variant.launch is not None)
        names = [axis.name for axis in variant.contract.axes if isinstance(axis, Int)]
        least = {name: min(int(case.axes[name]) for case, _ in cases) for name in names} if cases else {}
        for case, config in cases:
            grown = [name for name in names if int(case.axes[name]) > least[name]]
            fewer = {**case.axes, **{name: least[name] for name in grown}}
            small = count_programs(variant, variant.contract.case(fewer, case.seed), config)
            assert count_programs(variant, case, config) > small
