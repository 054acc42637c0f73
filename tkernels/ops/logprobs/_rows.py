"""What logprobs' kernels do with a row: one read of it, and the list of its largest logits, by the largest of parts.

The `top` largest logits lie in the `top` parts whose own largest is largest, equal ones in the order of ids: each part
that comes before another has a logit that comes before all of the other's. So a row is read once, and of it these parts
alone once more, whatever they hold.

A key is an int64 in the order in which tokens are listed, the largest first: a logit in its upper half, as an integer
of the same order, and what is left of the ids in its lower. No two tokens have the same one.

The sum of a row's probabilities is kept as (largest, rest): exp(largest) * (1 + rest). So nothing is lost where one
token has nearly all of it. An empty sum has the lowest of finite numbers and the rest -1, which makes it 0; of a row at
fault the largest is +inf, or the rest NaN, or nothing is in the sum.
"""

import math

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config
from tkernels.language import INTERPRETING

_LEAST = tl.constexpr(-(2**63))
_LAST_ID = tl.constexpr(2**31 - 1)
_BUT_SIGN = tl.constexpr(0x7FFFFFFF)
_GUESSES = tl.constexpr(64)
"""Each halves what is left of 2**64 keys, at most, of one."""
LOWEST = tl.constexpr(-(2.0**128 - 2.0**104))
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(11629080 * 2.0**-24)
_MORE_LN_2 = tl.constexpr(math.log(2.0) - 11629080 * 2.0**-24)
"""The nearest fp32 number to log(2), and what it lacks."""
_SMALL = tl.constexpr(2.0**-26)
"""log(1 + x) of less is x in fp32."""
_NOTHING = tl.constexpr(-150.0)
"""The exponential of less is below every fp32 number."""
_TILE = tl.constexpr(32)
"""Keys of a list that are compared with as many others at a time."""


@triton.jit
def make_keys(logits, ids):
    """The keys of logits, none of them NaN, and of the tokens or parts that they are of."""
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & _BUT_SIGN)
    return (ordered.to(tl.int64) << 32) | (-ids + _LAST_ID)


@triton.jit
def ids_of(keys):
    """int32, of tokens or parts."""
    return -keys.to(tl.int32) + _LAST_ID


@triton.jit
def logits_of(keys):
    ordered = (keys >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & _BUT_SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def read_span(row_ptr, keys_ptr, chosen, first, end, PART: tl.constexpr, BLOCK: tl.constexpr):
    """(largest, rest, how many logits are larger than `chosen`) of tokens `first` to `end`.

    The keys of the largest logits of each PART tokens go to `keys_ptr`, where there is one. first: A multiple of PART.
    """
    largest, rest = tl.full((BLOCK,), LOWEST, tl.float32), tl.full((BLOCK,), -1.0, tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, end, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + tokens, mask=tokens < end, other=float("-inf"))
        above += (logits > chosen).to(tl.int32)
        # One exponential for both: what the smaller one weighs, be it the logit or all that was before it.
        share = exponentiate(-tl.abs(logits - largest))
        rest = rest * tl.where(logits > largest, share, 1.0) + share
        largest = tl.maximum(largest, logits)  # of a NaN and a number, the number
        if keys_ptr is not None:
            parts = start // PART + tl.arange(0, BLOCK // PART)
            highest = tl.max(tl.reshape(logits, (BLOCK // PART, PART)), axis=1)
            tl.store(keys_ptr + parts, make_keys(highest, parts), mask=parts * PART < end)
    all_largest, all_rest = merge_sums(largest, rest, tl.arange(0, BLOCK))
    return all_largest, all_rest, tl.sum(above, axis=0)


@triton.jit
def exponentiate(x):
    """exp of fp32 x <= 0, NaN of NaN. `tl.exp` alone rounds x * log2(e): at -20 that is an error of 16 roundings."""
    if INTERPRETING:
        return tl.exp(x)
    else:
        x = tl.maximum(x, _NOTHING, propagate_nan=tl.PropagateNan.ALL)
        binades = x * _LOG2_E
        power = tl.exp2(binades)
        return tl.fma(power, tl.fma(binades, -_MORE_LN_2, tl.fma(binades, -_LN_2, x)), power)


@triton.jit
def merge_sums(largest, rest, places):
    """The sum of all sums [n], which lie at `places` [n]: the rest of one of the largest, and the whole of others."""
    top = tl.max(largest, axis=0)
    own = tl.min(tl.where(largest == top, places, _LAST_ID), axis=0)
    whole = (rest + 1.0) * exponentiate(largest - top)
    return top, tl.sum(tl.where(places == own, rest, whole), axis=0)


@triton.jit
def store_row(
    logprob_ptr, rank_ptr, top_tokens_ptr, top_logprobs_ptr, row_ptr, keys_ptr, chosen_ptr, list_ptr,
    chosen, largest, rest, above, vocab, top, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores what there is to know of a row that has been read.

    keys_ptr: Where the parts' keys are, or None where nothing is listed. chosen_ptr: int64 [top] of scratch memory.
    list_ptr: int64 [top * PART].
    """
    broken = (largest == float("inf")) | (rest != rest) | (rest < 0.0)
    total = tl.where(broken, float("nan"), log_of_sum(rest.to(tl.float64)))
    tl.store(logprob_ptr, find_logprobs(chosen, largest, total))
    tl.store(rank_ptr, tl.where(broken, 1, above + 1))
    if keys_ptr is not None:
        if broken:
            for start in range(0, top, BLOCK):
                offs = start + tl.arange(0, BLOCK)
                tl.store(chosen_ptr + offs, make_keys(tl.zeros((BLOCK,), tl.float32), offs), mask=offs < top)
        else:
            num_parts = tl.cdiv(vocab, PART)
            beyond = make_keys(largest, tl.zeros((), tl.int32)) + 1
            least = find_least(keys_ptr, num_parts, top, tl.full((), _LEAST, tl.int64), beyond, BLOCK)
            num_chosen = keep_keys(chosen_ptr, keys_ptr, num_parts, least, BLOCK // 2)
            tl.debug_barrier()  # the chosen parts are there for all threads
            num_listed = list_tokens(list_ptr, row_ptr, chosen_ptr, num_chosen, vocab, least, PART, BLOCK // 2)
            tl.debug_barrier()  # their tokens are, and nobody reads the parts any more
            least = find_least(list_ptr, num_listed, top, least >> 32 << 32, beyond, BLOCK)
            keep_keys(chosen_ptr, list_ptr, num_listed, least, BLOCK // 2)
        tl.debug_barrier()  # the chosen tokens are
        store_list(top_tokens_ptr, top_logprobs_ptr, chosen_ptr, top, largest, total)


@triton.jit
def log_of_sum(rest):
    """log(1 + rest) of float64, to fp32's precision whatever its size."""
    return tl.where(rest < _SMALL, rest, tl.log(rest + 1.0))


@triton.jit
def find_logprobs(logits, largest, total):
    """fp32 log-probabilities. total: The logarithm of the row's sum, less `largest`, in float64."""
    return (logits.to(tl.float64) - largest.to(tl.float64) - total).to(tl.float32)


@triton.jit
def find_least(keys_ptr, length, limit, least, above, BLOCK: tl.constexpr):
    """A key that `limit` of the keys reach, or all where they are fewer.

    least, above: A key that all of them reach, and one that fewer than `limit` do.
    """
    reached = length
    for _ in range(_GUESSES):
        if reached > limit:
            guess = (least >> 1) + (above >> 1) + (least & 1)
            counts = tl.zeros((BLOCK,), tl.int32)
            for start in range(0, length, BLOCK):
                offs = start + tl.arange(0, BLOCK)
                counts += (tl.load(keys_ptr + offs, mask=offs < length, other=_LEAST) >= guess).to(tl.int32)
            counted = tl.sum(counts, axis=0)
            if counted >= limit:
                least, reached = guess, counted
            else:
                above = guess
    return least


@triton.jit
def keep_keys(kept_ptr, keys_ptr, length, least, BLOCK: tl.constexpr):
    """Copies the keys that are not below `least`, side by side; returns how many."""
    count = tl.zeros((), tl.int32)
    for start in range(0, length, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < length
        keys = tl.load(keys_ptr + offs, mask=inside, other=_LEAST)
        count = append_keys(kept_ptr, keys, inside & (keys >= least), count)
    return count


@triton.jit
def append_keys(kept_ptr, keys, kept, count):
    """Puts the keys that are `kept` behind the `count` ones there are; returns how many there are then."""
    places = tl.cumsum(kept.to(tl.int32), axis=0) + (count - 1)
    tl.store(kept_ptr + places, keys, mask=kept)
    return count + tl.sum(kept.to(tl.int32), axis=0)


@triton.jit
def list_tokens(list_ptr, row_ptr, parts_ptr, num_parts, vocab, least, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Lists the keys of those tokens of `num_parts` parts whose logits are no smaller than what the key `least` has of
    one; returns how many.
    """
    count = tl.zeros((), tl.int32)
    for start in range(0, num_parts * PART, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        there = offs < num_parts * PART
        tokens = ids_of(tl.load(parts_ptr + offs // PART, mask=there, other=_LAST_ID)) * PART + offs % PART
        inside = there & (tokens < vocab)
        keys = make_keys(tl.load(row_ptr + tokens, mask=inside), tokens)
        count = append_keys(list_ptr, keys, inside & (keys >> 32 >= least >> 32), count)
    return count


@triton.jit
def store_list(top_tokens_ptr, top_logprobs_ptr, list_ptr, top, largest, total):
    """Stores the tokens of a list of `top` keys, each at the place that as many larger keys give it."""
    for start in range(0, top, _TILE):
        mine = start + tl.arange(0, _TILE)
        keys = tl.load(list_ptr + mine, mask=mine < top, other=_LEAST)
        places = tl.zeros((_TILE,), tl.int32)
        for other in range(0, top, _TILE):
            theirs = other + tl.arange(0, _TILE)
            others = tl.load(list_ptr + theirs, mask=theirs < top, other=_LEAST)
            places += tl.sum((others[None, :] > keys[:, None]).to(tl.int32), axis=1)
        tl.store(top_tokens_ptr + places, ids_of(keys), mask=mine < top)
        tl.store(top_logprobs_ptr + places, find_logprobs(logits_of(keys), largest, total), mask=mine < top)


def list_buffers(axes: Axes, config: Config) -> dict[str, Buffer]:
    """What `store_row` lists in: nothing where nothing is listed."""
    rows, top, part = int(axes["B"]), int(axes["top"]), config["PART"]
    if not top:
        return {}
    return {
        "keys": Buffer((rows, triton.cdiv(int(axes["V"]), part)), torch.int64),
        "chosen": Buffer((rows, top), torch.int64),
        "list": Buffer((rows, top * part), torch.int64),
    }
