"""Samples tokens from logits, for all rows at once: requests change scores, then the op `sample` takes a token of each.

The order is vLLM's: logits processors, biases, penalties, temperature, min-p, top-k, top-p. What bars tokens comes
before penalties here, which leave a barred token barred. Random numbers depend on a request's seed and the output index
alone, and a row's token on that row: so other rows of a batch do not change a request's tokens.
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
from tsched.execution.random_numbers import SeedTable
from tsched.execution.step_kernels import TORCH_KERNELS, StepKernels
from tsched.execution.token_biases import HeldEnds, TokenBiases
from tsched.execution.token_masks import AllowedTokens
from tsched.requests.errors import RequestFault
from tsched.requests.logits_processors import apply_processors
from tsched.requests.sampling_params import Asks
from tsched.scheduling.sequence import Ints, Sequence, SequenceTable

# These stand in place of a token id.
NOT_FINITE = -1  # the model's logits for the row hold a NaN or +inf, or none above -inf
NONE_LEFT = -2  # the request's parameters left no finite logit

# As integers: an IntFlag takes microseconds to combine.
_PROCESSORS, _PENALTIES, _LOGPROBS = int(Asks.PROCESSORS), int(Asks.PENALTIES), int(Asks.LOGPROBS)


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
        tensors: As the op `logprobs` returns them.
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


class Sampler:
    """Chooses tokens for rows of `table`.

    It sends parameters, seeds and the tokens that penalties count to the device, and leaves the results there,
    so it never waits for a GPU. Only logits processors wait, because they run on the host.

    Args:
        table: The running sequences.
        runtime: Of the logits' device.
        seed: Of requests without a seed.
        eos_token_ids: The tokens that min_tokens holds back.
        kernels: The ops that take a token of each row, and score it.
        inverse_cdf: Whether tokens are drawn by one number a row, and not by one a token.

    Attributes:
        grammars: Of the sequences that have one; whoever adds a sequence tells them.
        kernels: As given; others may take their place between two steps.
    """

    def __init__(
        self,
        table: SequenceTable,
        runtime: Runtime,
        *,
        seed: int,
        eos_token_ids: tuple[int, ...],
        kernels: StepKernels = TORCH_KERNELS,
        inverse_cdf: bool = False,
    ) -> None:
        self.kernels = kernels
        self._inverse_cdf = inverse_cdf
        self._table = table
        self._runtime = runtime
        self._seeds = SeedTable(table, seed)
        self._penalties = PenaltyCounts(table, runtime)
        self.grammars = GrammarMasks(table, runtime)
        # Each changes the scores of those rows alone that ask for it, all of them at once.
        stages: tuple[tuple[Asks, Callable[[torch.Tensor, Ints, Ints, Ints], None]], ...] = (
            (Asks.BIAS, TokenBiases(table, runtime, lambda sequence: sequence.params.biases).apply),
            (Asks.MIN_TOKENS, HeldEnds(table, runtime, eos_token_ids).apply),
            (Asks.ALLOWED, AllowedTokens(table, runtime).apply),
            (Asks.BAD_WORDS, BadWords(table, runtime).apply),
            (Asks.GRAMMAR, self.grammars.apply),
        )
        self._stages = tuple((int(asks), apply) for asks, apply in stages)
        self._changing = _PROCESSORS | sum(asks for asks, _ in self._stages)

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
        asks, drawing = table.asks[rows], table.temperature[rows] > 0.0
        if epochs is not None:
            stays = table.epoch[rows] == epochs
            asks, drawing = asks * stays, drawing & stays
        is_own = asks & self._changing == 0
        changed = np.flatnonzero(~is_own)
        faults: dict[int, str] = {}
        # Of a row whose scores change this says alone whether its logits are sound.
        tokens = self._choose(logits, rows, lengths, asks * is_own, drawing & is_own).clamp_(min=NOT_FINITE)
        if changed.size:
            index = self._runtime.send(changed)
            scores = logits.index_select(0, index)
            rows_too, lengths_too, asks_too = rows[changed], lengths[changed], asks[changed]
            faults = self._change(scores, rows_too, lengths_too, asks_too)
            chosen = self._choose(scores, rows_too, lengths_too, asks_too, drawing[changed])
            chosen.masked_fill_(chosen < 0, NONE_LEFT).masked_fill_(tokens.index_select(0, index) < 0, NOT_FINITE)
            tokens.index_copy_(0, index, chosen)
        raw = self._gather_logprobs(logits, tokens, rows, np.flatnonzero(asks & _LOGPROBS))
        return Sampled(tokens, raw, {int(changed[i]): fault for i, fault in faults.items()})

    def _gather_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: Ints, entries: Ints
    ) -> RawLogprobs | None:
        """Log-probabilities of the model's own logits, for `entries` [l], whose requests ask for them."""
        if not entries.size:
            return None
        asking = (_require_sequence(self._table.sequences[row]) for row in rows[entries].tolist())
        num_top = [sequence.params.logprobs or 0 for sequence in asking]
        index = self._runtime.send(entries)
        chosen = tokens.index_select(0, index).clamp_min_(0)  # nobody reads the result of a row without a token
        scores = self.kernels.logprobs(logits.index_select(0, index), chosen, top=min(max(num_top), logits.shape[1]))
        return RawLogprobs(entries.tolist(), num_top, scores)

    def _choose(
        self, scores: torch.Tensor, rows: Ints, lengths: Ints, asks: Ints, drawing: NDArray[np.bool_]
    ) -> torch.Tensor:
        """Takes a token of each row of `scores` [s, V] by the op, which says what its negative tokens are.

        Args:
            scores: [s, V], less penalties.
            rows: [s] int64, of the table.
            lengths: [s] int64, as in `sample`.
            asks: [s] int64, the rows' Asks, of which penalties count.
            drawing: [s], which rows have a temperature.
        """
        table, size = self._table, rows.size
        # One copy for all. Each starts at 16 bytes, so that a kernel is compiled once and not for odd rows too.
        packed = np.zeros((6, size + size % 2), dtype=np.int64)
        floats = packed[:3].view(np.float64)
        drawn = rows[drawing]
        floats[0, :size][drawing] = table.temperature[drawn]
        floats[1, :size], floats[2, :size], packed[3, :size] = table.top_p[rows], table.min_p[rows], table.top_k[rows]
        packed[4, :size][drawing] = self._seeds.find_seeds(drawn)
        packed[5, :size] = lengths - table.prompt_len[rows]
        sent = self._runtime.send(packed)[:, :size]
        temperature, top_p, min_p = sent[:3].view(torch.float64)
        top_k, seeds, indices = sent[3:]
        penalized = np.flatnonzero(asks & _PENALTIES)
        counts, slots, penalties = (
            self._penalties.update(scores, penalized, rows[penalized], lengths[penalized])
            if penalized.size
            else (None, None, None)
        )
        return self.kernels.sample(
            scores, temperature, top_k, top_p, min_p, seeds, indices, counts=counts, slots=slots, penalties=penalties,
            inverse_cdf=self._inverse_cdf,
        )  # fmt: skip

    def _change(self, scores: torch.Tensor, rows: Ints, lengths: Ints, asks: Ints) -> dict[int, str]:
        """Applies what rows ask for to `scores` [s, V], in place, up to penalties.

        Barred tokens have -inf then, and a row whose processor failed has NaN.

        Returns:
            Place -> why its logits processor failed.
        """
        asked = int(np.bitwise_or.reduce(asks))
        faults: dict[int, str] = {}
        if asked & _PROCESSORS:
            faults = self._run_processors(scores, np.flatnonzero(asks & _PROCESSORS), rows, lengths)
        for stage, apply in self._stages:
            if asked & stage:
                entries = np.flatnonzero(asks & stage)
                apply(scores, entries, rows[entries], lengths[entries])
        return faults

    def _run_processors(self, scores: torch.Tensor, entries: Ints, rows: Ints, lengths: Ints) -> dict[int, str]:
        """Runs the logits processors of the rows `entries` [p] of `scores` [s, V], in place.

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


def _require_sequence(sequence: Sequence | None) -> Sequence:
    if sequence is None:
        raise RuntimeError("a row that is sampled from is empty")
    return sequence
