"""The error rule: how far a correct computation may be from the float64 oracle.

Per output tensor, with the baseline's (torch's own) error at the same dtype:
    max |error| <= 2 x baseline's + 2 eps max|oracle|, and, on 256 elements or more,
    rms error <= 1.25 x baseline's + eps/4 rms|oracle|, in float32 + eps rms|oracle|.
In float32 nothing wider hides what was rounded on the way: with eps/4, 67 of 1,500 correct norms of 3 rows of 2,049
failed, for a row's elements share the error of its root. With eps the worst of 8,000 norms uses 0.87 of the allowance.
Below the normal range a dtype's spacing no longer shrinks, so eps x size is at least the smallest subnormal there.
Integers have no eps: they are equal or wrong, and so is any output that its contract calls exact.
Neither a loose absolute tolerance nor a single rounding: the natural error of the computation itself is the measure.
"""

import math
from dataclasses import dataclass

import torch

RMS_FROM_ELEMENTS = 256

LUCK = 8.0
"""Times the allowance: what a right kernel may miss it by in one case of hundreds, where torch's error happens to be
nearly none. No check of a variant forgives that. What asks something else of a case (whether a mutant is noticed there,
what an earlier call left) makes nothing of one that the variant misses by no more.
"""


@dataclass(frozen=True)
class Verdict:
    """How one output fared. Ratios are error over allowance: at most 1 passes. `index` is the worst element's."""

    ok: bool
    max_ratio: float
    rms_ratio: float | None
    index: tuple[int, ...] = ()
    expected: float = 0.0
    got: float = 0.0
    reason: str = ""


def _mismatch(got: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """Where one is finite and the other not, or both are infinities of different signs; NaN agrees with NaN."""
    special = ~torch.isfinite(oracle) | ~torch.isfinite(got)
    agree = (got == oracle) | (torch.isnan(got) & torch.isnan(oracle))
    return special & ~agree


def _first(where: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in where.nonzero()[0])


def judge(
    got: torch.Tensor, oracle: torch.Tensor, baseline: torch.Tensor, slack: float = 1.0, exact: bool = False
) -> Verdict:
    """The error rule for one output.

    Args:
        got: Any shape, at the output's dtype.
        oracle: The same shape, float64.
        baseline: As got, by torch.
        slack: What the allowance is multiplied by: 1 for every variant; the check of the baseline itself takes more.
        exact: Nothing is allowed, neither eps nor a baseline's error.
    """
    eps, spacing = _precision(got.dtype, exact)
    wide, base = got.double(), baseline.double()
    odd = _mismatch(wide, oracle)
    if odd.any():
        index = _first(odd)
        reason = "a special value (NaN, infinity, or an element that must stay untouched) is where it should not be"
        return Verdict(False, math.inf, None, index, float(oracle[index]), float(wide[index]), reason)
    finite = torch.isfinite(oracle)
    if not finite.any():
        return Verdict(True, 0.0, None)
    zero = torch.zeros((), dtype=torch.float64, device=oracle.device)
    truth = torch.where(finite, oracle, zero)
    error = torch.where(finite, (wide - oracle).abs(), zero)
    natural = zero if exact else torch.where(finite & torch.isfinite(base), (base - oracle).abs(), zero)
    allowed_max = 2 * float(natural.max()) + 2 * max(eps * float(truth.abs().max()), spacing)
    max_ratio = _ratio(float(error.max()), slack * allowed_max)
    rms_ratio = None
    if (count := int(finite.sum())) >= RMS_FROM_ELEMENTS:
        rms_error, rms_natural, rms_truth = (float((t.square().sum() / count).sqrt()) for t in (error, natural, truth))
        rounded = max(eps * rms_truth, spacing) / (1 if got.dtype.itemsize >= 4 else 4)
        rms_ratio = _ratio(rms_error, slack * (1.25 * rms_natural + rounded))
    flat = int(error.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
    ok = max_ratio <= 1 and (rms_ratio is None or rms_ratio <= 1)
    reason = "" if ok else "max error" if max_ratio > 1 else "rms error"
    return Verdict(ok, max_ratio, rms_ratio, index, float(oracle[index]), float(wide[index]), reason)


def _precision(dtype: torch.dtype, exact: bool) -> tuple[float, float]:
    """The dtype's eps and its smallest subnormal number; zeros for integers, and of what is to be exact."""
    if exact or not dtype.is_floating_point:
        return 0.0, 0.0
    info = torch.finfo(dtype)
    return float(info.eps), float(info.smallest_normal) * float(info.eps)


def _ratio(error: float, allowed: float) -> float:
    return error / allowed if allowed > 0 else (0.0 if error == 0 else math.inf)
