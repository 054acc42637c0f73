"""Quantized weights put together and cut: fused projections, and tensor parallelism."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tkernels.quantized.codes import codes_per_row
from tkernels.quantized.outliers import Outliers, outliers_from
from tkernels.quantized.weight import QuantizedWeight, from_codes, in_order, unpack_codes


def incompatible_reason(one: QuantizedWeight, other: QuantizedWeight) -> str | None:
    """What keeps two weights of the same inputs from being one; None where nothing does."""
    for name in ("inputs", "bits", "group_size", "coding", "dtype", "order", "places"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} {getattr(one, name)} and {getattr(other, name)}"
    mine, theirs = one.permutation, other.permutation
    if mine is None or theirs is None:
        return None if mine is theirs else "only one is permuted"
    return None if torch.equal(mine, theirs) else "they are permuted each in its own way"


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight with the outputs of all, in order, bit for bit.

    Raises:
        ValueError: Two of them cannot be one weight; see `incompatible_reason`.
    """
    first = weights[0]
    for other in weights[1:]:
        if reason := incompatible_reason(first, other):
            raise ValueError(f"quantized weights cannot be one: {reason}")
    if len(weights) == 1:
        return first
    symmetric = all(weight.zeros is None for weight in weights)

    def joined(name: str) -> Any:
        if name == "zeros":
            return None if symmetric else torch.cat([zeros_of(weight) for weight in weights], dim=1)
        parts = [getattr(weight, name) for weight in weights]
        return None if parts[0] is None else torch.cat(parts, dim=1)

    return replace(
        first,
        **{name: joined(name) for name in ("packed", "high", "scales", "zeros", "table")},
        outliers=_stacked(weights),
    )


def zeros_of(weight: QuantizedWeight) -> torch.Tensor:
    """[G, N] int16: the zero-points of uniform codes, also where none are kept."""
    if weight.zeros is not None:
        return weight.zeros
    assert weight.scales is not None, "only where another one has zeros, which a table has not"
    return torch.full_like(weight.scales, 2 ** (weight.bits - 1), dtype=torch.int16)


def _stacked(weights: Sequence[QuantizedWeight]) -> Outliers | None:
    if all(weight.outliers is None for weight in weights):
        return None
    rows, cols, vals = [torch.zeros(1, dtype=torch.int32, device=weights[0].device)], [], []
    for weight in weights:
        end = rows[-1][-1]
        if weight.outliers is None:
            rows.append(end.repeat(weight.shape[0]))
            continue
        rows.append(weight.outliers.rows[1:] + end)
        cols.append(weight.outliers.cols)
        vals.append(weight.outliers.vals)
    return Outliers(torch.cat(rows), torch.cat(cols), torch.cat(vals))


def slice_outputs(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """The weight of outputs `start` to `stop`, bit for bit: a rank's part of a column-parallel layer (Shoeybi et al.,
    2019, "Megatron-LM"). ValueError where that is none of them.
    """
    _check_range("outputs", start, stop, weight.shape[0])
    outliers = weight.outliers
    if outliers is not None:
        first, last = int(outliers.rows[start]), int(outliers.rows[stop])
        rows = outliers.rows[start : stop + 1] - outliers.rows[start]
        outliers = Outliers(rows, outliers.cols[first:last].clone(), outliers.vals[first:last].clone())
    by_output = [(name, part) for name, part in weight.own_parts() if name != "permutation"]
    parts: dict[str, Any] = {name: part[:, start:stop].contiguous() for name, part in by_output}
    return replace(weight, **parts, outliers=outliers)


def slice_inputs(weight: QuantizedWeight, start: int, stop: int) -> QuantizedWeight:
    """The weight of inputs `start` to `stop`, as inputs from 0 on, bit for bit: a rank's part of a row-parallel layer.

    Under a permutation, or where the ends are not those of groups, groups come out with fewer places each. They are cut
    into equal ones, of the size that takes the fewest bytes, and filled with padding, so that the slice stays one
    ordinary weight. ValueError where the range is empty or too large.
    """
    _check_range("inputs", start, stop, weight.inputs)
    permutation = weight.permutation
    if permutation is None:
        permutation = torch.arange(weight.inputs, device=weight.device)
    kept = ((permutation >= start) & (permutation < stop)).nonzero().flatten()  # [k] places, by group
    group_of = kept // weight.group_size
    if weight.coding == "lookup":
        group_of = torch.zeros_like(group_of)
    groups, counts = torch.unique_consecutive(group_of, return_counts=True)
    size = _best_group_size(counts.tolist(), weight)
    places, sources = _padded(kept, counts.tolist(), size)  # [Kp] each: place in `weight`, -1 for padding; the group
    codes = unpack_codes(weight)[places.clamp(min=0)]
    inputs = torch.where(places >= 0, permutation[places.clamp(min=0)] - start, -1).int()  # [Kp]
    is_plain = inputs.numel() == stop - start and torch.equal(inputs, torch.arange(stop - start, device=inputs.device))
    chosen = groups[sources]
    sliced = from_codes(
        codes,
        weight.bits,
        scales=None if weight.scales is None else weight.scales[chosen].contiguous(),
        zeros=None if weight.zeros is None else weight.zeros[chosen].contiguous(),
        group_size=-1 if weight.coding == "lookup" else size,
        table=weight.table,
        permutation=None if is_plain else inputs,
        outliers=_outliers_of_inputs(weight, start, stop),
    )
    return in_order(replace(sliced, e2m1=weight.e2m1), weight.order)


def _check_range(what: str, start: int, stop: int, limit: int) -> None:
    if not 0 <= start < stop <= limit:
        raise ValueError(f"slice: {what} {start} to {stop} of a weight with {limit}")


def _best_group_size(counts: list[int], weight: QuantizedWeight) -> int:
    """The places to a group with which `counts` places, group by group, take the fewest bytes."""
    row = codes_per_row(weight.bits)
    if weight.coding == "lookup":
        return row
    per_group = weight.dtype.itemsize + (0 if weight.zeros is None else 2)

    def cost(size: int) -> float:
        groups = sum(-(-count // size) for count in counts)
        return groups * (size * weight.bits / 8 + per_group)

    sizes = [size for size in range(weight.group_size, 0, -row) if weight.group_size % size == 0]
    return min(sizes, key=cost)


def _padded(kept: torch.Tensor, counts: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`kept` places, `counts[i]` of group i in a row, each group filled up with -1 to a multiple of `size`: [Kp]; and
    the i of each group of `size`: [Kp / size].
    """
    places, sources = [], []
    for i, part in enumerate(kept.split(counts)):
        padding = -part.numel() % size
        places.append(torch.cat((part, part.new_full((padding,), -1))))
        sources += [i] * ((part.numel() + padding) // size)
    return torch.cat(places), torch.tensor(sources, device=kept.device)


def _outliers_of_inputs(weight: QuantizedWeight, start: int, stop: int) -> Outliers | None:
    if weight.outliers is None:
        return None
    cols = weight.outliers.cols
    mine = (cols >= start) & (cols < stop)
    shape = (weight.shape[0], stop - start)
    return outliers_from(weight.outliers.outputs()[mine], cols[mine] - start, weight.outliers.vals[mine], shape)
