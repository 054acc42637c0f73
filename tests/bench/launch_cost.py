"""What a launch costs the host, from an op's door to Triton's driver, beside a bare Triton launch of the same kernel.

python -m tests.bench.launch_cost [--rounds 200] [--calls 20] [--json]

Kernels are compiled for sm_90; the driver is a stub, so nothing of a launch below Triton counts: no C launcher, no
cuLaunchKernel. Tensors are the host's, and so is the cost of making outputs and workspaces; the host's memory is kept
as torch keeps a GPU's, or each large one would be asked of the kernel. Each figure is the least over the rounds of this
thread's CPU time, in microseconds. `first` is a structure's first call, which is checked and recorded.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.tkernels.stub_driver import stub_driver
from tkernels import OPS
from tkernels.device import TARGETS, DeviceFacts
from tkernels.launch import Kernel, launch_options
from tkernels.tuning import NEAREST

_CPU = torch.device("cpu")
_FACTS = TARGETS["sm_90"]
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

TOKENS = 16
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 2560, 32, 8, 128, 9728  # Qwen3-4B's
PAGES, PAGE_SIZE, PAGES_EACH = 64, 64, 4

Case = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""op, variant, and the arguments of a call."""


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def cases() -> list[Case]:
    """One call of each kind of op, of a decode step of 16 tokens of Qwen3-4B."""
    x, norm = tensor(TOKENS, HIDDEN), tensor(HIDDEN)
    qkv = tensor(TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    caches = tensor(2, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    table = torch.zeros(TOKENS, PAGES_EACH, dtype=torch.int32)
    lens = torch.ones(TOKENS, dtype=torch.int32)
    cos, sin = (torch.zeros(4096, HEAD_DIM // 2, dtype=torch.float32) for _ in range(2))
    places = torch.zeros(TOKENS, dtype=torch.int64)
    starts = torch.arange(TOKENS + 1, dtype=torch.int32)
    gate_up = tensor(TOKENS, 2 * WIDTH)
    attention = (q, caches[0], caches[1], table)
    rotary = (q, k, v, cos, sin, places, caches[0], caches[1], places.clone())
    heads_norms = {"q_weight": tensor(HEAD_DIM), "k_weight": tensor(HEAD_DIM), "eps": 1e-6}
    bound: dict[str, Any] = {"max_context_len": PAGES_EACH * PAGE_SIZE, "window": None}
    return [
        ("rms_norm", "row_per_program", (x, norm, 1e-6), {}),
        ("add_rms_norm", "row_per_program", (x, tensor(TOKENS, HIDDEN), norm, 1e-6), {}),
        ("swiglu", "fused", (gate_up,), {}),
        ("matmul", "persistent", (x, tensor(HIDDEN, HIDDEN)), {}),
        ("matmul", "tensor_descriptor", (x, tensor(HIDDEN, HIDDEN)), {}),
        ("gate_up_swiglu", "paired_tiles", (x, tensor(2 * WIDTH, HIDDEN)), {}),
        ("qk_norm_rope_scatter", "head_tile", rotary, heads_norms),
        ("paged_decode", "one_pass", (*attention, lens, HEAD_DIM**-0.5), bound),
        ("paged_decode", "last_arriver", (*attention, lens, HEAD_DIM**-0.5), bound),
        ("paged_prefill", "packed_gqa", (*attention, starts, lens, HEAD_DIM**-0.5), {}),
    ]


class BareLaunches:
    """What a kernel launches, for `kernel[grid](...)` again: a door that notes."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[int, ...], Mapping[str, Any], Mapping[str, Any]]] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Any) -> None:
        self.launches.append((kernel, grid, arguments, launch_options(config)))

    def start(self) -> None:
        for kernel, grid, arguments, options in self.launches:
            kernel[grid](**arguments, **options)


def _facts(device: torch.device) -> DeviceFacts:
    return _FACTS


def _no_reason(device: torch.device) -> None:
    return None


@contextmanager
def on_a_gpu_that_is_not_there() -> Iterator[None]:
    """Launches reach a stub driver, and the host's tensors are taken for those of an H200."""
    with (
        stub_driver(90, measuring=True),
        mock.patch("tkernels.launch.device_facts", _facts),
        mock.patch("tkernels.variant.device_facts", _facts),
        mock.patch("tkernels.variant.unavailable_reason", _no_reason),
    ):
        yield


def microseconds(call: Callable[[], object], calls: int) -> float:
    began = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - began) / calls / 1e3


def least(calls: Mapping[str, Callable[[], object]], rounds: int, count: int) -> dict[str, float]:
    """Of each, over rounds that take turns, so that all meet the same machine."""
    for call in calls.values():
        for _ in range(3):
            call()
    found = [{name: microseconds(call, count) for name, call in calls.items()} for _ in range(rounds)]
    return {name: min(one[name] for one in found) for name in calls}


def measure_op(case: Case, rounds: int, count: int) -> dict[str, Any]:
    op, name, args, kwargs = case
    variant = OPS[op].variants[name]
    kernel, bare = Kernel(variant, NEAREST, {}), BareLaunches()
    Kernel(variant, NEAREST, {}, bare)(*args, **kwargs)
    took = least({"door": lambda: kernel(*args, **kwargs), "bare": bare.start}, rounds, count)

    def first_call() -> None:
        kernel._known.clear()
        kernel(*args, **kwargs)

    first = least({"first": first_call}, rounds, max(count // 10, 1))["first"]
    return {"what": f"{op}.{name}", "launches": len(bare.launches), **took, "first": first}


def measure_layer(rounds: int, count: int) -> dict[str, Any]:
    """A decoder layer of Qwen3-4B in a decode step, its views included, with the fused kernels."""
    calls = {f"{op}.{name}": (OPS[op].variants[name], args, kwargs) for op, name, args, kwargs in cases()}
    norm, matmul, rotary, decode, gate_up = (
        Kernel(calls[name][0], NEAREST, {})
        for name in (
            "add_rms_norm.row_per_program", "matmul.persistent", "qk_norm_rope_scatter.head_tile",
            "paged_decode.last_arriver", "gate_up_swiglu.paired_tiles",
        )
    )  # fmt: skip
    heads = (HEADS, KV_HEADS, KV_HEADS)
    qkv_weight, out_weight = tensor(sum(heads) * HEAD_DIM, HIDDEN), tensor(HIDDEN, HEADS * HEAD_DIM)
    gate_up_weight, down_weight = tensor(2 * WIDTH, HIDDEN), tensor(HIDDEN, WIDTH)
    x, residual, norm_weight = tensor(TOKENS, HIDDEN), tensor(TOKENS, HIDDEN), tensor(HIDDEN)
    _, rotary_args, rotary_options = calls["qk_norm_rope_scatter.head_tile"]
    _, decode_args, decode_options = calls["paged_decode.last_arriver"]

    def layer() -> None:
        q, k, v = matmul(x, qkv_weight).view(-1, sum(heads), HEAD_DIM).split(heads, dim=1)
        rotary(q, k, v, *rotary_args[3:], **rotary_options)
        attended = decode(q[:TOKENS], *decode_args[1:], **decode_options).flatten(1)
        hidden, added = norm(matmul(attended, out_weight), residual, norm_weight, 1e-6)
        norm(matmul(gate_up(hidden, gate_up_weight), down_weight), added, norm_weight, 1e-6)

    return {"what": "a layer of Qwen3-4B", "launches": 8, **least({"door": layer}, rounds, count)}


def measure(rounds: int, count: int) -> list[dict[str, Any]]:
    with on_a_gpu_that_is_not_there(), torch.inference_mode():
        return [*(measure_op(case, rounds, count) for case in cases()), measure_layer(rounds, max(count // 4, 1))]


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'us of CPU':34}{'launches':>9}{'door':>8}{'bare':>8}{'door/bare':>11}{'first':>8}"]
    for row in rows:
        ratio = f"{row['door'] / row['bare']:.2f}" if "bare" in row else ""
        bare, first = (f"{row[name]:.1f}" if name in row else "" for name in ("bare", "first"))
        lines.append(f"{row['what']:34}{row['launches']:>9}{row['door']:>8.1f}{bare:>8}{ratio:>11}{first:>8}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(option, 32 << 20)
    rows = measure(asked.rounds, asked.calls)
    print(json.dumps(rows) if asked.json else as_table(rows))


if __name__ == "__main__":
    main()
