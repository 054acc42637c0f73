"""What a token adds to a text, whatever stands before it: its bytes, of which half a character may be some."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

_REPLACEMENT = "\ufffd"


def find_token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes that a token adds to a text; of a special token those of its name.

    Args:
        tokenizer: Of the library tokenizers.
        token_id: Any; an unknown one has no bytes.
    """
    alone = tokenizer.decode([token_id], skip_special_tokens=False)
    # After itself it has the space that decoders take from the beginning of a text.
    text: str = tokenizer.decode([token_id, token_id], skip_special_tokens=False).removeprefix(alone)
    if _REPLACEMENT not in text:
        return text.encode()
    name = str(tokenizer.id_to_token(token_id))
    if _is_byte_name(name):
        return bytes([int(name[3:5], 16)])
    alphabet = _byte_alphabet()
    if all(letter in alphabet for letter in name):
        return bytes(alphabet[letter] for letter in name)
    return text.encode()


class PlainTexts(dict[int, str]):
    """Token id -> the text that it adds to any text but an empty one, on whatever token that ends; made as it is met.

    It is "" where the text depends on other tokens: half a character, a byte of many, a token without text.

    Args:
        tokenizer: Of the library tokenizers, with a decoder of which `adds_alone` holds.
        textless: Tokens that are to have no text.
    """

    def __init__(self, tokenizer: Any, textless: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._textless = textless

    def __missing__(self, token_id: int) -> str:
        text = self[token_id] = "" if token_id in self._textless else self._find(token_id)
        return text

    def _find(self, token_id: int) -> str:
        if _is_byte_name(str(self._tokenizer.id_to_token(token_id))):
            return ""
        alone = self._tokenizer.decode([token_id], skip_special_tokens=False)
        twice: str = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return "" if _REPLACEMENT in twice else twice.removeprefix(alone)


def adds_alone(tokenizer: Any) -> bool:
    """Whether each token that is whole characters adds a text that does not depend on the tokens around it.

    So it is with the decoders of byte-level BPE and of sentencepiece with byte fallback, but for a space that these
    take from the beginning of a text. Others put spaces and marks between tokens as these go together.

    Args:
        tokenizer: Of the library tokenizers.
    """
    try:
        decoder = json.loads(tokenizer.decoder.__getstate__())
    except Exception:  # none, or one that Python code made
        return False
    if decoder["type"] == "ByteLevel":
        return True
    if decoder["type"] != "Sequence":
        return False
    steps = decoder["decoders"]
    kinds = [one["type"] for one in steps]
    if kinds not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return False
    return "String" in steps[0]["pattern"] and (len(steps) == 3 or steps[3]["stop"] == 0)


def _is_byte_name(name: str) -> bool:
    """Whether byte fallback reads a token of this name as a byte."""
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


@functools.cache
def _byte_alphabet() -> Mapping[str, int]:
    """The letters that byte-level BPE writes bytes as (GPT-2's): printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
