"""sample's definition, as plainly as it can be said: integers that are sorted, and sums of any size.

No variant imports this file, so that none can be right because it is the same.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.ops.sample._constants import DRAW, FARTHEST, LEAST_TEMPERATURE, LOG, LOG2_E, POWER, TOP_WEIGHT, UNIT

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_WORD = 0xFFFFFFFF


def reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    indices: torch.Tensor,
    *,
    counts: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    penalties: torch.Tensor | None = None,
    inverse_cdf: bool = False,
) -> torch.Tensor:
    """A token of each row, which is defined to the bit: every variant, device and batch gives the same.

    A row's scores are its logits, after its penalties where it has a slot. Scores become distances from the largest in
    binades (units of log 2), divided by the temperature and rounded down to 2**-31; a distance t becomes the integer
    weight 2**(62 - t), by a fixed polynomial. min-p keeps weights of at least its share of the largest, top-k the k
    nearest tokens of these, top-p the fewest nearest of these whose weights reach its share of their sum; of tokens
    equally far the lower id is nearer. Of what is kept, with a weight above 0, a token is drawn: the one whose distance
    less its noise is least (Gumbel's), or the first one at which the sum of weights in the order of ids exceeds a share
    of all. Noise is -log2(-log2(u)), by a fixed polynomial too, of a u in (0, 1) of 53 bits.

    Args:
        logits: [B, V] fp32, a free row stride; -inf bars a token. float64 is taken as it is.
        temperature: [B] float64, 0 or at least 2**-760; 0 takes the largest score's first token, and asks for nothing
            else.
        top_k: [B] int64, how many tokens are kept; 0 is all.
        top_p: [B] float64 in (0, 1], rounded up to 2**-31.
        min_p: [B] float64 in [0, 1].
        seeds: [B] int64, 64 bits that key a row's random numbers.
        indices: [B] int64 in [0, 2**31), which of the seed's tokens this is.
        counts: [R, V] int32, a free row stride: twice how often a token is in the output, plus 1 where it is in the
            prompt. It comes with slots and penalties.
        slots: [B] int64, each row's in `counts`, or -1 for a row without penalties.
        penalties: [B, 3] float32: what divides scores above 0 and multiplies others, of tokens in prompt or output;
            what is subtracted for each time in the output; and what is subtracted once.
        inverse_cdf: Draws by one number a row in place of one a token.

    Returns:
        [B] int64: the token, -1 where a logit is NaN or +inf, -2 where no score is above -inf.

    Random numbers are Philox4x32-10's, keyed by the seed. Of counter (v // 2, index, 0, 0) token v has words 0 and 1
    or, where it is odd, 2 and 3; a CDF is inverted at words 0 and 1 of (0, index, 1, 0).

    Sources: Gumbel, Statistical Theory of Extreme Values, 1954 (the largest of perturbed scores is a draw); Salmon et
    al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011 (Philox); Holtzman et al., The Curious Case of Neural Text
    Degeneration, 2020 (top-p); Nguyen et al., Min-p Sampling, 2024; Keskar et al., CTRL, 2019 (repetition).
    """
    rows = []
    for row in range(logits.shape[0]):
        scores = logits[row].double().numpy()
        if np.isnan(scores).any() or (scores == np.inf).any():
            rows.append(-1)
            continue
        if slots is not None and counts is not None and penalties is not None and slots[row] >= 0:
            scores = _penalize(scores, counts[int(slots[row])].numpy(), *penalties[row].double().tolist())
        rows.append(
            _choose(
                scores,
                float(temperature[row]),
                int(top_k[row]),
                float(top_p[row]),
                float(min_p[row]),
                int(seeds[row]),
                int(indices[row]),
                inverse_cdf,
            )
        )
    return torch.tensor(rows, dtype=torch.int64)


def _penalize(
    scores: Floats, counts: NDArray[np.int32], repetition: float, frequency: float, presence: float
) -> Floats:
    """In float64, an operation at a time; products of two fp32 numbers are exact in it."""
    outputs = counts >> 1
    with np.errstate(invalid="ignore"):
        repeated = np.where(scores > 0, scores / repetition, scores * repetition)
    return np.where(counts > 0, repeated, scores) - frequency * outputs - presence * (outputs > 0)


def _choose(
    scores: Floats, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, index: int, inverse_cdf: bool
) -> int:
    top = scores.max(initial=-np.inf)
    if top == -np.inf:
        return -2
    if temperature == 0.0:
        return int(scores.argmax())
    distances, weights = find_weights(scores, temperature)
    least = max(1, int(np.ceil(min_p * 2.0**TOP_WEIGHT)))
    nearest = np.lexsort((np.arange(scores.size), top - scores))
    kept = [int(token) for token in nearest if weights[token] >= least]
    if top_k:
        kept = kept[:top_k]
    share = int(np.ceil(top_p * 2.0**UNIT))
    needed, reached = share * sum(int(weights[token]) for token in kept), 0
    for place, token in enumerate(kept):
        reached += int(weights[token])
        if reached << UNIT >= needed:
            kept = kept[: place + 1]
            break
    if not inverse_cdf:
        noise = find_noise(np.array(kept), seed, index)
        return max(zip(noise - distances[kept], (-token for token in kept), kept, strict=True))[2]
    low, high, _, _ = philox(seed, (0, index, DRAW, 0))
    target = reached_by(int(high) << 32 | int(low), sum(int(weights[token]) for token in kept))
    reached = 0
    for token in sorted(kept):
        reached += int(weights[token])
        if reached > target:
            return token
    raise AssertionError("a share below 1 of a sum is below it")


def reached_by(word: int, total: int) -> int:
    """What a random word of 64 bits, of which 62 count, takes of a sum."""
    return (word >> 2) * total >> 62


def find_weights(scores: Floats, temperature: float) -> tuple[Ints, Ints]:
    """(distances from the largest in units of 2**-31 binades, weights in units of 2**-62), [V] each."""
    binades = np.minimum((scores.max() - scores) * (LOG2_E / max(temperature, LEAST_TEMPERATURE)), FARTHEST)
    distances = (binades * 2.0**UNIT).astype(np.int64)
    whole = (distances + 2 ** (UNIT - 1)) >> UNIT  # to the nearest
    rest = distances - (whole << UNIT)
    power = np.full_like(rest, POWER[-1])
    for coefficient in POWER[-2::-1]:
        power = coefficient + ((power * rest) >> UNIT)
    return distances, (2**TOP_WEIGHT + ((power * rest) >> 2)) >> np.minimum(whole, 63)


def find_noise(tokens: Ints, seed: int, index: int) -> Ints:
    """-log2(-log2(u)) of each token's u, in units of 2**-31."""
    words = [philox(seed, (int(token) // 2, index, 0, 0))[2 * (int(token) % 2) :][:2] for token in tokens]
    odd = np.array([((high << 32 | low) >> 12 << 1) + 1 for low, high in words], dtype=np.int64)  # u * 2**53
    exponent, rest = _take_apart(odd.astype(np.float64))
    whole = 52 - exponent
    below_one = _find_log(rest)
    whole_too = (whole << 52) + (below_one * 2.0**52).astype(np.int64)  # then rounded to a float64 once
    exponent, rest = _take_apart(np.where(whole == 0, below_one, whole_too.astype(np.float64) * 2.0**-52))
    return (_find_log(rest) * 2.0**UNIT).astype(np.int64) - ((exponent + 1) << UNIT)


def _take_apart(positive: Floats) -> tuple[Ints, Ints]:
    """(e, x) of numbers 2**(e + 1) * (1 - x * 2**-53), where x is in [1, 2**52]."""
    bits = positive.view(np.int64)
    return (bits >> 52) - 1023, 2**52 - (bits & (2**52 - 1))


def _find_log(rest: Ints) -> Floats:
    """-log2(1 - x) of x = rest * 2**-53, below 1: x times a polynomial in units of 2**-31, the product rounded once."""
    centered = (rest >> 22) - 2 ** (UNIT - 2)
    value = np.full_like(centered, LOG[-1])
    for coefficient in LOG[-2::-1]:
        value = coefficient + ((value * centered) >> UNIT)
    return rest.astype(np.float64) * value.astype(np.float64) * 2.0 ** -(53 + UNIT)


def philox(seed: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """The four words of Philox4x32-10 at a counter, keyed by the 64 bits of a seed."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        one, other = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = other >> 32 ^ c1 ^ k0, other & _WORD, one >> 32 ^ c3 ^ k1, one & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3
