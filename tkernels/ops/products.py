"""What the launches of matrix products share: configs of tiles, and grids over the tiles of the output."""

from collections.abc import Iterable

import triton

from tkernels.config import Config
from tkernels.launch import Run


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
