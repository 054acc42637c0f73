"""Groups of rows that begin with the same blocks, against every choice that there is."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tsched.device_worlds import make_engine
from tests.tsched.hash_model import HashModel
from tkernels.runtime import HostRuntime
from tmodel.layers import PagedAttention
from tsched import LLM
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.block_pool import BlockIds
from tsched.scheduling.sequence import Ints
from tsched.scheduling.shared_prefixes import SharedPrefixes, find_shared_prefixes, take_out_faulty


def num_saved(found: SharedPrefixes) -> int:
    """The blocks that need not be read, as a group's are read once."""
    return int(((np.diff(found.starts) - 1) * found.num_blocks).sum())


def most_saved(rows: list[list[int]]) -> int:
    """What the best choice at every parting saves, by trying all: rows are lists of blocks, all of which are shared."""
    if len(rows) < 2:
        return 0
    depth = next((i for i, ids in enumerate(zip(*rows, strict=False)) if len(set(ids)) > 1), min(map(len, rows)))
    branches: dict[Any, list[list[int]]] = {}
    for place, row in enumerate(rows):
        branches.setdefault(row[depth] if len(row) > depth else f"ends {place}", []).append(row)
    choices = product([False, True], repeat=len(branches))
    return max(saved_by(list(branches.values()), joins, depth) for joins in choices)


def saved_by(branches: list[list[list[int]]], joins: tuple[bool, ...], depth: int) -> int:
    joining = sum(len(rows) for rows, join in zip(branches, joins, strict=True) if join)
    apart = sum(most_saved(rows) for rows, join in zip(branches, joins, strict=True) if not join)
    return apart + max(joining - 1, 0) * depth


def shared_by(blocks: np.ndarray, num_full: np.ndarray, rows: list[int]) -> int:
    least = min(num_full[rows])
    return next((i for i in range(least) if len(set(blocks[rows, i].tolist())) > 1), int(least))


def check_groups(found: SharedPrefixes, blocks: np.ndarray, num_full: np.ndarray) -> None:
    assert sorted(found.order.tolist()) == list(range(len(num_full)))
    assert found.starts[0] == 0
    for start, end, shared in zip(found.starts[:-1], found.starts[1:], found.num_blocks, strict=True):
        rows = found.order[start:end].tolist()
        assert len(rows) > 1
        assert 0 < shared == shared_by(blocks, num_full, rows)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, 5)), max_size=8))
def test_no_other_choice_at_a_parting_saves_more(drawn: list[tuple[list[int], int]]) -> None:
    num_full = np.array([min(len(ids), full) for ids, full in drawn], dtype=np.int64)
    blocks = np.full((len(drawn), 5), -1, dtype=np.int32)
    for row, (ids, _) in enumerate(drawn):
        # A block's id says what came before it, as in a cache.
        blocks[row, : len(ids)] = [hash(tuple(ids[: i + 1])) % 2**31 for i in range(len(ids))]
    found = find_shared_prefixes(blocks, num_full)
    check_groups(found, blocks, num_full)
    assert num_saved(found) == most_saved([row[:n].tolist() for row, n in zip(blocks, num_full, strict=True)])


def test_a_long_prefix_is_compared_to_its_end() -> None:
    blocks = np.arange(400, dtype=np.int32) + np.zeros((5, 1), dtype=np.int32)
    blocks[3:, 129:] += 1000
    blocks[4, 300:] += 1000
    found = find_shared_prefixes(blocks, np.array([400, 200, 150, 400, 400]))
    groups = [sorted(found.order[a:b].tolist()) for a, b in zip(found.starts[:-1], found.starts[1:], strict=True)]
    assert dict(zip(found.num_blocks.tolist(), groups, strict=True)) == {150: [0, 1, 2], 300: [3, 4]}  # or 4 * 129


def test_a_chain_as_long_as_a_batch_is_no_recursion() -> None:
    rows = 3000
    blocks = np.tile(np.arange(rows, dtype=np.int32), (rows, 1))
    found = find_shared_prefixes(blocks, np.arange(1, rows + 1))
    check_groups(found, blocks, np.arange(1, rows + 1))
    assert num_saved(found) > 0


BLOCKS = np.array([[4, 5, 6], [4, 5, 7], [4, 9, 6], [4, 5, 6], [4, 5, 6]], dtype=np.int32)
NUM_FULL = np.array([3, 3, 3, 1, 3])


def grouped(*groups: tuple[list[int], int]) -> SharedPrefixes:
    """Groups of entries, and how many blocks each shares."""
    order = [entry for entries, _ in groups for entry in entries]
    starts = np.cumsum([0, *(len(entries) for entries, _ in groups)])
    rest = [entry for entry in range(len(NUM_FULL)) if entry not in order]
    return SharedPrefixes(np.array([*order, *rest]), starts, np.array([depth for _, depth in groups], dtype=np.int64))


@pytest.mark.parametrize(
    ("groups", "faults", "left"),
    [
        ([([0, 1, 4], 2)], {}, [([0, 1, 4], 2)]),
        (
            [([0, 2, 1], 2)],
            {
                2: "it begins with other blocks than prefix group 0: block 1 is page 9, and 5 of most requests of the "
                "group; of all of them it is the same"
            },
            [([0, 1], 2)],
        ),
        (
            [([2, 0, 1], 2)],
            {
                2: "it begins with other blocks than prefix group 0: block 1 is page 9, and 5 of most requests of the "
                "group; of all of them it is the same"
            },
            [([0, 1], 2)],
        ),
        (
            [([0, 1], 9), ([4, 2], 1)],
            {
                0: "it has 3 full blocks, and prefix group 0 shares 9: at most what each of it has",
                1: "it has 3 full blocks, and prefix group 0 shares 9: at most what each of it has",
            },
            [([4, 2], 1)],
        ),
        (
            [([0, 1, 4], 1), ([3, 1, 2], 1)],
            {1: "it is also in prefix group 1, and groups have no request in common"},
            [([0, 4], 1), ([3, 2], 1)],
        ),
        (
            [([0, 3], 2)],
            {3: "it has 1 full blocks, and prefix group 0 shares 2: at most what each of it has"},
            [],
        ),
    ],
)
def test_what_may_not_be_in_its_group_is_named_and_taken_out(
    groups: list[tuple[list[int], int]], faults: dict[int, str], left: list[tuple[list[int], int]]
) -> None:
    found, told = take_out_faulty(grouped(*groups), BLOCKS, NUM_FULL)
    assert told == faults
    cuts = pairwise(found.starts.tolist())
    there = [(found.order[a:b].tolist(), depth) for (a, b), depth in zip(cuts, found.num_blocks.tolist(), strict=True)]
    assert there == left
    assert sorted(found.order.tolist()) == list(range(len(NUM_FULL)))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fault", ["pages differ", "groups overlap"])
def test_a_request_in_a_wrong_group_ends_and_no_other_does(overlap: bool, fault: str) -> None:
    """Once three decode that share two blocks, and one that does not begin like them."""

    def find(blocks: BlockIds, num_full: Ints) -> SharedPrefixes:
        found = find_shared_prefixes(blocks, num_full)
        if found.order.size < 4 or found.starts.tolist() != [0, 3]:
            return found
        if fault == "pages differ":
            return SharedPrefixes(found.order, np.array([0, 4]), found.num_blocks)
        order, depths = found.order[[0, 1, 2, 1, 0]], found.num_blocks[[0, 0]]
        return SharedPrefixes(order[:4], np.array([0, 2, 4]), depths)

    outputs = []
    for find_groups in (find, find_shared_prefixes):
        engine = make_engine(
            HostRuntime(), HashModel(), overlap=overlap, cuda_graphs=False, find_groups=find_groups, num_blocks=60,
            prefix_cache="radix",
        )  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        begin = list(range(1, 9))
        requests = []
        for number, prompt in enumerate([[*begin, 1], [*begin, 2], [*begin, 3], begin[::-1]]):
            requests.append(engine.add(number, prompt, params))
            engine.step()
            engine.step()
        while engine.has_unfinished:
            engine.step()
        outputs.append(requests)
    ended = [request.sequence.id for request in outputs[0] if request.sequence.finish_reason == "error"]
    assert len(ended) == 1
    for here, there in zip(*outputs, strict=True):
        tokens, expected = here.sequence.output_token_ids, there.sequence.output_token_ids
        assert len(expected) == 9
        if here.sequence.id in ended:
            assert "prefix group" in str(here.error)
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_an_option_reads_what_requests_share_together(checkpoint: Path, prefix_cache: str) -> None:
    """In fp32, with samples of one prompt too: the same tokens, and log-probabilities that differ by roundings."""
    params = [SamplingParams(temperature=0, max_tokens=12, logprobs=0, n=n, ignore_eos=True) for n in (1, 3, 1, 1)]
    prompts = [[*range(1, 14), *own] for own in ([20], [21, 22], [23], [24, 25, 26])]
    outputs, calls = [], []
    for shares in (False, True):
        llm = LLM(
            checkpoint, dtype="float32", device="cpu", block_size=4, prefix_cache=prefix_cache, shared_prefixes=shares
        )
        assert ("cascade_decode" in llm.arm) == shares
        with mock.patch.object(PagedAttention, "_decode", autospec=True, side_effect=PagedAttention._decode) as decode:
            found = llm.generate(prompts, params, use_tqdm=False)
        calls.append({call.args[0].prefix_groups is not None for call in decode.call_args_list})
        outputs.append([sample for output in found for sample in output.outputs])
    assert calls[0] == {False}
    assert True in calls[1]
    for apart, together in zip(*outputs, strict=True):
        assert apart.token_ids == together.token_ids
        assert apart.cumulative_logprob == pytest.approx(together.cumulative_logprob, abs=1e-4)
