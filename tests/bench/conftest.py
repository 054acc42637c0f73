"""What a benchmark run says about itself."""

import pytest

from tests.conftest import DEVICE
from tkernels.measurement import CPU_BYTES, CPU_SIZE, INTERPRETED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("benchmark_only"):
        return
    for one in config._benchmarksession.benchmarks:  # type: ignore[attr-defined]
        if "p99_us" in one.extra_info:  # the plugin's table has no percentiles
            mean, p99 = one.extra_info["mean_us"], one.extra_info["p99_us"]
            terminalreporter.write_line(f"{one.name}: mean {mean:.1f} us, p99 {p99:.1f} us")
    if DEVICE.type == "cpu":
        terminalreporter.write_line(
            f"Kernels: torch variants on a CPU, sizes of at most {CPU_SIZE}, inputs of at most {CPU_BYTES >> 20} MiB. "
            f"Triton variants: not measured, {INTERPRETED}."
        )
