"""Samples tokens from logits, for all rows at once.

The order is vLLM's: logits processors, biases, penalties, temperature, min-p, top-k, top-p; but what bars tokens comes
after penalties, and holds whatever they were. A draw inverts the CDF over a row's
tokens in the order of their ids, in float64, at a uniform number that depends on the request's seed and output index
alone. So other rows of a batch do not change a request's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.runtime import Runtime
from tsched.execution.bad_words import BadWords
from tsched.execution.grammar_masks import GrammarMasks
from tsched.execution.penalties import PenaltyCounts
from tsched.execution.random_numbers import UniformTable
from tsched.execution.token_biases import HeldEnds, TokenBiases
from tsched.execution.token_masks import AllowedTokens
from tsched.requests.errors import RequestFault
from tsched.requests.logits_processors import apply_processors
from tsched.requests.sampling_params import Asks
from tsched.scheduling.sequence import Ints, Sequence, SequenceTable

# These stand in place of a token id.
NOT_FINITE = -1  # the model's logits for the row hold a NaN, or no finite maximum
NONE_LEFT = -2  # the request's parameters left no finite logit

# As integers: an IntFlag takes microseconds to combine.
_PROCESSORS, _LOGPROBS = int(Asks.PROCESSORS), int(Asks.LOGPROBS)
_COMPUTED = int(Asks.PROCESSORS | Asks.BIAS | Asks.PENALTIES | Asks.MIN_TOKENS)
"""What changes scores, in float64. The rest bars tokens or leaves scores as they are."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probabilities of one output token, the chosen one's first.

    Attributes:
        token_ids: [1 + n], the chosen token and the n most likely ones.
        logprobs: [1 + n] natural logarithms.
        ranks: [1 + n], from 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log-probabilities of l entries on the device: of each the chosen token and the k most likely ones.

    Attributes:
        entries: l places among the sampled.
        num_top: l numbers, at most k, of most likely tokens that the request asks for.
        tensors: (chosen [l], ranks [l] int64, top_values [l, k], top_ids [l, k] int64).
    """

    entries: list[int]
    num_top: list[int]
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's sampled tokens, on the device, which may still compute them.

    Attributes:
        token_ids: [m] int64, NOT_FINITE or NONE_LEFT where there was nothing to choose from.
        logprobs: Of the entries whose requests ask for them; None where none does.
        faults: Entry -> why its logits processors failed.
    """

    token_ids: torch.Tensor
    logprobs: RawLogprobs | None
    faults: dict[int, str]


_NO_FAULTS: dict[int, str] = {}


class Sampler:
    """Chooses tokens for rows of `table`.

    It sends parameters, random numbers and the tokens that penalties count to the device, and leaves the results there,
    so it never waits for a GPU. Only logits processors wait, because they run on the host.

    Args:
        table: The running sequences.
        runtime: Of the logits' device.
        seed: Of requests without a seed.
        eos_token_ids: The tokens that min_tokens holds back.

    Attributes:
        grammars: Of the sequences that have one; whoever adds a sequence tells them.
    """

    def __init__(self, table: SequenceTable, runtime: Runtime, *, seed: int, eos_token_ids: tuple[int, ...]) -> None:
        self._table = table
        self._runtime = runtime
        self._uniforms = UniformTable(table, seed)
        self._penalties = PenaltyCounts(table, runtime)
        self.grammars = GrammarMasks(table, runtime)
        # Each changes the scores of those rows alone that ask for it, all of them at once.
        stages: tuple[tuple[Asks, Callable[[torch.Tensor, Ints, Ints, Ints], None]], ...] = (
            (Asks.BIAS, TokenBiases(table, runtime, lambda sequence: sequence.params.biases).apply),
            (Asks.PENALTIES, self._penalties.apply),
            (Asks.MIN_TOKENS, HeldEnds(table, runtime, eos_token_ids).apply),
            (Asks.ALLOWED, AllowedTokens(table, runtime).apply),
            (Asks.BAD_WORDS, BadWords(table, runtime).apply),
            (Asks.GRAMMAR, self.grammars.apply),
        )
        self._stages = tuple((int(asks), apply) for asks, apply in stages)

    def forget(self, rows: Ints) -> None:
        """Drops what is cached for `rows` [n]: their tokens have changed."""
        self._penalties.forget(rows)

    def sample(self, logits: torch.Tensor, rows: Ints, lengths: Ints, epochs: Ints | None = None) -> Sampled:
        """Samples a token for each row.

        Args:
            logits: [m, V] float32 or wider; they stay unchanged.
            rows: [m] int64, of the table.
            lengths: [m] int64, the tokens, prompt and output, that each row's logits have seen. The table has them all.
            epochs: [m] int64, of the rows when the step was planned. A row with another sequence since gets any token,
                which nobody reads. None where no row can have one.
        """
        table = self._table
        plain = table.plain[rows]
        if epochs is not None:
            plain |= table.epoch[rows] != epochs
        special = np.flatnonzero(~plain)
        if special.size and special.size == rows.size:
            finite: torch.Tensor | None = logits.amax(dim=-1).isfinite()
            tokens, faults = self._choose(logits.clone(), rows, lengths)
        else:
            tokens, finite = _most_likely_tokens(logits, self._runtime)
            if not special.size:
                return Sampled(_mark(NOT_FINITE, tokens, finite), None, _NO_FAULTS)
            index = self._runtime.send(special)
            chosen, faults = self._choose(logits.index_select(0, index), rows[special], lengths[special])
            tokens.index_copy_(0, index, chosen)
        tokens = _mark(NOT_FINITE, tokens, finite)
        raw = self._gather_logprobs(logits, tokens, rows, special)
        return Sampled(tokens, raw, {int(special[i]): fault for i, fault in faults.items()})

    def _gather_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: Ints, special: Ints
    ) -> RawLogprobs | None:
        """Log-probabilities of the model's own logits, for the entries in `special` [s] whose requests ask for them."""
        entries = special[self._table.asks[rows[special]] & _LOGPROBS != 0].tolist()
        if not entries:
            return None
        asking = (_require_sequence(self._table.sequences[row]) for row in rows[entries].tolist())
        num_top = [sequence.params.logprobs or 0 for sequence in asking]
        index = self._runtime.send(np.array(entries))
        chosen = tokens.index_select(0, index).clamp_min_(0)  # nobody reads the result of a row without a token
        return RawLogprobs(entries, num_top, token_logprobs(logits.index_select(0, index), chosen, max(num_top)))

    def _choose(self, logits: torch.Tensor, rows: Ints, lengths: Ints) -> tuple[torch.Tensor, dict[int, str]]:
        """Chooses tokens of rows with any sampling parameters.

        Args:
            logits: [s, V], which may change.
            rows: [s] int64, of the table.
            lengths: [s] int64, as in `sample`.

        Returns:
            ([s] int64, NONE_LEFT where there is no token; place -> why its logits processor failed).
        """
        scores, faults = self._compute_scores(logits, rows, lengths)
        drawing = np.flatnonzero(self._table.temperature[rows] > 0.0)
        if drawing.size == rows.size:
            finite: torch.Tensor | None = scores.amax(dim=-1).isfinite()
            tokens = self._draw(scores, rows, lengths)
        else:
            tokens, finite = _most_likely_tokens(scores, self._runtime)
            if drawing.size:
                index = self._runtime.send(drawing)
                drawn = self._draw(scores.index_select(0, index), rows[drawing], lengths[drawing])
                tokens.index_copy_(0, index, drawn)
        return _mark(NONE_LEFT, tokens, finite), faults

    def _draw(self, scores: torch.Tensor, rows: Ints, lengths: Ints) -> torch.Tensor:
        """Draws tokens [s] int64 by `scores` [s, V] of rows with a temperature; of a row without a finite one any."""
        table = self._table
        probabilities = filtered_probabilities(
            scores.double(),
            temperature=table.temperature[rows],
            min_p=table.min_p[rows],
            top_k=table.top_k[rows],
            top_p=table.top_p[rows],
            runtime=self._runtime,
        )
        uniform = self._uniforms.find_uniforms(rows, lengths - table.prompt_len[rows])
        return draw_tokens(probabilities, uniform, self._runtime)

    def _compute_scores(self, logits: torch.Tensor, rows: Ints, lengths: Ints) -> tuple[torch.Tensor, dict[int, str]]:
        """Applies what rows ask for to `logits` [s, V], up to the temperature.

        Returns:
            ([s, V], float64 where there was something to compute, with barred tokens at -inf and NaN in a row whose
            processor failed; place -> why it failed).
        """
        asks = self._table.asks[rows]
        asked = int(np.bitwise_or.reduce(asks))
        scores = logits.double() if asked & _COMPUTED else logits
        faults: dict[int, str] = {}
        if asked & _PROCESSORS:
            faults = self._run_processors(scores, np.flatnonzero(asks & _PROCESSORS), rows, lengths)
        for stage, apply in self._stages:
            if asked & stage:
                entries = np.flatnonzero(asks & stage)
                apply(scores, entries, rows[entries], lengths[entries])
        return scores, faults

    def _run_processors(self, scores: torch.Tensor, entries: Ints, rows: Ints, lengths: Ints) -> dict[int, str]:
        """Runs the logits processors of the rows `entries` [p] of `scores` [s, V] float64, in place.

        Returns:
            Row of `scores` -> why its processor failed.
        """
        faults: dict[int, str] = {}
        for i in entries.tolist():
            if bool(scores[i].max().isfinite()):  # else the model is at fault
                sequence = _require_sequence(self._table.sequences[rows[i]])
                known = sequence.freeze_tokens(self._table.tokens[sequence.row, : lengths[i]])
                prompt, output = known[: sequence.prompt_len], known[sequence.prompt_len :]
                try:
                    # The processor gets a copy: through a view of the row it could reach other requests' rows.
                    scores[i] = apply_processors(sequence.params.processors, prompt, output, scores[i].clone())
                except RequestFault as fault:
                    scores[i] = torch.nan
                    faults[i] = str(fault)
        return faults


def _most_likely_tokens(logits: torch.Tensor, runtime: Runtime) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Finds the largest logit of each row of `logits` [m, V]. A NaN counts as the largest.

    Returns:
        (its token [m] int64, whether it is finite [m]). The second is None where all are known to be finite, which is
        never on a GPU, as that would mean to wait.
    """
    if runtime.is_host:  # numpy's argmax: a tenth of torch's time on [32, 1024]
        array = logits.numpy()
        best = array.argmax(axis=-1)
        finite = np.isfinite(array[np.arange(best.size), best])
        return torch.from_numpy(best), None if finite.all() else torch.from_numpy(finite)
    highest, places = logits.max(dim=-1)
    return places, highest.isfinite()


def _mark(why: int, tokens: torch.Tensor, finite: torch.Tensor | None) -> torch.Tensor:
    """Puts `why` into `tokens` [m], in place, where not `finite` [m]; None is finite everywhere."""
    return tokens if finite is None else tokens.masked_fill_(~finite, why)


def filtered_probabilities(
    scores: torch.Tensor,
    *,
    temperature: NDArray[np.float64],
    min_p: NDArray[np.float64],
    top_k: Ints,
    top_p: NDArray[np.float64],
    runtime: Runtime,
) -> torch.Tensor:
    """Applies temperature, min-p, top-k and top-p.

    Args:
        scores: [n, V] float64.
        temperature: [n], above 0.
        min_p: [n].
        top_k: [n] int64; 0 keeps all tokens.
        top_p: [n].
        runtime: Of the scores' device.

    Returns:
        [n, V] float64, not normalized (the most likely token has 1), and 0 where a filter removed the token.
    """
    top = scores.amax(dim=-1, keepdim=True)
    probabilities = _exponentiate((scores - top).div_(runtime.send(temperature).unsqueeze(1)), runtime)  # [n, V]
    if min_p.any():
        probabilities.masked_fill_(probabilities < runtime.send(min_p).unsqueeze(1), 0.0)
    filtered = np.flatnonzero((top_k > 0) & (top_k < scores.shape[1]) | (top_p < 1.0))
    if filtered.size:
        index = runtime.send(filtered)
        kept = _keep_most_likely(probabilities.index_select(0, index), top_k[filtered], top_p[filtered], runtime)
        probabilities.index_copy_(0, index, kept)
    return probabilities


def _exponentiate(shares: torch.Tensor, runtime: Runtime) -> torch.Tensor:
    """exp of `shares` [n, V] float64 <= 0, in place, but 0 below 1e-300."""
    if not runtime.is_host:
        return shares.exp_()
    # A CPU's exp takes twice to five times as long where a result is no ordinary number, as of a token that is barred.
    return torch.nn.functional.threshold(shares.clamp_(min=-700.0).exp_(), 1e-300, 0.0, inplace=True)


def _keep_most_likely(
    probabilities: torch.Tensor, top_k: Ints, top_p: NDArray[np.float64], runtime: Runtime
) -> torch.Tensor:
    """`probabilities` [n, V] with 0 for all but each row's top_k [n] tokens, and of these for all but its top_p [n]."""
    vocab_size = probabilities.shape[1]
    limit = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    limits, shares = runtime.send(limit).unsqueeze(1), runtime.send(top_p).unsqueeze(1)
    largest = _sort_largest(probabilities, int(limit.max()), runtime)  # [n, K]
    reached = largest.cumsum(dim=-1)
    total = reached.gather(1, limits - 1)  # of each row's top_k
    num_reached = (reached < shares * total).sum(dim=-1, keepdim=True)  # the most tokens whose sum is below top_p
    num_kept = torch.minimum(num_reached + 1, limits)  # [n, 1]
    threshold = largest.gather(1, num_kept - 1)
    keep = probabilities >= threshold
    # On a GPU ties are always resolved: a test for them would wait for the device.
    if not runtime.is_host or bool((keep.sum(dim=-1, keepdim=True) > num_kept).any()):
        # Of the tokens as likely as the last one kept, the lower ids stay.
        above = probabilities > threshold
        ties = probabilities == threshold
        keep = above | (ties & (ties.cumsum(dim=-1) <= num_kept - above.sum(dim=-1, keepdim=True)))
    return probabilities.masked_fill(~keep, 0.0)


def _sort_largest(values: torch.Tensor, count: int, runtime: Runtime) -> torch.Tensor:
    """[n, count]: the largest of each row of `values` [n, V], in descending order."""
    size = values.shape[1]
    if not runtime.is_host:
        return values.topk(count, dim=-1).values if count < size else values.sort(dim=-1, descending=True).values
    # numpy's vectorized sort: 20 times torch's speed on [32, 1024] float64.
    array = values.numpy()
    if count < size:
        array = np.partition(array, size - count, axis=-1)[:, size - count :]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def draw_tokens(probabilities: torch.Tensor, uniform: NDArray[np.float64], runtime: Runtime) -> torch.Tensor:
    """Draws a token of each row: the first whose cumulated probability exceeds uniform * total.

    Args:
        probabilities: [n, V] float64, at least 0, with a positive sum.
        uniform: [n] float64 in [0, 1).
        runtime: Of their device.

    Returns:
        [n] int64.
    """
    cdf = probabilities.cumsum(dim=-1)  # [n, V]
    total = cdf[:, -1:]
    # A uniform is at most 1 - 2**-53, so even the rounded product stays below the total.
    target = runtime.send(uniform).unsqueeze(1) * total
    return torch.searchsorted(cdf, target, right=True).squeeze(1)


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes log-probabilities of given and of the most likely tokens.

    Args:
        logits: [n, V].
        tokens: [n] int64.
        num_top: k, at most the whole vocabulary.

    Returns:
        (log-probability of `tokens` [n], their ranks [n] int64 from 1, the k largest log-probabilities [n, k], their
        ids [n, k] int64).
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1))  # [n, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return chosen.squeeze(1), ranks, top.values, top.indices


def _require_sequence(sequence: Sequence | None) -> Sequence:
    if sequence is None:
        raise RuntimeError("a row that is sampled from is empty")
    return sequence
