"""One program writes a part of one sequence: a run of its tokens and a run of its table; one sequence more is padding.

Wins everywhere so far: one launch of a few programs, that takes its place in the decode graph before the model's.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant

CONFIGS = tuple(
    Config(BLOCK=block, num_warps=warps) for block, warps in ((256, 1), (256, 2), (512, 4), (1024, 4), (2048, 8))
)


@triton.jit
def step_inputs_sequence_parts_sequence(
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,
    tokens_ptr,
    blocks_ptr,
    row,
    start,
    count,
    offs,
    width,
    stride_tokens_r,
    stride_blocks_r,
    PAGE_SIZE: tl.constexpr,
):
    """This program's tokens [BLOCK] of the sequence, and its entries [BLOCK] of the sequence's table."""
    blocks_ptr += row * stride_blocks_r
    positions = start + offs
    is_read = (row >= 0) & (offs < count)
    token_ids = tl.load(tokens_ptr + row * stride_tokens_r + positions, mask=is_read, other=0)
    pages = tl.load(blocks_ptr + positions // PAGE_SIZE, mask=is_read, other=0).to(tl.int64)  # times S: past 2**31
    slots = pages * PAGE_SIZE + positions % PAGE_SIZE
    tl.store(token_ids_ptr + offs, token_ids, mask=offs < count)
    tl.store(positions_ptr + offs, tl.where(row >= 0, positions, 0), mask=offs < count)
    tl.store(slots_ptr + offs, tl.where(row >= 0, slots, -1), mask=offs < count)
    is_live = (row >= 0) & (offs < tl.cdiv(start + count, PAGE_SIZE))
    entries = tl.load(blocks_ptr + offs, mask=is_live, other=0)
    tl.store(table_ptr + offs, entries, mask=offs < width)


@triton.jit
def step_inputs_sequence_parts(
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    block_tables_ptr,
    context_lens_ptr,
    logit_indices_ptr,
    tokens_ptr,
    blocks_ptr,
    rows_ptr,
    starts_ptr,
    cu_counts_ptr,
    sampled_ptr,
    stride_tokens_r,
    stride_blocks_r,
    stride_block_tables_b,
    sequences,
    num_sampled,
    num_tokens,
    width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(cu_counts_ptr + seq)
    if seq < sequences:
        count = tl.load(cu_counts_ptr + seq + 1) - begin
        row = tl.load(rows_ptr + seq).to(tl.int64)  # times L can pass 2**31
        start = tl.load(starts_ptr + seq, mask=row >= 0, other=0)
        step_inputs_sequence_parts_sequence(
            token_ids_ptr + begin,
            positions_ptr + begin,
            slots_ptr + begin,
            block_tables_ptr + seq.to(tl.int64) * stride_block_tables_b,
            tokens_ptr,
            blocks_ptr,
            row,
            start,
            count,
            offs,
            width,
            stride_tokens_r,
            stride_blocks_r,
            PAGE_SIZE,
        )
        tl.store(context_lens_ptr + seq, tl.where(row >= 0, start + count, 0))  # each of its programs, the same
    else:
        is_padding = offs < num_tokens - begin
        zeros = tl.zeros((BLOCK,), dtype=tl.int64)
        tl.store(token_ids_ptr + begin + offs, zeros, mask=is_padding)
        tl.store(positions_ptr + begin + offs, zeros, mask=is_padding)
        tl.store(slots_ptr + begin + offs, zeros - 1, mask=is_padding)
        wanted = tl.load(sampled_ptr + offs, mask=offs < num_sampled, other=-1)
        ends = tl.load(cu_counts_ptr + wanted + 1, mask=wanted >= 0, other=1)
        tl.store(logit_indices_ptr + offs, ends - 1, mask=offs < num_sampled)


def launch(
    run: Run,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    logit_indices: torch.Tensor,
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_counts: torch.Tensor,
    sampled: torch.Tensor,
    num_tokens: int,
    width: int,
    page_size: int,
) -> None:
    sequences, num_sampled, block = rows.shape[0], sampled.shape[0], run.config["BLOCK"]
    run.launch(
        step_inputs_sequence_parts,
        (sequences + 1, triton.cdiv(max(num_tokens, width, num_sampled), block)),
        token_ids_ptr=token_ids,
        positions_ptr=positions,
        slots_ptr=slots,
        block_tables_ptr=block_tables,
        context_lens_ptr=context_lens,
        logit_indices_ptr=logit_indices,
        tokens_ptr=tokens,
        blocks_ptr=blocks,
        rows_ptr=rows,
        starts_ptr=starts,
        cu_counts_ptr=cu_counts,
        sampled_ptr=sampled,
        stride_tokens_r=tokens.stride(0),
        stride_blocks_r=blocks.stride(0),
        stride_block_tables_b=block_tables.stride(0),
        sequences=sequences,
        num_sampled=num_sampled,
        num_tokens=num_tokens,
        width=width,
        PAGE_SIZE=page_size,
        BLOCK=block,
    )


VARIANT = Variant(
    wins="everywhere: one launch, and its work does not depend on what the contexts hold",
    launch=launch,
    configs=CONFIGS,
    # A table of 32k tokens in pages of 16 is two parts. Interpreted ones are short and have parts too.
    default={"": Config(BLOCK=1024, num_warps=4), "interpreter": Config(BLOCK=8)},
    key=("page_size",),
    deterministic=True,
    batch_invariant=True,
)
