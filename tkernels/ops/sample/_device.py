"""What sample's kernels share: scores, distances, weights and noise of tokens, as the definition has them, and what is
looked for among them.

A double operation rounds once, and no compiler may make one instruction of two whose result it would change: products
that are added to are exact in float64, because their factors were fp32 or powers of two.
"""

import triton
import triton.language as tl

from tkernels.ops.sample import _constants

UNIT = tl.constexpr(_constants.UNIT)
_HALF = tl.constexpr(1 << _constants.UNIT - 1)
_QUARTER = tl.constexpr(1 << _constants.UNIT - 2)
_LARGEST_WEIGHT = tl.constexpr(1 << _constants.TOP_WEIGHT)
_TO_UNITS = tl.constexpr(2.0**_constants.UNIT)
_TO_WEIGHT = tl.constexpr(2.0**_constants.TOP_WEIGHT)
_TO_FRACTION = tl.constexpr(2.0**52)
_FROM_FRACTION = tl.constexpr(2.0**-52)
_FROM_PRODUCT = tl.constexpr(2.0 ** -(53 + _constants.UNIT))
_FARTHEST = tl.constexpr(_constants.FARTHEST)
_LOG2_E = tl.constexpr(_constants.LOG2_E)
_LEAST_TEMPERATURE = tl.constexpr(_constants.LEAST_TEMPERATURE)
_POWER = tl.constexpr(_constants.POWER)
_POWERS = tl.constexpr(len(_constants.POWER))
_LOG = tl.constexpr(_constants.LOG)
_LOGS = tl.constexpr(len(_constants.LOG))
_DRAW = tl.constexpr(_constants.DRAW)
_WORD = tl.constexpr(0xFFFFFFFF)
_FRACTION = tl.constexpr(2**52 - 1)
_ONE = tl.constexpr(2**52)


@triton.jit
def load_scores(row_ptr, counts_ptr, tokens, inside, penalties):
    """float64 scores of tokens of a row, -inf for what is not `inside` it.

    penalties: Repetition, frequency and presence, float64, and whether the row has them; None where `counts_ptr` is.
    """
    scores = tl.load(row_ptr + tokens, mask=inside, other=float("-inf")).to(tl.float64)
    if counts_ptr is not None:
        seen = tl.load(counts_ptr + tokens, mask=inside & penalties[3], other=0)
        outputs = seen >> 1
        repeated = tl.where(scores > 0, scores / penalties[0], scores * penalties[0])
        scores = tl.where(seen > 0, repeated, scores)
        scores -= outputs.to(tl.float32).to(tl.float64) * penalties[1]
        scores = tl.where(outputs > 0, scores - penalties[2], scores)
    return scores


@triton.jit
def evaluate(x, COEFFICIENTS: tl.constexpr, COUNT: tl.constexpr):
    """The polynomial with these coefficients at x, int64 in units of 2**-31."""
    value = tl.full(x.shape, COEFFICIENTS[COUNT - 1], tl.int64)
    for step in tl.static_range(COUNT - 1):
        value = (value * x >> UNIT) + COEFFICIENTS[COUNT - 2 - step]
    return value


@triton.jit
def measure_distances(apart, scale):
    """int64 distances in units of 2**-31 binades of float64 differences of scores."""
    return (tl.minimum(apart * scale, _FARTHEST) * _TO_UNITS).to(tl.int64)


@triton.jit
def weigh(distances):
    """int64 weights in units of 2**-62."""
    whole = (distances + _HALF) >> UNIT
    rest = distances - (whole << UNIT)
    power = (evaluate(rest, _POWER, _POWERS) * rest >> 2) + _LARGEST_WEIGHT
    return power >> tl.minimum(whole, 63)


@triton.jit
def find_noise(low, high):
    """-log2(-log2(u)) in units of 2**-31, of u by the two words of a token."""
    odd = (((high << 20) | (low >> 12)) << 1) + 1  # u * 2**53
    exponent, rest = take_apart(odd.to(tl.float64))
    whole = 52 - exponent
    below_one = find_log(rest)
    whole_too = (below_one * _TO_FRACTION).to(tl.int64) + (whole << 52)
    exponent, rest = take_apart(tl.where(whole == 0, below_one, whole_too.to(tl.float64) * _FROM_FRACTION))
    return (find_log(rest) * _TO_UNITS).to(tl.int64) - ((exponent + 1) << UNIT)


@triton.jit
def take_apart(positive):
    """(e, x) of float64 numbers 2**(e + 1) * (1 - x * 2**-53), where x is in [1, 2**52]."""
    bits = positive.to(tl.int64, bitcast=True)
    return (bits >> 52) - 1023, -(bits & _FRACTION) + _ONE


@triton.jit
def find_log(rest):
    """-log2(1 - x) of x = rest * 2**-53, float64: one rounded product."""
    slope = evaluate((rest >> 22) - _QUARTER, _LOG, _LOGS)
    return rest.to(tl.float64) * slope.to(tl.float64) * _FROM_PRODUCT


@triton.jit
def draw_words(seed, index, pairs):
    """The four words, int64, of Philox4x32-10 at pairs of tokens, int32."""
    zeros = tl.zeros_like(pairs)
    w0, w1, w2, w3 = tl.philox(seed, pairs, zeros + index, zeros, zeros)
    return w0.to(tl.int64), w1.to(tl.int64), w2.to(tl.int64), w3.to(tl.int64)


@triton.jit
def draw_share(seed, index):
    """(the upper, the lower) 31 of the 62 bits at which a CDF is inverted, int64."""
    zero = tl.zeros((), tl.int32)
    w0, w1, _, _ = tl.philox(seed, zero, zero + index, zero + _DRAW, zero)
    low, high = w0.to(tl.int64), w1.to(tl.int64)
    return high >> 1, ((high & 1) << 30) | (low >> 2)


@triton.jit
def add_and_shift(high, low, factor, more_high, more_low):
    """(sum * factor + more) / 2**31, rounded down, of pairs: units of 2**32 and the rest. factor: At most 2**31."""
    bottom = low * factor + more_low
    middle = (high & _WORD) * factor + (bottom >> 32) + (more_high & _WORD)
    top = (high >> 32) * factor + (middle >> 32) + (more_high >> 32)
    rest = ((middle & _WORD) << 1) + ((bottom & _WORD) >> UNIT)
    return (top << 1) + (rest >> 32), rest & _WORD


@triton.jit
def is_less(high, low, other_high, other_low):
    """Whether a pair is less than the other."""
    return (high < other_high) | ((high == other_high) & (low < other_low))


@triton.jit
def least_weight(min_p):
    """The least weight that min-p keeps, int64; 1 at least."""
    return tl.maximum(tl.ceil(min_p * _TO_WEIGHT).to(tl.int64), 1)


@triton.jit
def units_of_share(top_p):
    """top_p in units of 2**-31, rounded up."""
    return tl.ceil(top_p * _TO_UNITS).to(tl.int64)


@triton.jit
def scale_of(temperature):
    """What makes binades of differences of scores."""
    return tl.full((), _LOG2_E, tl.float64) / tl.maximum(temperature, _LEAST_TEMPERATURE)
