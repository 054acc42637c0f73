"""Spans as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is the Trace Event Format's JSON object: complete events ("ph": "X") of `ts` and `dur` in microseconds, on
tracks named by metadata events ("M"). Events of one track have to nest, which spans of one track do.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; https://perfetto.dev/docs/faq
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tkernels.spans import Span, Track

_PROCESSES = {"host": 1, "device": 2}
"""What stands for a process: the host's threads, and the device's streams. 0 would be the idle process to Perfetto."""


def trace_of(spans: Sequence[Span], about: Mapping[str, Any]) -> dict[str, Any]:
    """The trace; `about` is what it is a trace of, for whoever reads the file. An event's args hold the requests that
    it is about, where the range carried them.
    """
    tracks = {track: number for number, track in enumerate(dict.fromkeys(span.track for span in spans), 1)}
    events = [event for track, number in tracks.items() for event in _names(track, number)]
    for span in spans:
        events.append(
            {
                "name": span.name,
                "cat": span.category,
                "ph": "X",
                "ts": span.begin_ns / 1000,
                "dur": span.ns / 1000,
                "pid": _PROCESSES[span.track.clock],
                "tid": tracks[span.track],
                "args": {"request_ids": list(span.request_ids)} if span.request_ids else {},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _names(track: Track, number: int) -> list[dict[str, Any]]:
    of = {"ph": "M", "pid": _PROCESSES[track.clock], "tid": number}
    return [
        {**of, "name": "process_name", "args": {"name": track.clock}},
        {**of, "name": "thread_name", "args": {"name": track.title}},
        {**of, "name": "thread_sort_index", "args": {"sort_index": number}},
    ]


def write_trace(path: Path, spans: Sequence[Span], about: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(trace_of(spans, about), separators=(",", ":")), encoding="utf-8")
