"""A workload as requests: prompts with their sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.schema import PromptsWorkload, SyntheticWorkload
from tsched import SamplingParams


@dataclass(frozen=True)
class Request:
    """A text or token ids, and how it is continued."""

    prompt: str | list[int]
    params: SamplingParams


def requests_of(workload: SyntheticWorkload | PromptsWorkload, vocab_size: int) -> list[Request]:
    """The workload's requests, the same ones on every machine.

    A request that samples has a seed of its own (`sampling.seed`, or the workload's, plus its index), so that its
    tokens depend on nothing around it.
    """
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": None, **workload.sampling})
    first_seed = params.seed if params.seed is not None else getattr(workload, "seed", 0)

    def of(index: int, prompt: str | list[int], max_tokens: int, *, exact: bool) -> Request:
        mine = replace(params, seed=first_seed + index, max_tokens=max_tokens)
        return Request(prompt, replace(mine, ignore_eos=True) if exact else mine)

    if isinstance(workload, PromptsWorkload):
        texts = enumerate(workload.prompts)
        return [of(index, text, workload.max_tokens, exact=False) for index, text in texts]
    generator = np.random.default_rng(workload.seed)
    lengths = [
        (_drawn(generator, workload.input_len.uniform), _drawn(generator, workload.output_len.uniform))
        for _ in range(workload.num_requests)
    ]
    return [
        of(index, generator.integers(0, vocab_size, inputs).tolist(), outputs, exact=True)
        for index, (inputs, outputs) in enumerate(lengths)
    ]


def _drawn(generator: np.random.Generator, bounds: Sequence[int]) -> int:
    return int(generator.integers(bounds[0], bounds[1] + 1))
