"""A fixed piece of work whose time says how fast a CPU is at the moment."""

import statistics
import time

import numpy as np

# 64 x 64: the largest power of two that OpenBLAS keeps on one thread, so that a run's thread count does not matter.
_SIDE, _ELEMENTS, _REPETITIONS = 64, 16_384, 8


class Yardstick:
    """Takes a sample each time it is called, 100 us or so: a multiplication of small matrices, and a pass over numbers
    that a second-level cache holds.

    Numpy's, so that neither the kernels nor torch's version change it. Kernels' times follow it: on two cores with four
    busy processes, the medians of 777 processes spread by 10.1% (swiglu on [16, 512]), 11.2% (rms_norm) and 3.8%
    (attention); over the yardstick's median, taken in turns in the same process, by 7.0%, 8.0% and 1.6%, and blocks of
    ten that follow each other by 2.1%, 2.6% and 0.5% where they had drifted by 3.2%, 3.7% and 1.2%. A matrix product
    that the third-level cache decides did not follow it (7.7%, 7.5%).
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
