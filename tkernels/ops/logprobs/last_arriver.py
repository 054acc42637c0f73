"""Several programs read a row, a span each; the one that finishes last sums up and lists the most likely tokens.

Each program leaves its span's sum and its parts' keys in the workspace and counts itself in; the one that counts to the
end knows that the others' are there, and takes the count back to zero for the next launch. It adds the sums in the
order of the spans, and where these lie follows from the vocabulary alone: neither the batch nor the run changes a bit.
Wins where rows are few, whose spans then fill the device; and beside many rows, one is listed while others are read.
"""

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.logprobs._rows import LOWEST, list_buffers, merge_sums, read_span, store_row

CONFIGS = tuple(
    Config(BLOCKS=blocks, BLOCK_V=block, PART=part, num_warps=warps, maxnreg=96)
    for blocks, block, warps in ((4, 1024, 4), (8, 1024, 4), (16, 1024, 4), (4, 2048, 8), (8, 2048, 8))
    for part in (32, 64)
)


@triton.jit(do_not_specialize=["top"])
def logprobs_last_arriver(
    logprobs_ptr, ranks_ptr, top_tokens_ptr, top_logprobs_ptr, logits_ptr, tokens_ptr, arrived_ptr, largest_ptr,
    rest_ptr, above_ptr, keys_ptr, chosen_ptr, list_ptr, stride_logits_b, vocab, top, spans,
    BLOCKS: tl.constexpr, BLOCK_S: tl.constexpr, PART: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // spans).to(tl.int64)
    span = tl.program_id(0) % spans
    row_ptr = logits_ptr + row * stride_logits_b
    if keys_ptr is not None:
        keys_ptr += row * tl.cdiv(vocab, PART)
    chosen = tl.load(row_ptr + tl.load(tokens_ptr + row))
    first = span * (BLOCKS * BLOCK_V)
    end = tl.minimum(first + BLOCKS * BLOCK_V, vocab)
    largest, rest, above = read_span(row_ptr, keys_ptr, chosen, first, end, PART, BLOCK_V)
    tl.store(largest_ptr + row * spans + span, largest)
    tl.store(rest_ptr + row * spans + span, rest)
    tl.store(above_ptr + row * spans + span, above)
    # One thread counts for all: the barrier puts the others' stores before its release, as the barrier by which the
    # count reaches the others puts their loads after its acquire.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == spans - 1:
        tl.store(arrived_ptr + row, 0)
        places = tl.arange(0, BLOCK_S)
        mask = places < spans
        offs = row * spans + places
        all_largest, all_rest = merge_sums(
            tl.load(largest_ptr + offs, mask=mask, other=LOWEST),
            tl.load(rest_ptr + offs, mask=mask, other=-1.0),
            places,
        )
        if keys_ptr is not None:
            chosen_ptr += row * top
            list_ptr += row * top * PART
        store_row(
            logprobs_ptr + row, ranks_ptr + row, top_tokens_ptr + row * top, top_logprobs_ptr + row * top, row_ptr,
            keys_ptr, chosen_ptr, list_ptr, chosen, all_largest, all_rest,
            tl.sum(tl.load(above_ptr + offs, mask=mask, other=0), axis=0), vocab, top, PART, BLOCK_V,
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
    rows, vocab = logits.shape
    spans = count_spans(vocab, run.config)
    keys, chosen, listed = (run.workspace.get(name) for name in ("keys", "chosen", "list"))
    arrived, *sums = (run.workspace[name] for name in ("arrived", "largest", "rest", "above"))
    run.launch(
        logprobs_last_arriver,
        (rows * spans,),
        **pointers("logprobs ranks top_tokens top_logprobs", logprobs, ranks, top_tokens, top_logprobs),
        **pointers("logits[b] tokens keys chosen list", logits, tokens, keys, chosen, listed),
        **pointers("arrived largest rest above", arrived, *sums),
        vocab=vocab,
        top=top,
        spans=spans,
        BLOCK_S=triton.next_power_of_2(spans),
        **run.config,
    )


def count_spans(vocab: int, config: Config) -> int:
    """How many programs read a row."""
    return triton.cdiv(vocab, config["BLOCKS"] * config["BLOCK_V"])


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> dict[str, Buffer]:
    rows, spans = int(axes["B"]), count_spans(int(axes["V"]), config)
    floats, counts = Buffer((rows, spans), torch.float32), Buffer((rows, spans), torch.int32)
    arrived = Buffer((rows,), torch.int32, zeroed=True)
    return {"arrived": arrived, "largest": floats, "rest": floats, "above": counts, **list_buffers(axes, config)}


VARIANT = Variant(
    wins="rows are few, or more than fill the device evenly",
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    # 1024 tokens over 4 warps: two 16-byte loads a thread. Left alone, ptxas takes 80 registers on sm_90, and spills;
    # with up to 96 nothing does, on seven architectures. gfx942's warps have 64 threads.
    default={
        "": Config(BLOCKS=8, BLOCK_V=1024, PART=32, num_warps=4, maxnreg=96),
        "gfx942": Config(BLOCKS=4, BLOCK_V=2048, PART=32, num_warps=4),
        "interpreter": Config(BLOCKS=2, BLOCK_V=128, PART=8),
    },
    key=("V",),
    deterministic=True,
    batch_invariant=True,
)
