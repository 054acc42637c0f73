"""Codes of 2, 3, 4 or 8 bits in int32 words, and the two orders in which a word keeps them.

A word has 32 / b fields of b bits, the first in its lowest bits. A checkpoint's words are sequential: field i holds
code i. Those that kernels read are interleaved: the even codes lie in the low half and the odd ones in the high half,
so that one shift and one mask give two neighbours in their order, each in 16 bits of its own (Kim et al., 2022, "Who
Says Elephants Can't Run"):

    4 bits, sequential    | 7 | 6 | 5 | 4 | 3 | 2 | 1 | 0 |
    4 bits, interleaved   | 7 | 5 | 3 | 1 | 6 | 4 | 2 | 0 |    >> 4 j & 0x000F000F: codes 2 j and 2 j + 1 (above)

A 3-bit code does not fit a word evenly. Its two low bits are kept as a 2-bit code and its third bit apart, as a 1-bit
code in a word of 32: every load is of whole, aligned words.

     packed [Kp / 16, N]      | low bits of places 0 .. 15 | low bits of places 16 .. 31 |  two rows for each
     high   [Kp / 32, N]      |               third bits of places 0 .. 31               |  of these
"""

from typing import Literal, get_args

import torch

Order = Literal["sequential", "interleaved"]
ORDERS: tuple[Order, ...] = get_args(Order)

BITS = (2, 3, 4, 8)
WORD_BITS = 32


def low_bits(bits: int) -> int:
    """Of a code, those that `packed` keeps together: all of them, or the two low ones of three."""
    return 2 if bits == 3 else bits


def codes_per_word(bits: int) -> int:
    """Codes of which a word of `packed` keeps the low bits."""
    return WORD_BITS // low_bits(bits)


def codes_per_row(bits: int) -> int:
    """The places that whole words stand for: 32 / bits, and 32 for 3 bits, whose third bits come by the 32."""
    return WORD_BITS if bits == 3 else codes_per_word(bits)


def interleaving(fields: int) -> list[int]:
    """The code that each field of an interleaved word holds, lowest bits first."""
    half = fields // 2
    return [2 * i if i < half else 2 * (i - half) + 1 for i in range(fields)]


def pack(codes: torch.Tensor, dim: int, bits: int = 4, order: Order = "sequential") -> torch.Tensor:
    """Integer codes of `bits` (1, 2, 4, 8), of any shape, packed along `dim`, 32 / bits to an int32 word."""
    fields = WORD_BITS // bits
    words = codes.unflatten(dim, (-1, fields)).movedim(dim % codes.dim() + 1, -1)
    if order == "interleaved":
        words = words[..., interleaving(fields)]
    unsigned = torch.zeros(words.shape[:-1], dtype=torch.int64, device=codes.device)
    for field in range(fields):  # not one shift of all fields: that would take 64 bits for each code
        unsigned |= words[..., field].long() << (bits * field)
    return (unsigned - ((unsigned >> 31) << 32)).int()


def unpack(words: torch.Tensor, dim: int, bits: int = 4, order: Order = "sequential") -> torch.Tensor:
    """The inverse of `pack`: uint8 codes, 32 / bits times as many along `dim`."""
    fields, dim = WORD_BITS // bits, dim % words.dim()
    held = interleaving(fields) if order == "interleaved" else list(range(fields))
    shape = [*words.shape[: dim + 1], fields, *words.shape[dim + 1 :]]
    codes = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for field, code in enumerate(held):
        # The shift is arithmetic; the mask drops the sign's copies.
        codes.select(dim + 1, code).copy_((words >> (bits * field)) & (2**bits - 1))
    return codes.flatten(dim, dim + 1)


def pack_codes(codes: torch.Tensor, bits: int, order: Order = "sequential") -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes [Kp, N] of 2, 3, 4 or 8 bits as `packed` [Kp / codes_per_word, N] int32; of 3 also `high` [Kp / 32, N].

    Kp is a multiple of codes_per_row(bits).
    """
    if bits != 3:
        return pack(codes, 0, bits, order), None
    return pack(codes & 3, 0, 2, order), pack(codes >> 2, 0, 1, order)


def codes_in(packed: torch.Tensor, high: torch.Tensor | None, bits: int, order: Order = "sequential") -> torch.Tensor:
    """The inverse of `pack_codes`: [Kp, N] uint8."""
    codes = unpack(packed, 0, low_bits(bits), order)
    return codes if high is None else codes | (unpack(high, 0, 1, order) << 2)


def _swap(words: torch.Tensor, mask: int, distance: int) -> None:
    """The bits in `mask` and those `distance` above them into each other's place, in the words themselves."""
    moved = words >> distance
    moved.bitwise_xor_(words).bitwise_and_(mask)
    words.bitwise_xor_(moved).bitwise_xor_(moved.bitwise_left_shift_(distance))


# What brings sequential fields of 1, 2, 4, 8 bits into interleaved order: the middle quarters of every stretch change
# places, from stretches of four fields up to the word (an unshuffle: Warren, 2012, "Hacker's Delight", section 7-2).
# On whole words, in place: scratch of the words' size, not of their codes'.
_MIDDLES = {1: 0x22222222, 2: 0x0C0C0C0C, 4: 0x00F000F0, 8: 0x0000FF00}


def reordered(words: torch.Tensor, bits: int, order: Order) -> torch.Tensor:
    """int32 words of `bits`-bit fields in the other order as words in `order`."""
    steps = [(_MIDDLES[width], width) for width in (1, 2, 4, 8) if width >= bits]
    words = words.clone()
    for mask, distance in steps if order == "interleaved" else reversed(steps):
        _swap(words, mask, distance)
    return words
