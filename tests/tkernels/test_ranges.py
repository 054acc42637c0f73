"""NVTX ranges: one domain, names made once, nothing made for nobody."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import nvtx
import pytest
import torch

import tkernels
from tkernels.ranges import SILENCE, NvtxRanges

ROOT = Path(__file__).parents[2]


class ToolDomain:
    """NVTX's domain as it is when a tool listens: it keeps what it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_made = 0
        self.told: list[tuple[str, str, list[int] | None] | str] = []

    def get_event_attributes(self, message: str, category: str = "", payload: Any = None) -> Any:
        self.num_made += 1
        return message, category, None if payload is None else payload.tolist()

    def push_range(self, attributes: Any) -> None:
        self.told.append(attributes)

    def pop_range(self) -> None:
        self.told.append("end")


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> ToolDomain:
    made = ToolDomain("tkernels")
    monkeypatch.setattr(nvtx, "get_domain", {"tkernels": made}.__getitem__)  # another domain is a KeyError
    return made


def test_without_a_tool_every_range_is_silence() -> None:
    assert not tkernels.NVTX.listening
    assert tkernels.NVTX.named("rms_norm.torch", "op") is SILENCE
    with SILENCE.carrying([1]), SILENCE.capture(), pytest.raises(ZeroDivisionError), SILENCE:
        _ = 1 / 0


def test_a_tool_hears_op_variant_and_pins_and_each_name_is_made_once(domain: ToolDomain) -> None:
    axes = {"T": (1, 4), "H": 32}
    kernels = tkernels.select(
        {"rms_norm": {"rows_per_program": {"BLOCK_ELEMENTS": 64}}, "swiglu": "torch"},
        device="cpu", dtype=torch.float32, axes={"rms_norm": axes, "swiglu": {"T": (1, 4), "I": 16}},
        ranges=NvtxRanges(),
    )  # fmt: skip
    assert kernels.ranges.listening
    made = domain.num_made
    for _ in range(3):
        kernels.rms_norm(torch.ones(2, 32), torch.ones(32), 1e-6)
        kernels.swiglu(torch.ones(2, 32))
    assert domain.num_made == made
    once = [("rms_norm.rows_per_program[BLOCK_ELEMENTS=64]", "op", None), "end", ("swiglu.torch", "op", None), "end"]
    assert domain.told == once * 3


def test_the_parts_of_a_fusion_are_named_inside_it(domain: ToolDomain) -> None:
    kernels = tkernels.select(
        {}, device="cpu", dtype=torch.float32, axes={"gate_up_swiglu": {"T": (1, 4), "H": 32, "I": 16}},
        ranges=NvtxRanges(),
    )  # fmt: skip
    kernels.gate_up_swiglu(torch.ones(2, 32), torch.ones(32, 32))
    names = [told if isinstance(told, str) else told[0] for told in domain.told]
    assert names == ["gate_up_swiglu.composed", "matmul.torch", "end", "swiglu.torch", "end", "end"]


def test_a_range_is_left_where_its_kernel_raises(domain: ToolDomain) -> None:
    class Unfit(RuntimeError):
        pass

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise Unfit

    op = tkernels.OPS["swiglu"]
    kernel = tkernels.Kernel(replace(op.variants["torch"], function=fails), tkernels.Tuning("nearest"), {},
                             ranges=NvtxRanges())  # fmt: skip
    with pytest.raises(Unfit):
        kernel(torch.ones(2, 32))
    assert domain.told == [("swiglu.torch", "op", None), "end"]


def test_requests_are_a_payload_of_one_entry_alone(domain: ToolDomain) -> None:
    forward = NvtxRanges().named("forward", "phase")
    with forward.carrying([3, 5]):
        pass
    with forward:
        pass
    assert domain.told == [("forward", "phase", [3, 5]), "end", ("forward", "phase", None), "end"]


def test_nvtx_is_asked_for_in_one_place() -> None:
    users = [
        str(file.relative_to(ROOT))
        for floor in ("tkernels", "tmodel", "tsched", "experiments")
        for file in sorted((ROOT / floor).rglob("*.py"))
        if "import nvtx" in file.read_text()
    ]
    assert users == ["tkernels/ranges.py"]
