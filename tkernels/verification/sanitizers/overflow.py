"""Offsets that overflow int32 in tensors too large to allocate: by faked strides and by huge sizes."""

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.variant import Variant
from tkernels.verification.offsets import check_offsets
from tkernels.verification.sanitizers.base import Sanitizer, without_launches
from tkernels.verification.sanitizers.huge_sizes import check_sizes


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    assert config is not None
    check_offsets(variant, case, config)
    check_sizes(variant, case, config)
    return None


SANITIZER = Sanitizer(
    "overflow",
    "offsets that overflow int32 in large tensors, by strides faked to 2**30 and by sizes of 2**31 elements",
    _run,
    unfit=without_launches,
    draws=12,
    max_programs=64,  # sizes of 3 and more in every dim: index 2 is the first past 2**31
)
