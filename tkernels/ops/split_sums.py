"""Partial sums of a K that is split over programs, added up in the same launch by the program that comes last.

A config's PROGRAMS_PER_SM says how many programs each multiprocessor is to have, and so how often K is cut.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tkernels.config import Config
from tkernels.contract import Axes
from tkernels.device import DeviceFacts
from tkernels.launch import Run
from tkernels.workspace import Buffer

MAX_ROWS = 64
"""Tokens that the kernels which keep a partial sum for each take."""


@triton.jit
def summed_by_the_last(sums, partial_ptrs, mask, arrived_ptr, split, splits, stride_partial_s):
    """Leaves this split's sums in the workspace; (whether it is the last to arrive, then the sum over all splits).

    sums, partial_ptrs (of split 0) and mask have one shape; arrived_ptr counts the splits of this tile. The splits are
    added in their order, whoever comes last, so the sum has the same bits on every run.
    """
    tl.store(partial_ptrs + split * stride_partial_s, sums, mask=mask)
    # One thread counts for all: the barrier puts the others' stores before its release, as the barrier by which the
    # count reaches the others puts their loads after its acquire.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == splits - 1
    if is_last:
        tl.store(arrived_ptr, 0)
        sums = tl.load(partial_ptrs, mask=mask)  # what is masked off is not stored
        for other in range(1, splits):
            sums += tl.load(partial_ptrs + other * stride_partial_s, mask=mask)
    return is_last, sums


def order_of_rows(config: Config) -> tuple[int, int, int, bool]:
    """What decides in which order a row's sums are added: where K is cut, how much of it a step multiplies, and which
    instruction adds a weight's outliers, whose tile has the tokens as its rows.
    """
    return config["PROGRAMS_PER_SM"], config["BLOCK_N"], config["BLOCK_K"], config["BLOCK_TOKENS"] >= 64


def words_per_split(words: int, block: int, outputs: int, config: Config, device: DeviceFacts, most: int) -> int:
    """Word rows of K for one program: as few as still fill the device.

    Never a function of the number of tokens: where the sums are cut decides how they round.

    Args:
        words: Rows of words that K has; where codes are not packed, its inputs.
        block: What the result is a multiple of.
        most: Splits.
    """
    programs, tiles = device.multiprocessors * config["PROGRAMS_PER_SM"], triton.cdiv(outputs, config["BLOCK_N"])
    splits = min(max(programs // tiles, 1), most)
    return triton.cdiv(triton.cdiv(words, splits), block) * block


def partial_buffers(
    splits: int, sums: tuple[int, ...], tiles: int, dtype: torch.dtype = torch.float32
) -> Mapping[str, Buffer]:
    """The workspace of a launch that cuts K: each split's sums, and a count for each tile; none where K is whole."""
    if splits == 1:
        return {}
    return {"partial": Buffer((splits, *sums), dtype), "arrived": Buffer((tiles,), torch.int32, zeroed=True)}


def partial_buffers_of_rows(
    splits: int, tokens: int, outputs: int, config: Config, dtype: torch.dtype = torch.float32
) -> Mapping[str, Buffer]:
    """The same for tiles of tokens. There are counts for the most rows there may be: one buffer serves every batch."""
    tiles = triton.cdiv(MAX_ROWS, config["BLOCK_TOKENS"]) * triton.cdiv(outputs, config["BLOCK_N"])
    return partial_buffers(splits, (tokens, outputs), tiles, dtype)


def partial_arguments(run: Run) -> dict[str, Any]:
    """The workspace as a kernel takes it: None where K is whole."""
    return {"partial_ptr": run.workspace.get("partial"), "arrived_ptr": run.workspace.get("arrived")}


def too_many_rows(axes: Axes) -> str | None:
    """Why a kernel that keeps a partial sum for each row cannot take so many, or None where it can.

    This is also what keeps the workspace's offsets in 32 bits: splits * N is at most the programs times BLOCK_N.
    """
    if int(axes["M"]) > MAX_ROWS:
        return f"it keeps a partial sum for every row and split, and takes {MAX_ROWS} rows, not M = {axes['M']}"
    return None


def row_configs(tiles: Iterable[tuple[int, int, int, int, int]]) -> tuple[Config, ...]:
    """Configs from (BLOCK_TOKENS, BLOCK_N, BLOCK_K, num_warps, num_stages), each with 2 and 4 PROGRAMS_PER_SM.

    Tiles of the size that is sm_90's default are also launched early, with what waits for it: see `Run.early_tiles`.
    BLOCK_TOKENS, not BLOCK_M: the product is transposed, and its rows are outputs.
    """
    return tuple(
        Config(
            BLOCK_TOKENS=tokens,
            BLOCK_N=columns,
            BLOCK_K=depth,
            PROGRAMS_PER_SM=programs,
            num_warps=warps,
            num_stages=stages,
            launch_pdl=early,
        )
        for tokens, columns, depth, warps, stages in tiles
        for programs, early in ((2, 0), (4, 0), (4, 1))
        if not early or (tokens, columns) == (32, 64)
    )
