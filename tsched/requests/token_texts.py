"""The texts of token ids: of a whole output, of an output as it grows, and of each token in log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tsched.requests.callbacks import attribute_to
from tsched.requests.detokenizer import IncrementalDetokenizer, Step
from tsched.requests.errors import RequestFault
from tsched.requests.outputs import Logprob
from tsched.requests.sampling_params import SamplingParams
from tsched.requests.token_bytes import PlainTexts, adds_alone, find_token_bytes


class TokenTexts:
    """Makes texts with one tokenizer. Where the tokenizer fails, a RequestFault says how.

    Args:
        tokenizer: A transformers one; None where there is none, and no texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.use(tokenizer)

    def use(self, tokenizer: Any) -> None:
        """Makes texts with another tokenizer from now on."""
        self.tokenizer = tokenizer
        self._backend = _find_backend(tokenizer)
        special_ids: frozenset[int] = frozenset()
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder()
            special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Both by whether special tokens are skipped.
        self._textless = {True: special_ids, False: frozenset[int]()}
        self._plain: dict[bool, PlainTexts] = {}
        if self._backend is not None and adds_alone(self._backend):
            self._plain = {skips: PlainTexts(self._backend, ids) for skips, ids in self._textless.items()}
        self._labels: dict[int, tuple[str | None, bytes | None]] = {}  # the text and the bytes of a token

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids; "" where there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        with attribute_to("the tokenizer's decode"):
            text = self.tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
            if not isinstance(text, str):
                raise RequestFault(f"the tokenizer's decode gave a {type(text).__name__}, not a text")
        return text

    def make_detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer | None:
        """Makes the detokenizer of one output; None where there is no tokenizer."""
        if self.tokenizer is None:
            return None
        skips = params.skip_special_tokens
        return IncrementalDetokenizer(
            partial(self.decode, skip_special_tokens=skips),
            params.stop_strings,
            open_stream=None if self._backend is None else partial(self._open_stream, skips),
            textless=self._textless[skips],
            plain=self._plain.get(skips),
            includes_stop=params.include_stop_str_in_output,
        )

    def label_logprobs(self, token_ids: list[int], logprobs: list[float], ranks: list[int]) -> dict[int, Logprob]:
        """Labels the log-probabilities at one place of an output with their tokens' texts.

        Args:
            token_ids: [1 + n], the chosen token's and those of the most likely ones.
            logprobs: [1 + n], theirs.
            ranks: [1 + n], theirs.

        Returns:
            Token id -> log-probability, the chosen token first.
        """
        known = self._labels
        for token_id in token_ids:
            if token_id not in known:
                known[token_id] = self._make_label(token_id)
        labels = [known[token_id] for token_id in token_ids]
        entries = [Logprob(logprob, rank, *label) for logprob, rank, label in zip(logprobs, ranks, labels, strict=True)]
        found = dict(zip(token_ids, entries, strict=True))
        found[token_ids[0]] = entries[0]  # it may be one of the most likely too, there with its rank among equals
        return found

    def _make_label(self, token_id: int) -> tuple[str | None, bytes | None]:
        """Makes the text of one token alone, a special one's too, and its bytes."""
        if self.tokenizer is None:
            return None, None
        label, found = self.decode([token_id], skip_special_tokens=False), None
        if self._backend is not None:
            with attribute_to("the tokenizer's decode"):
                found = find_token_bytes(self._backend, token_id)
        return label, found

    def _open_stream(self, skip_special_tokens: bool, token_ids: list[int]) -> Step:
        from tokenizers.decoders import DecodeStream  # late: a directory without a tokenizer does not need it

        return partial(DecodeStream(token_ids, skip_special_tokens).step, self._backend)


def _find_backend(tokenizer: Any) -> Any:
    """The tokenizers library's object that makes the tokenizer's texts; None where it has none, or they differ."""
    if tokenizer is None:
        return None
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not issubclass(kind, PreTrainedTokenizerFast):
        return None
    is_plain = kind.decode is PreTrainedTokenizerFast.decode and kind._decode is PreTrainedTokenizerFast._decode
    return tokenizer.backend_tokenizer if is_plain else None
