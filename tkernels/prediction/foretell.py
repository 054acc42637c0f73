"""A modelled time for a variant at a point on a named GPU; where there is none, the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tkernels.contract import Case
from tkernels.prediction.calls import make_call
from tkernels.prediction.compiled import NotKeptError, find_compiled
from tkernels.prediction.gpus import Gpu
from tkernels.prediction.kept import CompiledFacts
from tkernels.prediction.model import Prediction, predict_launch
from tkernels.prediction.walk import WalkError
from tkernels.variant import UnsupportedError, Variant


@dataclass(frozen=True)
class Foretold:
    """What the model says of one call of a variant.

    us: the sum over its launches; None where the model says nothing, with the `reason`. limit_us: the time that the
    data sheet's peaks allow for what the contract counts. launches: one for each, in order. compiled_for: constant ->
    value of the nearest code that there is, where there is none for this very call.
    is_unsupported: it has no time because the variant does not take the point.
    """

    us: float | None = None
    limit_us: float | None = None
    launches: tuple[Prediction, ...] = ()
    compiled_for: Mapping[str, object] | None = None
    reason: str | None = None
    is_unsupported: bool = False

    @property
    def bound(self) -> str | None:
        """What its longest launch is bound by."""
        return max(self.launches, key=lambda one: one.us).bound if self.launches else None


def foretell(
    variant: Variant,
    case: Case,
    gpu: Gpu,
    rows: Sequence[CompiledFacts],
    pins: Mapping[str, int] | None = None,
    is_exact: bool = False,
) -> Foretold:
    """The modelled time of a call.

    Args:
        case: Of `case_without_values`, or with values.
        rows: Of the kept table, where its kernels are looked for.
        pins: Values in place of the default config's.
        is_exact: Code that was compiled for other constants does not stand for this call's.
    """
    try:
        if variant.launch is None and not variant.parts:
            return Foretold(reason=f"its kernels are not compiled here: a {variant.kind} variant")
        return _of_launches(variant, case, gpu, rows, pins, is_exact)
    except UnsupportedError as error:
        return Foretold(reason=str(error), is_unsupported=True)
    except (NotKeptError, WalkError) as error:
        return Foretold(reason=str(error))


def _of_launches(
    variant: Variant,
    case: Case,
    gpu: Gpu,
    rows: Sequence[CompiledFacts],
    pins: Mapping[str, int] | None,
    is_exact: bool,
) -> Foretold:
    call = make_call(variant, case, gpu.facts, pins)
    found = []
    differs: dict[str, object] = {}
    for launch in call.launches:
        match = find_compiled(launch, gpu.facts.arch, rows) if launch.kernel is not None else None
        if match is not None and match.differs and is_exact:
            raise NotKeptError(f"{match.compiled.kernel} was compiled for {dict(match.differs)} alone")
        differs |= match.differs if match is not None else {}
        found.append(predict_launch(launch, match.compiled if match is not None else None, gpu))
    dtype = str(case.axes.get("codes") or case.axes.get("activation"))
    rate = gpu.peaks.flops_per_s.get(dtype)
    limits = [call.bytes_moved / gpu.peaks.memory_bytes_per_s, call.flops / rate if rate else 0.0]
    return Foretold(sum(one.us for one in found), max(limits) * 1e6, tuple(found), differs or None)
