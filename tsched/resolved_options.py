"""What an engine's options mean for one model: the sizes of its scheduler and its caches. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tsched.options import BYTES_END, EngineOptions, OptionError

if TYPE_CHECKING:
    from tkernels.selection import OpAxes
    from tmodel import ModelConfig


@dataclass(frozen=True, kw_only=True)
class UnitSizes:
    """What a model's caches take.

    block_bytes     of a block of tokens; 0 where all layers keep states
    state_bytes     of a sequence's state; 0 where no layer keeps one
    state_interval  blocks between two states of a sequence that are kept for later prefixes
    window          tokens before which a sequence's blocks are given back; None where they are kept to its end
    """

    block_bytes: int
    state_bytes: int = 0
    state_interval: int = 1
    window: int | None = None


@dataclass(frozen=True)
class CacheUnits:
    num_blocks: int
    num_states: int


def split_bytes(num_bytes: int, sizes: UnitSizes, each: CacheUnits, most: CacheUnits) -> CacheUnits:
    """The blocks and states that `num_bytes` hold where sequences need `each` of them, `most` at most.

    As many sequences find their blocks as find their states. What `most` leaves of the bytes of the one goes to the
    other. Blocks that take no bytes are as many as `most` says.
    """
    if sizes.state_bytes == 0:
        return CacheUnits(min(num_bytes // sizes.block_bytes, most.num_blocks), 0)
    sequence_bytes = each.num_blocks * sizes.block_bytes + each.num_states * sizes.state_bytes
    num_states = min(num_bytes * each.num_states // sequence_bytes, most.num_states)
    if sizes.block_bytes == 0:
        return CacheUnits(most.num_blocks, num_states)
    num_blocks = min((num_bytes - num_states * sizes.state_bytes) // sizes.block_bytes, most.num_blocks)
    left = num_bytes - num_blocks * sizes.block_bytes
    return CacheUnits(num_blocks, min(left // sizes.state_bytes, most.num_states))


@dataclass(frozen=True)
class ResolvedOptions:
    """What options mean for one model: the sizes of its scheduler and cache.

    max_model_len: tokens of a sequence, prompt and output together.
    num_blocks, block_size: the KV cache: blocks, and tokens of a block.
    num_host_blocks, num_host_states: in host memory for preemption by swapping.
    num_states: slots for states of sequences, 0 where no layer keeps one; kept every `state_interval` blocks.
    window: a sequence's blocks wholly before the last so many tokens are given back; None where they are kept.
    """

    options: EngineOptions
    max_model_len: int
    block_size: int
    num_blocks: int
    num_host_blocks: int = 0
    num_states: int = 0
    num_host_states: int = 0
    state_interval: int = 1
    window: int | None = None

    def kernel_axes(self, config: ModelConfig) -> OpAxes:
        """The ops that the engine calls, with every axis that it calls them at, for `tkernels.select`."""
        from tmodel import Limits, kernel_axes  # loads torch

        limits = Limits(
            max_num_tokens=self.options.max_num_batched_tokens,
            max_num_seqs=self.options.max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            shared_prefixes=self.options.shared_prefixes,
        )
        return kernel_axes(config, limits)


def resolve_options(
    options: EngineOptions, *, max_position_embeddings: int, block_size: int, sizes: UnitSizes, cache_bytes: int
) -> ResolvedOptions:
    """What `options` mean for a model.

    Args:
        options: The engine's options.
        max_position_embeddings: Tokens that the model was made for.
        block_size: Tokens in a block of its cache.
        sizes: Bytes of the units of the model's cache, see `tmodel.kv_bytes_per_block` and `tmodel.bytes_per_state`.
        cache_bytes: Bytes that there are for the cache: kv_cache_bytes or what the device has left, see
            `tsched.execution.cache_size`. No more of them are used than max_num_seqs requests can fill.

    Raises:
        OptionError: The model is not made for max_model_len tokens, or not one block or too few states fit.
    """
    longest = max_position_embeddings if options.max_model_len is None else options.max_model_len
    if longest > max_position_embeddings:
        allowed = f"None or an integer from 1 to {max_position_embeddings}, the model's max_position_embeddings"
        raise OptionError("max_model_len", f"max_model_len must be {allowed}, got {longest}")
    check_expected_len(options, sizes, longest)
    most = most_units(options, sizes, longest, block_size)
    units = fit_cache(options, sizes, cache_bytes, longest, block_size, most)
    host = fit_host(options, sizes, longest, block_size)
    return ResolvedOptions(
        options,
        longest,
        block_size,
        num_blocks=units.num_blocks,
        num_host_blocks=host.num_blocks,
        num_states=units.num_states,
        num_host_states=host.num_states,
        state_interval=sizes.state_interval,
        window=sizes.window,
    )


def check_expected_len(options: EngineOptions, sizes: UnitSizes, longest: int) -> None:
    """Refuses an expected_len that nothing would heed, or above the `longest` tokens of a request, by OptionError."""
    if options.expected_len is not None and (sizes.state_bytes == 0 or options.expected_len > longest):
        why = f"at most {longest}, max_model_len" if sizes.state_bytes else "None: no layer of the model keeps states"
        raise OptionError("expected_len", f"expected_len must be {why}; got {options.expected_len}")


def most_units(options: EngineOptions, sizes: UnitSizes, longest: int, block_size: int) -> CacheUnits:
    """What max_num_seqs requests of up to `longest` tokens can fill."""
    num_blocks = -(-options.max_num_seqs * longest // block_size)
    num_states = most_states(options, sizes, num_blocks)
    if sizes.block_bytes == 0:  # so that no kept state goes for want of a block that takes no bytes
        num_blocks += num_states * sizes.state_interval
    return CacheUnits(num_blocks, num_states)


def most_states(options: EngineOptions, sizes: UnitSizes, num_blocks: int) -> int:
    """The states that requests in `num_blocks` blocks can fill; 0 where no layer keeps one."""
    return 2 * options.max_num_seqs + num_blocks // sizes.state_interval if sizes.state_bytes else 0


def fit_cache(
    options: EngineOptions, sizes: UnitSizes, cache_bytes: int, longest: int, block_size: int, most: CacheUnits
) -> CacheUnits:
    """The device's blocks and states in `cache_bytes`, `most` at most, for requests of up to `longest` tokens.

    Raises:
        OptionError: Not one block or too few states fit.
    """
    # A row writes one state and has the last one that it passed; one more is kept for later prefixes.
    each = CacheUnits(_expected_blocks(options, longest, block_size), 2 if options.prefix_cache == "none" else 3)
    # Padding's state takes a slot of its own.
    units = split_bytes(max(0, cache_bytes - sizes.state_bytes), sizes, each, most)
    given = "kv_cache_bytes is" if options.kv_cache_bytes is not None else "the memory left for the KV cache is"
    option = "kv_cache_fraction" if options.kv_cache_bytes is None else "kv_cache_bytes"
    if sizes.state_bytes and units.num_states < 2:
        message = (
            f"{given} {cache_bytes}, three states take {3 * sizes.state_bytes} bytes, and there are blocks beside them"
        )
        raise OptionError(option, message)
    if units.num_blocks < 1:
        block = f"a block of {block_size} tokens takes {sizes.block_bytes} bytes"
        raise OptionError(option, f"{given} {cache_bytes}, {block}")
    return units


def fit_host(options: EngineOptions, sizes: UnitSizes, longest: int, block_size: int) -> CacheUnits:
    """The host's blocks and states for requests that give way; none where they are computed again.

    Raises:
        OptionError: swap_bytes hold not one of each.
    """
    if options.preemption != "swap":
        return CacheUnits(0, 0)
    most_blocks = BYTES_END
    if sizes.block_bytes == 0:
        most_blocks = options.swap_bytes // sizes.state_bytes * -(-longest // block_size)
    most = CacheUnits(most_blocks, BYTES_END)
    host = split_bytes(options.swap_bytes, sizes, CacheUnits(_expected_blocks(options, longest, block_size), 1), most)
    if host.num_blocks < 1 or (sizes.state_bytes and host.num_states < 1):
        needed = f"one of {block_size} tokens takes {sizes.block_bytes} bytes"
        if sizes.state_bytes:
            needed += f", a request's state {sizes.state_bytes}"
        message = f"preemption 'swap' needs swap_bytes for a block at least: {needed}, got {options.swap_bytes}"
        raise OptionError("swap_bytes", message)
    return host


def _expected_blocks(options: EngineOptions, longest: int, block_size: int) -> int:
    """Blocks of a request of the expected length."""
    expected = -(-longest // 2) if options.expected_len is None else options.expected_len
    return -(-expected // block_size)
