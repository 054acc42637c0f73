"""What sample's kernels do with a row: its largest score, the sums of its weights, the cut that filters make, a draw.

A cut (key, last) keeps the tokens that are less than `key` away, and of those that far the ones up to the id `last`.
A key is a distance in scores as the bits of a float64 that is not negative, which are in the same order.

Where a list holds all of a row's tokens that are looked for (`listed`), only it is read.
"""

import triton
import triton.language as tl

from tkernels.ops.sample._device import (
    add_and_shift,
    draw_share,
    draw_words,
    find_noise,
    is_less,
    load_scores,
    measure_distances,
    units_of_share,
    weigh,
)

NO_TOKEN = tl.constexpr(2**31 - 1)
NOWHERE = tl.constexpr(0x7FF0000000000000)
"""The bits of an infinite distance."""
WORD = tl.constexpr(0xFFFFFFFF)
_NO_GAIN = tl.constexpr(-(2**62))
_GUESSES = tl.constexpr(88)
"""Each halves what is left of 2**63 keys, or of the 2**24 ids, at most, of one."""


@triton.jit
def load_penalties(penalties_ptr, slot):
    """A row's penalties as `load_scores` takes them; none where its slot is -1."""
    repetition = tl.load(penalties_ptr).to(tl.float64)
    frequency = tl.load(penalties_ptr + 1).to(tl.float64)
    presence = tl.load(penalties_ptr + 2).to(tl.float64)
    return repetition, frequency, presence, slot >= 0


@triton.jit
def find_highest(
    row_ptr, counts_ptr, penalties, vocab, parts_ptr, wants_parts, PART: tl.constexpr, BLOCK: tl.constexpr
):
    """(the largest score, its first token, whether a logit is NaN or +inf) of a row.

    Where it `wants_parts`, the largest of each PART tokens goes to `parts_ptr`, float64.
    """
    highest = tl.full((BLOCK,), float("-inf"), tl.float64)
    first = tl.full((BLOCK,), NO_TOKEN, tl.int32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        scores = load_scores(row_ptr, counts_ptr, tokens, tokens < vocab, penalties)
        broken |= ((scores != scores) | (scores == float("inf"))).to(tl.int32)
        higher = scores > highest
        first = tl.where(higher, tokens, first)
        highest = tl.where(higher, scores, highest)
        if parts_ptr is not None:
            parts = start // PART + tl.arange(0, BLOCK // PART)
            largest = tl.max(tl.reshape(scores, (BLOCK // PART, PART)), axis=1)
            tl.store(parts_ptr + parts, largest, mask=(parts * PART < vocab) & wants_parts)
    top = tl.max(highest, axis=0)
    token = tl.min(tl.where(highest == top, first, NO_TOKEN), axis=0)
    return top, token, tl.max(broken, axis=0)


@triton.jit
def can_draw(temperature, top, broken):
    """Whether a row's token is drawn: where it asks for a draw, and there is something to draw from."""
    return (temperature > 0) & (top > float("-inf")) & (broken == 0)


@triton.jit
def mark_token(token, top, broken):
    """The token, or in its place what its row's scores are at fault of."""
    token = tl.where(top == float("-inf"), -2, token)
    return tl.where(broken != 0, -1, token)


@triton.jit
def load_block(
    row_ptr, counts_ptr, penalties, list_ptr, listed, start, length, top, scale, least, BLOCK: tl.constexpr,
    LIST: tl.constexpr,
):  # fmt: skip
    """(tokens, keys, weights) of a block of a row, or of the list of its tokens, which has all three; int64 but for the
    tokens. A weight below `least`, and of what is not there, is 0.
    """
    offs = start + tl.arange(0, BLOCK)
    inside = offs < length
    if LIST > 0:
        if listed:
            tokens = tl.load(list_ptr + offs, mask=inside, other=NO_TOKEN).to(tl.int32)
            keys = tl.load(list_ptr + LIST + offs, mask=inside, other=NOWHERE)
            weights = tl.load(list_ptr + 2 * LIST + offs, mask=inside, other=0)
        else:
            tokens = offs
            keys, weights = weigh_block(row_ptr, counts_ptr, penalties, offs, inside, top, scale, least)
    else:
        tokens = offs
        keys, weights = weigh_block(row_ptr, counts_ptr, penalties, offs, inside, top, scale, least)
    return tokens, keys, weights


@triton.jit
def weigh_block(row_ptr, counts_ptr, penalties, tokens, inside, top, scale, least):
    """(keys, weights) of tokens of a row."""
    apart = -load_scores(row_ptr, counts_ptr, tokens, inside, penalties) + top
    weights = weigh(measure_distances(apart, scale))
    return apart.to(tl.int64, bitcast=True), tl.where(weights >= least, weights, 0)


@triton.jit
def add_up(
    row_ptr, counts_ptr, penalties, list_ptr, listed, length, top, scale, least, key, last, BLOCK: tl.constexpr,
    LIST: tl.constexpr,
):  # fmt: skip
    """(how many tokens there are before a cut, their weights' sum as a pair, the largest key before it, and the least
    behind it).
    """
    count = tl.zeros((BLOCK,), tl.int32)
    highs, lows = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    largest, least_key = tl.full((BLOCK,), -1, tl.int64), tl.full((BLOCK,), NOWHERE, tl.int64)
    for start in range(0, length, BLOCK):
        tokens, keys, weights = load_block(
            row_ptr, counts_ptr, penalties, list_ptr, listed, start, length, top, scale, least, BLOCK, LIST
        )
        before = is_before(tokens, keys, key, last)
        kept = before & (weights > 0)
        largest = tl.where(kept, tl.maximum(largest, keys), largest)
        least_key = tl.where(before, least_key, tl.where(weights > 0, tl.minimum(least_key, keys), least_key))
        weights = tl.where(kept, weights, 0)
        count += kept.to(tl.int32)
        highs += weights >> 32
        lows += weights & WORD
    low = tl.sum(lows, axis=0)
    high = tl.sum(highs, axis=0) + (low >> 32)
    return tl.sum(count, axis=0), high, low & WORD, tl.max(largest, axis=0), tl.min(least_key, axis=0)


@triton.jit
def is_before(tokens, keys, key, last):
    """Whether tokens lie before a cut."""
    return (keys < key) | ((keys == key) & (tokens <= last))


@triton.jit
def find_cut(
    row_ptr, counts_ptr, penalties, list_ptr, listed, length, vocab, top, scale, least, key, last, count, high, low,
    limit, need_high, need_low, BLOCK: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """The nearest cut that keeps `limit` tokens and a sum of `need`, as (key, last, count, high, low).

    key, last, count, high, low: A cut that keeps enough, and how much.
    """
    far, near = key, tl.full((), -1, tl.int64)
    before = tl.full((), -1, tl.int32)
    count_near = tl.zeros((), tl.int32)
    for _ in range(_GUESSES):
        # One token between the two cuts: it is the last one kept, and where exactly the cut is makes no difference.
        if count - count_near > 1:
            by_key = far - near > 1
            key = far
            guess = before + (last - before) // 2
            if by_key:
                key = near + (far - near) // 2
                guess = vocab - 1
            counted, sum_high, sum_low, largest, least_key = add_up(
                row_ptr, counts_ptr, penalties, list_ptr, listed, length, top, scale, least, key, guess, BLOCK, LIST
            )
            if (counted >= limit) & (not is_less(sum_high, sum_low, need_high, need_low)):
                far, last, count, high, low = largest, guess, counted, sum_high, sum_low
            else:
                count_near = counted
                if by_key:
                    near = least_key - 1
                else:
                    before = guess
    return far, last, count, high, low


@triton.jit
def draw_by_noise(
    row_ptr, counts_ptr, penalties, list_ptr, listed, length, top, scale, least, key, last, seed, index,
    BLOCK: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """The token before a cut whose noise less its distance is the largest."""
    best = tl.full((BLOCK,), _NO_GAIN, tl.int64)
    token = tl.full((BLOCK,), NO_TOKEN, tl.int32)
    for start in range(0, length, BLOCK):
        tokens, keys, weights = load_block(
            row_ptr, counts_ptr, penalties, list_ptr, listed, start, length, top, scale, least, BLOCK, LIST
        )
        w0, w1, w2, w3 = draw_words(seed, index, tokens >> 1)
        odd = (tokens & 1) != 0
        noise = find_noise(tl.where(odd, w2, w0), tl.where(odd, w3, w1))
        gain = noise - measure_distances(keys.to(tl.float64, bitcast=True), scale)
        higher = (weights > 0) & is_before(tokens, keys, key, last) & (gain > best)
        token = tl.where(higher, tokens, token)
        best = tl.where(higher, gain, best)
    return tl.min(tl.where(best == tl.max(best, axis=0), token, NO_TOKEN), axis=0)


@triton.jit
def draw_by_sum(
    row_ptr, counts_ptr, penalties, list_ptr, listed, length, top, scale, least, key, last, high, low, seed, index,
    BLOCK: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """The first token before a cut at which the sum of weights exceeds a drawn share of all, the pair (high, low)."""
    upper, lower = draw_share(seed, index)
    nothing = tl.zeros((), tl.int64)
    more_high, more_low = add_and_shift(high, low, lower, nothing, nothing)
    target_high, target_low = add_and_shift(high, low, upper, more_high, more_low)
    token = tl.full((), NO_TOKEN, tl.int32)
    sum_high, sum_low = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, length, BLOCK):
        tokens, keys, weights = load_block(
            row_ptr, counts_ptr, penalties, list_ptr, listed, start, length, top, scale, least, BLOCK, LIST
        )
        weights = tl.where(is_before(tokens, keys, key, last), weights, 0)
        highs, lows = tl.cumsum(weights >> 32, axis=0) + sum_high, tl.cumsum(weights & WORD, axis=0) + sum_low
        reached = is_less(target_high, target_low, highs + (lows >> 32), lows & WORD)
        token = tl.minimum(token, tl.min(tl.where(reached, tokens, NO_TOKEN), axis=0))
        sum_high += tl.sum(weights >> 32, axis=0)
        sum_low += tl.sum(weights & WORD, axis=0)
    return token


@triton.jit
def draw_token(
    row_ptr, counts_ptr, penalties, list_ptr, vocab, top, scale, least, top_k, top_p, seed, index,
    listed, num_listed, farthest, list_high, list_low, count, high, low,
    INVERSE_CDF: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Draws a token of a row by what is kept of it.

    listed, num_listed, farthest, list_high, list_low: Whether there is a list (never where LIST is 0), of how many
        tokens, of keys up to which, and their sum.
    count, high, low: How many tokens there are of weights of at least `least`, and their sum; needed where top_k, top_p
        or a CDF is asked for.
    """
    key, last = tl.full((), NOWHERE, tl.int64), vocab - 1
    share, round_up = units_of_share(top_p), tl.full((), 0x7FFFFFFF, tl.int64)
    for stage in range(2):
        limit, need_high, need_low = tl.zeros((), tl.int64), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        wanted = top_p < 1.0
        if stage == 0:
            limit = top_k
            wanted = (top_k > 0) & (top_k < count)
        else:
            need_high, need_low = add_and_shift(high, low, share, need_high, round_up)
        if wanted:
            if listed:  # noqa: SIM102  # known to be false where there never is a list
                if key == NOWHERE:
                    if (limit <= num_listed) & (not is_less(list_high, list_low, need_high, need_low)):
                        key, count, high, low = farthest, num_listed, list_high, list_low
                    else:
                        listed = listed & False
            length = vocab
            if listed:
                length = num_listed
            key, last, count, high, low = find_cut(
                row_ptr, counts_ptr, penalties, list_ptr, listed, length, vocab, top, scale, least, key, last,
                count, high, low, limit, need_high, need_low, BLOCK, LIST,
            )  # fmt: skip
    listed = listed & (key != NOWHERE)
    length = vocab
    if listed:
        length = num_listed
    if INVERSE_CDF:
        token = draw_by_sum(
            row_ptr, counts_ptr, penalties, list_ptr, listed, length, top, scale, least, key, last, high, low, seed,
            index, BLOCK, LIST,
        )  # fmt: skip
    else:
        token = draw_by_noise(
            row_ptr, counts_ptr, penalties, list_ptr, listed, length, top, scale, least, key, last, seed, index, BLOCK,
            LIST,
        )  # fmt: skip
    return token
