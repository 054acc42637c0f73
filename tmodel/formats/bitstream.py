"""Codes as one stream of bits, the way checkpoints pack them: code i begins at bit i * bits, the lowest bits first.

Where bits divides 32, a word holds whole codes. At 3 bits, 32 codes fill three words exactly, and two codes cross a
border between words. Ten codes to a word, with two bits lost, is another layout, which no format here has.
"""

from __future__ import annotations

import torch

_PERIOD = 32
"""32 codes of any size fill whole words: as many words as a code has bits."""


def num_words(count: int, bits: int) -> int:
    """int32 words that `count` codes take, rounded up."""
    return -(-count * bits // 32)


def unpack_stream(words: torch.Tensor, dim: int, bits: int, count: int) -> torch.Tensor:
    """Unpacks a stream of codes.

    Args:
        words: int32, num_words(count, bits) of them along `dim`.
        dim: Along which the stream runs.
        bits: Of a code.
        count: Codes along `dim`.

    Returns:
        uint8 codes, `count` of them along `dim`; the other dims as in `words`.
    """
    words = words.movedim(dim, 0)
    missing = -words.shape[0] % bits
    if missing:
        words = torch.cat((words, words.new_zeros((missing, *words.shape[1:]))))
    words = words.unflatten(0, (-1, bits))  # [periods, bits, ...]
    codes = torch.empty((words.shape[0], _PERIOD, *words.shape[2:]), dtype=torch.uint8, device=words.device)
    for i in range(_PERIOD):
        word, offset = divmod(i * bits, 32)
        code = words[:, word] >> offset  # an arithmetic shift: the masks drop the sign's copies
        if offset + bits > 32:
            code = code & (2 ** (32 - offset) - 1) | words[:, word + 1] << (32 - offset)
        codes[:, i] = code & (2**bits - 1)
    return codes.flatten(0, 1)[:count].movedim(0, dim)


def pack_stream(codes: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """The inverse of `unpack_stream`.

    Args:
        codes: Integers below 2**bits.
        dim: Along which they are packed.
        bits: Of a code.

    Returns:
        int32 words, contiguous, num_words(codes.shape[dim], bits) of them along `dim`.
    """
    codes = codes.movedim(dim, 0).long()
    count = codes.shape[0]
    missing = -count % _PERIOD
    if missing:
        codes = torch.cat((codes, codes.new_zeros((missing, *codes.shape[1:]))))
    codes = codes.unflatten(0, (-1, _PERIOD))  # [periods, 32, ...]
    words = codes.new_zeros((codes.shape[0], bits, *codes.shape[2:]))
    for i in range(_PERIOD):
        word, offset = divmod(i * bits, 32)
        words[:, word] |= codes[:, i] << offset & 0xFFFFFFFF
        if offset + bits > 32:
            words[:, word + 1] |= codes[:, i] >> (32 - offset)
    signed = words - ((words >> 31) << 32)
    return signed.int().flatten(0, 1)[: num_words(count, bits)].movedim(0, dim).contiguous()
