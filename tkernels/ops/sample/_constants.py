"""The numbers in sample's definition: fixed polynomials for 2**-t and -log2, and how a random word becomes a uniform.

Both polynomials are minimax but for rounding (interpolated at Chebyshev's nodes in 50 digits), with coefficients as
integers, so that every device evaluates them alike. Over their ranges the first is within 0.85 * 2**-31 of 2**-f, the
second within 1.2 * 2**-31, both relative.
"""

import math

UNIT = 31
"""Distances in binades, and noise, are integers in units of 2**-31."""

FARTHEST = 64.0
"""Binades below the most likely token at which a token's weight is 0 for certain."""

TOP_WEIGHT = 62
"""The most likely token's weight is 2**62; others are 2**(62 - t), rounded down."""

POWER = (-5954088944, 2063530001, -476776665, 82618478, -11453391, 1328128, -131403)
"""2**-f = 1 + f * p(f), |f| <= 1/2: the coefficients of p in units of 2**-33, the constant one first."""

LOG = (
    3565144972, 2262961495, 1963848621, 1936335557, 2046323501, 2258879595, 2573495544, 2991530961, 3398930204,
    4063339452, 6849539204, 8390210488,
)  # fmt: skip
"""-log2(1 - x) = x * p(x - 1/4), 0 <= x <= 1/2: the coefficients of p in units of 2**-31, the constant one first."""

LOG2_E = math.log2(math.e)
"""What divides by the temperature to turn logits into binades; the nearest float64."""

LEAST_TEMPERATURE = 2.0**-760
"""What a lower one counts as; a difference of scores, below 2**256, over it is still a float64."""

DRAW = 1
"""The third counter of the number by which a CDF is inverted; 0 in the counters of noise."""
