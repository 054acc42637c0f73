"""From a report's rows to marks: each with our best variant, its peer, and whether the comparison holds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from experiments.gpu_report.marks import FAR_UNDER, MARKS, PUBLISHED, Mark, Published
from experiments.peers import KERNELS
from experiments.runs.rows import Row

Verdict = Literal["met", "missed", "void", "not measured"]


@dataclass(frozen=True)
class MarkRow:
    """How far a mark was reached: a share of the measured bandwidth, or times as fast as the peer. `note` says why that
    is not known, or what voids it. ours, peer: the fastest rows of each at the mark's point.
    """

    mark: Mark
    verdict: Verdict
    note: str = ""
    ours: Row | None = None
    peer: Row | None = None
    reached: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the peer."""
        return _median(self.peer) / _median(self.ours) if self.ours is not None and self.peer is not None else None


@dataclass(frozen=True)
class _Found:
    """What the rows say of a mark's op and point. wrong: variants of the op that a check on the device found wrong."""

    timed: dict[str, Row]
    untimed: list[Row]
    rates: Row | None
    wrong: list[str]

    @staticmethod
    def of(mark: Mark, rows: Sequence[Row]) -> "_Found":
        here = [row for row in rows if (row.op, row.point) == (mark.op, mark.point)]
        tried = [row for row in rows if row.op == mark.op and row.test == "drawn cases"]
        return _Found(
            timed={str(row.variant): row for row in here if row.median_us is not None},
            untimed=[row for row in here if row.stage in ("check", "kernels") and row.status != "ok"],
            rates=next((row for row in rows if row.stage == "rates"), None),
            wrong=list(dict.fromkeys(str(row.variant) for row in tried if row.status == "wrong")),
        )

    def fastest(self, names: Iterable[str]) -> Row | None:
        return min((self.timed[name] for name in names if name in self.timed), key=_median, default=None)


def mark_rows(rows: Sequence[Row], marks: Sequence[Mark] = MARKS) -> list[MarkRow]:
    """Every mark's row, in order; "not measured" where there is no run of it."""
    return [_judge(mark, _Found.of(mark, rows)) for mark in marks]


def _judge(mark: Mark, found: _Found) -> MarkRow:
    own = [name for name in found.timed if _is_ours(mark.op, name) and name not in found.wrong]
    row = MarkRow(mark, "not measured", ours=found.fastest(own), peer=found.fastest(mark.peers))
    if row.ours is None:
        return replace(row, note=_why_not_timed(mark, found))
    if mark.against == "peer":
        if row.ratio is None:
            return replace(row, note=f"no time of {' or '.join(mark.peers)} here")
        reached = row.ratio
    else:
        rate = getattr(found.rates, f"{mark.against}_bytes_per_s", None)
        if not rate:
            return replace(row, note=f"no {mark.against} bandwidth was measured")
        reached = (row.ours.bytes_moved or 0) / _median(row.ours) * 1e6 / rate
    row = replace(row, reached=reached, verdict="met" if reached >= mark.target else "missed")
    void = _why_void(row, reached, found)
    return replace(row, verdict="void", note=void) if void else row


def _median(row: Row | None) -> float:
    assert row is not None
    assert row.median_us is not None
    return row.median_us


def _is_ours(op: str, variant: str) -> bool:
    """Neither another project's kernel nor torch's own way."""
    return variant != "torch" and not (KERNELS / op / f"{variant}.py").exists()


def _why_not_timed(mark: Mark, found: _Found) -> str:
    reasons = [f"{row.variant}: {row.reason}" for row in found.untimed if _is_ours(mark.op, str(row.variant))]
    reasons += [f"{name}: wrong on this device" for name in found.wrong]
    return "; ".join(reason.splitlines()[0][:200] for reason in reasons)


def _why_void(row: MarkRow, reached: float, found: _Found) -> str:
    """What makes a comparison worth nothing, or an empty text."""
    mark, ours, peer = row.mark, row.ours, row.peer
    if mark.against != "peer":  # a measured rate is itself no exact limit
        return f"{reached:.0%} of what the card was measured at" if reached > 1.05 else ""
    assert ours is not None
    assert peer is not None
    if mark.ideal is not None and reached > mark.ideal:
        return f"{reached:.2f}x is above the ideal of {mark.ideal:g}x"
    if peer.timer != ours.timer:
        return f"timed differently: {ours.timer} and, {peer.variant}, {peer.timer}"
    known = [one for one in PUBLISHED if (one.op, one.point, one.peer) == (mark.op, mark.point, peer.variant)]
    return next(filter(None, (_under_published(peer, one, found) for one in known)), "")


def _under_published(peer: Row, published: Published, found: _Found) -> str:
    """Says so where a peer is far under what others measured of it."""
    if published.over is None:
        reached = peer.roofline_fraction if peer.roofline_bound == "memory" else None
    else:
        other = found.timed.get(published.over)
        reached = _median(other) / _median(peer) if other is not None else None
    if reached is None or reached >= FAR_UNDER * published.value or math.isclose(reached, published.value):
        return ""
    return f"{peer.variant} reaches {reached:.2f} here where {published.value:g} was published ({published.source})"
