"""Offsets that overflow int32 in tensors too large to allocate: by faked strides, by huge sizes and by far indices."""

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.variant import Variant
from tkernels.verification.far_indices import check_far_indices
from tkernels.verification.offsets import check_offsets
from tkernels.verification.sanitizers.base import Sanitizer, without_launches
from tkernels.verification.sanitizers.huge_sizes import check_sizes


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    assert config is not None
    check_offsets(variant, case, config)
    check_sizes(variant, case, config)
    check_far_indices(variant, case, config)
    return None


SANITIZER = Sanitizer(
    "overflow",
    "offsets that overflow int32 in large tensors: by faked strides, sizes of 2**31 elements and indices past 2**32",
    _run,
    unfit=without_launches,
    draws=12,
    max_programs=64,  # sizes of 3 and more in every dim: index 2 is the first past 2**31
)
