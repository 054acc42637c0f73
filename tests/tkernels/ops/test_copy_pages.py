"""copy_pages: pairs to skip, the baseline's path for a device that the host must not wait for, and what is refused."""

import pytest
import torch

from tkernels import OPS, ContractError
from tkernels.device import TARGETS
from tkernels.inputs import clone_inputs
from tkernels.ops.copy_pages.contract import CONTRACT, copy_without_sync, reference
from tkernels.ops.paged_cache import as_bits
from tkernels.verification.draws import chooser

VARIANTS = OPS["copy_pages"].variants


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("skipped", ["none", "some", "all"])
@pytest.mark.parametrize("seed", range(8))
def test_the_path_without_a_sync_writes_the_same(skipped: str, seed: int) -> None:
    case = CONTRACT.case(CONTRACT.draw_axes(chooser(seed), {"skipped": skipped}), seed)
    expected, got = clone_inputs(case.inputs), clone_inputs(case.inputs)
    reference(**expected)
    copy_without_sync(**got)
    same = (got["caches"].double() == expected["caches"].double()) | expected["caches"].double().isnan()
    assert bool(same.all())
    assert torch.equal(got["caches"].double().isnan(), expected["caches"].double().isnan())


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_minus_one_on_either_side_is_not_the_last_page(variant: str) -> None:
    caches = torch.arange(4.0).repeat(2, 1).view(2, 4, 1, 1, 1).clone()
    VARIANTS[variant](caches, ints(-1, 3, 2, -1), ints(1, -1, 0, -1))
    assert caches.flatten(1).tolist() == [[2.0, 1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_every_bit_pattern_is_copied_as_it_is(variant: str, dtype: torch.dtype) -> None:
    """NaN payloads, infinities, subnormal numbers, negative zero: a cache's pages are bits."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    page = patterns.view(1, 1, 64, 8, -1).view(dtype)
    caches = torch.cat((torch.zeros_like(as_bits(page)), as_bits(page)), dim=1).view(dtype)
    VARIANTS[variant](caches, ints(1), ints(0))
    assert torch.equal(caches[:, 0].view(torch.uint8), caches[:, 1].view(torch.uint8))
    assert torch.equal(caches[:, 1].view(torch.uint8), page[:, 0].view(torch.uint8))


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_no_pairs_are_no_launch(variant: str) -> None:
    caches = torch.ones(1, 1, 1, 1, 1)
    assert VARIANTS[variant](caches, ints(), ints()) is None
    assert caches.item() == 1


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (torch.tensor([1]), ints(0), "argument 'src' must be int32, got int64"),
        (ints(1), ints(0, 2), "pairs = 2, but pairs = 1"),
    ],
)
def test_what_does_not_fit_is_refused(src: torch.Tensor, dst: torch.Tensor, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        VARIANTS["torch"](torch.zeros(1, 3, 1, 1, 1), src, dst)


@pytest.mark.parametrize(("arch", "known"), [("sm_80", False), ("sm_86", False), ("sm_89", True), ("gfx942", False)])
def test_fp8_is_unsupported_where_nothing_can_write_it(arch: str, known: bool) -> None:
    supports = VARIANTS["page_parts"].supports
    assert (supports({"kv": "float8_e4m3fn"}, TARGETS[arch]) is None) == known
    assert supports({"kv": "bfloat16"}, TARGETS[arch]) is None
