"""From a report's rows to marks: each with our best variant, its peer, and whether the comparison holds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from experiments.gpu_report.marks import FAR_UNDER, MARKS, PUBLISHED, Mark, Place, Published
from experiments.peers import KERNELS
from experiments.runs.rows import Row

CASES = ("drawn cases", "marked shape")
"""The tests on a device that compare with the definition: what fails one has no time."""

Verdict = Literal["met", "missed", "void", "not measured"]


@dataclass(frozen=True)
class MarkRow:
    """A mark, and how far it was reached: as a share of the measured bandwidth or rate, times as fast as the peer, or
    microseconds. `note` says why that is not known, or what voids it. ours, peer, plus: the fastest rows of each where
    the mark has them timed.
    """

    mark: Mark
    verdict: Verdict
    note: str = ""
    ours: Row | None = None
    peer: Row | None = None
    plus: Row | None = None
    reached: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the peer."""
        return _median(self.peer) / _median(self.ours) if self.ours is not None and self.peer is not None else None


@dataclass(frozen=True)
class _Found:
    """What the rows say of an op at a point. here: those of its checks and times. timed: of these by variant, where
    there is a time. wrong: variants of the op that a check on the device found wrong.
    """

    op: str
    here: Sequence[Row]
    timed: dict[str, Row]
    wrong: Sequence[str]

    @property
    def ours(self) -> Row | None:
        """The fastest variant of the project's own that is not wrong."""
        return self.fastest(name for name in self.timed if _is_ours(self.op, name) and name not in self.wrong)

    def fastest(self, names: Iterable[str]) -> Row | None:
        return min((self.timed[name] for name in names if name in self.timed), key=_median, default=None)


def mark_rows(rows: Sequence[Row], marks: Sequence[Mark] = MARKS) -> list[MarkRow]:
    """Every mark's row, in order; "not measured" where there is no run of it."""
    rates = next((row for row in rows if row.stage == "rates"), None)
    return [_judge(mark, rows, rates) for mark in marks]


def _find(place: Place, rows: Sequence[Row]) -> _Found:
    op, point = place
    mine = [row for row in rows if row.op == op]
    here = [row for row in mine if row.point == point and row.stage in ("check", "kernels")]
    wrong = [str(row.variant) for row in mine if row.status == "wrong" and row.test in CASES]
    timed = {str(row.variant): row for row in here if row.median_us is not None}
    return _Found(op, here, timed, list(dict.fromkeys(wrong)))


def _judge(mark: Mark, rows: Sequence[Row], rates: Row | None) -> MarkRow:
    found, beside = (_find(place, rows) for place in ((mark.op, mark.point), mark.peers_place))
    plus = _find((mark.plus, mark.point), rows).ours if mark.plus else None
    row = MarkRow(mark, "not measured", ours=found.ours, peer=beside.fastest(mark.peers), plus=plus)
    if row.ours is None:
        return replace(row, note=_why_not_timed(mark, found))
    reached = _reached(row, row.ours, rates)
    if isinstance(reached, str):
        return replace(row, note=reached)
    void = _why_void(row, reached, beside)
    is_met = reached <= mark.target if mark.against == "time" else reached >= mark.target
    verdict: Verdict = "void" if void else "met" if is_met else "missed"
    return replace(row, reached=reached, verdict=verdict, note=void)


def _reached(row: MarkRow, ours: Row, rates: Row | None) -> float | str:
    """How far the mark was reached, or why that is not known."""
    if row.mark.plus and row.plus is None:
        return f"no time of {row.mark.plus} here"
    if row.mark.against == "time":
        return _median(ours) + (_median(row.plus) if row.plus is not None else 0.0)
    if row.mark.against == "peer":
        return row.ratio if row.ratio is not None else f"no time of {' or '.join(row.mark.peers)} here"
    if row.mark.against == "matmul":
        rate = getattr(rates, "matmul_flops_per_s", None)
        return (ours.flops or 0) / _median(ours) * 1e6 / float(rate) if rate else "no matmul rate was measured"
    rate = getattr(rates, f"{row.mark.against}_bytes_per_s", None)
    if not rate:
        return f"no {row.mark.against} bandwidth was measured"
    return (ours.bytes_moved or 0) / _median(ours) * 1e6 / float(rate)


def _median(row: Row | None) -> float:
    assert row is not None
    assert row.median_us is not None
    return row.median_us


def _is_ours(op: str, variant: str) -> bool:
    """Neither another project's kernel nor torch's own way."""
    return variant != "torch" and not (KERNELS / op / f"{variant}.py").exists()


def _why_not_timed(mark: Mark, found: _Found) -> str:
    reasons = [
        f"{row.variant}: {row.reason}" for row in found.here if row.reason and _is_ours(mark.op, str(row.variant))
    ]
    reasons += [f"{name}: wrong on this device" for name in found.wrong]
    return "; ".join(reason.splitlines()[0][:200] for reason in reasons)


def _why_void(row: MarkRow, reached: float, beside: _Found) -> str:
    """What makes a comparison worth nothing, or an empty text. beside: where the peers were timed."""
    mark, ours, peer = row.mark, row.ours, row.peer
    if mark.against == "time":
        return ""
    if mark.against != "peer" or ours is None or peer is None:  # a measured rate is itself no exact limit
        return f"{reached:.0%} of what the card was measured at" if reached > 1.05 else ""
    if mark.ideal is not None and reached > mark.ideal:
        return f"{reached:.2f}x is above the ideal of {mark.ideal:g}x"
    if peer.timer != ours.timer:
        return f"timed differently: {ours.timer} and, {peer.variant}, {peer.timer}"
    return _under_published(mark, peer, beside)


def _under_published(mark: Mark, peer: Row, found: _Found) -> str:
    """Says so where a peer is far under what others measured of it."""
    for published in PUBLISHED:
        if (published.op, published.point, published.peer) != (*mark.peers_place, peer.variant):
            continue
        reached = _reached_as_published(peer, published, found)
        if reached is None or reached >= FAR_UNDER * published.value or math.isclose(reached, published.value):
            continue
        return f"{peer.variant} reaches {reached:.2f} here where {published.value:g} was published ({published.source})"
    return ""


def _reached_as_published(peer: Row, published: Published, found: _Found) -> float | None:
    if published.over is None:
        return peer.roofline_fraction if peer.roofline_bound == "memory" else None
    other = found.timed.get(published.over)
    return _median(other) / _median(peer) if other is not None else None
