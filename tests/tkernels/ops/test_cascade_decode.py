"""cascade_decode: groups change nothing but cost, whoever shares and whatever the parts; bad calls."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from tests.tkernels.traffic import count_bytes
from tkernels import OPS, Config, ContractError, Kernel
from tkernels.contract import Axes, Case
from tkernels.inputs import Draws, poison, roughen_floats
from tkernels.interpreter.replaced import exact_products, replaced_methods
from tkernels.launch import jit_door
from tkernels.ops.cascade_decode.contract import CONTRACT, loosen, take_sequences
from tkernels.ops.paged_cache import paged_inputs
from tkernels.tuning import NEAREST
from tkernels.verification.check import check_case

CASCADE = OPS["cascade_decode"].variants
ALL = list(CASCADE)
ALGORITHMS = ["torch", "composed", "one_launch"]
AXES: Axes = {
    "B": 5, "lengths": "edges", "S": 8, "N": 9, "P": 64, "Hkv": 2, "Hq": 6, "D": 32, "Dv": 64, "G": 2, "shared": 4,
    "activation": "float32", "kv": "float32", "window": 0, "k_scale": False, "v_scale": False, "soft_cap": 0,
    "sinks": False, "return_lse": True,
    "bound": "none", "layout": "contiguous", "values": "ordinary",
}  # fmt: skip


def case_of(
    contexts: tuple[int, ...], starts: tuple[int, ...], prefixes: tuple[int, ...], seed: int = 0, **axes: Any
) -> Case:
    """Sequences of these contexts in these groups. All of a group have the prefix of its first, whose context is the
    shortest where a window cuts into it.
    """
    point = {**AXES, "B": len(contexts), "G": len(prefixes), **axes}
    device = torch.device("cpu")
    inputs = paged_inputs(point, Draws(seed, device), device, [1] * len(contexts), len(contexts), contexts)
    tables, page = inputs["block_tables"], int(point["S"])
    for begin, end, prefix in zip(starts, starts[1:], prefixes, strict=False):
        shared = tables[begin : begin + 1, : prefix // page].clone()
        tables[begin:end, : prefix // page] = shared
    groups = {"group_starts": torch.tensor(starts).int(), "prefix_lens": torch.tensor(prefixes).int()}
    return Case(CONTRACT, point, seed, {**inputs, **groups, "max_prefix_len": None, "return_lse": True})


GROUPS = {
    "one_group": ((40, 33, 72), (0, 3), (32,)),
    "alone": ((40, 33, 72), (0, 1, 2, 3), (40, 8, 64)),
    "in_no_group": ((40, 33, 72), (0, 2), (24,)),
    "empty_groups": ((40, 33, 72), (0, 0, 2, 2, 3, 3), (poison(torch.int32), 32, poison(torch.int32), 8, 8)),
    "all_shared": ((32, 32, 40), (0, 3), (32,)),
    "nothing_shared": ((40, 33, 0), (0, 2, 3), (0, 0)),
    "no_groups": ((40, 33, 72), (0,), ()),
    "more_sharers_than_keys": ((9, 10, 11, 12, 13, 14, 15, 16, 16, 10), (0, 10), (8,)),
}


@pytest.mark.parametrize("variant", ALGORITHMS)
@pytest.mark.parametrize("groups", list(GROUPS))
def test_groups_change_nothing_but_cost(variant: str, groups: str) -> None:
    result = check_case(CASCADE[variant], case_of(*GROUPS[groups]), offsets=False)
    assert result.status == "ok", result


@pytest.mark.parametrize("variant", ALGORITHMS)
@pytest.mark.parametrize("window", [1, 8, 20, 40])
def test_a_window_begins_inside_the_prefix_of_each_sequence_elsewhere(variant: str, window: int) -> None:
    """Entries that a sequence has passed are not read through, though others of its group still see their pages."""
    case = case_of((33, 72, 50), (0, 3), (32,), window=window)
    for sequence, length in enumerate((33, 72, 50)):
        case.inputs["block_tables"][sequence, : max(length - window, 0) // 8] = poison(torch.int32)
    result = check_case(CASCADE[variant], case, offsets=False)
    assert result.status == "ok", result


@pytest.mark.parametrize(
    ("parts", "groups", "page"),
    [
        (("packed_gqa", "last_arriver", "head_tile"), GROUPS["empty_groups"], 8),
        (("packed_gqa", "last_arriver", "torch"), GROUPS["nothing_shared"], 8),
        (("packed_gqa", "split_kv", "head_tile"), GROUPS["more_sharers_than_keys"], 8),
        (("tensor_descriptor", "one_pass", "head_tile"), ((40, 33, 72), (0, 0, 2, 3), (0, 32, 16)), 16),
    ],
)
def test_composed_calls_the_chosen_parts(parts: tuple[str, ...], groups: Any, page: int) -> None:
    inputs = case_of(*groups, Hq=2, Hkv=1, S=page).inputs
    ops = ("paged_prefill", "paged_decode", "merge_states")
    kernels = tuple(Kernel(OPS[op].variants[name], NEAREST, {}) for op, name in zip(ops, parts, strict=True))
    got = Kernel(CASCADE["composed"], NEAREST, {}, parts=kernels)(**inputs)
    for one, expected in zip(got, CASCADE["torch"](**inputs), strict=True):
        torch.testing.assert_close(one, expected, rtol=3e-6, atol=3e-6)


def test_composed_is_the_definition_in_float64() -> None:
    inputs = case_of(*GROUPS["empty_groups"], activation="float64", kv="float64").inputs
    for got, expected in zip(CASCADE["composed"](**inputs), CONTRACT.reference(**inputs), strict=True):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", ALL)
def test_a_batch_may_be_empty(variant: str) -> None:
    out, lse = CASCADE[variant](**case_of((), (0, 0), (8,)).inputs)
    assert (out.shape, lse.shape) == ((0, 6, 64), (0, 6))


def backwards(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
    """Runs the programs in the opposite order: sequences before tiles, so that tiles merge."""
    place = interpreter_builder.set_grid_idx
    last = [size - 1 for size in (*grid, 1, 1)[:3]]
    with replaced_methods(set_grid_idx=lambda *program: place(*(n - i for n, i in zip(last, program, strict=True)))):
        jit_door(kernel, grid, arguments, config)


@pytest.mark.parametrize("window", [0, 40])
def test_whoever_merges_leaves_counts_at_zero_and_the_same_bits(window: int) -> None:
    cascade = CASCADE["one_launch"]
    inputs = roughen_floats(case_of((33, 72, 40, 0), (0, 3), (32,), window=window).inputs, 0)
    first = cascade(**inputs)
    for got in (cascade(**inputs), Kernel(cascade, NEAREST, {}, backwards)(**inputs)):
        for one, expected in zip(got, first, strict=True):
            assert torch.equal(one, expected)
    assert cascade.zeroed.not_zero() == []


@pytest.mark.parametrize("window", [0, 40])
def test_a_row_has_the_same_bits_whoever_shares_its_prefix(window: int) -> None:
    """In one group, each in a group of its own, and alone in the batch behind looser bounds.

    With products as the batch sanitizer has them: numpy's give a row of a tile other bits at another place, on some
    CPUs.
    """
    cascade = CASCADE["one_launch"]
    inputs = roughen_floats(case_of((33, 72, 40), (0, 3), (32,), window=window).inputs, 0)
    with exact_products():
        shared = cascade(**inputs)
        apart = {"group_starts": torch.arange(4).int(), "prefix_lens": torch.full((3,), 32).int()}
        for one, expected in zip(cascade(**{**inputs, **apart}), shared, strict=True):
            assert torch.equal(one, expected)
        for row in range(3):
            alone = loosen(take_sequences(inputs, [row]))
            for one, expected in zip(cascade(**alone), shared, strict=True):
                assert torch.equal(one[0], expected[row])


def test_one_launch_passes_what_the_contract_counts_and_few_parts() -> None:
    """The prefix in one split, in tiles and blocks as on a GPU: its keys pass once for 16 sequences."""
    sequences, prefix, own, key = 16, 8192, 256, (64 + 64) * 2
    width = (prefix + own) // 16
    sizes = {"Hq": 4, "Hkv": 1, "D": 64, "S": 16, "N": width, "P": sequences * width}
    contexts = (prefix + own,) * sequences
    case = case_of(contexts, (0, sequences), (prefix,), **sizes, activation="float16", kv="float16")
    cascade = CASCADE["one_launch"]
    config = cascade.default["sm_90"].pinned({"num_splits": 1})
    with count_bytes({name: case.inputs[name] for name in ("k_cache", "v_cache")}) as passed:
        Kernel(cascade, NEAREST, config.as_dict())(**case.inputs)
    assert passed["k_cache", "load"] + passed["v_cache", "load"] == (prefix + sequences * own) * key
    assert sum(passed.values()) <= 1.05 * case.bytes_moved
    assert case.bytes_moved < sequences * (prefix + own) * key / 10


def test_cost_counts_what_is_shared_once() -> None:
    case = case_of((40, 33, 72), (0, 2, 3, 3), (24, 16, 999), window=20)
    # Of the first group's prefix 13 .. 23 is visible, to the second sequence alone; the third has passed all of its.
    own, shared = (40 - 24) + (33 - 24) + 20, 24 - 13
    assert case.flops == 2 * 6 * (32 + 64) * 3 * 20
    pages = (3 - 1) + (5 - 3) + (5 - 3) + (9 - 6)
    queries = 3 * 6 * (4 * (32 + 64) + 4)
    assert case.bytes_moved == (own + shared) * 2 * (32 + 64) * 4 + queries + 4 * (pages + 3 + 4 + 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix_lens": torch.zeros(3).int()}, "'prefix_lens' gives G = 3, but G = 2"),
        ({"group_starts": torch.zeros(0).int()}, r"'group_starts' has shape \[0\], where \[G\+1\] is needed"),
        ({"group_starts": torch.zeros(3)}, "'group_starts' must be int32"),
        ({"prefix_lens": torch.zeros(2, dtype=torch.int64)}, "'prefix_lens' must be int32"),
        ({"max_prefix_len": -1}, "'max_prefix_len' must be at least 0"),
        ({"window": 0}, "'window' must be at least 1"),
        ({"q": torch.zeros(5, 5, 32)}, "Hq % Hkv == 0 does not hold"),
    ],
)
def test_a_bad_call_is_refused(change: dict[str, Any], message: str) -> None:
    inputs = CONTRACT.case(AXES, 0).inputs
    with pytest.raises(ContractError, match=message):
        CASCADE["torch"](**{**inputs, **change})


def test_drawn_groups_share_pages_and_what_they_leave_is_poison() -> None:
    """Over many draws: groups of several, of one, of none, of all; prefixes of nothing and of the whole context."""
    met = set()
    for seed in range(60):
        inputs = CONTRACT.case({**AXES, "window": 40 * (seed % 2)}, seed).inputs
        starts, prefixes, lens = (inputs[name].tolist() for name in ("group_starts", "prefix_lens", "context_lens"))
        window = inputs["window"] or math.inf
        for begin, end, prefix in zip(starts, starts[1:], prefixes, strict=False):
            met |= {f"group of {min(end - begin, 2)}"} | ({"all of the batch"} if end - begin == 5 else set())
            if begin == end:
                continue
            met |= {"no prefix"} if prefix == 0 else {"a prefix"}
            met |= {"all shared"} if prefix and prefix in lens[begin:end] else set()
            assert prefix % 8 == 0
            assert prefix <= min(lens[begin:end])
            for column in range(prefix // 8):
                seen = [s for s in range(begin, end) if column >= max(lens[s] - window, 0) // 8]
                assert len({int(inputs["block_tables"][s, column]) for s in seen}) <= 1
        met |= {"in no group"} if starts[-1] < 5 else set()
    assert met == {
        "group of 0", "group of 1", "group of 2", "all of the batch", "no prefix", "a prefix", "all shared",
        "in no group",
    }  # fmt: skip
