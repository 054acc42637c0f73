"""One program reads a row once, and lists its most likely tokens from the parts of it that hold them.

Wins where rows are as many as fill the device: nothing but a part's largest logit is written and read again.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.logprobs._rows import list_buffers, read_span, store_row

CONFIGS = tuple(
    Config(BLOCK_V=block, PART=part, num_warps=warps, maxnreg=96)
    for block, warps in ((1024, 4), (2048, 8), (4096, 16))
    for part in (32, 64)
)


@triton.jit(do_not_specialize=["top"])
def logprobs_row_per_program(
    logprobs_ptr, ranks_ptr, top_tokens_ptr, top_logprobs_ptr, logits_ptr, tokens_ptr, keys_ptr, chosen_ptr, list_ptr,
    stride_logits_b, vocab, top, PART: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits_b
    if keys_ptr is not None:
        keys_ptr += row * tl.cdiv(vocab, PART)
        chosen_ptr += row * top
        list_ptr += row * top * PART
    chosen = tl.load(row_ptr + tl.load(tokens_ptr + row))
    largest, rest, above = read_span(row_ptr, keys_ptr, chosen, 0, vocab, PART, BLOCK_V)
    if keys_ptr is not None:
        tl.debug_barrier()  # the parts' keys are there for all threads
    store_row(
        logprobs_ptr + row, ranks_ptr + row, top_tokens_ptr + row * top, top_logprobs_ptr + row * top, row_ptr,
        keys_ptr, chosen_ptr, list_ptr, chosen, largest, rest, above, vocab, top, PART, BLOCK_V,
    )  # fmt: skip


def launch(
    run: Run,
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
    top_tokens: torch.Tensor,
    top_logprobs: torch.Tensor,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    top: int,
) -> None:
    keys, chosen, listed = (run.workspace.get(name) for name in ("keys", "chosen", "list"))
    run.launch(
        logprobs_row_per_program,
        (logits.shape[0],),
        **pointers("logprobs ranks top_tokens top_logprobs", logprobs, ranks, top_tokens, top_logprobs),
        **pointers("logits[b] tokens keys chosen list", logits, tokens, keys, chosen, listed),
        vocab=logits.shape[1],
        top=top,
        **run.config,
    )


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> dict[str, Buffer]:
    return list_buffers(axes, config)


VARIANT = Variant(
    wins="as many rows as fill the device evenly",
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    # As last_arriver's, 8 tokens a thread.
    default={
        "": Config(BLOCK_V=2048, PART=32, num_warps=8, maxnreg=96),
        "gfx942": Config(BLOCK_V=2048, PART=32, num_warps=4),
        "interpreter": Config(BLOCK_V=256, PART=8),
    },
    key=("V",),
    deterministic=True,
    batch_invariant=True,
)
