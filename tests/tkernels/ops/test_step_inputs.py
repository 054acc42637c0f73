"""step_inputs: tokens that nobody has seen yet, padding of both kinds, and slots past 2**31."""

import pytest
import torch

from tkernels import OPS, ContractError

VARIANTS = OPS["step_inputs"].variants
EVERY = pytest.mark.parametrize("variant", list(VARIANTS))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def longs(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@EVERY
def test_a_decode_a_prefill_chunk_and_padding(variant: str) -> None:
    token_ids, positions, slots, context_lens = VARIANTS[variant](
        longs(-2, 11, 12, 13, -1, 99, 99),  # row 1's newest; a chunk; row 0's, of padding; nobody's
        longs(70, 71),
        ints(5, 6, 7, 8, 9, 2, -9, -9, -9).view(3, 3),
        longs(4, 1, -1),
        ints(0, 1, 4, 5),
        2,
    )
    assert token_ids.tolist() == [71, 11, 12, 13, 0, 0, 0]
    assert positions.tolist() == [4, 1, 2, 3, 0, 0, 0]
    assert slots.tolist() == [14, 17, 18, 19, -1, -1, -1]
    assert context_lens.tolist() == [5, 4, 0]


@EVERY
def test_a_chunk_crosses_runs_of_tokens(variant: str) -> None:
    """Its interpreted default writes 8 at a time."""
    tokens = torch.arange(100, 121)
    token_ids, positions, slots, context_lens = VARIANTS[variant](
        tokens, longs(0), torch.arange(12, dtype=torch.int32).flip(0).view(1, 12), longs(3), ints(0, 21), 2
    )
    assert token_ids.tolist() == tokens.tolist()
    assert positions.tolist() == list(range(3, 24))
    assert slots.tolist() == [(11 - p // 2) * 2 + p % 2 for p in range(3, 24)]
    assert context_lens.tolist() == [24]


@EVERY
def test_a_slot_may_lie_past_what_32_bits_hold(variant: str) -> None:
    page = 2**31 - 1
    _, _, slots, _ = VARIANTS[variant](longs(7), longs(0), ints(page).view(1, 1), longs(15), ints(0, 1), 16)
    assert slots.tolist() == [page * 16 + 15]


@EVERY
@pytest.mark.parametrize(("sequences", "tokens"), [(0, 0), (0, 3), (2, 0)])
def test_an_empty_step(variant: str, sequences: int, tokens: int) -> None:
    token_ids, positions, slots, context_lens = VARIANTS[variant](
        torch.full((tokens,), -1), longs(5), torch.zeros(sequences, 1, dtype=torch.int32),
        torch.zeros(sequences, dtype=torch.int64), torch.zeros(sequences + 1, dtype=torch.int32), 4,
    )  # fmt: skip
    assert token_ids.tolist() == positions.tolist() == [0] * tokens
    assert slots.tolist() == [-1] * tokens
    assert context_lens.tolist() == [0] * sequences


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ContractError, match="B = 2, but B = 1"):
        VARIANTS["torch"](longs(1), longs(0), ints(0).view(1, 1), longs(0), ints(0, 1, 1), 4)
    with pytest.raises(ContractError, match="argument 'page_size' must be at least 1, got 0"):
        VARIANTS["torch"](longs(1), longs(0), ints(0).view(1, 1), longs(0), ints(0, 1), 0)
