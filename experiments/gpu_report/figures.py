"""From a journal's facts to rows: each mark with our best variant, its peer, and whether the comparison holds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.gpu_report.journal import Fact, facts
from experiments.gpu_report.marks import FAR_UNDER, MARKS, PUBLISHED, Mark
from tkernels.roofline import PEAKS

Verdict = Literal["met", "missed", "void", "not measured"]


@dataclass(frozen=True)
class Row:
    """One line of the table. Everything unknown is None; `note` says why, or what voids the row."""

    figure: str
    mark: str
    verdict: Verdict
    note: str = ""
    variant: str | None = None
    microseconds: float | None = None
    iqr_us: float | None = None
    reached: float | None = None
    roofline: float | None = None
    peer: str | None = None
    peer_us: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Found:
    """What a journal knows, looked up: timings by op, point and variant; the device's own rates."""

    timings: Mapping[tuple[str, str, str], Fact]
    rates: Mapping[str, float]
    device: str | None
    wrong: Mapping[tuple[str, str], str]

    @staticmethod
    def of(lines: Iterable[Fact]) -> "Found":
        timings: dict[tuple[str, str, str], Fact] = {}
        rates: dict[str, float] = {}
        device: str | None = None
        failures: dict[tuple[str, str], dict[str, str]] = {}  # of each variant, by signature
        known = facts(lines)
        # Of a variant whose code has changed, what was found of the old code is no fact any more.
        newest = {(fact["op"], fact["variant"]): _code_of(fact) for fact in known if "variant" in fact}
        for fact in known:
            if "variant" in fact and _code_of(fact) != newest[fact["op"], fact["variant"]]:
                continue
            if fact.get("kind") == "timing":
                timings[fact["op"], fact["point"], fact["variant"]] = fact
            elif fact.get("kind") == "rates":
                rates |= {name: value for name, value in fact.items() if isinstance(value, float)}
            elif fact.get("kind") == "device":
                device = str(fact["name"])
            elif fact.get("kind") == "correctness":
                of_variant = failures.setdefault((fact["op"], fact["variant"]), {})
                of_variant.pop(fact["signature"], None)
                if fact["failures"]:
                    of_variant[fact["signature"]] = str(fact["failures"][0])
        wrong = {variant: next(iter(found.values())) for variant, found in failures.items() if found}
        return Found(timings, rates, device, wrong)

    def best(self, op: str, point: str, variants: Sequence[str]) -> Fact | None:
        """The fastest of the named variants that has a time."""
        known = [self.timings[op, point, name] for name in variants if (op, point, name) in self.timings]
        timed = [fact for fact in known if fact.get("median_us")]
        return min(timed, key=lambda fact: float(fact["median_us"])) if timed else None

    def ours(self, op: str, point: str) -> Fact | None:
        """This project's fastest variant that no check found wrong."""
        names = [
            name for (its_op, its_point, name), fact in self.timings.items()
            if (its_op, its_point) == (op, point) and fact["side"] == "ours" and (op, name) not in self.wrong
        ]  # fmt: skip
        return self.best(op, point, names)


def _code_of(fact: Fact) -> str:
    """The hash of the code that a fact is about, from its step's name."""
    return str(fact["step"]).partition("@")[2].partition(" ")[0]


def rows_of(lines: Iterable[Fact], marks: Sequence[Mark] = MARKS) -> list[Row]:
    """Every mark's row, in order; "not measured" where there is no run of it."""
    found = Found.of(lines)
    return [_row(mark, found) for mark in marks]


def _row(mark: Mark, found: Found) -> Row:
    figure = f"{mark.op} {mark.point}"
    ours = found.ours(mark.op, mark.point)
    peer = found.best(mark.op, mark.point, mark.peers)
    known: dict[str, Any] = {"figure": figure, "mark": mark.text}
    if peer is not None:
        known |= {"peer": peer["variant"], "peer_us": peer["median_us"]}
    if ours is None:
        return Row(**known, verdict="not measured", note=_why_not(mark, found))
    known |= {"variant": ours["variant"], "microseconds": ours["median_us"], "iqr_us": ours["iqr_us"]}
    known["roofline"] = ours.get("roofline_fraction")
    ratio = float(peer["median_us"]) / float(ours["median_us"]) if peer is not None else None
    known["ratio"] = ratio
    if mark.against == "peer":
        if ratio is None:
            return Row(**known, verdict="not measured", note=f"no time of {' or '.join(mark.peers)} here")
        reached, target = ratio, mark.target
    else:
        rate = found.rates.get(f"{mark.against}_bytes_per_s")
        if not rate:
            return Row(**known, verdict="not measured", note=f"no {mark.against} bandwidth was measured")
        reached, target = float(ours["bytes_per_s"]) / rate, mark.target
    known["reached"] = reached
    if void := _why_void(mark, ours, peer, reached, found):
        return Row(**known, verdict="void", note=void)
    return Row(**known, verdict="met" if reached >= target else "missed")


def _why_not(mark: Mark, found: Found) -> str:
    tried = [fact for (op, point, _), fact in found.timings.items() if (op, point) == (mark.op, mark.point)]
    reasons = [
        f"{fact['variant']}: {fact['reason']}" for fact in tried if fact["side"] == "ours" and fact.get("reason")
    ]
    reasons += [f"{name}: wrong on this device" for op, name in found.wrong if op == mark.op]
    return "; ".join(reason.splitlines()[0][:200] for reason in reasons)


def _why_void(mark: Mark, ours: Fact, peer: Fact | None, reached: float, found: Found) -> str:
    """What makes a comparison worth nothing, or an empty text."""
    if mark.against == "peer" and mark.ideal is not None and reached > mark.ideal:
        return f"{reached:.2f}x is above the ideal of {mark.ideal:g}x"
    if mark.against != "peer" and reached > 1.05:  # a measured rate is itself no exact limit
        return f"{reached:.0%} of what the card was measured at"
    if mark.against == "peer" and peer is not None:
        if peer["timer"] != ours["timer"]:
            return f"timed differently: {ours['timer']} and, {peer['variant']}, {peer['timer']}"
        return under_published(mark.op, mark.point, str(peer["variant"]), found)
    return ""


def under_published(op: str, point: str, peer: str, found: Found) -> str:
    """Says so where a peer is far under what others measured of it."""
    fact = found.timings[op, point, peer]
    for published in PUBLISHED:
        if (published.op, published.peer, published.point) != (op, peer, point):
            continue
        if published.over is not None:
            other = found.timings.get((op, point, published.over))
            reached = float(other["median_us"]) / float(fact["median_us"]) if other and other.get("median_us") else None
        else:
            peaks = PEAKS.get(found.device or "")
            reached = float(fact["bytes_per_s"]) / peaks.memory_bytes_per_s if peaks else None
        if reached is not None and reached < FAR_UNDER * published.value and not math.isclose(reached, published.value):
            return f"{peer} reaches {reached:.2f} here where {published.value:g} was published ({published.source})"
    return ""
