"""The timer and the roofline."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from tkernels.clocks import Clocks, read_clocks
from tkernels.device import INTERPRETER, DeviceFacts
from tkernels.roofline import RooflineError, roofline
from tkernels.timing import Timing, time_call

H200 = DeviceFacts("NVIDIA H200", "sm_90", 132)


def test_a_timing_keeps_its_samples_and_reports_their_spread() -> None:
    timing = Timing((4.0, 1.0, 3.0, 2.0, 100.0), 7, "perf_counter")
    assert timing.median_us == 3.0
    assert timing.iqr_us == 2.0  # one outlier does not move it
    assert (timing.min_us, timing.max_us) == (1.0, 100.0)
    with pytest.raises(ValueError, match="at least 2 samples"):
        Timing((1.0,), 1, "perf_counter")


def test_a_call_is_warmed_up_and_sampled() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        sum(range(100_000))  # long enough that one call is a sample

    timing = time_call(call, "cpu", samples=5, warmup=2)
    assert len(timing.samples_us) == 5
    assert timing.min_us > 0
    assert calls == 2 + 5 * timing.calls_per_sample


def test_what_comes_between_samples_is_not_in_them() -> None:
    happened: list[str] = []

    def rest() -> None:
        happened.append("between")
        time.sleep(0.05)

    def work() -> None:
        happened.append("work")
        time.sleep(0.001)

    timing = time_call(work, "cpu", samples=3, warmup=2, between=rest)
    assert happened == ["work"] * 2 + ["work", "between"] * 3
    assert timing.min_us < 50_000


def test_a_short_call_is_repeated_within_a_sample() -> None:
    assert time_call(lambda: None, "cpu", samples=2).calls_per_sample > 10


@pytest.mark.parametrize(("samples", "warmup", "device"), [(1, 1, "cpu"), (2, 0, "cpu"), (2, 1, "meta")])
def test_what_cannot_be_timed_is_refused(samples: int, warmup: int, device: str) -> None:
    with pytest.raises(ValueError, match="at least 2|there is a timer for cpu and cuda"):
        time_call(lambda: None, torch.device(device), samples=samples, warmup=warmup)


def test_the_tighter_limit_counts() -> None:
    memory = roofline(2.0, 4_800_000, 1, "bfloat16", H200)  # 1 us at 4.8 TB/s
    assert (memory.fraction, memory.bound, memory.reason) == (pytest.approx(0.5), "memory", None)
    compute = roofline(4.0, 1, 989_500_000, "bfloat16", H200)  # 1 us at 989.5 TFLOP/s
    assert (compute.fraction, compute.bound) == (pytest.approx(0.25), "compute")
    slower = roofline(100.0, 1, 989_500_000, "float32", H200)  # no tensor cores: 14.8 us
    assert slower.fraction == pytest.approx(989.5 / 67 / 100)


def test_beyond_the_limit_is_an_error() -> None:
    with pytest.raises(RooflineError, match="beyond the memory limit of NVIDIA H200"):
        roofline(0.99, 4_800_000, 1, "bfloat16", H200)


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (INTERPRETER, "bfloat16", "CPU"),
        (DeviceFacts("NVIDIA B900", "sm_200", 1), "bfloat16", "no peaks are known for 'NVIDIA B900'"),
        (H200, "float64", "no peak is known for float64"),
    ],
)
def test_what_is_not_known_is_none_with_its_reason(device: DeviceFacts, dtype: str, reason: str) -> None:
    result = roofline(1.0, 1, 1, dtype, device)
    assert result.fraction is None
    assert result.bound is None
    assert result.reason is not None
    assert reason in result.reason


def test_what_is_done_once_is_timed_apart() -> None:
    made = []

    def call() -> None:
        if not made:
            made.append(time.sleep(0.05))

    timing = time_call(call, "cpu", samples=3)
    assert timing.first_call_us is not None
    assert timing.first_call_us > 20_000
    assert timing.max_us < 1000
    assert timing.before.sm_mhz is None
    assert timing.before.reason == "a CPU's clocks are not read"


def test_unknown_ways_to_time_are_refused() -> None:
    with pytest.raises(ValueError, match="there is eager and graph"):
        time_call(lambda: None, "cpu", launch="lazy")  # type: ignore[arg-type]


class FakeNvml:
    """The part of pynvml that is asked, on a GPU that is too warm."""

    NVMLError = RuntimeError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    nvmlClocksThrottleReasonSwPowerCap, nvmlClocksThrottleReasonHwThermalSlowdown = 4, 64

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, which: int) -> int:
        return {1: 1410, 2: 3201}[which]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 64 | 1


def test_the_clocks_are_what_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert read_clocks(torch.device("cuda", 0)) == Clocks(1410, 3201, ("thermal slowdown by hardware",))
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetClockInfo", lambda *a: (_ for _ in ()).throw(RuntimeError("no")))
    assert read_clocks(torch.device("cuda", 0)).reason == "the driver does not tell: no"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_clocks(torch.device("cuda", 0)).reason == "pynvml is not installed"
