"""paged_prefill: the definition against dense attention, chunks, single tokens, invariance, cost and bad calls."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tkernels import OPS, ContractError, UnsupportedError
from tkernels.contract import Axes, Case
from tkernels.device import INTERPRETER, TARGETS
from tkernels.inputs import Draws, poison
from tkernels.interpreter.accesses import watch_accesses
from tkernels.launch import Kernel, jit_door
from tkernels.ops.paged_cache import paged_inputs
from tkernels.ops.paged_prefill.contract import CONTRACT, reference
from tkernels.tuning import NEAREST
from tkernels.verification.check import check_case

PREFILL = OPS["paged_prefill"].variants
TRITON = [name for name, v in PREFILL.items() if v.kind == "triton"]
AXES: Axes = {
    "B": 1, "T": 40, "lengths": "edges", "S": 16, "N": 4, "P": 18, "Hkv": 2, "Hq": 4, "D": 32, "Dv": 64,
    "activation": "float32", "kv": "float32", "window": 0, "k_scale": False, "v_scale": False, "soft_cap": 0,
    "sinks": False, "return_lse": True,
    "bound": "none", "layout": "contiguous", "values": "ordinary", "causal": True,
}  # fmt: skip


def whole_prompt(**axes: Any) -> dict[str, Any]:
    """One sequence of 40 tokens, all of them queries."""
    point, device = {**AXES, **axes}, torch.device("cpu")
    inputs = paged_inputs(point, Draws(0, device), device, [40], 40, [40])
    cu_seqlens_q = torch.tensor([0, 40], dtype=torch.int32)
    return {**inputs, "cu_seqlens_q": cu_seqlens_q, "return_lse": True, "causal": point["causal"]}


def chunk(inputs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The tokens begin .. end-1 of a whole prompt, on top of the cached ones before them."""
    return {
        **inputs,
        "q": inputs["q"][begin:end],
        "cu_seqlens_q": torch.tensor([0, end - begin], dtype=torch.int32),
        "context_lens": torch.tensor([end], dtype=torch.int32),
    }


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("causal", [True, False])
def test_the_definition_is_dense_attention(window: int, causal: bool) -> None:
    inputs = whole_prompt(activation="float64", kv="float64", window=window, causal=causal)
    out, lse = reference(**inputs)
    pages = inputs["block_tables"][0, :3]
    k, v = (inputs[name][pages].flatten(0, 1)[:40].transpose(0, 1) for name in ("k_cache", "v_cache"))  # [Hkv, 40, D]
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    visible = torch.ones(40, 40, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    visible = visible.triu(1 - window) if window else visible
    q = inputs["q"].transpose(0, 1)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=inputs["scale"]).transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    logits = (q @ k.transpose(1, 2) * inputs["scale"]).masked_fill(~visible, float("-inf"))
    torch.testing.assert_close(lse, logits.logsumexp(-1).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", list(PREFILL))
@pytest.mark.parametrize("window", [0, 19])
def test_chunks_give_what_the_whole_prompt_gives(variant: str, window: int) -> None:
    inputs = whole_prompt(window=window)
    whole, whole_lse = PREFILL[variant](**inputs)
    for begin, end in ((0, 1), (0, 16), (16, 40), (31, 40), (39, 40)):
        out, lse = PREFILL[variant](**chunk(inputs, begin, end))
        torch.testing.assert_close(out, whole[begin:end], rtol=0, atol=2e-6)
        torch.testing.assert_close(lse, whole_lse[begin:end], rtol=0, atol=2e-6)


@pytest.mark.parametrize("variant", list(PREFILL))
@pytest.mark.parametrize("causal", [True, False])
def test_pages_wholly_before_the_window_are_not_touched(variant: str, causal: bool) -> None:
    """Their entries lie outside of the pool and their keys are NaN; the blocks of 64 keys begin on such pages."""
    point = {**AXES, "T": 9, "S": 8, "N": 8, "P": 20, "Dv": 32, "B": 2, "window": 21, "causal": causal}
    point |= {"activation": "float16", "kv": "float16"}
    if PREFILL[variant].refusal(point, INTERPRETER):  # boxes have 16 keys at least
        point |= {"S": 16, "N": 4}
    device = torch.device("cpu")
    inputs = paged_inputs(point, Draws(0, device), device, [7, 2], 9, [59, 64])
    cu_seqlens_q = torch.tensor([0, 7, 9], dtype=torch.int32)
    case = Case(CONTRACT, point, 0, {**inputs, "cu_seqlens_q": cu_seqlens_q, "return_lse": True, "causal": causal})
    unseen = [(59 - 7 + 1 - 21) // point["S"], (64 - 2 + 1 - 21) // point["S"]]
    assert (inputs["block_tables"] == poison(torch.int32)).sum(1).tolist() == unseen
    tile = {"BLOCK_M": 16, "BLOCK_N": 64}
    config = None if variant == "torch" else PREFILL[variant].default_config("interpreter").pinned(tile)
    result = check_case(PREFILL[variant], case, config)
    assert result.status == "ok", result


@pytest.mark.parametrize("variant", list(PREFILL))
def test_one_token_of_each_sequence_is_a_decode(variant: str) -> None:
    inputs = (
        OPS["paged_decode"]
        .contract.case({**{n: v for n, v in AXES.items() if n not in ("T", "causal")}, "B": 3, "window": 17}, 3)
        .inputs
    )
    lens = inputs["context_lens"].clamp_min(1)  # a sequence with a query has a context
    inputs = {**inputs, "context_lens": lens, "block_tables": inputs["block_tables"].clamp_max(17)}
    inputs["k_cache"], inputs["v_cache"] = inputs["k_cache"].nan_to_num(), inputs["v_cache"].nan_to_num()
    expected, expected_lse = OPS["paged_decode"].variants["torch"](**inputs)
    out, lse = PREFILL[variant](**inputs, cu_seqlens_q=torch.arange(4, dtype=torch.int32))
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("variant", TRITON)
def test_the_batch_around_a_sequence_changes_no_bit(variant: str) -> None:
    inputs = whole_prompt(window=19)
    alone, alone_lse = PREFILL[variant](**inputs)
    batch = {
        "q": torch.cat((inputs["q"][:3], inputs["q"], inputs["q"][5:6])),
        "block_tables": inputs["block_tables"].repeat(4, 1),
        "cu_seqlens_q": torch.tensor([0, 3, 3, 43, 44], dtype=torch.int32),
        "context_lens": torch.tensor([3, 9, 40, 6], dtype=torch.int32),
    }
    out, lse = PREFILL[variant](**{**inputs, **batch})
    assert torch.equal(out[3:43], alone)
    assert torch.equal(lse[3:43], alone_lse)


@pytest.mark.parametrize("variant", list(PREFILL))
@pytest.mark.parametrize(("sequences", "tokens"), [(0, 7), (2, 0), (0, 0)])
def test_there_may_be_no_sequence_or_no_token(variant: str, sequences: int, tokens: int) -> None:
    inputs = CONTRACT.case({**AXES, "B": sequences, "T": tokens, "return_lse": False}, 0).inputs
    assert PREFILL[variant](**inputs).shape == (tokens, 4, 64)


def keys_read(variant: str, inputs: dict[str, Any]) -> set[int]:
    """The positions of the one sequence whose keys, or the boxes that they lie in, are read."""
    read: set[int] = set()
    k_cache, pages = inputs["k_cache"], inputs["block_tables"][0].tolist()
    page_bytes, key_bytes = k_cache.stride(0) * 4, k_cache.stride(1) * 4

    def door(kernel: Any, grid: tuple[int, ...], arguments: Any, config: Any) -> None:
        def note(addresses: Any, mask: Any, width: int, access: str) -> None:
            if access == "load" and width == 4:
                offsets = addresses[np.broadcast_to(mask, addresses.shape)].astype(np.int64) - k_cache.data_ptr()
                offsets = offsets[(offsets >= 0) & (offsets < k_cache.numel() * 4)]
                for page, key in {*zip(offsets // page_bytes, offsets % page_bytes // key_bytes, strict=True)}:
                    read.add(pages.index(page) * k_cache.shape[1] + int(key))

        with watch_accesses(note):
            jit_door(kernel, grid, arguments, config)

    Kernel(PREFILL[variant], NEAREST, {"BLOCK_M": 16, "BLOCK_N": 16}, door)(**inputs)
    return read


@pytest.mark.parametrize("variant", TRITON)
@pytest.mark.parametrize(
    ("begin", "end", "window", "causal", "first", "last"),
    [
        (0, 8, 0, True, 0, 16),  # the first tile alone holds what 8 tokens see
        (8, 16, 0, True, 0, 16),  # the next one lies wholly above the diagonal
        (16, 17, 0, True, 0, 32),
        (32, 40, 17, True, 16, 40),  # the key at 16 is the first that token 32 sees
        (32, 40, 16, True, 16, 40),
        (31, 32, 16, True, 16, 32),
        (32, 40, 1, True, 32, 40),
        (32, 40, 17, False, 16, 40),
        (0, 8, 0, False, 0, 40),
    ],
)
def test_no_tile_of_keys_that_nobody_sees_is_visited(
    variant: str, begin: int, end: int, window: int, causal: bool, first: int, last: int
) -> None:
    inputs = chunk(whole_prompt(window=window, causal=causal), begin, end)
    inputs["context_lens"] = torch.tensor([end if causal else 40], dtype=torch.int32)
    if not causal:  # the queries are the last of the context
        inputs["q"] = inputs["q"][-(end - begin) :]
    read = keys_read(variant, inputs)
    live = 40 if not causal else end
    assert {key // 16 for key in read} == set(range(first // 16, -(-min(last, live) // 16)))


@pytest.mark.parametrize(
    ("axes", "arch", "reason"),
    [
        ({}, "sm_90", None),
        ({}, "sm_120", None),
        ({}, "sm_89", "from sm_90 on; this is sm_89"),
        ({}, "gfx942", "from sm_90 on; this is gfx942"),
        ({"S": 8, "N": 8}, "sm_90", "matrix products take 16 keys at least; pages have 8"),
        ({"D": 100, "activation": "float16", "kv": "float16"}, "sm_90", "k_cache's address and strides"),
        ({"Dv": 100, "activation": "float16", "kv": "float16"}, "sm_90", "v_cache's address and strides"),
        ({"D": 100}, "sm_90", None),  # 400 bytes
    ],
)
def test_what_a_tensor_descriptor_cannot_copy_is_refused_with_the_reason(
    axes: dict[str, Any], arch: str, reason: str | None
) -> None:
    inputs = CONTRACT.case({**AXES, **axes}, 0).inputs
    bound, _ = CONTRACT.bind_axes(CONTRACT.bind_arguments((), inputs))
    got = PREFILL["tensor_descriptor"].supports(bound, TARGETS[arch])
    assert (got is None) if reason is None else (got is not None and reason in got)


def test_a_cache_that_begins_off_a_16_byte_boundary_is_refused_even_after_one_that_does_not() -> None:
    kernel = Kernel(PREFILL["tensor_descriptor"], NEAREST, {})
    inputs = whole_prompt()
    kernel(**inputs)
    storage = torch.zeros(inputs["k_cache"].numel() + 1)
    shifted = storage[1:].view(inputs["k_cache"].shape)
    assert shifted.stride() == inputs["k_cache"].stride()
    with pytest.raises(UnsupportedError, match="k_cache's address and strides to be multiples of 16 bytes"):
        kernel(**{**inputs, "k_cache": shifted})


def test_cost_counts_visible_pairs_and_cached_rows_once() -> None:
    point = {**AXES, "window": 10}
    inputs = chunk(whole_prompt(window=10), 25, 40)
    case = Case(CONTRACT, point, 0, inputs)
    assert case.flops == 2 * 4 * (32 + 64) * 15 * 10
    rows = 10 + 15 - 1
    pages = 3 - 16 // 16
    assert case.bytes_moved == rows * 2 * (32 + 64) * 4 + 15 * 4 * (4 * (32 + 64) + 4) + 4 * (pages + 1 + 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, "'context_lens' gives B = 1, but B = 2|gives B = 2"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int64)}, "'cu_seqlens_q' must be int32"),
        ({"causal": 1}, "'causal' must be bool"),
        ({"q": torch.zeros(40, 4, 16)}, "gives D = 32, but D = 16"),
    ],
)
def test_a_bad_call_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        PREFILL["torch"](**{**whole_prompt(), **change})
