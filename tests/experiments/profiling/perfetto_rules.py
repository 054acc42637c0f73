"""What Perfetto's importer of the JSON trace format asks of a file, for complete and metadata events."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any


def problems_of(text: str) -> list[str]:
    """What is wrong with a trace; nothing where Perfetto takes it as it is meant.

    Rules: the Trace Event Format, "JSON Object Format", "Complete Events", "Metadata Events"; and that the complete
    events of one track nest (perfetto.dev/docs/faq, "Why are overlapping events in JSON traces not displayed
    correctly?"). Process and thread 0 are the kernel's idle ones.
    """

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        trace = json.loads(text, parse_constant=no_constant)
    except ValueError as error:
        return [str(error)]
    events = trace if isinstance(trace, list) else trace.get("traceEvents")
    if not isinstance(events, list) or not events:
        return ["there are no traceEvents"]
    problems = []
    if isinstance(trace, dict) and trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        problems.append("displayTimeUnit is neither ms nor ns")
    named: dict[str, set[tuple[int, int]]] = defaultdict(set)
    tracks: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        problems += [f"{problem}: {event}" for problem in _event_problems(event)]
        if problems:
            return problems
        track = (event["pid"], event["tid"])
        if event["ph"] == "M":
            named[event["name"]].add(track)
        else:
            begin = round(event["ts"] * 1000)
            tracks[track].append((begin, round((event["ts"] + event["dur"]) * 1000), event["name"]))
    for track, spans in tracks.items():
        problems += [f"{track} has no {what}" for what in ("process_name", "thread_name") if track not in named[what]]
        problems += _overlaps(spans)
    return problems


def _event_problems(event: Any) -> list[str]:
    if not isinstance(event, dict):
        return ["is no object"]
    found = [f"{key} is missing" for key in ("name", "ph", "pid", "tid") if key not in event]
    if found:
        return found
    found += [f"{key} is no text" for key in ("name", "ph", "cat") if not isinstance(event.get(key, ""), str)]
    found += [f"{key} is no number above 0" for key in ("pid", "tid") if type(event[key]) is not int or event[key] < 1]
    if not isinstance(event.get("args", {}), dict):
        found.append("args is no object")
    if event["ph"] == "M":
        wanted = {"process_name": str, "thread_name": str, "thread_sort_index": int}.get(event["name"])
        if wanted is None or not any(isinstance(value, wanted) for value in event.get("args", {}).values()):
            found.append("is no metadata that Perfetto knows")
    elif event["ph"] == "X":
        for key in ("ts", "dur"):
            value = event.get(key)
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                found.append(f"{key} is no time")
    else:
        found.append("ph is neither X nor M")
    return found


def _overlaps(spans: list[tuple[int, int, str]]) -> list[str]:
    """Events of a track that lie partly inside another."""
    open_spans: list[tuple[int, int, str]] = []
    found = []
    for begin, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_spans and open_spans[-1][1] <= begin:
            open_spans.pop()
        if open_spans and end > open_spans[-1][1]:
            found.append(f"{name} ends at {end} ns, after {open_spans[-1][2]}, in which it began")
        open_spans.append((begin, end, name))
    return found
