"""What came out, in a few lines made from the table: a winner is named only where the test of arms says so."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.reporting.arms import arm_key, select_stages, select_timed, swept_names, title_of
from experiments.reporting.comparison_tables import OUTCOMES, format_change
from experiments.reporting.modelled import modelled_winners
from experiments.reporting.table_style import format_number, group_by, list_names, name_runs, plain_place
from experiments.runs import verdicts as judgement
from experiments.runs.comparison import MIN_REPLICATES
from experiments.runs.rows import Row
from experiments.runs.table import distinct_parts, label_of, place_of, question_of, swept_ops
from experiments.runs.verdicts import Comparison

_BUSY = 1.25
"""Times the machine's cores: a load of more is of processes that waited for others'."""

_WAITS = {"ttft_s.p50": "first token (p50)", "tpot_s.p50": "time per token (p50)", "gap_s.p99": "gap (p99)"}
"""What users wait for: the figures that are judged, and what they are called."""


@dataclass(frozen=True)
class Verdict:
    """good: nothing is wrong and nothing failed, no request either. notes: what the sentence has no room for."""

    sentence: str
    good: bool
    notes: tuple[str, ...]


def verdict_of(
    rows: Sequence[Row], count: int, finished: bool, judged: Comparison | None, environment: Mapping[str, Any]
) -> Verdict:
    """The verdict on a run.

    Args:
        rows: Merged.
        count: Processes that timed things were repeated in.
        finished: Whether the run ended.
        judged: Its arms beside the first of their places, where there are processes enough to tell.
        environment: Of the run: its cores, and the outside variants that `tk check` never saw.
    """
    served = select_stages(rows, "engine", "peers", "http")
    unserved = _failed_requests(served)
    parts = [*_checks(select_stages(rows, "check")), *unserved, *_tokens(rows)]
    speeds = _judged_speeds(judged) if judged is not None else []
    first_speed, *more_speeds = [*(speeds or _unjudged_speeds(rows, count)), ""]
    lines = [
        " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]])),
        _quantized(select_stages(rows, "quantization")),
        "; ".join(filter(None, [_timed(rows, served), first_speed])),
        *more_speeds,
        *modelled_winners(select_stages(rows, "foretold")),
        _unchecked(environment),
        _load(rows, environment),
        "" if finished else "the run has not ended: what follows is what it knew when it was cut off",
    ]
    first, *others = list(map(_sentence, filter(None, lines))) or ["Nothing was measured."]
    bad = any(row.status in ("wrong", "failed") for row in rows)
    return Verdict(first, not bad and not unserved and bool(rows), tuple(others))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _begin(where: str) -> str:
    """How a sentence about one of several places begins."""
    return f"with “{plain_place(where)}”, " if where else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _checks(checks: Sequence[Row]) -> list[str]:
    judged = [row for row in checks if row.status != "unsupported"]
    variants = group_by(judged, lambda row: f"{row.op}.{row.variant}")
    wrong = list(dict.fromkeys(f"{row.op}.{row.variant}" for row in judged if row.status != "ok"))
    points = {place_of(row) for row in judged if row.point is not None}  # a process may die after its last one
    at = f"at the {_count(len(points), 'point')} of this run"
    if not judged:
        return ["no variant could be checked"] if checks else []
    if wrong:
        verb = "is" if len(wrong) == 1 else "are"
        return [f"{len(wrong)} of {len(variants)} variants {verb} not right {at} ({list_names(wrong)})"]
    return [f"all {len(variants)} variants were right {at}" if len(variants) > 1 else f"the variant was right {at}"]


def _failed_requests(served: Sequence[Row]) -> list[str]:
    """How many requests failed, where some did: rows that are ok all the same."""
    short = [row for row in served if row.requests_failed]
    if not short:
        return []
    worst = max(short, key=lambda row: (row.requests_failed or 0) / (row.requests or 1))
    counts = f"{worst.requests_failed} of {worst.requests}"
    if len(served) == 1:
        return [f"{counts} requests failed"]
    names = swept_names(select_stages(served, "engine"))
    where = ", ".join(filter(None, [worst.workload, title_of(worst, names)]))
    if len(short) == 1:
        return [f"{counts} requests failed ({where})"]
    return [f"requests failed in {len(short)} of {len(served)} servings (the most: {counts}, {where})"]


def _tokens(rows: Sequence[Row]) -> list[str]:
    """What was compared are the arms at one question each: the same workload, sizes and model."""
    parities = select_stages(rows, "parity")
    if not parities:
        return []
    if other := sum(row.tokens_equal is False for row in parities):
        verb = "differs" if other == 1 else "differ"
        return [f"{other} of {len(parities)} comparisons with the first arm {verb} in some token"]
    requests = {arm_key(row): row.requests or 0 for row in select_stages(rows, "engine")}
    partly = any((row.requests or 0) < requests.get(arm_key(row), 0) for row in parities)
    same = "the same tokens" + " to the requests that both served" * partly
    others = Counter(map(question_of, parities))
    if len(set(others.values())) > 1:
        return [f"all {len(parities)} arms that stand beside the first of their workload and model gave {same}"]
    places = f" at each of {len(others)} workloads or models" * (len(others) > 1)
    return [f"all {1 + next(iter(others.values()))} arms gave {same}{places}"]


def _timed(rows: Sequence[Row], served: Sequence[Row]) -> str:
    """ "2 of 6 arms timed (swiglu interpreted on a CPU: not measured)"; of a run without an engine, variants."""
    noun = "arm" if served else "variant"
    groups: dict[object, list[Row]] = group_by(served, arm_key) if served else group_by(
        select_stages(rows, "check", "kernels"), lambda row: (row.op, row.variant)
    )  # fmt: skip
    if not groups:
        return ""
    untimed = [mine[-1] for mine in groups.values() if not select_timed(mine)]
    reasons = Counter(why for row in untimed if row.stage != "check" and (why := row.speed_reason or row.reason))
    others = f"; {_count(len(reasons) - 1, 'other reason')}" if len(reasons) > 1 else ""
    besides = f" ({reasons.most_common(1)[0][0]}{others})" if reasons else ""
    return f"{len(groups) - len(untimed)} of {_count(len(groups), noun)} timed{besides}"


def _unjudged_speeds(rows: Sequence[Row], count: int) -> list[str]:
    """Of runs with too few processes for a test: how far apart what was timed lies, and no winner."""
    each = "one process an arm" if count == 1 else f"{count} processes an arm, and a test needs {MIN_REPLICATES}"
    served = group_by(select_timed(select_stages(rows, "engine", "peers", "http")), place_of)
    swept, wheres = swept_ops(rows), distinct_parts(served)
    found = []
    for place, mine in served.items():
        rates = sorted((row.tokens_per_s or 0.0, label_of(row, swept=swept).title) for row in mine)
        ends = [f"{rate:,.0f} tokens/s" + (f" ({name})" if len(rates) > 1 else "") for rate, name in rates]
        which = f"{ends[0]} to {ends[-1]}" if len(rates) > 1 else ends[0]
        found.append(f"{_begin(wheres[place])}not judged: {each}; {which}")
    return found or _unjudged_kernels(rows, each)


def _unjudged_kernels(rows: Sequence[Row], each: str) -> list[str]:
    """Of each op, how far apart its variants lie at a point; of one whose only variant was timed, its times."""
    found = []
    for op, mine in group_by(select_timed(select_stages(rows, "kernels")), lambda row: str(row.op)).items():
        places = [[row.median_us or 0.0 for row in some] for some in group_by(mine, place_of).values()]
        apart = [max(times) / min(times) for times in places if len(times) > 1]
        ratios = f"the slowest variant's time is {_range(apart)} times the fastest's at a point, " if apart else ""
        times = _range([time for some in places for time in some])
        found.append(f"for {op}, not judged: {each}; {ratios}{times} us")
    return found


def _range(values: Sequence[float]) -> str:
    low, high = (f"{end(values):.3g}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def _judged_speeds(found: Comparison) -> list[str]:
    """Of arms that were compared process by process: which are faster than the first, and by how much."""
    places = group_by(found.verdicts, lambda one: one.place)
    rates = {
        place: speeds
        for place, mine in places.items()
        if place.startswith(("engine", "http")) and (speeds := [one for one in mine if one.figure == "tokens_per_s"])
    }
    wheres = distinct_parts(rates)
    shown = []
    for place, speeds in rates.items():
        ratio, text = _judged_place(speeds)
        besides = [*_judged_peers(speeds), *_judged_waits(places[place])]
        shown.append((ratio, _begin(wheres[place]) + "; ".join([text, *besides])))
    ordered = [text for _, text in sorted(shown, key=lambda pair: -pair[0])]
    return ordered + _judged_kernels([one for one in found.verdicts if one.figure == "median_us"])


def _judged_place(verdicts: Sequence[judgement.Verdict]) -> tuple[float, str]:
    """By how much the best arm of a place beats the first (1 and less: none does), and what is said of that."""
    # The largest ratio need not be a real one: another arm's smaller one may be surer.
    best = max(verdicts, key=lambda one: (one.effect.outcome == "better", one.effect.ratio))
    outcomes = Counter(str(one.effect.outcome) for one in verdicts)
    if outcomes["better"]:
        ratio = f"{best.effect.ratio:.{4 if best.effect.ratio < 1.005 else 3}g}"
        text = f"the arm {best.arm} serves {ratio} times the tokens per second of {best.beside} ({_interval(best)})"
        return best.effect.ratio, text
    if outcomes["worse"]:
        slower = f"{outcomes['worse']} of {len(verdicts)} others are slower"
        return 1.0, f"no arm is faster than {best.beside}, and {slower}"
    if outcomes["cannot tell"]:
        return 0.0, f"not judged: of {outcomes['cannot tell']} arms there are too few processes"
    least = max(one.effect.smallest for one in verdicts if one.effect.smallest is not None)
    text = f"no arm's tokens per second differ from those of {best.beside} by more than noise"
    return 0.0, f"{text} (a change of {format_change(least).removeprefix('+')} would have been found)"


def _judged_kernels(times: Sequence[judgement.Verdict]) -> list[str]:
    """Of each op, which variant is really faster than the first at which points; and how many differences are real."""
    lines = []
    for op, mine in group_by(times, lambda one: one.place.partition(", ")[0]).items():
        first, points = mine[0].beside, group_by(mine, lambda one: one.place)
        wins = _wins(points)
        which = f"{first} is beaten by {list_names(wins)}" if wins else f"no variant is faster than {first}"
        lines.append(f"for {op}, of {len(points)} points, {which}")
    if times:
        counts = Counter(str(one.effect.outcome) for one in times)
        counted = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
        lines.append(f"of {len(times)} kernel times beside the first variant's, {counted}")
    return lines


def _wins(points: Mapping[str, Sequence[judgement.Verdict]]) -> list[str]:
    """ "fused at 2, up to 2.5 times as fast (T=1 to T=2)", of each variant that is the fastest at some points."""
    wins: dict[str, dict[int, float]] = {}
    for index, mine in enumerate(points.values()):
        best = min(mine, key=lambda one: (one.effect.outcome != "better", one.effect.ratio))
        if best.effect.outcome == "better":
            wins.setdefault(best.arm, {})[index] = 1 / best.effect.ratio
    names = list(map(plain_place, distinct_parts(points).values()))
    shown = []
    for arm, won in sorted(wins.items(), key=lambda pair: -len(pair[1])):
        at = f" ({list_names(name_runs([*won], names))})" if len(won) < len(points) else ""
        shown.append(f"{arm} at {len(won)}, up to {max(won.values()):.3g} times as fast{at}")
    return shown


def _judged_peers(verdicts: Sequence[judgement.Verdict]) -> list[str]:
    """What the first arm is beside each peer, where that is no noise."""
    lines = []
    for one in verdicts:
        low, high = one.effect.low, one.effect.high
        if one.arm.startswith("peer ") and one.effect.outcome in ("better", "worse") and low and high:
            times = f"{1 / one.effect.ratio:.3g} times the tokens per second of {one.arm.removeprefix('peer ')}"
            lines.append(f"{one.beside} serves {times} ({1 / high:.3g} to {1 / low:.3g})")
    return lines


def _judged_waits(verdicts: Sequence[judgement.Verdict]) -> list[str]:
    """Of the differences in waiting that are real the largest, where there are any."""
    real = [one for one in verdicts if one.figure in _WAITS and one.effect.outcome in ("better", "worse")]
    if not real:
        return []
    most = max(real, key=lambda one: abs(math.log(one.effect.ratio)))
    ratio = f"{most.effect.ratio:.3g} times that of {most.beside} ({_interval(most)})"
    return [f"of what users wait for, the {_WAITS[most.figure]} differs most: that of {most.arm} is {ratio}"]


def _interval(one: judgement.Verdict) -> str:
    low, high = (format_number(bound, ".3g") for bound in (one.effect.low, one.effect.high))
    return f"{low} to {high}"


def _quantized(rows: Sequence[Row]) -> str:
    """Whose perplexity is the lowest at each number of bits: that is no matter of noise."""
    judged = group_by((row for row in rows if row.perplexity is not None), lambda row: row.bits)
    dense = judged.get(None)
    widths = sorted(bits for bits in judged if bits is not None)
    best = [min(judged[bits], key=lambda row: (row.perplexity, row.method)) for bits in widths]
    shown = ", ".join(map(_lowest, group_by(best, lambda row: row.method).values()))
    beside = f"; the dense model's is {dense[0].perplexity:.4g}" if dense else ""
    return f"the lowest perplexity is {shown}{beside}" if shown else ""


def _lowest(rows: Sequence[Row]) -> str:
    """ "rtn's at 3, 4 bits (28.1, 27)"."""
    bits, values = ", ".join(str(row.bits) for row in rows), ", ".join(f"{row.perplexity:.4g}" for row in rows)
    return f"{rows[0].method}'s at {bits} bits ({values})"


def _unchecked(environment: Mapping[str, Any]) -> str:
    names = list(environment.get("unchecked") or ())
    return f"never put through `tk check`: {list_names(names)}" if names else ""


def _load(rows: Sequence[Row], environment: Mapping[str, Any]) -> str:
    """That the machine had more to do than it has cores, where it had while something was timed."""
    cores = environment.get("host", {}).get("cpus")
    loads = [load for row in rows for load in (row.load_before, row.load_after) if load is not None]
    if not cores or not loads or max(loads) <= _BUSY * cores:
        return ""
    busy = sum(load > _BUSY * cores for load in loads)
    return (
        f"the machine was busy: {max(loads):.1f} processes ran or waited on its {cores} cores (before and after tasks, "
        f"{busy} of {len(loads)} times more than {_BUSY:g} a core)"
    )
