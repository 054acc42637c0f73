"""A workload's requests, drawn or read from its trace."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from experiments.schema import AnyWorkload, LateRequests, Priorities, PromptsWorkload, SyntheticWorkload, TraceWorkload
from experiments.serving.requests import Request
from experiments.simulation.trace_files import MOONCAKE_BLOCK, read_trace
from tsched import SamplingParams


def requests_of(workload: AnyWorkload, vocab_size: int) -> list[Request]:
    """The workload's requests, the same ones on every machine.

    A request that samples has a seed of its own (`sampling.seed`, or the workload's, plus its index), so that its
    tokens depend on nothing around it.
    """
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": None, **workload.sampling, "n": workload.n})
    first_seed = params.seed if params.seed is not None else getattr(workload, "seed", 0)

    def of(index: int, prompt: str | list[int], max_tokens: int, *, exact: bool, after: int = 0) -> Request:
        mine = replace(params, seed=first_seed + index, max_tokens=max_tokens)
        mine = replace(mine, ignore_eos=True) if exact else mine
        return Request(prompt, mine, after, ranks[index], index % workload.tenants)

    ranks = _ranks(workload)
    if isinstance(workload, PromptsWorkload):
        texts = enumerate(workload.prompts)
        return [of(index, text, workload.max_tokens, exact=False) for index, text in texts]
    if isinstance(workload, TraceWorkload):
        traced = zip(_prompts(workload, vocab_size), traced_lengths(workload), strict=True)
        return [of(index, prompt, outputs, exact=True) for index, (prompt, (_, outputs)) in enumerate(traced)]
    generator = np.random.default_rng(workload.seed)
    lengths = _lengths(generator, workload, workload.num_requests)
    prompts = [generator.integers(0, vocab_size, inputs).tolist() for inputs, _ in lengths]
    if workload.shared_prefix:
        text = generator.integers(0, vocab_size, workload.input_len.uniform[1]).tolist()
        for prompt in prompts:
            shared = int(workload.shared_prefix * len(prompt))
            prompt[:shared] = text[:shared]
    found = [
        of(index, prompt, outputs, exact=True)
        for index, (prompt, (_, outputs)) in enumerate(zip(prompts, lengths, strict=True))
    ]
    if workload.late is not None:
        for place, (inputs, outputs) in enumerate(_lengths(generator, workload.late, workload.late.num_requests), 1):
            prompt = generator.integers(0, vocab_size, inputs).tolist()
            found.append(of(len(found), prompt, outputs, exact=True, after=place * workload.late.every))
    return found


def traced_lengths(workload: TraceWorkload) -> list[tuple[int, int]]:
    """Of each of the trace's requests, the tokens in and out, in the workload's size of a block."""
    scale = workload.block_tokens
    return [
        (-(-line.input_len * scale // MOONCAKE_BLOCK), -(-line.output_len * scale // MOONCAKE_BLOCK))
        for line in islice(read_trace(workload.file), workload.num_requests)
    ]


def _prompts(workload: TraceWorkload, vocab_size: int) -> list[list[int]]:
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


def _ranks(workload: AnyWorkload) -> list[int]:
    """The priorities, those of late requests last; drawn apart, so that the prompts are the same with and without."""
    if isinstance(workload, PromptsWorkload):
        drawn: list[tuple[Priorities | None, int]] = [(workload.priority, len(workload.prompts))]
    elif isinstance(workload, TraceWorkload):
        drawn = [(workload.priority, len(traced_lengths(workload)))]
    else:
        drawn = [(workload.priority, workload.num_requests)]
        if workload.late is not None:
            drawn.append((workload.late.priority, workload.late.num_requests))
    generator = np.random.default_rng((getattr(workload, "seed", 0), 1))
    ranks: list[int] = []
    for priorities, count in drawn:
        if priorities is None:
            ranks += [0] * count
        else:
            ranks += priorities.each or [_drawn(generator, priorities.uniform) for _ in range(count)]
    return ranks


def _lengths(
    generator: np.random.Generator, drawn: SyntheticWorkload | LateRequests, count: int
) -> list[tuple[int, int]]:
    """[count] times the tokens in and out."""
    return [
        (_drawn(generator, drawn.input_len.uniform), _drawn(generator, drawn.output_len.uniform)) for _ in range(count)
    ]


def _drawn(generator: np.random.Generator, bounds: Sequence[int]) -> int:
    return int(generator.integers(bounds[0], bounds[1] + 1))
