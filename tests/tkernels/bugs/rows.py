"""Bugs of kernels that work row by row, and of recurrences: offsets, strides, grids, the last block."""

from tests.tkernels.bugs.bug import Bug

_SUMS = "decayed_sums/chunk_by_chunk"

BUGS = (
    Bug(
        link="https://github.com/flashinfer-ai/flashinfer/pull/3007",
        title="fix: use sym_int64 for strides in rmsnorm CuTe DSL kernels to prevent int32 overflow",
        happened="A row's number times a row stride of 32 bits wrapped around in a large buffer.",
        kind="32-bit offset",
        base="rms_norm/in_blocks",
        changes=(("row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),),
        finder="check",
    ),
    Bug(
        link="https://github.com/fla-org/flash-linear-attention/pull/1082",
        title="[Fix] Fix int32 overflow in pointer arithmetic across Triton kernels",
        happened="Token offsets of packed sequences were kept in int32: silent corruption past 2**31 elements.",
        kind="32-bit offset",
        base=_SUMS,
        changes=(
            ("begin = tl.load(starts_ptr + sequence).to(tl.int64)", "begin = tl.load(starts_ptr + sequence)"),
            ("end = tl.load(starts_ptr + sequence + 1).to(tl.int64)", "end = tl.load(starts_ptr + sequence + 1)"),
            ("tokens = tl.cast(start, tl.int64) + offs", "tokens = tl.cast(start, tl.int32) + offs"),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/issues/42684",
        title="[Bug]: native Triton top-k/top-p kernel assumes contiguous logits",
        happened="Rows were taken to follow each other, whatever the tensor's row stride was.",
        kind="strides",
        base="swiglu/row_and_block",
        changes=(
            ("gate = tl.load(x_ptr + row * stride_x_t + offs", "gate = tl.load(x_ptr + row * columns * 2 + offs"),
            ("up = tl.load(x_ptr + row * stride_x_t + columns", "up = tl.load(x_ptr + row * columns * 2 + columns"),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/fla-org/flash-linear-attention/pull/1077",
        title="[GDN] Fix invalid launch above 65535/HV sequences in the state kernels",
        happened="Sequences were on the grid's second axis, which ends at 65,535 programs.",
        kind="grid limit",
        base="swiglu/row_and_block",
        changes=(
            ("row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(1).to(tl.int64)"),
            ("offs = tl.program_id(1) * BLOCK", "offs = tl.program_id(0) * BLOCK"),
            ("grid = (rows, triton.cdiv(columns, block))", "grid = (triton.cdiv(columns, block), rows)"),
        ),
        finder="overflow",
    ),
    Bug(
        link="https://github.com/fla-org/flash-linear-attention/issues/215",
        title="[Bug] Numerical Instability in chunk_gla Due to Overflow of tl.exp",
        happened="The decay between two tokens was a product of two exponentials, of which one overflowed.",
        kind="overflow of exp",
        base=_SUMS,
        changes=(("tl.exp(tl.minimum(between, 0.0))", "tl.exp(decay)[:, None, :] * tl.exp(-decay)[None, :, :]"),),
        finder="check",
    ),
    Bug(
        link="https://github.com/fla-org/flash-linear-attention/issues/1142",
        title="[Bug] Log-linear attention reads `level_scales` out of bounds, and drops a gate-gradient term, when the "
        "sequence length is not a multiple of 64",
        happened="The dead rows of a partial last chunk were loaded, past the tensor's end.",
        kind="last block",
        base=_SUMS,
        changes=(
            (
                "gates = tl.load(gates_ptr + tokens[:, None] * stride_gates_t + offs_c[None, :], mask=mask, other=0.0)",
                "gates = tl.load(\n            gates_ptr + tokens[:, None] * stride_gates_t + offs_c[None, :],"
                " mask=mask_c[None, :], other=0.0\n        )",
            ),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/issues/43810",
        title="[Bug]: extract_hidden_states CUDA graph padding writes PADDING_SLOT_ID=-1 into last hidden-state KV "
        "slot",
        happened="Slot -1 of padded rows was an index from the end: padding overwrote the cache's last slot.",
        kind="padding",
        base="kv_scatter/row_per_program",
        changes=(
            ("    PAGE_SIZE: tl.constexpr,", "    SLOTS: tl.constexpr, PAGE_SIZE: tl.constexpr,"),
            (
                "    slot = tl.load(slots_ptr + token)\n",
                "    slot = tl.load(slots_ptr + token)\n    slot = tl.where(slot < 0, slot + SLOTS, slot)\n",
            ),
            (
                "        PAGE_SIZE=k_cache.shape[1],",
                "        SLOTS=k_cache.shape[0] * k_cache.shape[1],\n        PAGE_SIZE=k_cache.shape[1],",
            ),
        ),
        finder="check",
    ),
)
