"""merge_states: two halves of a context make the whole, empty parts, bad calls."""

import math

import pytest
import torch

from tests.tkernels.ops.test_paged_decode import case_with_contexts
from tkernels import OPS, ContractError

MERGE = OPS["merge_states"].variants
EMPTY = -math.inf


@pytest.mark.parametrize("variant", list(MERGE))
@pytest.mark.parametrize("decode", ["torch", "one_pass", "split_kv", "last_arriver"])
def test_decode_over_two_halves_merged_is_decode_over_the_whole(variant: str, decode: str) -> None:
    inputs = case_with_contexts((72, 41, 33)).inputs  # pages of 8: the first 32 keys, and the rest
    attend, tables = OPS["paged_decode"].variants[decode], inputs["block_tables"]
    whole = attend(**inputs)
    first = {**inputs, "block_tables": tables[:, :4].contiguous(), "context_lens": torch.full((3,), 32).int()}
    second = {**inputs, "block_tables": tables[:, 4:].contiguous(), "context_lens": inputs["context_lens"] - 32}
    merged = MERGE[variant](*attend(**first), *attend(**second))
    for got, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("variant", list(MERGE))
def test_an_empty_part_leaves_the_other_as_it_is_and_is_not_read(variant: str) -> None:
    part, nothing = torch.randn(1, 2, 16), torch.full((1, 2, 16), math.nan)
    lse, empty = torch.tensor([[0.5, -3.0]]), torch.full((1, 2), EMPTY)
    for merged in (MERGE[variant](part, lse, nothing, empty), MERGE[variant](nothing, empty, part, lse)):
        assert torch.equal(merged[0], part)
        assert torch.equal(merged[1], lse)


@pytest.mark.parametrize("variant", list(MERGE))
def test_two_empty_parts_are_zeros(variant: str) -> None:
    nothing, empty = torch.full((1, 2, 16), math.nan), torch.full((1, 2), EMPTY)
    out, lse = MERGE[variant](nothing, empty, nothing, empty)
    assert torch.equal(out, torch.zeros(1, 2, 16))
    assert torch.equal(lse, empty)


@pytest.mark.parametrize("variant", list(MERGE))
def test_equal_parts_meet_half_way_and_weigh_twice_as_much(variant: str) -> None:
    a, b, lse = torch.full((1, 1, 16), 1.0), torch.full((1, 1, 16), 3.0), torch.full((1, 1), 100.0)
    out, total = MERGE[variant](a, lse, b, lse)
    assert torch.equal(out, torch.full((1, 1, 16), 2.0))
    torch.testing.assert_close(total, lse + math.log(2), rtol=1e-7, atol=0)


def test_a_log_sum_exp_of_16_bits_is_refused() -> None:
    part, lse = torch.zeros(1, 2, 16), torch.zeros(1, 2)
    with pytest.raises(ContractError, match="'lse_b' must be float32, got bfloat16"):
        MERGE["torch"](part, lse, part, lse.bfloat16())
