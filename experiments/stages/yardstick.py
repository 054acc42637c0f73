"""A fixed piece of work whose time says how fast a CPU is at the moment."""

import statistics
import time

import numpy as np

# 64 x 64: the largest power of two that OpenBLAS keeps on one thread, so that a run's thread count does not matter.
_SIDE, _ELEMENTS, _REPETITIONS = 64, 16_384, 8


class Yardstick:
    """Takes a sample each time it is called, 100 us or so: a multiplication of small matrices, and a pass over numbers
    that a second-level cache holds.

    Numpy's, so that neither the kernels nor torch's version change it. Kernels' times follow it in part. On two cores
    that others used too, the medians of 502 processes in two minutes spread by 11.5% (swiglu on [16, 512]), 10.3%
    (rms_norm), 9.6% (a product with a [512, 512] matrix) and 2.7% (attention); divided by the yardstick's median, taken
    in turns in the same process, by 8.1%, 7.1%, 8.4% and 1.9%. Means of ten processes, beside the next ten's: by 4.5%,
    4.3%, 3.2% and 1.1%; divided, by 3.2%, 3.1%, 2.6% and 0.5%.
    """

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self._matrix = generator.random((_SIDE, _SIDE), dtype=np.float32)
        self._product = np.empty_like(self._matrix)
        self._numbers = generator.random(_ELEMENTS, dtype=np.float32)
        self._roots = np.empty_like(self._numbers)
        self.samples_us: list[float] = []
        self._work()  # the first call allocates

    def __call__(self) -> None:
        start = time.perf_counter()
        self._work()
        self.samples_us.append((time.perf_counter() - start) * 1e6)

    def _work(self) -> None:
        for _ in range(_REPETITIONS):
            np.matmul(self._matrix, self._matrix, out=self._product)
            np.multiply(self._numbers, self._numbers, out=self._roots)
            np.sqrt(self._roots, out=self._roots)

    @property
    def median_us(self) -> float:
        """Of the samples; StatisticsError where none was taken."""
        return statistics.median(self.samples_us)
