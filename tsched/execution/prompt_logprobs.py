"""Log-probabilities of prompts: the step that computes a prompt's tokens scores each by the logits of the one before.

The head and the op `logprobs` run over a few tokens at a time, because the logits of a whole prompt are larger than
many a model: 1.2 GB for 2,048 tokens and a vocabulary of 151,936.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from tkernels.runtime import Runtime
from tmodel import Batch, KVCache, SplitModel
from tsched.execution.batch_builder import ArrangedPlan
from tsched.execution.sampler import TokenLogprobs
from tsched.execution.step_kernels import Tensors
from tsched.scheduling.sequence import Ints, Sequence

SLICE_BYTES = 16 * 2**20  # of float32 logits at a time; the head's output lies beside them


@dataclass(eq=False, slots=True)
class PromptScores:
    """The log-probabilities of one prompt, as far as they are known. The samples of a request share them.

    Attributes:
        token_ids: [n], the prompt.
        num_top: The most likely tokens reported beside each of its tokens.
        found: For the prompt's second token and the next ones.
    """

    token_ids: Ints
    num_top: int
    found: list[TokenLogprobs] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.found) == self.token_ids.size - 1

    @property
    def has_nan(self) -> bool:
        """Whether the model's logits for some token are not finite."""
        return any(math.isnan(one.logprobs[0]) for one in self.found)

    def add(self, first: int, scores: list[TokenLogprobs]) -> None:
        """Adds `scores` of the tokens after place `first` and the next ones; some of them may be known already."""
        self.found += scores[len(self.found) - first :]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Tokens of a step whose logits score the tokens of a prompt after them.

    Attributes:
        scores: Of the prompt.
        first: The place of the first token in its sequence.
        tokens: [l] int64, ascending, their places among the step's tokens.
    """

    scores: PromptScores
    first: int
    tokens: Ints

    @property
    def next_ids(self) -> Ints:
        """[l] int64, the prompt's tokens after these."""
        return self.scores.token_ids[self.first + 1 : self.first + 1 + self.tokens.size]


@dataclass(frozen=True, slots=True)
class ScoredPrompts:
    """The scores of a step's spans, on the device, which may still compute them.

    Attributes:
        spans: The spans, in the order of their tokens.
        tensors: Of all their tokens, as the op `logprobs` returns them.
    """

    spans: list[PromptSpan]
    tensors: Tensors

    def store(self, tensors: list[torch.Tensor]) -> None:
        """Adds the scores to those of their prompts; `tensors` are the same, on the host."""
        columns = zip(*(tensor.tolist() for tensor in tensors), strict=True)
        for span in self.spans:
            span.scores.add(span.first, list(_list_scores(span, columns)))


def _list_scores(
    span: PromptSpan, columns: Iterator[tuple[float, int, list[int], list[float]]]
) -> Iterator[TokenLogprobs]:
    for token, (chosen, rank, ids, values) in zip(span.next_ids.tolist(), columns, strict=False):
        n = min(span.scores.num_top, len(ids))
        yield TokenLogprobs([token, *ids[:n]], [chosen, *values[:n]], [rank, *range(1, n + 1)])


class PromptScorer:
    """Knows whose prompts are not scored yet, and finds their tokens in a step."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Sequence, PromptScores]] = {}  # by the sequence's id

    def add(self, sequence: Sequence, scores: PromptScores) -> None:
        """Scores the prompt of `sequence` from now on, as far as `scores` does not know it."""
        self._waiting[sequence.id] = sequence, scores

    def forget(self, sequence_id: int) -> None:
        """Scores nothing for a sequence any more."""
        self._waiting.pop(sequence_id, None)

    def clear(self) -> None:
        """Forgets every sequence."""
        self._waiting.clear()

    def find_spans(self, step: ArrangedPlan) -> list[PromptSpan]:
        """The spans of a step, in the order of its tokens."""
        if not self._waiting:
            return []
        spans: list[tuple[int, PromptSpan]] = []
        firsts = np.cumsum(step.counts) - step.counts  # [n], the place of each entry's first token in the step
        for sequence, scores in list(self._waiting.values()):
            if scores.is_complete:
                self.forget(sequence.id)
                continue
            for entry in np.flatnonzero(step.rows == sequence.row).tolist() if sequence.row >= 0 else ():
                start = int(step.starts[entry])
                first, end = max(start, len(scores.found)), min(int(step.ends[entry]), scores.token_ids.size - 1)
                if first < end:
                    tokens = firsts[entry] + np.arange(first - start, end - start)
                    spans.append((entry, PromptSpan(scores, first, tokens)))
        return [span for _, span in sorted(spans, key=lambda one: one[0])]


def compute_with_prompts(
    model: Callable[[Batch, KVCache], torch.Tensor] | SplitModel,
    batch: Batch,
    kv_cache: KVCache,
    sampled: Ints,
    spans: list[PromptSpan],
    runtime: Runtime,
    logprobs: Callable[..., Tensors],
) -> tuple[torch.Tensor, ScoredPrompts]:
    """Runs a step that scores prompts.

    Args:
        model: As the engine's. Of one that is no SplitModel the logits of all tokens are in memory at once.
        batch: Its logit_indices are the tokens of `sampled` and of `spans`.
        kv_cache: The caches.
        sampled: [m] int64, the tokens whose logits are sampled from.
        spans: The tokens that score prompts, none of them in `sampled`.
        runtime: Of the model's device.
        logprobs: The op.

    Returns:
        (logits [m, V] of the sampled tokens, the scores).
    """
    head: Callable[[torch.Tensor], torch.Tensor] = _keep
    if isinstance(model, SplitModel):
        states, head = model.compute_hidden(batch, kv_cache), model.compute_logits  # [n, H]
    else:
        states = model(batch, kv_cache)  # [n, V]
    scoring = np.concatenate([span.tokens for span in spans])  # [l]
    wanted = np.sort(np.concatenate((sampled, scoring)))  # [n], as the batch has them
    logits = head(states.index_select(0, runtime.send(np.searchsorted(wanted, sampled))))
    places = runtime.send(np.searchsorted(wanted, scoring))
    following = runtime.send(np.concatenate([span.next_ids for span in spans]))
    vocab_size = logits.shape[1]
    top, size = min(max(span.scores.num_top for span in spans), vocab_size), max(1, SLICE_BYTES // (4 * vocab_size))
    slices = [
        logprobs(head(states.index_select(0, places[i : i + size])), following[i : i + size], top=top)
        for i in range(0, scoring.size, size)
    ]
    chosen, ranks, ids, values = (torch.cat(parts) for parts in zip(*slices, strict=True))
    return logits, ScoredPrompts(spans, (chosen, ranks, ids, values))


def _keep(logits: torch.Tensor) -> torch.Tensor:
    return logits
