"""Resolves options for this machine: the device and the dtype of a model, and the memory for its cache."""

from __future__ import annotations

from pathlib import Path

import torch

import tmodel
from tkernels.device import device_facts, is_from_sm_90
from tsched.execution.cache_size import compute_cache_bytes, device_memory
from tsched.options import EngineOptions, OptionError
from tsched.requests.errors import ArgumentError
from tsched.resolved_options import ResolvedOptions, UnitSizes, resolve_options


def find_device(name: torch.device | str | None) -> torch.device:
    """The device called `name`; None is CUDA where there is one, else the CPU.

    Raises:
        ArgumentError: It is CUDA, and there is none.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"device is {str(device)!r}, and torch finds no CUDA here; there is 'cpu'")
    return device


def find_block_size(given: int | None, device: torch.device) -> int:
    """The tokens in a block of the KV cache where `given` is asked for.

    None is 64 where tensor descriptors copy keys, from sm_90 on: a box of theirs ends where its page does, and the
    matrix units want tiles of 64 keys. Elsewhere it is 16: smaller blocks leave less of them empty.
    """
    if given is not None:
        return given
    return 64 if is_from_sm_90(device_facts(device).arch) else 16


def find_dtype(name: torch.dtype | str, of_checkpoint: torch.dtype) -> torch.dtype:
    """The dtype called `name`, one that EngineOptions allows; "auto" is the checkpoint's."""
    return of_checkpoint if name == "auto" else getattr(torch, str(name))


def fit_options(
    options: EngineOptions,
    config: tmodel.ModelConfig,
    weights: Path | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> ResolvedOptions:
    """Resolves `options` for a model on this machine.

    Args:
        options: The engine's options.
        config: The model's configuration.
        weights: The directory of its weights; None where there is none yet.
        device: Where the model will run.
        dtype: Of its weights and its cache.

    Raises:
        ArgumentError: As `resolve_options`.
    """
    block_size = find_block_size(options.block_size, device)
    return resolve_options(
        options,
        max_position_embeddings=config.max_position_embeddings,
        block_size=block_size,
        sizes=unit_sizes(config, block_size, dtype),
        cache_bytes=compute_cache_bytes(options, config, weights, device=device, dtype=dtype),
    )


def check_token_table(resolved: ResolvedOptions) -> None:
    """Checks that the host has room for the int64 tokens of every row; what is never written takes none of it.

    Raises:
        OptionError: It has not. The message has the numbers.
    """
    rows, longest = resolved.options.max_num_seqs, resolved.max_model_len
    total, _ = device_memory(torch.device("cpu"))
    if rows * longest * 8 > total:
        raise OptionError(
            "max_model_len",
            f"max_model_len is {longest}: the tokens of max_num_seqs={rows} such sequences take "
            f"{rows * longest * 8 / 1e9:.1f} GB, this machine has {total / 1e9:.1f} GB; lower one of the two",
        )


def unit_sizes(config: tmodel.ModelConfig, block_size: int, dtype: torch.dtype) -> UnitSizes:
    """What a block and a state of a model's caches take, and how long they are kept."""
    return UnitSizes(
        block_bytes=tmodel.kv_bytes_per_block(config, block_size, dtype),
        state_bytes=tmodel.bytes_per_state(config, block_size, dtype),
        state_interval=tmodel.state_interval(config),
        window=tmodel.cache_window(config),
    )


def check_random_weights(plan: tmodel.ModelPlan, device: torch.device, dtype: torch.dtype) -> None:
    """Checks that a plan's random weights fit the device's memory, before they are made.

    Raises:
        ArgumentError: They do not. The message has the numbers.
    """
    total, _ = device_memory(device)
    needed = plan.random_weights * dtype.itemsize
    if needed > total:
        where = "this machine has" if device.type == "cpu" else f"{device} has"
        raise ArgumentError(
            f"{plan.name}: {plan.random_weights / 1e9:.2f} billion random weights take {needed / 1e9:.1f} GB as "
            f"{str(dtype).removeprefix('torch.')}, {where} {total / 1e9:.1f} GB"
        )
