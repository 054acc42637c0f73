"""What a CPU does at most, by a copy and a matrix product: its own roofline. Measured once for a machine, and kept."""

import json
import time
from collections.abc import Callable, Mapping

import torch

from tkernels.files import write_text
from tmodel.presets import cache_folder

_ELEMENTS, _SIDE, _SAMPLES = 1 << 25, 1024, 7
"""A copy of 128 MB, and a product of 2 GFLOP: more than caches hold, and 10 to 50 ms each on two cores."""


def cpu_rates(processor: str) -> Mapping[str, float]:
    """ "copy_bytes_per_s", read and written bytes counted, and "matmul_flops_per_s" in fp32, of torch on the threads
    that it has: the best of a few samples, since what else runs only slows.

    Args:
        processor: The CPU's name, by which, with the threads and torch's version, they are kept in the cache folder.
    """
    name = f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    path = cache_folder() / "cpu_rates.json"
    try:
        kept: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    if name in kept:
        return kept[name]
    rates = measure_rates()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({**kept, name: rates}, indent=1) + "\n")
    except OSError:  # a folder that cannot be written: the next run measures again
        pass
    return rates


def measure_rates(elements: int = _ELEMENTS, side: int = _SIDE) -> dict[str, float]:
    """The rates, measured now. elements: fp32 numbers that are copied; side: of the square matrices."""
    source, target = torch.zeros(elements), torch.zeros(elements)
    left, right, product = (torch.full((side, side), 0.5) for _ in range(3))
    return {
        "copy_bytes_per_s": 2 * 4 * elements / _fastest(lambda: target.copy_(source)),
        "matmul_flops_per_s": 2 * side**3 / _fastest(lambda: torch.mm(left, right, out=product)),
    }


def _fastest(work: Callable[[], object]) -> float:
    """Seconds, the least of a few samples after one that is not counted."""
    work()
    samples = []
    for _ in range(_SAMPLES):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return min(samples)
