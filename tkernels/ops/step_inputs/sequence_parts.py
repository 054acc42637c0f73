"""One program writes a run of one sequence's tokens; one sequence more is the padding after the last.

Wins everywhere so far: one launch of small programs, in the place of ten of torch's, which a decode graph replays.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers

CONFIGS = tuple(
    Config(BLOCK=block, num_warps=warps) for block, warps in ((32, 1), (128, 1), (128, 4), (512, 4), (1024, 4))
)


@triton.jit(do_not_specialize=["sequences", "num_tokens"])
def step_inputs_sequence_parts(
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    context_lens_ptr,
    tokens_ptr,
    last_tokens_ptr,
    block_tables_ptr,
    starts_ptr,
    cu_counts_ptr,
    stride_block_tables_b,
    sequences,
    num_tokens,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_sequence = seq < sequences
    begin = tl.load(cu_counts_ptr + seq)
    # Not by `other`: the interpreter takes a scalar one that is 0 for none.
    end = tl.where(is_sequence, tl.load(cu_counts_ptr + seq + 1, mask=is_sequence), num_tokens)
    start = tl.load(starts_ptr + seq, mask=is_sequence)
    is_mine = offs < end - begin
    is_live = is_mine & is_sequence & (start >= 0)

    tokens = tl.load(tokens_ptr + begin + offs, mask=is_live, other=0)
    newest = tl.load(last_tokens_ptr - 1 - tokens, mask=tokens < 0)
    positions = tl.where(is_live, start + offs, 0)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_block_tables_b
    pages = tl.load(table_ptr + positions // PAGE_SIZE, mask=is_live).to(tl.int64)
    slots = pages * PAGE_SIZE + positions % PAGE_SIZE  # can pass 2**31

    tl.store(token_ids_ptr + begin + offs, tl.where(tokens < 0, newest, tokens), mask=is_mine)
    tl.store(positions_ptr + begin + offs, positions, mask=is_mine)
    tl.store(slots_ptr + begin + offs, tl.where(is_live, slots, -1), mask=is_mine)
    context = tl.where(start >= 0, start + end - begin, 0)
    tl.store(context_lens_ptr + seq, context, mask=is_sequence)  # all of its programs store the same


def launch(
    run: Run,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    context_lens: torch.Tensor,
    tokens: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
    starts: torch.Tensor,
    cu_counts: torch.Tensor,
    page_size: int,
) -> None:
    sequences, num_tokens, block = starts.shape[0], tokens.shape[0], run.config["BLOCK"]
    # Where there are no tokens there still are contexts.
    run.launch(
        step_inputs_sequence_parts,
        (sequences + 1, triton.cdiv(max(num_tokens, 1), block)),
        **pointers("token_ids positions slots context_lens", token_ids, positions, slots, context_lens),
        **pointers("tokens last_tokens block_tables[b] starts", tokens, last_tokens, block_tables, starts),
        cu_counts_ptr=cu_counts,
        sequences=sequences,
        num_tokens=num_tokens,
        PAGE_SIZE=page_size,
        BLOCK=block,
    )


VARIANT = Variant(
    wins="everywhere: one launch, whose work does not depend on the contexts",
    launch=launch,
    configs=CONFIGS,
    # Most sequences have one token; a prefill's 2048 are 16 parts. Interpreted ones are short and have parts too.
    default={"": Config(BLOCK=128, num_warps=1), "interpreter": Config(BLOCK=8)},
    key=("page_size",),
    deterministic=True,
    batch_invariant=True,
)
