"""What a row must hold to: a gate that fails says what is wrong in a few words."""

import re
from collections.abc import Sequence

from tkernels.verification.inspection.rows import CompiledKernel

_TILED = ("gemm", "prefill")
"""The work that is matrix products over many rows; of the others, memory traffic is what counts."""

_WGMMA = {"int8": "IGMMA", "float8_e4m3fn": "QGMMA"}
"""Hopper's asynchronous matrix instruction by the codes that it multiplies; of 16-bit floats it is HGMMA."""


_NEVER = re.compile(r" (?:sums in|fast_(?:sin|cos|sincos|tan)f|(?:sin|cos)\.approx)")
"""What no dtype forgives: a sum loses terms, and an angle of a long context has no digit after its turns."""


def failures(row: CompiledKernel) -> list[str]:
    """The gates that a row fails, in words; none of an unsupported row, which has its reason.

    - It compiles, and a block fits on the architecture.
    - A config that is launched early waits for the launches ahead of it in one place, and nothing is written before.
    - A default config, or the first that is launched early, does not spill, at the engine's strides: operands without
      alignment go through registers, which a tile that is sized for aligned ones need not have. What a config with a
      cap spills, tuning weighs against the blocks that it makes room for.
    - sm_90: prefill and GEMMs of more than 64 rows, in tiles of a default config, use wgmma (HGMMA, of 8-bit codes
      IGMMA or QGMMA) and tiles of 64 rows at least.
    - Decode and the elementwise kernels: no main-loop access to 8- or 16-bit numbers, which is what caches, codes and
      activations are, is less than 16 bytes wide at aligned strides. An elementwise kernel without a loop is its own
      main loop; decode's second launch, which has none, writes a few rows.
    - In fp32 nothing has fewer digits: no product in tf32, no approximation of a function. No sum has fewer in any
      dtype, and no sine of an angle.
    - In an op whose results are exact, nothing rounds otherwise than its text says and the interpreter does.
    """
    if row.status != "ok":
        return [] if row.status == "unsupported" else [row.reason]
    found = _memory_failures(row) if row.point not in ("unaligned", "fp32", "fp16") else []
    many_rows = max(int(row.axes.get(axis, 0)) for axis in ("M", "T")) > 64
    if row.default and row.work in _TILED and "BLOCK_M" in row.config and many_rows and row.arch == "sm_90":
        found += _product_failures(row)
    return found + _precision_failures(row)


def _memory_failures(row: CompiledKernel) -> list[str]:
    found = []
    if row.config.get("launch_pdl") and row.early_launch.get("waits") != 1:
        found.append(f"launched early, and waits {row.early_launch.get('waits', 0)} times")
    if writes := row.early_launch.get("writes"):
        found.append(f"writes in {writes} places before it waits for the launches ahead of it")
    if (row.default or row.point == "early") and row.spill_bytes:
        found.append(f"spills {row.spill_bytes} bytes")
    if row.work not in _TILED and row.narrow and (row.loop or row.work != "decode"):
        found.append(f"narrow (16 bytes are wanted): {', '.join(row.narrow)}")
    return found


def _product_failures(row: CompiledKernel) -> list[str]:
    found = []
    if row.config["BLOCK_M"] < 64:
        found.append(f"tile of {row.config['BLOCK_M']} rows, 64 are the least")
    # fp32 is multiplied as fp32 (ieee), for which there is no matrix instruction.
    wanted = _WGMMA.get(str(row.axes.get("codes")), "HGMMA")
    # A launch without a loop only brings the product's operands into order.
    is_product = row.launch == 0 and row.loop
    if is_product and row.axes.get("activation") != "float32" and wanted not in row.matrix_instructions:
        found.append(f"no {wanted}")
    return found


def _precision_failures(row: CompiledKernel) -> list[str]:
    lowered = [one for one in row.lowered if row.point == "fp32" or _NEVER.search(one)]
    found = [f"fewer digits than fp32's: {', '.join(lowered)}"] if lowered else []
    return found + ([f"not rounded as an exact result's: {', '.join(row.rounded)}"] if row.rounded else [])


def failing(rows: Sequence[CompiledKernel]) -> list[str]:
    """ "row's name: what it fails" for every row that fails a gate."""
    return [f"{row.name}: {'; '.join(found)}" for row in rows if (found := failures(row))]
