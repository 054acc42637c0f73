"""The tests bite: each kernel with one fault planted in it must fail its check. Any survivor is a hole in the tests.

The whole of it is `tk check --mutate --quota 1000`; here is, in every op, one of each kind of fault that this field has
seen most.
"""

from collections.abc import Iterator

import pytest

import tkernels
from tkernels.verification.mutation.campaign import KINDS, Trial, outcomes, sampled, trials
from tkernels.verification.mutation.pool import Pool, task

VARIANTS = [v for op in tkernels.OPS.values() for v in op.variants.values() if v.kind == "triton" and v.kernels]
EVERYTHING = list(trials(VARIANTS, KINDS["kernel"]))
OPS = sorted({trial.op for trial in EVERYTHING})
_LONG = ("dequant_gemm", "paged_decode", "paged_prefill", "quantize_tokens", "rms_norm")
LONGEST = [variant for variant in VARIANTS if variant.contract.name in _LONG]
"""Those of the ops whose checks come nearest to a mutant's limits: up to 16 s, where no other op's took 4."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as started:
        yield started


def alive(pool: Pool, everything: list[Trial]) -> list[str]:
    """Of one mutant of each kind those that nobody noticed, and the declared equivalents that somebody did."""
    chosen = sampled(everything, 1, seed=0)
    ended = list(outcomes(pool, chosen, seed=1, compiled=False))
    assert len(ended) == len(chosen)
    return [f"{o.column}: {o.trial.mutant.name}" for o in ended if o.column == "survived" or o.wrong]


def of(op: str, *kinds: str) -> list[Trial]:
    return [trial for trial in EVERYTHING if trial.op == op and trial.mutant.kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("variant", LONGEST, ids=lambda v: f"{v.contract.name}-{v.name}")
def test_the_original_survives(variant: tkernels.Variant, pool: Pool) -> None:
    """Under a mutant's own limits, or what is said to have killed a mutant may have been they."""
    answer = pool.ask(task("check", None, variant, seed=1, draws=8))
    assert answer["verdict"] == "survived", answer


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_dropped_mask_is_caught(op: str, pool: Pool) -> None:
    assert not alive(pool, [trial for trial in of(op, "mask_dropped") if "mask=" in trial.mutant.before])


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_swapped_stride_is_caught(op: str, pool: Pool) -> None:
    assert not alive(pool, of(op, "stride_swapped"))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_comparison_or_bound_off_by_one_is_caught(op: str, pool: Pool) -> None:
    added = " + 1"  # to an address or an index: hundreds, and none of them subtle
    chosen = [trial for trial in of(op, "mask_shifted", "off_by_one") if not trial.mutant.after.endswith(added)]
    assert not alive(pool, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_lost_scale_or_zero_point_is_caught(op: str, pool: Pool) -> None:
    assert not alive(pool, of(op, "scale_dropped", "zero_point_dropped"))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_a_lost_64_bit_offset_is_caught(op: str, pool: Pool) -> None:
    assert not alive(pool, [trial for trial in of(op, "cast_removed") if "int64" in trial.mutant.before])


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.contract.name}-{v.name}")
def test_every_kernel_has_masks_to_drop(variant: tkernels.Variant) -> None:
    """In its own file or in the helpers that it calls."""
    assert list(trials([variant], ("mask_dropped",))), "no mask found: are the kernel's files read rightly?"


def test_every_kind_of_fault_is_planted_somewhere() -> None:
    assert {trial.mutant.kind for trial in EVERYTHING} == set(KINDS["kernel"])
    assert {trial.mutant.kind for trial in trials(VARIANTS, KINDS["launcher"])} == set(KINDS["launcher"])
