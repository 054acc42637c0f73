"""Inputs of gigabytes are drawn in a moment: values repeat, but never in step with a tensor's rows."""

import torch

from tkernels.inputs import MOST_DRAWN, Draws, fill
from tkernels.ops.paged_cache import _normal

CPU = torch.device("cpu")


def test_a_tensor_that_is_drawn_whole_is_what_its_seed_has_always_given() -> None:
    values = Draws(3, CPU).normal((4, 5), torch.float64)
    assert torch.equal(values, torch.randn(4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64))


def test_beyond_that_values_repeat_and_no_two_rows_are_alike() -> None:
    values = Draws(0, CPU).normal((1100, 4096), torch.bfloat16)
    assert values.shape == (1100, 4096)
    flat = values.flatten()
    assert torch.equal(flat[MOST_DRAWN:], flat[: flat.numel() - MOST_DRAWN])
    assert len({row.float().sum().item() for row in values}) > 1000
    assert not any(torch.equal(values[0], row) for row in values[1:])
    codes = Draws(0, CPU).integers(0, 15, (1100, 4096))
    assert (codes.dtype, int(codes.min()), int(codes.max())) == (torch.int64, 0, 15)
    assert not any(torch.equal(codes[0], row) for row in codes[1:])


def test_each_context_is_from_another_place_of_the_same_numbers() -> None:
    draws, shape = Draws(0, CPU), (1024, 8, 128)
    one, other = (_normal(draws, shape, CPU) for _ in range(2))
    assert one.dtype == torch.float32
    assert not torch.equal(one, other)
    assert abs(one.std().item() - 1.0) < 0.01
    assert _normal(draws, (1023, 8, 128), CPU).dtype == torch.float64


def test_few_values_fill_a_shape() -> None:
    assert fill(torch.arange(3), (2, 4)).tolist() == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert fill(torch.arange(9), (2, 2)).tolist() == [[0, 1], [2, 3]]
