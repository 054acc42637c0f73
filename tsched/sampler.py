"""From logits to tokens, for all rows at once.

The order is vLLM's: logits processors, penalties, temperature, min-p, top-k, top-p. The draw is an inverse CDF over
the row's own tokens in the order of their ids, in float64, with a uniform number that depends on the request's seed
and output index alone, so the rows around a request do not change its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tsched.logits_processors import RequestFault, process
from tsched.random_numbers import UniformTable
from tsched.sequence import Ints, Sequence, SequenceTable

# In place of a token id: the row's logits hold a NaN, or no finite maximum, or a logits processor failed.
NOT_FINITE = -1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One place's log-probabilities, the chosen token's first: [1 + n] ids, natural logarithms, ranks from 1."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_ids` [m] int64 on the host, NOT_FINITE where there was nothing to choose from; `logprobs` by entry, for
    those whose requests ask for them; `faults` by entry, for those whose logits processors failed."""

    token_ids: Ints
    logprobs: dict[int, TokenLogprobs]
    all_finite: bool
    faults: dict[int, str] = field(default_factory=dict)


_NO_LOGPROBS: dict[int, TokenLogprobs] = {}


class Sampler:
    """Chooses a token for rows of `table`; `seed` is that of requests without one of their own."""

    def __init__(self, table: SequenceTable, *, seed: int, eos_token_ids: tuple[int, ...]) -> None:
        self._table = table
        self._eos_token_ids = eos_token_ids
        self._uniforms = UniformTable(table, seed)

    def sample(self, logits: torch.Tensor, rows: Ints, lengths: Ints) -> Sampled:
        """A token for each of `rows` [m] from `logits` [m, V] float32 or wider, not changed.

        lengths: [m] int64, the tokens, prompt and output, that each row's logits have seen: all that the table knows
        of it.
        """
        table = self._table
        tokens, finite = _most_likely_tokens(logits)
        if not finite.all():
            # A broken kernel ends the requests that it broke, by name; what the others get does not change.
            sound = self.sample(logits.masked_fill(_on(~finite, logits).unsqueeze(1), 0.0), rows, lengths)
            faults = {entry: fault for entry, fault in sound.faults.items() if finite[entry]}
            return Sampled(np.where(finite, sound.token_ids, NOT_FINITE), sound.logprobs, False, faults)
        plain = table.plain[rows]
        if plain.all():
            return Sampled(tokens, _NO_LOGPROBS, all_finite=True)
        special = np.flatnonzero(~plain)
        special_rows = rows[special]
        sequences = [_present(table.sequences[row]) for row in special_rows.tolist()]
        chosen_logits = logits.index_select(0, _on(special, logits))  # [s, V], a copy
        scores = chosen_logits.to(torch.float64, copy=True)  # log-probabilities are of the model's own logits
        faults = {int(special[i]): fault for i, fault in self._processed(scores, sequences).items()}
        scores = self._penalized(scores, sequences)
        tokens[special] = scores.argmax(dim=-1).cpu().numpy()
        drawing = np.flatnonzero(table.temperature[special_rows] > 0.0)
        if drawing.size:
            drawn_rows = special_rows[drawing]
            output_indices = lengths[special][drawing] - table.prompt_len[drawn_rows]
            probabilities = filtered_probabilities(
                scores if drawing.size == special.size else scores.index_select(0, _on(drawing, scores)),
                temperature=table.temperature[drawn_rows],
                min_p=table.min_p[drawn_rows],
                top_k=table.top_k[drawn_rows],
                top_p=table.top_p[drawn_rows],
            )
            tokens[special[drawing]] = draw(probabilities, self._uniforms.at(drawn_rows, output_indices))
        tokens[list(faults)] = NOT_FINITE
        wanted = {
            i: s.params.logprobs
            for i, s in enumerate(sequences)
            if s.params.logprobs is not None and int(special[i]) not in faults
        }
        if not wanted:
            return Sampled(tokens, _NO_LOGPROBS, not faults, faults)
        entries = np.fromiter(wanted, dtype=np.int64)
        found = token_logprobs(
            chosen_logits.index_select(0, _on(entries, logits)), tokens[special[entries]], list(wanted.values())
        )
        return Sampled(tokens, dict(zip(special[entries].tolist(), found, strict=True)), not faults, faults)

    def _processed(self, scores: torch.Tensor, sequences: list[Sequence]) -> dict[int, str]:
        """Let the logits processors change their rows of `scores` [s, V] float64, in place; returns what failed, by
        row.
        """
        faults: dict[int, str] = {}
        for i, sequence in enumerate(sequences):
            if sequence.params.processors:
                known = self._known(sequence)
                known.flags.writeable = False
                prompt, output = known[: sequence.prompt_len], known[sequence.prompt_len :]
                try:
                    scores[i] = process(sequence.params.processors, prompt, output, scores[i])
                except RequestFault as fault:
                    scores[i] = 0.0
                    faults[i] = str(fault)
        return faults

    def _penalized(self, scores: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
        """[s, V] float64: `scores`, changed, with penalties, and with what must not come yet at -inf."""
        vocab_size = scores.shape[1]
        penalized = [i for i, sequence in enumerate(sequences) if sequence.params.has_penalties]
        if penalized:
            known = [self._known(sequences[i]) for i in penalized]
            apply_penalties(
                scores,
                np.array(penalized),
                known,
                np.array([sequences[i].prompt_len for i in penalized]),
                np.array(
                    [
                        (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
                        for p in (sequences[i].params for i in penalized)
                    ]
                ),
            )
        for i, sequence in enumerate(sequences):
            params = sequence.params
            if params.min_tokens and self._table.known[sequence.row] - sequence.prompt_len < params.min_tokens:
                barred = set(params.stop_ids) | (set() if params.ignore_eos else set(self._eos_token_ids))
                if barred:
                    scores[i, [token for token in barred if token < vocab_size]] = -torch.inf
        return scores

    def _known(self, sequence: Sequence) -> Ints:
        tokens: Ints = self._table.tokens[sequence.row, : self._table.known[sequence.row]]
        return tokens


def _most_likely_tokens(logits: torch.Tensor) -> tuple[Ints, NDArray[np.bool_]]:
    """For each row of `logits` [m, V], the token of the largest logit [m] int64, and whether that logit is finite [m].

    A NaN counts as the largest.
    """
    if logits.device.type == "cpu":  # numpy's argmax: a tenth of torch's time on [32, 1024]
        array = logits.numpy()
        best: Ints = array.argmax(axis=-1)
        return best, np.isfinite(array[np.arange(best.size), best])
    highest, places = logits.max(dim=-1)
    on_host: Ints = places.masked_fill_(~highest.isfinite(), NOT_FINITE).cpu().numpy()  # one copy, one wait
    return on_host, on_host != NOT_FINITE


def apply_penalties(
    scores: torch.Tensor, rows: Ints, known: list[Ints], prompt_lens: Ints, penalties: NDArray[np.float64]
) -> None:
    """Change `rows` [p] of `scores` [s, V] float64 in place, at the tokens that the rows have already: `known` [p] of
    [prompt + output].

    penalties: [p, 3], repetition (over prompt and output), presence and frequency (over the output).
    """
    vocab_size = scores.shape[1]
    lens = np.array([tokens.size for tokens in known])
    owner = np.repeat(np.arange(rows.size), lens)  # [sum of lens]
    place = np.arange(owner.size) - np.repeat(np.cumsum(lens) - lens, lens)
    keys, inverse = np.unique(rows[owner] * vocab_size + np.concatenate(known), return_inverse=True)
    output_counts = np.bincount(inverse, weights=place >= prompt_lens[owner], minlength=keys.size)  # [keys]
    key_owner = np.empty(keys.size, dtype=np.int64)
    key_owner[inverse] = owner
    repetition, presence, frequency = (_on(column, scores) for column in penalties[key_owner].T)
    counts = _on(output_counts, scores)
    flat, index = scores.view(-1), _on(keys, scores)
    values = flat[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[index] = values - frequency * counts - presence * (counts > 0)


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
    if bool((keep.sum(dim=-1, keepdim=True) > num_kept).any()):
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


def draw(probabilities: torch.Tensor, uniform: NDArray[np.float64]) -> Ints:
    """[n] int64: for each row the first token whose cumulated probability exceeds uniform * total.

    probabilities: [n, V] float64, >= 0, with a positive sum; uniform: [n] in [0, 1).
    """
    cdf = probabilities.cumsum(dim=-1)  # [n, V]
    total = cdf[:, -1:]
    # A uniform is at most 1 - 2**-53, so the product stays below the total also when it is rounded.
    target = _on(uniform, probabilities).unsqueeze(1) * total
    tokens: Ints = torch.searchsorted(cdf, target, right=True).squeeze(1).cpu().numpy()
    return tokens


def token_logprobs(logits: torch.Tensor, tokens: Ints, num_top: list[int]) -> list[TokenLogprobs]:
    """For each of n rows of `logits` [n, V], the log-probabilities of its `tokens` [n] and of its `num_top` [n] most
    likely.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, _on(tokens, logits).unsqueeze(1))  # [n, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top = logprobs.topk(min(max(num_top), logits.shape[1]), dim=-1)
    return [
        TokenLogprobs([token, *ids[:n]], [value, *values[:n]], [rank, *range(1, min(n, len(ids)) + 1)])
        for token, value, rank, ids, values, n in zip(
            tokens.tolist(),
            chosen.squeeze(1).tolist(),
            ranks.tolist(),
            top.indices.tolist(),
            top.values.tolist(),
            num_top,
            strict=True,
        )
    ]


def _on(array: NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)


def _present(sequence: Sequence | None) -> Sequence:
    if sequence is None:
        raise RuntimeError("a row that is sampled from is empty")
    return sequence
