"""The bytes of a token, of which half a character may be some."""

from __future__ import annotations

import functools
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
    if len(name) == 6 and name.startswith("<0x"):
        return bytes([int(name[3:5], 16)])
    alphabet = _byte_alphabet()
    if all(letter in alphabet for letter in name):
        return bytes(alphabet[letter] for letter in name)
    return text.encode()


@functools.cache
def _byte_alphabet() -> Mapping[str, int]:
    """The letters that byte-level BPE writes bytes as (GPT-2's): printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
