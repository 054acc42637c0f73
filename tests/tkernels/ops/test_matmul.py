"""matmul: the persistent kernel walks every tile, and a row's bits do not depend on the rows around it."""

import pytest
import torch

from tkernels import OPS
from tkernels.contract import ContractError
from tkernels.device import TARGETS

VARIANTS = OPS["matmul"].variants
TRITON = [name for name, v in VARIANTS.items() if v.kind == "triton"]


@pytest.mark.parametrize("variant", TRITON)
@pytest.mark.parametrize(("tokens", "outputs"), [(1, 1), (16, 64), (33, 96), (80, 50), (40, 33)])
def test_fewer_programs_than_tiles_cover_every_tile_once(variant: str, tokens: int, outputs: int) -> None:
    # Products and sums of these are exact, and so is their fp16 result.
    x, weight = (torch.randint(-3, 4, (rows, 8)).half() for rows in (tokens, outputs))
    assert torch.equal(VARIANTS[variant](x, weight), x @ weight.t())


@pytest.mark.parametrize("variant", TRITON)
def test_a_row_alone_and_in_a_batch_has_the_same_bits(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 104, generator=generator).bfloat16() for rows in (37, 24))
    whole = VARIANTS[variant](x, weight)
    for row in (0, 15, 16, 36):
        assert torch.equal(VARIANTS[variant](x[row : row + 1], weight), whole[row : row + 1])


@pytest.mark.parametrize(
    ("x", "weight", "arch", "reason"),
    [
        (torch.zeros(2, 8).half(), torch.zeros(4, 8).half(), "sm_90", None),
        (torch.zeros(2, 8).half(), torch.zeros(4, 8).half(), "sm_89", "from sm_90 on; this is sm_89"),
        (torch.zeros(2, 8), torch.zeros(4, 8), "sm_90", "fp32 products run on FMA units"),
        (torch.zeros(2, 9).half()[:, :8], torch.zeros(4, 8).half(), "sm_90", "x's address and row stride"),
        (torch.zeros(17).half()[1:].view(2, 8), torch.zeros(4, 8).half(), "sm_90", "x's address and row stride"),
        (torch.zeros(2, 8).half(), torch.zeros(4, 12).half()[:, :8], "sm_90", "weight's address and row stride"),
    ],
)
def test_what_a_tensor_descriptor_cannot_copy_is_refused_with_the_reason(
    x: torch.Tensor, weight: torch.Tensor, arch: str, reason: str | None
) -> None:
    contract = OPS["matmul"].contract
    bound, _ = contract.bind_axes(contract.bind_arguments((x, weight), {}))
    got = VARIANTS["tensor_descriptor"].supports(bound, TARGETS[arch])
    assert (got is None) if reason is None else (got is not None and reason in got)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_widths_that_differ_are_refused_with_both_named(variant: str) -> None:
    with pytest.raises(ContractError, match="matmul.*weight"):
        VARIANTS[variant](torch.zeros(2, 8), torch.zeros(4, 9))
