"""How many blocks the cache gets: by bytes, by a fraction of the device's memory, and in the host's for swapping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tmodel.conftest import write_checkpoint as write_checkpoint  # the fixture
from tests.tmodel.formats.by_hand import Kind
from tests.tmodel.formats.models import write_models
from tkernels import select
from tkernels.device import INTERPRETER, TARGETS
from tmodel import Limits, kernel_axes, kv_bytes_per_block, load_config, load_model
from tsched.execution import placement
from tsched.execution.placement import fit_options
from tsched.options import EngineOptions
from tsched.scheduling.scheduler import Scheduler

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
TOTAL, FREE = 10_000_000, 9_000_000


@pytest.fixture
def directory(write_checkpoint: Any) -> Path:
    path: Path = write_checkpoint()
    return path


@pytest.fixture
def blocks(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The blocks that a cache of these options gets on a GPU of TOTAL bytes, FREE of them free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, TOTAL))

    def count(*, device: torch.device = GPU, dtype: torch.dtype = torch.float32, **options: Any) -> int:
        given = EngineOptions(**({"max_num_seqs": 10**8, "block_size": 16} | options))
        return fit_options(given, load_config(directory), directory, device=device, dtype=dtype).num_blocks

    return count


def block_bytes(directory: Path, dtype: torch.dtype = torch.float32) -> int:
    return kv_bytes_per_block(load_config(directory), 16, dtype)


@pytest.mark.parametrize(("fraction", "meant"), [(0.5, 0.5), (1.0, 1.0), (None, 0.9)])
def test_a_fraction_is_of_all_memory_less_what_is_taken_and_the_weights(
    blocks: Any, directory: Path, fraction: float | None, meant: float
) -> None:
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    expected = int(TOTAL * meant) - (TOTAL - FREE) - weights
    assert blocks(kv_cache_fraction=fraction) == expected // block_bytes(directory)


def test_weights_are_counted_as_they_will_be_kept(blocks: Any, directory: Path) -> None:
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors")) // 2
    expected = (TOTAL - (TOTAL - FREE) - weights) // block_bytes(directory, torch.bfloat16)
    assert blocks(kv_cache_fraction=1.0, dtype=torch.bfloat16) == expected


@pytest.mark.parametrize(("first", "expected"), [(0, 7), (1, None)])
def test_the_window_of_all_layers_reaches_the_scheduler(
    first: int, expected: int | None, write_checkpoint: Any
) -> None:
    directory = write_checkpoint(use_sliding_window=True, sliding_window=7, max_window_layers=first)
    options = EngineOptions(kv_cache_bytes=10**6, max_num_seqs=4)
    resolved = fit_options(options, load_config(directory), directory, device=CPU, dtype=torch.float32)
    window = Scheduler(resolved).window
    assert expected == (None if window is None else window.size)


def test_what_is_taken_already_may_leave_nothing(blocks: Any) -> None:
    with pytest.raises(ValueError, match="the memory left for the KV cache is 0, a block of 16 tokens takes"):
        blocks(kv_cache_fraction=0.05)


def test_bytes_are_taken_at_their_word_and_no_more_than_can_be_filled(blocks: Any, directory: Path) -> None:
    bytes_ = 7 * block_bytes(directory) + 5
    assert blocks(kv_cache_bytes=bytes_) == blocks(kv_cache_bytes=bytes_, device=CPU) == 7
    assert blocks(kv_cache_bytes=bytes_, max_num_seqs=3, max_model_len=11) == 3
    assert blocks(device=CPU) == 2**30 // block_bytes(directory)


def test_a_cpu_has_a_fraction_too(blocks: Any) -> None:
    half, quarter = (blocks(kv_cache_fraction=fraction, device=CPU) for fraction in (0.5, 0.25))
    assert quarter < half <= 2.1 * quarter


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan")])
def test_a_fraction_is_above_0_and_at_most_1(blocks: Any, fraction: float) -> None:
    with pytest.raises(ValueError, match="kv_cache_fraction must be None or a number above 0 and at most 1, got"):
        blocks(kv_cache_fraction=fraction)


def test_host_blocks_are_what_swap_bytes_hold(directory: Path) -> None:
    config, size = load_config(directory), block_bytes(directory)

    def host_blocks(swap_bytes: int, preemption: str) -> int:
        options = EngineOptions(swap_bytes=swap_bytes, preemption=preemption)
        return fit_options(options, config, directory, device=CPU, dtype=torch.float32).num_host_blocks

    assert host_blocks(3 * size + 1, "swap") == 3
    assert host_blocks(3 * size, "recompute") == 0
    with pytest.raises(ValueError, match=f"takes {size} bytes, got {size - 1}"):
        host_blocks(size - 1, "swap")


def test_a_quantized_models_words_do_not_grow_with_the_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, TOTAL))
    quantized, _ = write_models(tmp_path, Kind("gptq", 4, 32))
    config = load_config(quantized)
    left = {}
    for dtype in (torch.float16, torch.float32):
        options = EngineOptions(max_num_seqs=10**8, block_size=16)
        blocks = fit_options(options, config, quantized, device=GPU, dtype=dtype).num_blocks
        left[dtype] = blocks * kv_bytes_per_block(config, 16, dtype)
    limits = Limits(max_num_tokens=8, max_num_seqs=2, max_model_len=32, block_size=16, num_blocks=8)
    weights = load_model(
        quantized,
        config,
        select({}, device="cpu", dtype=torch.float32, axes=kernel_axes(config, limits)),
        device="cpu",
        dtype=torch.float32,
    ).weight_bytes  # fmt: skip
    available = TOTAL * 0.9 - (TOTAL - FREE) - weights
    # The file's g_idx and packed zero-points are what it has beyond the model.
    assert available - 60_000 < left[torch.float32] <= available
    assert left[torch.float16] > left[torch.float32]


@pytest.mark.parametrize(("arch", "size"), [("sm_80", 16), ("sm_90", 64), ("sm_120", 64), ("gfx942", 16), ("", 16)])
def test_blocks_are_as_large_as_tensor_descriptors_want_them_unless_a_size_is_given(
    arch: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = TARGETS[arch] if arch else INTERPRETER
    monkeypatch.setattr(placement, "device_facts", lambda device: facts)
    device = torch.device("cuda" if arch else "cpu")
    assert (placement.find_block_size(None, device), placement.find_block_size(32, device)) == (size, 32)
