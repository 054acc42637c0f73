"""Text and tokens in the front end: the `tokenizers` library alone, and the model's chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tsched.requests.token_bytes import find_token_bytes
from tsched.serving.protocol.errors import ApiError, invalid_value
from tsched.serving.protocol.tokenization import TokenizerInfo
from tsched.torch_free import TKernelsError

MAX_CUT_CHARS = 1 << 18
"""Characters that a text may have which is cut to the last of its tokens, where the model takes fewer."""

_MEMO = 1 << 16  # tokens whose texts are kept


class TokenizerFilesError(TKernelsError, ValueError):
    """A model's directory has no tokenizer that the front end can read."""


class TextCodec:
    """Turns text into tokens and back, on any thread.

    Args:
        directory: Of the model.

    Attributes:
        tokenizer: The library's.
        config: What tokenizer_config.json says; empty where there is none.
        max_token_chars: Characters of the longest token.
    """

    def __init__(self, directory: Path) -> None:
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise TokenizerFilesError(f"{directory}: the server reads tokenizer.json, and there is none")
        try:
            self.tokenizer: Any = Tokenizer.from_file(str(file))
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise TokenizerFilesError(f"{file}: cannot be read: {error}") from error
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        config_file = directory / "tokenizer_config.json"
        self.config: Mapping[str, Any] = json.loads(config_file.read_text()) if config_file.is_file() else {}
        self.max_token_chars = max(map(len, vocabulary), default=1)
        self.token = functools.lru_cache(_MEMO)(self._token)
        self._pieces = functools.lru_cache(_MEMO)(functools.partial(find_token_bytes, self.tokenizer))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Other threads run meanwhile, which the library's own `encode` does not let them."""
        ids: list[int] = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, together."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_name(self, token_id: int) -> str:
        """A token as the vocabulary has it."""
        return str(self.tokenizer.id_to_token(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; half a character is some of its bytes."""
        return self._pieces(token_id)

    def text_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """The bytes that a token has in a text; a special token has none there unless it is not skipped."""
        return b"" if skip_special_tokens and token_id in self._special else self.token_bytes(token_id)

    def describe(self, chat_template: str | None) -> TokenizerInfo:
        """What clients ask of a tokenizer."""
        names = {
            f"{name}_token": special_token(self.config.get(f"{name}_token")) for name in ("bos", "eos", "pad", "unk")
        }
        kind = str(self.config.get("tokenizer_class", "Tokenizer"))
        return TokenizerInfo(tokenizer_class=kind, chat_template=chat_template, **names)

    def _token(self, token_id: int) -> str:
        """A token as OpenAI writes it: its text, or `bytes:\\xe2\\x80` where it is no whole characters."""
        piece = self.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def special_token(token: Any) -> str | None:
    """A special token as tokenizer_config.json writes it: a text, or a mapping with its content."""
    return token.get("content") if isinstance(token, Mapping) else token


def check_length(
    num_chars: int, codec: TextCodec, max_model_len: int, param: str, *, will_be_cut: bool = False
) -> None:
    """Refuses text that must be too long, without tokenizing it.

    Args:
        num_chars: Its characters.
        codec: The model's tokenizer.
        max_model_len: Tokens that the model takes.
        param: The request's field that has it.
        will_be_cut: Whether only the last of its tokens are kept. Which those are is known once all is tokenized, so
            such a text is bounded too.

    Raises:
        ApiError: Even with the longest tokens it has more than the model takes.
    """
    most = max_model_len * codec.max_token_chars
    if will_be_cut:
        most = max(most, MAX_CUT_CHARS)
    if num_chars > most:
        message = f"the model takes {max_model_len} tokens, and a text of {num_chars} characters has more"
        if will_be_cut:
            message += f"; to be truncated it may have {most}"
        raise invalid_value(message, param, "context_length_exceeded")


def no_tokenizer(param: str) -> ApiError:
    return invalid_value("the model has no tokenizer: send token ids", param)
