"""What came out, in a sentence made of the rows."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.reporting.places import Place, arm_of, asked_of, own_settings, place_of, told_apart
from experiments.reporting.replicates import arm_key
from experiments.reporting.table_style import plain, told
from experiments.reporting.tables import swept
from experiments.runs import verdicts as judgement
from experiments.runs.comparison import MIN_REPLICATES
from experiments.runs.rows import CheckRow, EngineRow, KernelRow, ParityRow, PeerRow, QuantizationRow, Row, SpeedupRow
from experiments.runs.verdicts import Comparison


@dataclass(frozen=True)
class Verdict:
    """good: nothing is wrong and nothing failed, no request either. notes: what the sentence has no room for."""

    sentence: str
    good: bool
    notes: tuple[str, ...]


def verdict_of(rows: Sequence[Row], processes: int, finished: bool, judged: Comparison | None = None) -> Verdict:
    """The verdict on a run.

    Args:
        rows: merged. processes: that timed things were repeated in. finished: the run ended. judged: its arms beside
            the first of their places, where there are processes enough to tell.
    """
    bad = [row for row in rows if row.status in ("wrong", "failed")]
    engines = [row for row in rows if isinstance(row, EngineRow)]
    unserved = _unserved([row for row in rows if isinstance(row, EngineRow | PeerRow)])
    parts = [*_checks([row for row in rows if isinstance(row, CheckRow)]), *unserved]
    parts += _tokens([row for row in rows if isinstance(row, ParityRow)], engines)
    speeds = _judged_speed(judged) if judged is not None else []
    peers = _peers([row for row in rows if isinstance(row, SpeedupRow)])
    speeds = speeds or _engine_speed(engines, peers) or _kernel_speed([r for r in rows if isinstance(r, KernelRow)])
    quantized = _quantized([row for row in rows if isinstance(row, QuantizationRow)])
    if len(set(map(arm_of, engines))) > 1:  # a single arm's are in its own sentence
        names = told_apart([*map(place_of, engines), *peers])
        speeds += [f"{_with(names[place])}{text}" for place, texts in peers.items() for text in texts]
    found = [*quantized, *speeds]
    main = "; ".join([_joined(parts), *found[:1]] if parts else found[:1]) or "nothing was measured"
    notes = [_sentence(note) for note in found[1:]]
    if any("times" in note or "the fastest" in note for note in speeds) and judged is None:
        times = "One process" if processes == 1 else f"{processes} processes"
        notes.append(
            f"{times} each: no test says which of these differences are noise; with replicates: {MIN_REPLICATES}, "
            "tk compare does."
        )
    if not finished:
        notes.append("The run has not ended: what follows is what it knew when it was cut off.")
    return Verdict(_sentence(main), not bad and not unserved and bool(rows), tuple(notes))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _joined(parts: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _with(where: str) -> str:
    """How a sentence about one of several places begins."""
    return f"with “{where}”, " if where else ""


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def _checks(checks: Sequence[CheckRow]) -> list[str]:
    verdicts: dict[str, set[str]] = {}
    for row in checks:
        verdicts.setdefault(f"{row.op}.{row.variant}", set()).add(row.status)
    judged = {name: found for name, found in verdicts.items() if found != {"unsupported"}}
    wrong = [name for name, found in judged.items() if found & {"wrong", "failed"}]
    if not judged:
        return ["no variant could be checked"] if verdicts else []
    if wrong:
        verb = "is" if len(wrong) == 1 else "are"
        return [f"{len(wrong)} of {len(judged)} variants {verb} not right ({_listed(wrong)})"]
    return [f"all {len(judged)} variants were right" if len(judged) > 1 else "the variant was right"]


def _unserved(rows: Sequence[EngineRow | PeerRow]) -> list[str]:
    """How many requests failed, where some did: rows that are ok all the same."""
    short = [row for row in rows if row.requests_failed]
    if not short:
        return []
    worst = max(short, key=lambda row: (row.requests_failed or 0) / (row.requests or 1))
    counts = f"{worst.requests_failed} of {worst.requests}"
    if len(rows) == 1:
        return [f"{counts} requests failed"]
    names = swept([row for row in rows if isinstance(row, EngineRow)])
    where = ", ".join(filter(None, [worst.workload, _title(worst, names)]))
    if len(short) == 1:
        return [f"{counts} requests failed ({where})"]
    return [f"requests failed in {len(short)} of {len(rows)} servings (the most: {counts}, {where})"]


def _tokens(parities: Sequence[ParityRow], engines: Sequence[EngineRow]) -> list[str]:
    """What was compared are the arms at one question each: the same workload, sizes and model."""
    if not parities:
        return []
    other = [row for row in parities if row.tokens_equal is False]
    if other:
        verb = "differs" if len(other) == 1 else "differ"
        return [f"{len(other)} of {len(parities)} comparisons with the first arm {verb} in some token"]
    requests = {arm_key(row): row.requests or 0 for row in engines}
    partly = any((row.requests or 0) < requests.get(arm_key(row), 0) for row in parities)
    same = "the same tokens" + (" to the requests that both served" if partly else "")
    others = Counter(asked_of(row) for row in parities)
    if len(set(others.values())) > 1:
        return [f"all {len(parities)} arms that stand beside the first of their workload and model gave {same}"]
    arms = f"all {1 + next(iter(others.values()))} arms gave {same}"
    models = len({asked.model for asked in others})
    workloads = len({(asked.workload, asked.sizes) for asked in others})
    if len(others) == 1:
        return [arms]
    noun = "models" if workloads == 1 else "workloads" if models == 1 else "workloads and models"
    return [f"{arms} with each of {len(others)} {noun}"]


def _judged_speed(found: Comparison) -> list[str]:
    """Of arms that were compared process by process: which are faster than the first, and by how much."""
    rates = [one for one in found.verdicts if one.figure == "tokens_per_s" and one.place.startswith("engine")]
    shown = []
    places = list(dict.fromkeys(one.place for one in rates))
    wheres = _own(places)
    for place in places:
        mine = [one for one in rates if one.place == place]
        where = _with(wheres[place])
        # The largest ratio need not be a real one: another arm's smaller one may be surer.
        best = max(mine, key=lambda one: (one.effect.outcome == "better", one.effect.ratio))
        first = best.beside or "the first arm"
        outcomes = [one.effect.outcome for one in mine]
        waits = _judged_waits([one for one in found.verdicts if one.place == place])
        if best.effect.outcome == "better":
            ratio = f"{best.effect.ratio:.{4 if best.effect.ratio < 1.005 else 3}g}"
            text = f"{where}the arm {best.arm} serves {ratio} times the tokens per second of {first}"
            shown.append((best.effect.ratio, f"{text} ({_interval(best)}){waits}"))
        elif "worse" in outcomes:
            slower = f"{outcomes.count('worse')} of {len(mine)} others are slower"
            shown.append((1.0, f"{where}no arm is faster than {first}, and {slower}{waits}"))
        else:
            least = max((one.effect.smallest or 0.0 for one in mine), default=0.0)
            text = f"{where}no arm's tokens per second differ from those of {first} by more than noise"
            shown.append((0.0, f"{text} (a change of {least:.1%} would have been found){waits}"))
    ordered = [text for _, text in sorted(shown, key=lambda pair: -pair[0])]
    return ordered + _judged_kernels([one for one in found.verdicts if one.figure == "median_us"])


def _own(places: Collection[str]) -> dict[str, str]:
    """ "75% shared" of "engine, 75% shared, float32": what all places have tells none from the others."""
    counts = Counter(part for place in places for part in set(place.split(", ")))
    return {
        place: ", ".join(plain(part) for part in place.split(", ") if counts[part] < len(places)) for place in places
    }


def _judged_kernels(times: Sequence[judgement.Verdict]) -> list[str]:
    """Of each op, which variant is really faster than the first at which points; and how many differences are real."""
    ops: dict[str, dict[str, list[judgement.Verdict]]] = {}
    for one in times:
        ops.setdefault(one.place.partition(", ")[0], {}).setdefault(one.place, []).append(one)
    told = []
    for op, points in ops.items():
        wins: dict[str, list[tuple[int, float]]] = {}
        for place, mine in enumerate(points.values()):
            if better := [one for one in mine if one.effect.outcome == "better"]:
                best = min(better, key=lambda one: one.effect.ratio)
                wins.setdefault(best.arm, []).append((place, 1 / best.effect.ratio))
        first = next(iter(points.values()))[0].beside or "the first variant"
        names = list(_own(points).values())
        parts = []
        for arm, won in sorted(wins.items(), key=lambda pair: -len(pair[1])):
            at = f" ({_listed(_runs([place for place, _ in won], names))})" if len(won) < len(points) else ""
            parts.append(f"{arm} at {len(won)}, up to {max(ratio for _, ratio in won):.3g} times as fast{at}")
        which = f"{first} is beaten by {_listed(parts)}" if parts else f"no variant is faster than {first}"
        told.append(f"for {op}, of {len(points)} points, {which}")
    if times:
        counts = Counter(str(one.effect.outcome) for one in times)
        counted = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if counts[outcome])
        told.append(f"of {len(times)} kernel times beside the first variant's, {counted}")
    return told


_WAITS = {"ttft_s": ("p50", "first token"), "tpot_s": ("p50", "time per token"), "gap_s": ("p99", "gap")}
"""What users wait for: of each column the percentile that is judged, and what it is called."""


def _judged_waits(verdicts: Sequence[judgement.Verdict]) -> str:
    """Of the differences in waiting that are real the largest, where there are any."""
    names = {f"{column}.{key}": f"{what} ({key})" for column, (key, what) in _WAITS.items()}
    real = [one for one in verdicts if one.figure in names and one.effect.outcome in ("better", "worse")]
    if not real:
        return ""
    most = max(real, key=lambda one: abs(math.log(one.effect.ratio)))
    ratio = f"{most.effect.ratio:.3g} times that of {most.beside or 'the first arm'} ({_interval(most)})"
    return f"; of what users wait for, the {names[most.figure]} differs most: that of {most.arm} is {ratio}"


def _waits(rows: Sequence[EngineRow], than: float, names: Sequence[str]) -> str:
    """Of a place's arms beside the first, what users wait for and differs most, where it does more than `than`."""
    first, found = rows[0], []
    for row in rows[1:]:
        for column, (key, what) in _WAITS.items():
            before, mine = ((getattr(one, column) or {}).get(key) for one in (first, row))
            if before and mine:
                found.append((abs(math.log(mine / before)), mine / before, f"{what} ({key})", row))
    size, ratio, what, row = max(found, key=lambda one: one[0], default=(0.0, 1.0, "", first))
    if size <= abs(math.log(than)) or _is_one(ratio):
        return ""
    return f"; the {what} differs more: with {_arm(row, names)} it is {ratio:.3g} times that with {_arm(first, names)}"


def _is_one(ratio: float) -> bool:
    """Whether it is not worth a number."""
    return f"{ratio:.3g}" == "1"


_OUTCOMES = ("better", "worse", "within noise", "cannot tell")


def _interval(one: judgement.Verdict) -> str:
    low, high = one.effect.low, one.effect.high
    return f"{low:.3g} to {high:.3g}" if low is not None and high is not None else "no interval"


def _engine_speed(engines: Sequence[EngineRow], peers: Mapping[Place, Sequence[str]]) -> list[str]:
    """By place the fastest arm over the first one; the place with the largest difference first."""
    arms = len(set(map(arm_of, engines)))
    names = swept(engines)
    served = [row for row in engines if row.status == "ok"]
    timed = [row for row in served if row.tokens_per_s]
    if served and not timed:
        return [f"no arm's speed was measured ({served[0].speed_reason})"]
    found: list[tuple[float, str]] = []
    places: dict[Place, list[EngineRow]] = {}
    for row in timed:
        places.setdefault(place_of(row), []).append(row)
    untimed = Counter(place_of(row) for row in served if row.tokens_per_s is None)
    wheres = told_apart(places)
    for place, everyone in places.items():
        least = min(row.requests_failed or 0 for row in everyone)
        # Whoever serves less work is not the faster for it.
        mine = [row for row in everyone if (row.requests_failed or 0) == least]
        best, first = max(mine, key=lambda row: row.tokens_per_s or 0.0), mine[0]
        where = _with(wheres[place])
        speed = f"{best.tokens_per_s:,.0f} tokens/s"
        left_out = len(everyone) - len(mine)
        besides = f" ({left_out} that failed more requests left out)" if left_out else ""
        if len(mine) == 1:
            text = f"{where}{f'the arm {_arm(best, names)}' if arms > 1 else 'this engine'} served {speed}{besides}"
            if arms == 1 and (beside := peers.get(place)):
                text += f", {' and '.join(beside)}"
            if others := untimed[place]:
                text += f", and {'the other arm was' if others == 1 else f'the other {others} were'} not timed"
            found.append((0.0, text))
            continue
        ratio = (best.tokens_per_s or 0.0) / (first.tokens_per_s or math.inf)
        if best is first:
            second = sorted(mine, key=lambda row: -(row.tokens_per_s or 0.0))[1]
            ratio = (best.tokens_per_s or 0.0) / (second.tokens_per_s or math.inf)
            rival = f"the next one's ({_arm(second, names)})"
        else:
            rival = f"the first arm's ({_arm(first, names)})"
        rival = f"about {rival}" if _is_one(ratio) else f"{ratio:.3g} times {rival}"
        overlap = " (nearer than their spreads)" if _overlap(best, first) and best is not first else ""
        text = f"{where}the arm {_arm(best, names)} was the fastest{besides}: {speed}, {rival}{overlap}"
        text += _waits(mine, ratio, names)
        found.append((ratio, text))
    return [text for _, text in sorted(found, key=lambda pair: -pair[0])]


def _title(row: EngineRow | PeerRow, names: Sequence[str]) -> str:
    """What tells a row of several workloads from the others."""
    if isinstance(row, PeerRow):
        return str(row.peer).replace("_", " ")
    return _told(row, names, row.settings)


def _arm(row: EngineRow, names: Sequence[str]) -> str:
    """What tells an arm from the others of its place."""
    return _told(row, names, own_settings(row))


def _told(row: EngineRow, names: Sequence[str], settings: Mapping[str, Any]) -> str:
    """The variants of the swept ops, of several each with its op's name, and the settings."""
    ops = [name for name in names if name in row.arm]
    labels = [row.arm[op] if len(ops) == 1 else f"{op} {row.arm[op]}" for op in ops]
    shown = [f"{plain(key)} {told(value)}" for key, value in settings.items()]
    return ", ".join([*labels, *shown]) or "this engine"


def _overlap(one: EngineRow, other: EngineRow) -> bool:
    """Whether medians are nearer than half their spreads together."""
    distance = abs((one.tokens_per_s or 0.0) - (other.tokens_per_s or 0.0))
    return distance < ((one.tokens_per_s_iqr or 0.0) + (other.tokens_per_s_iqr or 0.0)) / 2


def _kernel_speed(kernels: Sequence[KernelRow]) -> list[str]:
    """Of each op with several timed variants, which was the fastest at how many points."""
    ok = [row for row in kernels if row.status == "ok"]
    timed = [row for row in ok if row.median_us is not None]
    if ok and not timed:
        return [f"no speed was measured ({ok[0].speed_reason})"]
    found = []
    for op in dict.fromkeys(row.op for row in timed):
        points: dict[Any, list[KernelRow]] = {}
        for row in timed:
            if row.op == op:
                points.setdefault((row.point, row.dtype, str(row.settings)), []).append(row)
        contested = [rows for rows in points.values() if len(rows) > 1]
        if contested:
            found.append(f"for {op}, {_fastest(contested)}")
    if not found and timed:
        alone: dict[str, list[KernelRow]] = {}
        for row in timed:
            alone.setdefault(f"{row.op}.{row.variant}", []).append(row)
        beside = f"{'was' if len(alone) == 1 else 'were'} timed, beside no other variant of the same op"
        spans = _listed([f"{name} took {_span(mine)}" for name, mine in alone.items()])
        found = [f"{_listed(list(alone))} {beside}; {spans}"]
    return found


def _fastest(points: Sequence[Sequence[KernelRow]]) -> str:
    """Which variant was the fastest at which points, the one that was at the most of them first, beside the first
    variant; that one is told beside the next.
    """
    wins: dict[str, list[tuple[int, float, str]]] = {}
    for place, mine in enumerate(points):
        best, second = sorted(mine, key=lambda row: row.median_us or 0.0)[:2]
        rival, whose = (second, "the next") if best is mine[0] else (mine[0], str(mine[0].variant))
        ratio = (rival.median_us or 0.0) / (best.median_us or math.inf)
        wins.setdefault(str(best.variant), []).append((place, ratio, whose))
    several = len({mine[0].dtype for mine in points}) > 1
    names = [", ".join([str(mine[0].point), *([mine[0].dtype] if several else [])]) for mine in points]
    told = []
    for number, (variant, won) in enumerate(sorted(wins.items(), key=lambda pair: -len(pair[1]))):
        _, ratio, whose = max(won, key=lambda one: one[1])
        lead = f"about as fast as {whose}" if _is_one(ratio) else f"up to {ratio:.3g} times as fast as {whose}"
        count = f"{len(won)} of {len(points)} points" if number == 0 else str(len(won))
        at = f" ({_listed(_runs([place for place, _, _ in won], names))})" if len(won) < len(points) else ""
        told.append(f"{variant} {'was the fastest ' if number == 0 else ''}at {count}, {lead}{at}")
    return _listed(told)


def _runs(places: Sequence[int], names: Sequence[str]) -> list[str]:
    """ "T=1 to T=4", "T=64": neighbours are told by the first and the last."""
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return [names[run[0]] + (f" to {names[run[-1]]}" if len(run) > 1 else "") for run in runs]


def _span(rows: Sequence[KernelRow]) -> str:
    """ "3 us (T=1) to 9 us (T=64)": a variant's shortest and longest time."""
    ends = min(rows, key=lambda row: row.median_us or 0.0), max(rows, key=lambda row: row.median_us or 0.0)
    return " to ".join(dict.fromkeys(f"{row.median_us:.3g} us ({row.point})" for row in ends))


def _peers(peers: Sequence[SpeedupRow]) -> dict[Place, list[str]]:
    """By place what this engine is beside each peer."""
    found: dict[Place, list[str]] = {}
    for row in peers:
        if row.status == "ok" and row.speedup is not None:
            iqr = f" (IQR {row.speedup_iqr:.2f})" if row.speedup_iqr is not None else ""
            times = "about" if _is_one(row.speedup) else f"{row.speedup:.3g} times"
            text = f"{times} the tokens per second of {str(row.peer).replace('_', ' ')}{iqr}"
            found.setdefault(place_of(row), []).append(text)
    return found


def _quantized(rows: Sequence[QuantizationRow]) -> list[str]:
    """Whose perplexity is the lowest at each number of bits."""
    judged = [row for row in rows if row.status == "ok" and row.perplexity is not None]
    best: dict[int, QuantizationRow] = {}
    for row in judged:
        if row.bits is not None and (row.perplexity or 0.0) < (
            best[row.bits].perplexity or 0.0 if row.bits in best else math.inf
        ):
            best[row.bits] = row
    if not best:
        return []
    winners: dict[str, list[QuantizationRow]] = {}
    for bits in sorted(best):
        winners.setdefault(str(best[bits].method), []).append(best[bits])
    shown = []
    for method, mine in winners.items():
        widths = ", ".join(str(row.bits) for row in mine)
        perplexities = ", ".join(f"{row.perplexity:.4g}" for row in mine)
        shown.append(f"{method}'s at {widths} bits ({perplexities})")
    dense = next((row for row in judged if row.bits is None), None)
    beside = f"; the dense model's is {dense.perplexity:.4g}" if dense is not None else ""
    return [f"the lowest perplexity is {', '.join(shown)}{beside}"]
