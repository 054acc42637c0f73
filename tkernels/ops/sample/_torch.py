"""sample by torch: a baseline for the kernels, and what a CPU draws by.

On a CPU what no row asks for is left out, and noise is looked at in float64 first: of exact noise, 40 integer
operations a token, only what float64 cannot tell apart is computed.
"""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.ops.sample._constants import DRAW, FARTHEST, LEAST_TEMPERATURE, LOG, LOG2_E, POWER, TOP_WEIGHT, UNIT

_WORD = 0xFFFFFFFF
_MARGIN = 2.0**-24
"""Binades: of noise in float64, which is within 2**-29 of the fixed one (the two polynomials' errors, mostly)."""

Array = TypeVar("Array", torch.Tensor, NDArray[np.int64])

Pair = tuple[torch.Tensor, torch.Tensor]
"""A sum of weights: units of 2**32, and the rest, below 2**32."""


def baseline(
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
    if not logits.shape[0]:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    scores, is_host = logits, logits.device.type == "cpu"
    if counts is not None and slots is not None and penalties is not None:
        scores = _penalize(logits.double(), counts, slots, penalties.double())
    highest, token = _find_highest(scores, is_host)
    if not is_host or bool((temperature > 0).any()):
        drawn = _draw(
            scores.double(), highest.double(), temperature, top_k, top_p, min_p, seeds, indices, inverse_cdf, is_host
        )
        token = torch.where(temperature > 0, drawn, token)
    token = torch.where(highest == -torch.inf, -2, token)
    # A penalty leaves neither NaN nor infinities where there were none, and takes none away.
    return torch.where(highest.isnan() | (highest == torch.inf), -1, token)


def _find_highest(scores: torch.Tensor, is_host: bool) -> Pair:
    """(the largest score [B], its first token [B] int64) of each row; a NaN counts as the largest."""
    if not is_host:
        highest, token = scores.max(dim=1)
        return highest, token
    array = scores.numpy()  # numpy's argmax: a tenth of torch's time on [32, 1024]
    best = array.argmax(axis=1)
    return torch.from_numpy(array[np.arange(best.size), best]), torch.from_numpy(best)


def _penalize(scores: torch.Tensor, counts: torch.Tensor, slots: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """Scores [B, V] float64 of the rows that have a slot less their penalties [B, 3]."""
    repetition, frequency, presence = penalties.unsqueeze(2).unbind(1)  # [B, 1] each
    seen = counts.index_select(0, slots.clamp(min=0))  # [B, V]
    outputs = seen >> 1
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    penalized = torch.where(seen > 0, repeated, scores) - frequency * outputs - presence * (outputs > 0)
    return torch.where(slots.unsqueeze(1) >= 0, penalized, scores)


def _draw(
    scores: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    indices: torch.Tensor,
    inverse_cdf: bool,
    is_host: bool,
) -> torch.Tensor:
    """Tokens [B] of rows whose temperature is above 0 and whose scores [B, V] are fit to draw from; of others any."""
    apart = highest.unsqueeze(1) - scores  # [B, V]
    scale = (LOG2_E / temperature.clamp(min=LEAST_TEMPERATURE)).unsqueeze(1)
    distances = _measure(apart, scale)
    filters = not is_host or bool(((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)).any())
    if filters or inverse_cdf:
        weights = _weigh(distances)
        least = (min_p * 2.0**TOP_WEIGHT).ceil().long().clamp(min=1).unsqueeze(1)
        kept = weights >= least
        if not is_host or bool(((top_k > 0) | (top_p < 1.0)).any()):
            kept &= _keep_nearest(apart, weights.where(kept, 0), scale, top_k, top_p)
    else:
        kept = distances <= TOP_WEIGHT << UNIT  # those with a weight above 0
    if inverse_cdf:
        return _invert(weights.where(kept, 0), seeds, indices)
    return (_perturb_on_host if is_host else _perturb)(distances, kept, seeds, indices)


def _measure(apart: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Distances [B, V] in units of 2**-31 binades of differences of scores; of a NaN any."""
    return (apart * scale).clamp_(max=FARTHEST).nan_to_num_(FARTHEST).mul_(2.0**UNIT).long()


def _weigh(distances: torch.Tensor) -> torch.Tensor:
    """Weights in units of 2**-62 of distances in units of 2**-31 binades."""
    whole = (distances + (1 << UNIT - 1)) >> UNIT
    rest = distances - (whole << UNIT)
    power = torch.full_like(rest, POWER[-1])
    for coefficient in POWER[-2::-1]:
        power.mul_(rest).bitwise_right_shift_(UNIT).add_(coefficient)
    return power.mul_(rest).bitwise_right_shift_(2).add_(1 << TOP_WEIGHT).bitwise_right_shift_(whole.clamp_(max=63))


def _keep_nearest(
    apart: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Which tokens [B, V] are among the top_k nearest, and the nearest of these that reach top_p of their sum.

    apart: float64, each token's distance. weights: 0 where a token is not kept anyway. scale: [B, 1].
    """
    apart = apart.masked_fill(weights == 0, torch.inf)
    limit = torch.where(top_k > 0, top_k, apart.shape[1]).clamp(max=apart.shape[1]).unsqueeze(1)  # [B, 1]
    nearest = _sort(apart)
    if apart.device.type == "cpu":  # where to ask for the largest limit is no wait
        nearest = nearest[:, : int(limit.max())]
    place = torch.arange(nearest.shape[1], device=apart.device)
    high, low = _cumulate(_weigh(_measure(nearest, scale)).where(place < limit, 0))
    share = (top_p * 2.0**UNIT).ceil().long().unsqueeze(1)
    need = _multiply((high[:, -1:], low[:, -1:]), share, (1 << UNIT) - 1)  # rounded up
    num_kept = torch.minimum(_is_less((high, low), need).sum(dim=1, keepdim=True) + 1, limit)  # [B, 1]
    farthest = nearest.gather(1, num_kept - 1)
    nearer, as_far = apart < farthest, apart == farthest
    return nearer | (as_far & (as_far.cumsum(dim=1) <= num_kept - nearer.sum(dim=1, keepdim=True)))


def _sort(values: torch.Tensor) -> torch.Tensor:
    """Each row of float64 [B, V] in ascending order."""
    if values.device.type == "cpu":  # numpy's vectorized sort: 20 times torch's speed on [32, 1024]
        return torch.from_numpy(np.sort(values.numpy(), axis=1))
    return values.sort(dim=1).values


def _cumulate(weights: torch.Tensor) -> Pair:
    """Sums of weights [B, V] up to and with each."""
    high, low = (weights >> 32).cumsum(dim=1), (weights & _WORD).cumsum(dim=1)
    return high + (low >> 32), low & _WORD


def _multiply(total: Pair, factor: torch.Tensor, more: int) -> Pair:
    """(total * factor + more) / 2**31, rounded down, of a factor of at most 2**31 and `more` below 2**31."""
    return _add_and_shift(total, factor, (torch.zeros_like(total[0]), torch.full_like(total[1], more)))


def _add_and_shift(total: Pair, factor: torch.Tensor, more: Pair) -> Pair:
    """(total * factor + more) / 2**31, rounded down."""
    low = (total[1] & _WORD) * factor + more[1]
    middle = (total[0] & _WORD) * factor + (low >> 32) + (more[0] & _WORD)
    high = (total[0] >> 32) * factor + (middle >> 32) + (more[0] >> 32)
    rest = ((middle & _WORD) << 1) + ((low & _WORD) >> UNIT)
    return (high << 1) + (rest >> 32), rest & _WORD


def _is_less(one: Pair, other: Pair) -> torch.Tensor:
    return (one[0] < other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))


def _invert(weights: torch.Tensor, seeds: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The first token [B] at which the sum of weights [B, V] exceeds a share of all."""
    high, low = _cumulate(weights)
    total = high[:, -1:], low[:, -1:]
    zeros = torch.zeros_like(seeds).unsqueeze(1)
    words = _philox(seeds.unsqueeze(1), zeros, indices.unsqueeze(1), zeros + DRAW)
    first, second = words[1] >> 1, ((words[1] & 1) << 30) | (words[0] >> 2)  # 31 bits each, the upper ones first
    target = _add_and_shift(total, first, _multiply(total, second, 0))
    return _is_less(target, (high, low)).int().argmax(dim=1)


def _perturb(distances: torch.Tensor, kept: torch.Tensor, seeds: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The kept token [B] whose noise less its distance is the largest, the first of equal ones."""
    rows, vocab = distances.shape
    pairs = torch.arange(-(-vocab // 2), device=distances.device).unsqueeze(0)
    words = _philox(seeds.unsqueeze(1), pairs, indices.unsqueeze(1), torch.zeros_like(pairs))
    odd = torch.stack([_odd(*words[:2]), _odd(*words[2:])], dim=2).view(rows, -1)[:, :vocab]
    return (_noise(odd) - distances).masked_fill_(~kept, -(2**63)).argmax(dim=1)


def _perturb_on_host(
    distances: torch.Tensor, kept: torch.Tensor, seeds: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    """As `_perturb`, by numpy: a tenth of torch's time on [32, 1024]. Of few tokens nothing else is computed."""
    rows, vocab = distances.shape
    if 4 * int(kept.sum()) < kept.numel():
        row, token = kept.numpy().nonzero()
        words = _philox(seeds.numpy()[row], token >> 1, indices.numpy()[row], np.zeros_like(token))
        odd = np.where(token & 1 == 0, _odd(*words[:2]), _odd(*words[2:]))
        gain = _guess_noise(odd) - distances.numpy()[row, token]
        best = np.full(rows, -np.inf)
        np.maximum.at(best, row, gain)
        near = (gain >= best[row] - _MARGIN * 2.0**UNIT).nonzero()[0]
        row, token, odd = row[near], token[near], odd[near]
    else:
        pairs = np.arange(-(-vocab // 2))[None, :]
        words = _philox(seeds.numpy()[:, None], pairs, indices.numpy()[:, None], np.zeros_like(pairs))
        all_odd = np.stack([_odd(*words[:2]), _odd(*words[2:])], axis=2).reshape(rows, -1)[:, :vocab]
        gain = _guess_noise(all_odd) - distances.numpy()
        gain[~kept.numpy()] = -np.inf
        row, token = (gain >= gain.max(axis=1, keepdims=True) - _MARGIN * 2.0**UNIT).nonzero()
        odd = all_odd[row, token]
    exact = _noise(torch.from_numpy(odd)).numpy() - distances.numpy()[row, token]
    # The last one written is a row's largest gain, and of equal ones the first token.
    order = np.lexsort((-token, exact))
    chosen = np.zeros(rows, dtype=np.int64)
    chosen[row[order]] = token[order]
    return torch.from_numpy(chosen)


def _guess_noise(odd: NDArray[np.int64]) -> NDArray[np.float64]:
    """`_noise` in float64."""
    guess: NDArray[np.float64] = np.log2(-np.log2(odd * 2.0**-53)) * -(2.0**UNIT)
    return guess


def _odd(low: Array, high: Array) -> Array:
    """u * 2**53 of the two words of a token."""
    return (((high << 20) | (low >> 12)) << 1) + 1


def _noise(odd: torch.Tensor) -> torch.Tensor:
    """-log2(-log2(odd / 2**53)) in units of 2**-31."""
    exponent, rest = _take_apart(odd.double())
    whole, below_one = 52 - exponent, _find_log(rest)
    whole_too = (whole << 52) + (below_one * 2.0**52).long()
    exponent, rest = _take_apart(torch.where(whole == 0, below_one, whole_too.double() * 2.0**-52))
    return (_find_log(rest) * 2.0**UNIT).long() - ((exponent + 1) << UNIT)


def _take_apart(positive: torch.Tensor) -> Pair:
    """(e, x) of float64 numbers 2**(e + 1) * (1 - x * 2**-53), where x is in [1, 2**52]."""
    bits = positive.view(torch.int64)
    return (bits >> 52) - 1023, (1 << 52) - (bits & ((1 << 52) - 1))


def _find_log(rest: torch.Tensor) -> torch.Tensor:
    """-log2(1 - x) of x = rest * 2**-53, float64."""
    centered = (rest >> 22) - (1 << UNIT - 2)
    value = torch.full_like(centered, LOG[-1])
    for coefficient in LOG[-2::-1]:
        value = ((value * centered) >> UNIT) + coefficient
    return rest.double() * value.double() * 2.0 ** -(53 + UNIT)


def _philox(seeds: Array, c0: Array, c1: Array, c2: Array) -> tuple[Array, Array, Array, Array]:
    """The words of Philox4x32-10 at the counters (c0, c1, c2, 0), int64 each below 2**32."""
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    c3 = c2 * 0
    for _ in range(10):
        # Products of two words below 2**64: their bits, whatever the sign.
        one, other = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((other >> 32) & _WORD) ^ c1 ^ k0, other & _WORD
        c2, c3 = ((one >> 32) & _WORD) ^ c3 ^ k1, one & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3
