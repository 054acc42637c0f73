"""A workload's requests, drawn or read from its trace."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from experiments.schema import (
    LateRequests,
    Priorities,
    PromptsWorkload,
    RequestsWorkload,
    SyntheticWorkload,
    TraceWorkload,
)
from experiments.serving.requests import Request
from experiments.simulation.trace_files import MOONCAKE_BLOCK, read_trace
from tsched import SamplingParams

Drawn = tuple[str | list[int], int, int]
"""A request's prompt, its most tokens out, and how many the others have when it comes."""


def requests_of(workload: RequestsWorkload, vocab_size: int) -> list[Request]:
    """The workload's requests, the same ones on every machine.

    A request that samples has a seed of its own (`sampling.seed`, or the workload's, plus its index), so that its
    tokens depend on nothing around it. All but texts run to their length, whatever the model's end token is.
    """
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": None, **workload.sampling, "n": workload.n})
    ignore_eos = params.ignore_eos or not isinstance(workload, PromptsWorkload)
    seed = getattr(workload, "seed", 0)
    first_seed = params.seed if params.seed is not None else seed
    drawn = list(_draw_requests(workload, vocab_size))
    # Priorities are drawn apart, so that the prompts are the same with and without.
    late = workload.late if isinstance(workload, SyntheticWorkload) else None
    num_late = late.num_requests if late is not None else 0
    generator = np.random.default_rng((seed, 1))
    ranks = _draw_ranks(generator, workload.priority, len(drawn) - num_late)
    ranks += _draw_ranks(generator, late.priority, num_late) if late is not None else []
    requests = []
    for index, ((prompt, most, after), rank) in enumerate(zip(drawn, ranks, strict=True)):
        own = replace(params, seed=first_seed + index, max_tokens=most, ignore_eos=ignore_eos)
        requests.append(Request(prompt, own, after, rank, index % workload.tenants))
    return requests


def _draw_requests(workload: RequestsWorkload, vocab_size: int) -> Iterator[Drawn]:
    if isinstance(workload, PromptsWorkload):
        yield from ((text, workload.max_tokens, 0) for text in workload.prompts)
    elif isinstance(workload, TraceWorkload):
        prompts = _draw_trace_prompts(workload, vocab_size)
        yield from ((prompt, most, 0) for prompt, (_, most) in zip(prompts, traced_lengths(workload), strict=True))
    else:
        yield from _draw_synthetic(workload, vocab_size)


def _draw_synthetic(workload: SyntheticWorkload, vocab_size: int) -> Iterator[Drawn]:
    generator = np.random.default_rng(workload.seed)
    lengths = _draw_lengths(generator, workload)
    prompts = [generator.integers(0, vocab_size, inputs).tolist() for inputs, _ in lengths]
    if workload.shared_prefix:
        text = generator.integers(0, vocab_size, workload.input_len.uniform[1]).tolist()
        for prompt in prompts:
            shared = int(workload.shared_prefix * len(prompt))
            prompt[:shared] = text[:shared]
    yield from ((prompt, outputs, 0) for prompt, (_, outputs) in zip(prompts, lengths, strict=True))
    if workload.late is not None:
        for place, (inputs, outputs) in enumerate(_draw_lengths(generator, workload.late), 1):
            yield generator.integers(0, vocab_size, inputs).tolist(), outputs, place * workload.late.every


def traced_lengths(workload: TraceWorkload) -> list[tuple[int, int]]:
    """Of each of the trace's requests, the tokens in and out, in the workload's size of a block."""
    scale = workload.block_tokens
    return [
        (-(-line.input_len * scale // MOONCAKE_BLOCK), -(-line.output_len * scale // MOONCAKE_BLOCK))
        for line in islice(read_trace(workload.file), workload.num_requests)
    ]


def _draw_trace_prompts(workload: TraceWorkload, vocab_size: int) -> list[list[int]]:
    """Random tokens, the same ones in blocks of the same hash id; each request its own where there are no ids."""
    blocks: dict[int, list[int]] = {}
    prompts = []
    lines = islice(read_trace(workload.file), workload.num_requests)
    for index, (line, (length, _)) in enumerate(zip(lines, traced_lengths(workload), strict=True)):
        if line.hash_ids is None:
            own = np.random.default_rng((workload.seed, 1, index))
            prompts.append(own.integers(0, vocab_size, length).tolist())
            continue
        for one in line.hash_ids:
            if one not in blocks:
                drawn = np.random.default_rng((workload.seed, 0, one))
                blocks[one] = drawn.integers(0, vocab_size, workload.block_tokens).tolist()
        prompts.append([token for one in line.hash_ids for token in blocks[one]][:length])
    return prompts


def _draw_ranks(generator: np.random.Generator, priorities: Priorities | None, count: int) -> list[int]:
    if priorities is None:
        return [0] * count
    return list(priorities.each) or [_draw_number(generator, priorities.uniform) for _ in range(count)]


def _draw_lengths(generator: np.random.Generator, drawn: SyntheticWorkload | LateRequests) -> list[tuple[int, int]]:
    """Of each request, the tokens in and out."""
    bounds = (drawn.input_len.uniform, drawn.output_len.uniform)
    return [(_draw_number(generator, bounds[0]), _draw_number(generator, bounds[1])) for _ in range(drawn.num_requests)]


def _draw_number(generator: np.random.Generator, bounds: Sequence[int]) -> int:
    return int(generator.integers(bounds[0], bounds[1] + 1))
