"""What the launches of matrix products share: configs of tiles, and grids over the tiles of the output."""

from collections.abc import Iterable

import triton
import triton.language as tl

from tkernels.config import Config
from tkernels.language import prefetch_rows
from tkernels.launch import Run

ROW_CLASSES = (1, 16, 64, 256)
"""The largest numbers of rows, tokens, between which another tile of a matrix product may be the best."""


@triton.jit
def prefetch_columns(weight_ptr, stride_weight_n, first_n, outputs, inputs, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """Asks for the first `WIDTH` inputs of a tile of outputs, before a launch has to wait: see `prefetch_rows`."""
    offs_n = first_n.to(tl.int64) + tl.arange(0, BLOCK_N)
    weight_ptrs = weight_ptr + offs_n[:, None] * stride_weight_n
    prefetch_rows(weight_ptrs, (offs_n < outputs)[:, None], 0, inputs, WIDTH)


def order_of_tile(config: Config) -> tuple[int, bool]:
    """What decides in which order a tile's sums are added: the depth that a step multiplies, and the instruction.

    Hopper's asynchronous matrix units take 64 rows and more; fewer go through the instructions of sm_80.
    """
    return config["BLOCK_K"], config["BLOCK_M"] >= 64


def tile_configs(tiles: Iterable[tuple[int, int, int, int, int]], **constants: int) -> tuple[Config, ...]:
    """Configs from (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages), each with the other constants."""
    return tuple(
        Config(BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=depth, **constants, num_warps=warps, num_stages=stages)
        for rows, columns, depth, warps, stages in tiles
    )


def tile_sizes(config: Config, rows: str = "BLOCK_M") -> tuple[int, int, int]:
    """The rows, columns and depth of a config's tile."""
    return config[rows], config["BLOCK_N"], config["BLOCK_K"]


def tile_grid(tokens: int, outputs: int, block_m: int, block_n: int) -> tuple[int, int]:
    """A program for each tile of the output [tokens, outputs].

    Tokens are on the faster axis: the programs that run together share their tile of the weight in the L2 cache.
    """
    return triton.cdiv(tokens, block_m), triton.cdiv(outputs, block_n)


def persistent_grid(run: Run, tokens: int, outputs: int, block_m: int, block_n: int) -> tuple[int]:
    """As many programs as the device has multiprocessors, or as there are tiles where those are fewer."""
    tiles_m, tiles_n = tile_grid(tokens, outputs, block_m, block_n)
    return (min(tiles_m * tiles_n, run.device.multiprocessors),)
