"""A fixed piece of work whose time says how fast a CPU is at the moment."""

import statistics
import time

import torch

_SIDE, _ELEMENTS, _REPETITIONS = 128, 40_000, 2
"""More elements than the 32,768 up to which torch keeps an elementwise op on one thread."""


class Yardstick:
    """Takes a sample each time it is called, 100 us or so: products of small matrices and passes over numbers that a
    second-level cache holds, by torch on the threads that the kernels have.

    What a thread computes and what its threads wait for one another drift apart. On two cores of a virtual machine with
    nothing beside it, one thread's work kept its speed, while handing work to the second thread and back took 2.5 us in
    some seconds and 5 us in others. Over 60 s the medians of 30 calls spread by 16% (swiglu on [64, 1024], standard
    deviation of logarithms), 19% (attention on [96, 64]) and 35% (rms_norm on [64, 512]); divided by this yardstick's,
    by 2.8%, 3.4% and 19% (2.4%, 2.5% and 9.1% with the slopes that these times show, 0.9, 1.1 and 2.0); divided by that
    of numpy's products on one thread, by 13%, 17% and 33%.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._matrix = torch.rand(_SIDE, _SIDE, generator=generator)
        self._product = torch.empty_like(self._matrix)
        self._numbers = torch.rand(_ELEMENTS, generator=generator)
        self._results = torch.empty_like(self._numbers)
        self.samples_us: list[float] = []
        self._work()  # the first call starts torch's threads

    def __call__(self) -> None:
        start = time.perf_counter()
        self._work()
        self.samples_us.append((time.perf_counter() - start) * 1e6)

    def _work(self) -> None:
        for _ in range(_REPETITIONS):
            torch.mm(self._matrix, self._matrix, out=self._product)
            torch.exp(self._numbers, out=self._results)
            torch.mul(self._numbers, self._numbers, out=self._results)

    @property
    def median_us(self) -> float:
        """Of the samples; StatisticsError where none was taken."""
        return statistics.median(self.samples_us)
