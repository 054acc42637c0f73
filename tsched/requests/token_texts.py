"""The texts of token ids: of a whole output, of an output as it grows, and of each token in log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tsched.requests.callbacks import attribute_to
from tsched.requests.detokenizer import IncrementalDetokenizer, Step
from tsched.requests.errors import RequestFault


class TokenTexts:
    """Makes texts with one tokenizer. What it raises is a RequestFault.

    Args:
        tokenizer: A transformers one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = _find_backend(tokenizer)
        self._special_ids: frozenset[int] = frozenset()
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder()
            self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._of_tokens: dict[int, str] = {}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        with attribute_to("the tokenizer's decode"):
            text = self._tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
            if not isinstance(text, str):
                raise RequestFault(f"the tokenizer's decode gave a {type(text).__name__}, not a text")
        return text

    def label(self, token_id: int) -> str:
        """Returns the text of one token alone, a special one's too. It is made once."""
        text = self._of_tokens.get(token_id)
        if text is None:
            text = self._of_tokens[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def make_detokenizer(self, stop_strings: Sequence[str] = ()) -> IncrementalDetokenizer:
        """Makes the detokenizer of one output."""
        if self._backend is None:
            return IncrementalDetokenizer(self.decode, stop_strings)
        return IncrementalDetokenizer(
            self.decode, stop_strings, open_stream=self._open_stream, textless=self._special_ids
        )

    def _open_stream(self, token_ids: list[int]) -> Step:
        from tokenizers.decoders import DecodeStream  # late: a directory without a tokenizer does not need it

        return partial(DecodeStream(token_ids, True).step, self._backend)


def _find_backend(tokenizer: Any) -> Any:
    """The tokenizers library's object that makes the tokenizer's texts; None where it has none, or they differ."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not issubclass(kind, PreTrainedTokenizerFast):
        return None
    is_plain = kind.decode is PreTrainedTokenizerFast.decode and kind._decode is PreTrainedTokenizerFast._decode
    return tokenizer.backend_tokenizer if is_plain else None
