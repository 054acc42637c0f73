"""sort_by_expert: the order is stable and nobody's pairs are dropped from it; every tile lies where its expert does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.tkernels.outside import computes_wrong, write_copy
from tkernels import OPS, Config, ContractError, Run, UnsupportedError, Variant
from tkernels.device import INTERPRETER, TARGETS
from tkernels.launch import jit_door
from tkernels.ops.sort_by_expert import _pairs
from tkernels.ops.sort_by_expert._tables import sorted_by_expert, table_buffers
from tkernels.verification.check import drawn_results
from tkernels.verification.sanitizers.base import sanitized
from tkernels.verification.sanitizers.suite import SANITIZERS

OP = OPS["sort_by_expert"]
EVERY = pytest.mark.parametrize("variant", list(OP.variants))
ALGORITHMS = pytest.mark.parametrize("variant", ["torch", "one_program", "histogram"])
Lists = tuple[list[int], list[int], list[int], list[int]]


def sort(variant: str, rows: Sequence[Sequence[int]], num_experts: int, tile: int) -> Lists:
    """(order, starts, tile_expert, tile_start) of experts [T, K], which lie in a wider tensor."""
    wide = torch.full((len(rows), len(rows[0]) + 3), 2**31 - 1, dtype=torch.int32)
    experts = wide[:, : len(rows[0])]
    experts.copy_(torch.tensor(rows, dtype=torch.int32))
    order, starts, tile_expert, tile_start = OP.variants[variant](experts, num_experts, tile)
    return order.tolist(), starts.tolist(), tile_expert.tolist(), tile_start.tolist()


def by_definition(rows: Sequence[Sequence[int]], num_experts: int, tile: int) -> Lists:
    """One pair after the other."""
    pairs = [expert for row in rows for expert in row]
    order: list[int] = []
    starts, tiles = [0], []
    for expert in range(num_experts):
        mine = [pair for pair, whose in enumerate(pairs) if whose == expert]
        tiles += [(expert, len(order) + first) for first in range(0, len(mine), tile)]
        order += mine
        starts.append(len(order))
    most = (len(pairs) + min(len(pairs), num_experts) * (tile - 1)) // tile
    assert len(tiles) <= most
    tiles += [(-1, -1)] * (most - len(tiles))
    order += [-1] * (len(pairs) - len(order))
    return order, starts, [expert for expert, _ in tiles], [start for _, start in tiles]


@ALGORITHMS
def test_the_order_is_exact_in_200_of_200_draws(variant: str) -> None:
    generator, tails = random.Random(5), 0
    for _ in range(200):
        tokens, top_k = generator.choice((1, 2, 5, 17, 34)), generator.choice((1, 1, 2, 3))
        num_experts = max(top_k, generator.choice((1, 2, 3, 5, 8)))
        lowest = generator.choice((-1, -1, 0))
        highest = generator.choice((num_experts - 1, generator.randrange(-1, num_experts)))
        rows = [[generator.randint(min(lowest, highest), highest) for _ in range(top_k)] for _ in range(tokens)]
        expected = by_definition(rows, num_experts, 16)
        assert sort(variant, rows, num_experts, 16) == expected
        tails += expected[0][-1] == -1
    assert 50 < tails < 150


@EVERY
def test_no_tokens_have_starts_and_no_tiles(variant: str) -> None:
    experts = torch.zeros((0, 2), dtype=torch.int32)
    order, starts, tile_expert, tile_start = OP.variants[variant](experts, 5, 16)
    assert (order.shape, tile_expert.shape, tile_start.shape) == ((0,), (0,), (0,))
    assert starts.tolist() == [0] * 6
    assert {one.dtype for one in (order, starts, tile_expert, tile_start)} == {torch.int32}


@EVERY
@pytest.mark.parametrize("num_experts", [1, 4, 127, 128])
def test_one_expert_takes_all_and_another_none(variant: str, num_experts: int) -> None:
    """As many experts as a power of two, whose last start lies in one more."""
    rows = [[num_experts - 1]] * 33
    assert sort(variant, rows, num_experts, 32) == by_definition(rows, num_experts, 32)
    assert sort(variant, [[-1]] * 3, num_experts, 32) == by_definition([[-1]] * 3, num_experts, 32)


@EVERY
def test_many_pairs_in_many_blocks(variant: str) -> None:
    """With a GPU's blocks: 1,100 pairs are nine, and an expert's tiles lie in more than one."""
    generator = random.Random(1)
    rows = [[generator.randrange(-1, 6) for _ in range(4)] for _ in range(275)]
    chosen, run = OP.variants[variant], by_definition(rows, 6, 16)
    if chosen.kind == "torch":
        assert sort(variant, rows, 6, 16) == run
        return
    config = chosen.default_config("sm_90")
    experts = torch.tensor(rows, dtype=torch.int32)
    axes = {"T": 275, "K": 4, "E": 6, "tile": 16}
    outputs = [torch.full((len(one),), 7, dtype=torch.int32) for one in run]
    buffers = chosen.workspace(axes, config, INTERPRETER)
    workspace = {name: torch.full(one.shape, 2**30, dtype=one.dtype) for name, one in buffers.items()}
    assert chosen.launch is not None
    chosen.launch(Run(INTERPRETER, axes, config, workspace, jit_door), *outputs, experts, num_experts=6, tile=16)
    assert tuple(one.tolist() for one in outputs) == run


@pytest.mark.parametrize(("tokens", "expected"), [(0, "one_program"), (128, "one_program"), (129, "histogram")])
def test_auto_follows_the_number_of_tokens(tokens: int, expected: str) -> None:
    auto = OP.variants["auto"]
    assert auto.chosen is not None
    axes = {"T": tokens, "K": 8, "E": 128, "tile": 16}
    assert auto.chosen(axes, auto.default[""], TARGETS["sm_90"]).name == expected
    assert auto.chosen({**axes, "K": 64}, auto.default[""], TARGETS["sm_90"]).name in (expected, "histogram")


@pytest.mark.parametrize("tokens", [0, 3, 200])
def test_another_ops_launcher_sorts_in_its_own_workspace(tokens: int) -> None:
    generator = random.Random(2)
    rows = [[generator.randrange(-1, 5) for _ in range(2)] for _ in range(tokens)]
    experts = torch.tensor(rows, dtype=torch.int32).view(tokens, 2)
    axes = {"T": tokens, "K": 2, "E": 5, "H": 64}
    buffers = table_buffers(axes, 16, INTERPRETER)
    workspace = {name: torch.full(one.shape, 2**30, dtype=one.dtype) for name, one in buffers.items()}
    tables = sorted_by_expert(Run(INTERPRETER, axes, Config(BLOCK_M=16), workspace, jit_door), experts, 5, 16)
    assert tuple(one.tolist() for one in tables) == by_definition(rows, 5, 16)


def test_what_does_not_fit_is_refused() -> None:
    experts = torch.zeros((2, 4), dtype=torch.int32)
    with pytest.raises(ContractError, match="K <= E does not hold for E = 3, K = 4"):
        OP.variants["torch"](experts, 3, 16)
    with pytest.raises(ContractError, match="tile = 48"):
        OP.variants["torch"](experts, 8, 48)
    with pytest.raises(ContractError, match="'experts' must be int32"):
        OP.variants["torch"](experts.long(), 8, 16)
    with pytest.raises(UnsupportedError, match=r"4096 pairs at most; this is T \* K = 4100: histogram"):
        OP.variants["one_program"](torch.zeros((1025, 4), dtype=torch.int32), 8, 16)
    assert OP.variants["one_program"].supports({"T": 1024, "K": 4}, INTERPRETER) is None


FAULTS = {
    "equal_experts_in_any_order": ("offs[None, :] < offs[:, None]", "offs[None, :] > offs[:, None]"),
    "nobodys_pairs_are_sorted": ("tl.where(experts < 0, num_experts, experts)", "tl.maximum(experts, 0)"),
    "nobodys_places_are_left": ("(offs >= kept) & (offs < pairs)", "offs < 0"),
    "the_last_tiles_start": ("tl.gather(ends - tiles, of, 0)) * TILE", "tl.gather(ends - tiles, of, 0)) * 0"),
    "tiles_begin_at_multiples": ("tl.gather(starts, of, 0)", "tl.gather(starts // TILE * TILE, of, 0)"),
    "tiles_of_an_expert_without_pairs": ("(counts % TILE > 0)", "(counts % TILE >= 0)"),
    "the_rest_of_the_tiles_is_left": ("inside = places < num_tiles", "inside = is_tile"),
    "a_stride_that_is_the_width": (".to(tl.int64) * stride_experts_t", ".to(tl.int64) * TOP_K"),
}


def with_fault(folder: Path, original: str, *changes: tuple[str, str]) -> Variant:
    """A copy of a variant, with the device functions in its own file and changes in these."""
    source = Path(_pairs.__file__).read_text()
    helpers = source[source.index("@triton.jit") :]
    for before, after in changes:
        assert before in helpers, before
        helpers = helpers.replace(before, after)
    text = OP.variants[original].file.read_text()
    start = text.index("_pairs import (") + len("_pairs import ")
    imported = text[start : text.index(")", start) + 1]
    changed = ((imported, "(experts_tile)"), ("CONFIGS = ", f"{helpers}\n\nCONFIGS = "))
    write_copy(folder, f"sort_by_expert.{original}", "planted", *changed)
    return OPS.with_variants_from(folder)["sort_by_expert"].variants["planted"]


@pytest.mark.parametrize("original", ["one_program", "histogram"])
def test_a_copy_without_a_fault_is_right(original: str, tmp_path: Path) -> None:
    assert {result.status for result in drawn_results(with_fault(tmp_path, original), 20)} == {"ok"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    original = ("one_program", "histogram")[list(FAULTS).index(fault) % 2]
    assert computes_wrong(with_fault(tmp_path, original, FAULTS[fault]))


def test_an_int32_offset_overflows_and_is_found(tmp_path: Path) -> None:
    wrong = with_fault(tmp_path, "one_program", ("(offs // TOP_K).to(tl.int64)", "(offs // TOP_K)"))
    found = [one.message for one in sanitized(SANITIZERS["overflow"], wrong, 4) if one is not None]
    assert any("int32 overflow" in one for one in found)
