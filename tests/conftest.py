"""What every test process has in common.

tkernels is imported before any test module imports Triton, and decides then whether this process interprets or
compiles. Tests interpret, also where there is a GPU, unless `--device cuda` is given: then the property tests and the
benchmarks run on it.

One thread per worker, here and in the processes that tests start: two workers with two threads each on two cores spend
their time waiting for each other (training a small model took 164 s instead of 18).
"""

import argparse
import os
import signal
import sys

import pytest

os.environ["OMP_NUM_THREADS"] = "1"

import torch


def _asked_for() -> str:
    """The --device of the command line, which is needed before pytest reads it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="cpu")
    return str(parser.parse_known_args(sys.argv[1:])[0].device)


# A worker inherits the choice of the process that started it.
os.environ.setdefault("TRITON_INTERPRET", "0" if _asked_for() == "cuda" and torch.cuda.is_available() else "1")

import tkernels  # noqa: E402, F401
from tkernels.mode import MODE  # noqa: E402

torch.set_num_threads(1)

# A script that starts the tests in the background has them ignore Ctrl-C, and what is tested is what it does.
signal.signal(signal.SIGINT, signal.default_int_handler)

DEVICE = torch.device("cuda", 0) if MODE == "compile" and torch.cuda.is_available() else torch.device("cpu")
"""Where the property tests and the benchmarks run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where property tests and benchmarks run")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`--benchmark-only` is enough to measure: one process, since two would share the cores, and benchmarks on."""
    if config.getoption("benchmark_only"):
        config.option.numprocesses = 0  # xdist, which looks after this hook, then distributes nothing
        config.option.benchmark_disable = False


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cuda" and DEVICE.type != "cuda":
        missing = "no CUDA device is found here" if not torch.cuda.is_available() else "TRITON_INTERPRET is set"
        raise pytest.UsageError(f"--device cuda: {missing}")
