"""Student's t distribution, of any real number of degrees of freedom above 0."""

import math


def two_sided(t: float, df: float) -> float:
    """How likely a |t| at least this large is: the regularized incomplete beta function of (df/2, 1/2) at
    df / (df + t^2).
    """
    x = df / (df + t * t)
    if not 0 < x < 1:
        return 1.0 if x >= 1 else 0.0
    a, b = df / 2, 0.5
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x < (a + 1) / (a + b + 2):  # where the fraction converges fast; its mirror image does elsewhere
        return math.exp(log_front) * _fraction(a, b, x) / a
    return 1 - math.exp(log_front) * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function (Abramowitz and Stegun 26.5.8), by Lentz's method."""
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for step in (even, odd):
            d = 1 / (1 + step * d)
            c = 1 + step / c
            value *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return value


def quantile(level: float, df: float) -> float:
    """The t that a |t| exceeds with probability `level`, 0 < level < 1, to 9 digits."""
    low, high = 0.0, 1.0
    while two_sided(high, df) > level:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, df) > level else (low, middle)
    return high
