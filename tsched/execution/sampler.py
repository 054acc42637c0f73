"""From logits to tokens, for all rows at once.

The order is vLLM's: logits processors, penalties, temperature, min-p, top-k, top-p. The draw is an inverse CDF over
the row's own tokens in the order of their ids, in float64, with a uniform number that depends on the request's seed
and output index alone, so the rows around a request do not change its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tsched.execution.device_state import to_device
from tsched.execution.penalties import PenaltyCounts
from tsched.execution.random_numbers import UniformTable
from tsched.requests.errors import RequestFault
from tsched.requests.logits_processors import apply_processors
from tsched.scheduling.sequence import Ints, Sequence, SequenceTable

# In place of a token id: the model's logits for the row hold a NaN, or no finite maximum; or it is what the request
# asked for that left none (its processors, penalties and min_tokens).
NOT_FINITE = -1
NONE_LEFT = -2


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One place's log-probabilities, the chosen token's first: [1 + n] ids, natural logarithms, ranks from 1."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log-probabilities as they lie on the device: of l entries, each the chosen token's and its k most likely ones'.

    entries: l places among the sampled; num_top: l numbers, at most k; tensors: chosen [l], ranks [l] int64,
    top_values [l, k], top_ids [l, k] int64.
    """

    entries: list[int]
    num_top: list[int]
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled, on the device, not waited for.

    token_ids  [m] int64, NOT_FINITE or NONE_LEFT where there was nothing to choose from
    logprobs   of the entries whose requests ask for them
    faults     by entry, why its logits processors gave it no token
    """

    token_ids: torch.Tensor
    logprobs: RawLogprobs | None
    faults: dict[int, str]


_NO_FAULTS: dict[int, str] = {}


class Sampler:
    """Chooses a token for rows of `table`; `seed` is that of requests without one of their own.

    It never waits for a GPU: what it needs of the host (parameters, random numbers, the tokens that penalties count) is
    sent, and the tokens stay there. Logits processors alone wait: they run on the host.
    """

    def __init__(self, table: SequenceTable, *, seed: int, eos_token_ids: tuple[int, ...]) -> None:
        self._table = table
        self._eos_token_ids = eos_token_ids
        self._uniforms = UniformTable(table, seed)
        self._penalties = PenaltyCounts(table)

    def forget(self, rows: Ints) -> None:
        """What is known of the tokens of `rows` [n] does not hold any more."""
        self._penalties.forget(rows)

    def sample(self, logits: torch.Tensor, rows: Ints, lengths: Ints, epochs: Ints | None = None) -> Sampled:
        """A token for each of `rows` [m] from `logits` [m, V] float32 or wider, not changed.

        lengths: [m] int64, the tokens, prompt and output, that each row's logits have seen; the table holds them all.
        epochs: [m] int64, the rows' epochs when the step was planned: a row that has changed hands since gets some
        token, which nobody reads. None where none can have.
        """
        table = self._table
        tokens, finite = _most_likely_tokens(logits)
        plain = table.plain[rows]
        if epochs is not None:
            plain |= table.epoch[rows] != epochs
        if plain.all():
            return Sampled(_without(tokens, finite), None, _NO_FAULTS)
        special = np.flatnonzero(~plain)
        chosen_logits = logits.index_select(0, _on(special, logits))  # [s, V], a copy
        chosen, faults = self._choose(chosen_logits, rows[special], lengths[special])
        tokens = _without(tokens.index_copy_(0, _on(special, logits), chosen), finite)
        raw = self._raw_logprobs(logits, tokens, rows, special)
        return Sampled(tokens, raw, {int(special[i]): fault for i, fault in faults.items()})

    def _raw_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: Ints, special: Ints
    ) -> RawLogprobs | None:
        """Of those entries among `special` [s] whose requests ask for them; of the logits as the model gave them."""
        entries, num_top = [], []
        for entry in special.tolist():
            wanted = _present(self._table.sequences[rows[entry]]).params.logprobs
            if wanted is not None:
                entries.append(entry)
                num_top.append(wanted)
        if not entries:
            return None
        index = _on(np.array(entries), logits)
        chosen = tokens.index_select(0, index).clamp_min_(0)  # where there is no token, nobody reads what comes of it
        return RawLogprobs(entries, num_top, token_logprobs(logits.index_select(0, index), chosen, max(num_top)))

    def _choose(self, logits: torch.Tensor, rows: Ints, lengths: Ints) -> tuple[torch.Tensor, dict[int, str]]:
        """[s] int64, the tokens of `rows` [s] from their `logits` [s, V], NONE_LEFT where there is none; and why, where
        a logits processor failed.
        """
        table = self._table
        scores, faults = self._scores(logits, [_present(table.sequences[row]) for row in rows.tolist()], lengths)
        highest, tokens = scores.max(dim=-1)
        finite = highest.isfinite()
        drawing = np.flatnonzero(table.temperature[rows] > 0.0)
        if drawing.size:
            drawn_rows, all_draw = rows[drawing], drawing.size == rows.size
            index = _on(drawing, scores)
            probabilities = filtered_probabilities(
                scores if all_draw else scores.index_select(0, index),
                temperature=table.temperature[drawn_rows],
                min_p=table.min_p[drawn_rows],
                top_k=table.top_k[drawn_rows],
                top_p=table.top_p[drawn_rows],
            )
            uniform = self._uniforms.at(drawn_rows, lengths[drawing] - table.prompt_len[drawn_rows])
            drawn = draw(probabilities, uniform)
            tokens = drawn if all_draw else tokens.index_copy_(0, index, drawn)
        return tokens.masked_fill_(~finite, NONE_LEFT), faults

    def _scores(
        self, logits: torch.Tensor, sequences: list[Sequence], lengths: Ints
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """[s, V] float64: `logits` after processors and penalties, with what must not come yet at -inf; NaN in a row
        whose processor failed, and why it did.
        """
        scores = logits.double()
        vocab_size = scores.shape[1]
        faults = self._processed(scores, sequences, lengths)
        penalized = [i for i, sequence in enumerate(sequences) if sequence.params.has_penalties]
        if penalized:
            entries = np.array(penalized)
            rows = np.array([sequences[i].row for i in penalized])
            self._penalties.apply(scores, entries, rows, lengths[entries])
        barred: list[int] = []  # places in the flat scores
        for i, sequence in enumerate(sequences):
            params = sequence.params
            if params.min_tokens and lengths[i] - sequence.prompt_len < params.min_tokens:
                ends = set(params.stop_ids) | (set() if params.ignore_eos else set(self._eos_token_ids))
                barred += [i * vocab_size + token for token in ends if token < vocab_size]
        if barred:
            scores.view(-1).index_fill_(0, _on(np.array(barred), scores), -torch.inf)
        return scores, faults

    def _processed(self, scores: torch.Tensor, sequences: list[Sequence], lengths: Ints) -> dict[int, str]:
        """Let the logits processors change their rows of `scores` [s, V] float64, in place; returns what failed, by
        row.
        """
        faults: dict[int, str] = {}
        for i, sequence in enumerate(sequences):
            if sequence.params.processors and bool(scores[i].max().isfinite()):  # else it is not their fault
                known = sequence.freeze_tokens(self._table.tokens[sequence.row, : lengths[i]])
                prompt, output = known[: sequence.prompt_len], known[sequence.prompt_len :]
                try:
                    # A copy: beside the row itself lie those of others, and a view can be made to reach them.
                    scores[i] = apply_processors(sequence.params.processors, prompt, output, scores[i].clone())
                except RequestFault as fault:
                    scores[i] = torch.nan
                    faults[i] = str(fault)
        return faults


def _most_likely_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For each row of `logits` [m, V], the token of the largest logit [m] int64, and whether that logit is finite [m];
    None where they all are, as far as can be said without waiting for a GPU.

    A NaN counts as the largest.
    """
    if logits.device.type == "cpu":  # numpy's argmax: a tenth of torch's time on [32, 1024]
        array = logits.numpy()
        best = array.argmax(axis=-1)
        finite = np.isfinite(array[np.arange(best.size), best])
        return torch.from_numpy(best), None if finite.all() else torch.from_numpy(finite)
    highest, places = logits.max(dim=-1)
    return places, highest.isfinite()


def _without(tokens: torch.Tensor, finite: torch.Tensor | None) -> torch.Tensor:
    """`tokens` [m], changed: NOT_FINITE where not `finite` [m]."""
    return tokens if finite is None else tokens.masked_fill_(~finite, NOT_FINITE)


def filtered_probabilities(
    scores: torch.Tensor,
    *,
    temperature: NDArray[np.float64],
    min_p: NDArray[np.float64],
    top_k: Ints,
    top_p: NDArray[np.float64],
) -> torch.Tensor:
    """[n, V] float64, not normalized (the most likely token has 1) and 0 where a filter removed the token.

    scores: [n, V] float64. The rest is [n]: temperature > 0, top_k 0 for all tokens.
    """
    top = scores.amax(dim=-1, keepdim=True)
    probabilities = ((scores - top) / _on(temperature, scores).unsqueeze(1)).exp_()  # [n, V]
    if min_p.any():
        probabilities.masked_fill_(probabilities < _on(min_p, scores).unsqueeze(1), 0.0)
    filtered = np.flatnonzero((top_k > 0) & (top_k < scores.shape[1]) | (top_p < 1.0))
    if filtered.size:
        index = _on(filtered, scores)
        kept = _most_likely(probabilities.index_select(0, index), top_k[filtered], top_p[filtered])
        probabilities.index_copy_(0, index, kept)
    return probabilities


def _most_likely(probabilities: torch.Tensor, top_k: Ints, top_p: NDArray[np.float64]) -> torch.Tensor:
    """`probabilities` [n, V] with all but each row's top_k, and of those all but its top_p, at 0."""
    vocab_size = probabilities.shape[1]
    limit = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    limits, shares = _on(limit, probabilities).unsqueeze(1), _on(top_p, probabilities).unsqueeze(1)
    largest = _largest(probabilities, int(limit.max()))  # [n, K]
    reached = largest.cumsum(dim=-1)
    total = reached.gather(1, limits - 1)  # of each row's top_k
    num_reached = (reached < shares * total).sum(dim=-1, keepdim=True)  # tokens that do not make up top_p yet
    num_kept = torch.minimum(num_reached + 1, limits)  # [n, 1]
    threshold = largest.gather(1, num_kept - 1)
    keep = probabilities >= threshold
    # To look whether there are ties would be to wait for a GPU.
    if keep.is_cuda or bool((keep.sum(dim=-1, keepdim=True) > num_kept).any()):
        # Of the tokens equal to the last one kept, those with the lower ids.
        above = probabilities > threshold
        ties = probabilities == threshold
        keep = above | (ties & (ties.cumsum(dim=-1) <= num_kept - above.sum(dim=-1, keepdim=True)))
    return probabilities.masked_fill(~keep, 0.0)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """[n, count], each row's largest of `values` [n, V], in falling order."""
    size = values.shape[1]
    if values.device.type != "cpu":
        return values.topk(count, dim=-1).values if count < size else values.sort(dim=-1, descending=True).values
    # numpy's vectorized sort: 20 times torch's speed on [32, 1024] float64.
    array = values.numpy()
    if count < size:
        array = np.partition(array, size - count, axis=-1)[:, size - count :]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def draw(probabilities: torch.Tensor, uniform: NDArray[np.float64]) -> torch.Tensor:
    """[n] int64: for each row the first token whose cumulated probability exceeds uniform * total.

    probabilities: [n, V] float64, >= 0, with a positive sum; uniform: [n] in [0, 1).
    """
    cdf = probabilities.cumsum(dim=-1)  # [n, V]
    total = cdf[:, -1:]
    # A uniform is at most 1 - 2**-53, so the product stays below the total also when it is rounded.
    target = _on(uniform, probabilities).unsqueeze(1) * total
    return torch.searchsorted(cdf, target, right=True).squeeze(1)


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each of n rows of `logits` [n, V]: its `tokens`' [n] log-probability [n] and rank [n], from 1, and the
    log-probabilities [n, k] and ids [n, k] of its k most likely, `num_top` or the whole vocabulary.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))  # [n, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return chosen.squeeze(1), ranks, top.values, top.indices


def _on(array: NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return to_device(array, like.device)


def _present(sequence: Sequence | None) -> Sequence:
    if sequence is None:
        raise RuntimeError("a row that is sampled from is empty")
    return sequence
