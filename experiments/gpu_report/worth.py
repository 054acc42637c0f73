"""Every step of a report, the most valuable first: whether the kernels are right, then the figures of the marks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from experiments.gpu_report.engine_marks import RUNS, models_of
from experiments.gpu_report.estimates import (
    BATCHED_S,
    BILLION_S,
    CONFIG_S,
    DRAW_S,
    DRAWN_S,
    JUDGE_S,
    MODEL_S,
    RATES_S,
    RUNS_S,
    SANITIZED_S,
    TIME_S,
)
from experiments.gpu_report.marks import MARKS, Place
from experiments.gpu_report.pieces import config_pieces, peer_pieces, signature_pieces
from experiments.gpu_report.steps import SIGNATURES, Kind, Step, new_step
from experiments.gpu_report.weights import draw_s
from experiments.peers import BUILDS, is_peer
from tkernels.buckets import bucket
from tkernels.contract import Axes, Contract, Value
from tkernels.device import DeviceFacts
from tkernels.measurement import benchmark_points, complete_axes
from tkernels.preparation import axes_as_kept
from tkernels.registry import Registry
from tkernels.tuning import candidates
from tkernels.tuning_session import TuningPoint, in_tuning_order, one_per_bucket
from tkernels.variant import Variant
from tmodel import RANDOM_PRESETS
from tmodel.random_weights import num_parameters

FIRST_RUNS = ("batch_1", "nano_vllm")
"""The engine's marks that come before the others: what one request gets, and what many do."""

LATER = ("moe_mlp", "route", "sort_by_expert")
"""Ops whose marks come right after those: three commands of nine minutes hold no more than the others' before."""

_FIRST, _MARKS, _REST = range(3)


def make_steps(ops: Registry, facts: DeviceFacts) -> list[Step]:
    """Every step for a registry with peers."""
    own = [variant for variant in triton_variants(ops) if not is_peer(variant)]
    atomic = [variant for variant in own if variant.kernels and has_counters(variant, facts)]
    places = dict.fromkeys(place for mark in MARKS for place in mark.places if place[0] in ops)
    marked, later = ([place for place in places if (place[0] in LATER) == is_later] for is_later in (False, True))
    every = [(op.name, point) for op in ops.values() for point in report_points(op.contract)]
    first_models = [name for name in RANDOM_PRESETS if name in models_of(FIRST_RUNS)]
    steps = [
        new_step("device", RATES_S),
        # The only proof on hardware of the order in which their last arrivers see what the others wrote.
        *(_repeated(kind, variant, facts, process="last arrivers", worth=_FIRST)
          for variant in atomic for kind in ("stress", "rerun")),
        *_verified(ops, facts, marked, _FIRST),
        *_measured(ops, facts, marked, _FIRST, lambda variant, point: _is_judged(variant, point)),
        *(_engine_step(model, _FIRST) for model in first_models),
        *(_mark_step(name, _FIRST) for name in FIRST_RUNS),
        *_verified(ops, facts, later, _MARKS),
        *_measured(ops, facts, later, _MARKS, lambda variant, point: _is_judged(variant, point)),
        *(_mark_step(name, _MARKS) for name in RUNS if name not in FIRST_RUNS),
        *(_step("check", variant, DRAWN_S, worth=_REST, pieces=signature_pieces(variant, SIGNATURES))
          for variant in own),
        *(_repeated("rerun", variant, facts, process=variant.contract.name, worth=_REST)
          for variant in own if variant.deterministic),
        *(_engine_step(model, _REST) for model in RANDOM_PRESETS),
        *(_step("batch", variant, BATCHED_S, worth=_REST) for variant in own if variant.batch_invariant),
        *(_step("sanitizer", variant, SANITIZED_S, worth=_REST) for variant in own),
        *_measured(ops, facts, every, _REST, lambda variant, point: True),
    ]  # fmt: skip
    first: dict[str, Step] = {}
    for step in steps:
        first.setdefault(step.key, step)
    return list(first.values())


def report_points(contract: Contract) -> dict[str, dict[str, Value]]:
    """The contract's realistic points, and those that a mark adds."""
    points = benchmark_points(contract, torch.device("cuda"))
    for mark in MARKS:
        if mark.op == contract.name and mark.point not in points and mark.axes:
            base = next(iter(contract.benchmarks.values()), {})
            points[mark.point] = complete_axes(contract, {**base, **mark.axes})
    return points


def tuning_points(variant: Variant, facts: DeviceFacts) -> dict[str, TuningPoint]:
    """Bucket of shapes -> the realistic point that stands for it, of those that the variant supports."""
    points = [TuningPoint(variant, name, axes) for name, axes in report_points(variant.contract).items()]
    return {bucket(variant, one.axes): one for one in one_per_bucket(points, facts)}


def triton_variants(ops: Registry) -> list[Variant]:
    """All that have kernels of Triton, peers' too."""
    return [variant for op in ops.values() for variant in op.variants.values() if variant.kind == "triton"]


def has_counters(variant: Variant, facts: DeviceFacts) -> bool:
    """Whether a variant keeps zeroed counters in its workspace at any realistic point, as a last arriver does."""
    config = variant.default_config(facts.arch)
    for axes in report_points(variant.contract).values():
        # Axes that a call binds and a point does not name are options that are off.
        bound = {**dict.fromkeys(variant.contract.arguments, 0), **axes}
        if any(buffer.zeroed for buffer in variant.workspace(bound, config, facts).values()):
            return True
    return False


def _is_judged(variant: Variant, point: str) -> bool:
    """Whether a mark at the point reads this variant's time: ours, and the peers that it names."""
    named = {peer for mark in MARKS if mark.peers_place == (variant.contract.name, point) for peer in mark.peers}
    return variant.name in named or variant.kind == "triton" or bool(variant.parts)


REPEATED_POINTS: Mapping[Kind, int] = {"stress": 2, "rerun": 1}
"""At how many of an op's realistic points a call is run again and again."""


def _repeated(kind: Kind, variant: Variant, facts: DeviceFacts, **more: Any) -> Step:
    points = list(report_points(variant.contract).values())[: REPEATED_POINTS[kind]]
    pieces = [piece for axes in points for piece in config_pieces(variant, axes, facts.arch)[:1]]
    return _step(kind, variant, len(points) * (DRAW_S + RUNS_S), pieces=pieces, **more)


def _verified(ops: Registry, facts: DeviceFacts, places: Sequence[Place], worth: int) -> Iterator[Step]:
    """Our kernels at their ops' marked points, in one process as long as none ends it."""
    for op, point in places:
        axes, drawing = report_points(ops[op].contract)[point], DRAW_S
        for variant in in_tuning_order(ops[op].variants.values()):
            refusal = _refusal(variant, axes, facts)
            pieces = config_pieces(variant, axes, facts.arch)[:1] if refusal is None else ()  # the default
            more: dict[str, Any] = {"process": "verify", "worth": worth, "refusal": refusal, "pieces": pieces}
            yield _step("verify", variant, drawing + JUDGE_S, point, **more)
            drawing = 0.0  # `verify` keeps a point's inputs for the next variant


def _refusal(variant: Variant, axes: Axes, facts: DeviceFacts) -> str | None:
    """Why a variant cannot run at a point, with its weight as it keeps it."""
    return variant.refusal(axes_as_kept(variant, axes), facts)


def _measured(
    ops: Registry, facts: DeviceFacts, places: Sequence[Place], worth: int, wanted: Callable[[Variant, str], bool]
) -> Iterator[Step]:
    """Of each op, its variants that are `wanted` at a point: tuned, once for each bucket of shapes, then timed.

    They share a process but for peers that build kernels of their own, which may hang or die of it.
    """
    for name in dict.fromkeys(op for op, _ in places):
        variants, points = list(ops[name].variants.values()), report_points(ops[name].contract)
        here = {point: points[point] for op, point in places if op == name}
        ours = [variant for variant in variants if not is_peer(variant)]
        for variant in in_tuning_order(ours):
            buckets = dict.fromkeys(bucket(variant, axes) for point, axes in here.items() if wanted(variant, point))
            stands_for = tuning_points(variant, facts)
            for one in (one for one in buckets if one in stands_for):
                seconds = DRAW_S + CONFIG_S * len(candidates(variant, facts.arch))
                pieces = config_pieces(variant, stands_for[one].axes, facts.arch)
                yield _step("tune", variant, seconds, one, process=name, worth=worth, pieces=pieces)
        for variant in (*ours, *sorted(filter(is_peer, variants), key=lambda one: one.name in BUILDS)):
            process = f"{name}.{variant.name}" if variant.name in BUILDS else name
            for point, axes in here.items():
                refusal = _refusal(variant, axes, facts)
                more: dict[str, Any] = {"process": process, "worth": worth, "refusal": refusal}
                if wanted(variant, point):
                    pieces = peer_pieces(variant, axes) if refusal is None else ()
                    yield _step("time", variant, DRAW_S + JUDGE_S + TIME_S, point, pieces=pieces, **more)


def _step(kind: Kind, variant: Variant, seconds: float, point: str = "", **more: Any) -> Step:
    source = variant.source if variant.kernels else "-"
    return new_step(kind, seconds, variant.contract.name, variant.name, source, point, is_peer=is_peer(variant), **more)


def _engine_step(model: str, worth: int) -> Step:
    """Its models are ours and transformers', on the same random weights, which it draws itself where that is not worth
    beginning early.
    """
    weights = num_parameters(RANDOM_PRESETS[model])
    seconds, early = MODEL_S + BILLION_S * weights / 1e9, worth == _FIRST
    return new_step(
        "engine", seconds + draw_s(model) * (not early), op=model, worth=worth, models=[model] if early else ()
    )


def _mark_step(name: str, worth: int) -> Step:
    run = RUNS[name]
    return new_step("mark", run.seconds, point=name, worth=worth, least=run.least, models=models_of([name]))


def models_to_draw(left: Sequence[Step]) -> list[str]:
    """Of the steps that are left, the first that need weights, and those of the same worth: these weights, in order."""
    needing = [step for step in left if step.models]
    return list(dict.fromkeys(name for step in needing if step.worth == needing[0].worth for name in step.models))
