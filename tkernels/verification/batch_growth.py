"""What a launcher decides by how many members its batch has, seen without launching anything.

A launcher is dry-run at batches of one member repeated 1 to 1,024 times. Numbers that count the batch, as grids, sizes
and strides do, grow with it; any other that changes may decide how a member is computed.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tkernels.batching import Batching
from tkernels.config import Config
from tkernels.device import device_facts
from tkernels.source_hash import called_functions
from tkernels.variant import Variant
from tkernels.verification.dry_run import Launch, dry_run

SIZES = (
    1, 2, 3, 5, 8, 13, 16, 17, 24, 25, 32, 33, 48, 64, 65, 80, 96, 100, 128, 129, 192, 256, 257, 384, 512, 513, 640,
    768, 1000, 1024,
)  # fmt: skip
"""Both sides of the powers of two, and numbers between them."""

FEW_SIZES = (1, 7, 24, 100, 512, 1024)
"""Of members as large as a model's, which take longer to lay out, and of all configs but the default one."""

_LARGEST_TILE = 1024
"""Members of a tile, at most."""

Numbers = Mapping[str, Any]
"""What a launch is made of, by name: its grid by axis, its config, its numbers. Of a tensor: whether it is there."""


def launches_by_size(
    variant: Variant,
    batching: Batching,
    inputs: Mapping[str, Any],
    member: int,
    config: Config,
    sizes: Sequence[int] = SIZES,
) -> dict[int, list[Launch]]:
    """What is launched for each size of batch that the variant supports.

    Args:
        inputs: A batch that holds the member.
        config: What is used for all of them.
    """
    found = {}
    for size in sizes:
        batch = batching.take(inputs, [member] * size)
        axes, device = variant.contract.bind_axes(batch)
        facts = device_facts(device)
        if not variant.unsupported_reason(axes, device, facts):
            found[size] = dry_run(variant, batch, axes, config, facts)
    return found


def unseen_change(by_size: Mapping[int, Sequence[Launch]], config: Config) -> str | None:
    """Which value of the config is another one in some batch of a kernel that adds up what its threads hold, in words;
    None where none is.

    The size of a tile and the number of warps decide which thread holds what, and so the order of a sum and the
    matrix instruction: no interpreted bits show that. A kernel without sums gives each element the same bits then.
    """
    first = min(by_size, default=0)
    for size in by_size:
        for before, now in zip(by_size[first], by_size[size], strict=False):
            here, there = _of_config(before, config), _of_config(now, config)
            if here.keys() == there.keys() and here != there and _adds_up(now.kernel):
                name = next(name for name in here if here[name] != there[name])
                return f"{name} is {there[name]} in a batch of {size}, and {here[name]} in one of {first}"
    return None


def _of_config(launch: Launch, config: Config) -> dict[str, Any]:
    """The numbers of a launch that are its config's: it may take one under its name in capitals."""
    names = {name.casefold() for name in config.as_dict()}
    return {name: value for name, value in _numbers(launch).items() if name.casefold() in names}


_SUMS = {"dot", "dot_scaled", "sum", "reduce", "cumsum", "cumprod", "associative_scan"}


def _adds_up(kernel: Any) -> bool:
    """Whether a kernel, or what it calls, makes a sum of several elements of a tile; by what it names."""
    trees = (ast.parse(textwrap.dedent(inspect.getsource(one.fn))) for one in called_functions({"": kernel}))
    nodes = [node for tree in trees for node in ast.walk(tree)]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return bool(_SUMS & (attributes | {node.id for node in nodes if isinstance(node, ast.Name)}))


def odd_sizes(by_size: Mapping[int, Sequence[Launch]], config: Config) -> list[int]:
    """The sizes from which something is launched that does not only count the batch, or has another value of the
    config: a few, the smallest first.
    """
    sizes = list(by_size)
    kinds = [tuple((id(one.kernel), *_numbers(one)) for one in by_size[size]) for size in sizes]
    odd = {sizes[i] for i in range(1, len(sizes)) if kinds[i] != kinds[i - 1]}
    alike = [size for size, kind in zip(sizes, kinds, strict=True) if kinds and kind == kinds[0]]
    for index in range(len(by_size[sizes[0]]) if sizes else 0):
        launches = [_numbers(by_size[size][index]) for size in alike]
        tuned = _of_config(by_size[alike[0]][index], config)
        for name in launches[0]:
            values = [launch[name] for launch in launches]
            if name != "num_warps" and (name in tuned or not _counts_members(alike, values)):
                odd |= {alike[i] for i in range(1, len(alike)) if values[i] != values[i - 1]}
    return sorted(odd)


def _numbers(launch: Launch) -> Numbers:
    parts: dict[str, Any] = {f"grid[{axis}]": size for axis, size in enumerate(launch.grid)}
    parts["num_warps"] = launch.config.num_warps  # stages decide when something is loaded, and no result
    for name, value in launch.arguments.items():
        parts[name] = value if isinstance(value, int | float | str | bool | None) else type(value).__name__
        if isinstance(value, torch.Tensor):
            parts[name] = str(value.dtype)
    return parts


def _counts_members(sizes: Sequence[int], values: Sequence[Any]) -> bool:
    """Whether values, one for each size, are all the same, or what counts members, tiles or programs comes to."""
    if all(value == values[0] for value in values):
        return True
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return False
    members, counts = np.array(sizes), np.array(values)
    most = counts.max()
    if any(bool((np.minimum(form, most) == counts).all()) for form in _forms(members, int(counts[0]))):
        return True
    # Tiles of what members have of their own, and one more here and there: a line, but for a few, to the end.
    growing = counts[np.isin(members, (256, 512, 768, 1024))]
    line = np.interp(members, members[[0, -1]], counts[[0, -1]])
    return bool((np.diff(growing) > 0).all() and (np.abs(counts - line) <= 2 * counts[0] + 2).all())


def _forms(members: np.ndarray, first: int) -> Iterator[np.ndarray]:
    """What numbers of batches come to that are `first` for one member: programs have a most, which is not in these."""
    yield first * 2 ** np.ceil(np.log2(members)).astype(int)  # room for them in a block
    for tile in range(1, _LARGEST_TILE + 1):
        yield first * -(-members // tile)
    for each in range(1, first):
        yield first + each * (members - members[0])
