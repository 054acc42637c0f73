"""What a benchmark run says about itself."""

import pytest

from tests.conftest import DEVICE
from tkernels.measurement import CPU_SIZE, INTERPRETED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("benchmark_only") and DEVICE.type == "cpu":
        terminalreporter.write_line(
            f"Kernels: torch variants on a CPU, sizes of at most {CPU_SIZE}. "
            f"Triton variants: not measured, {INTERPRETED}."
        )
