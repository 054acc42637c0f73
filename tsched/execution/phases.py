"""The phases of an engine's step, by name."""

from __future__ import annotations

from tkernels.ranges import RECORD_GRAPH, Ranges

PHASES = ("schedule", "prepare", "forward", RECORD_GRAPH, "sample", "wait", "commit", "detokenize")
"""The names in the order of a step.

forward launches the model; a bucket's first use also records a graph in it. wait waits for the device's tokens. commit
hands them to the scheduler. detokenize turns tokens into text: within a step for stop strings, else after it where
requests stream, or when a request has ended.
"""


class Phases:
    """The ranges of an engine's phases and of its step."""

    __slots__ = ("commit", "detokenize", "forward", "listening", "prepare", "sample", "schedule", "step", "wait")

    def __init__(self, ranges: Ranges) -> None:
        self.listening = ranges.listening
        self.step = ranges.named("step", "step", launches=False)
        self.schedule = ranges.named("schedule", "phase", launches=False)
        self.prepare = ranges.named("prepare", "phase")
        self.forward = ranges.named("forward", "phase")
        self.sample = ranges.named("sample", "phase")
        self.wait = ranges.named("wait", "phase", launches=False)
        self.commit = ranges.named("commit", "phase", launches=False)
        self.detokenize = ranges.named("detokenize", "phase", launches=False)
