"""Races: results that are right in the order in which an interpreter runs programs, and in most runs on a GPU."""

from tests.tkernels.bugs.bug import Bug

ATOMICS = "matmul/split_k_atomics"
LAST = "matmul/last_arriver"
LOCK = "column_sums/under_a_lock"
RECOVERED = "recovered_tokens/token_per_program"
ROTARY = "qk_norm_rope/head_per_program"

# The launch that clears the sums, and what it runs: left out where a program of the product is to do it.
NO_CLEARING = (
    """    run.launch(
        matmul_split_k_atomics_clear, (triton.cdiv(rows * columns, 1024),), sums_ptr=sums, elements=rows * columns,
        BLOCK=1024,
    )  # fmt: skip
""",
    "",
)
_ADDED = "    tl.atomic_add(sums_ptr + offs_m[:, None] * stride_sums_m"

BUGS = (
    Bug(
        link="https://github.com/vllm-project/vllm/pull/30719",
        title="[ROCm][GPTQ][Bugfix] Fix GPTQ GEMM kernel output zeroing race condition",
        happened="The blocks of split 0 cleared the output, behind a barrier that no other block waits at.",
        kind="race",
        base=ATOMICS,
        changes=(
            NO_CLEARING,
            (
                _ADDED,
                "    if split == 0:\n        zeros = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n"
                "        tl.store(sums_ptr + offs_m[:, None] * stride_sums_m + offs_n[None, :], zeros, mask=mask)\n"
                "    tl.debug_barrier()\n" + _ADDED,
            ),
        ),
        finder="order",
    ),
    Bug(
        link="https://github.com/triton-lang/triton/pull/6307",
        title="[Tutorial] Add barrier before atomic in layernorm backward",
        happened="One thread gave the lock back while the others were still adding to the shared sums.",
        kind="race",
        base=LOCK,
        changes=(("    tl.debug_barrier()\n", ""),),
        finder="race",
    ),
    Bug(
        link="https://github.com/flashinfer-ai/flashinfer/pull/4131",
        title="fix(topk): converge CTA before publishing multi-CTA radix group barrier arrival",
        happened="One thread counted its block in while the block's other threads were still writing.",
        kind="race",
        base=LAST,
        changes=(("    tl.debug_barrier()\n", ""),),
        finder="race",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/pull/41444",
        title="[Bugfix] Fix persistent_topk inter-CTA init race on RadixRowState",
        happened="Block 0 cleared the arrival counter with a plain store, which the other blocks did not wait for.",
        kind="race",
        base=LAST,
        changes=(
            (
                "    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n",
                "    if split == 0:\n        tl.store(arrived_ptr, 0)\n    tl.debug_barrier()\n"
                "    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n",
            ),
            ('"arrived": Buffer((tiles,), torch.int32, zeroed=True)', '"arrived": Buffer((tiles,), torch.int32)'),
        ),
        finder="order",
    ),
    Bug(
        link="https://github.com/flashinfer-ai/flashinfer/pull/3615",
        title="fix(topk): eliminate multi-CTA radix top-k stream hangs on SM120/SM121",
        happened="The leading block cleared the arrival counter at its end, whether the others had seen it or not.",
        kind="race",
        base=LAST,
        changes=(
            ("        tl.store(arrived_ptr, 0)\n", ""),
            (
                "        tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask)\n",
                "        tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask)\n"
                "    if split == 0:\n        tl.store(arrived_ptr, 0)\n",
            ),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/triton-lang/triton/pull/10594",
        title="[AMD] Fix race in f16 streamK gemm kernel",
        happened="The owner of a tile could take one that had a part left to do for finished, and added up too early.",
        kind="race",
        base=LAST,
        changes=(("if arrived == SPLITS - 1:", "if arrived == 1:"), ("SPLITS=2, BLOCK_M", "SPLITS=3, BLOCK_M")),
        finder="check",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/pull/23829",
        title="[bugfix] [spec-decoding] fix data race in sample_recovered_tokens_kernel (vLLM v1)",
        happened="Each program set the draft token's probability to 0 in memory that all read, and restored it after.",
        kind="race",
        base=RECOVERED,
        changes=(
            (
                "    probs = tl.load(row + offs, mask=mask & (offs != draft), other=0.0)\n",
                "    kept = tl.load(row + draft)\n    tl.store(row + draft, 0.0)\n    tl.debug_barrier()\n"
                "    probs = tl.load(row + offs, mask=mask, other=0.0)\n",
            ),
            (
                "(offs == best).to(tl.float32), mask=mask)\n",
                "(offs == best).to(tl.float32), mask=mask)\n    tl.debug_barrier()\n    tl.store(row + draft, kept)\n",
            ),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/sgl-project/sglang/issues/29748",
        title="[Bug] GPTQ gptq_gemm: uninitialized output accumulated into by multi-block atomicAdd (data race, "
        "silent wrong results)",
        happened="Blocks added to uninitialized memory, which one of them cleared meanwhile; mostly it was zero.",
        kind="race",
        base=ATOMICS,
        changes=(
            NO_CLEARING,
            (
                "    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n",
                "    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)\n    if split == 0:\n"
                "        out_ptrs = sums_ptr + offs_m[:, None] * stride_sums_m + offs_n[None, :]\n"
                "        tl.store(out_ptrs, sums, mask=mask_m[:, None] & mask_n[None, :])\n    tl.debug_barrier()\n",
            ),
        ),
        finder="order",
    ),
    Bug(
        link="https://github.com/fla-org/flash-linear-attention/issues/889",
        title="[Bug] Non-atomic shared-memory accumulation causes nondeterministic dg gradients in tilelang chunk_bwd",
        happened="All added to one sum by loading, adding and storing, without an atomic or a lock.",
        kind="race",
        base=LOCK,
        changes=(
            ('    while tl.atomic_cas(lock_ptr, 0, 1, sem="acquire") == 1:\n        pass\n', ""),
            ('    tl.debug_barrier()\n    tl.atomic_xchg(lock_ptr, 0, sem="release")\n', ""),
        ),
        finder="race",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/pull/48872",
        title="[Helion] Fix fused_qk_norm_rope in-place read-after-write race on B200",
        happened="Threads stored a normalized head, and others loaded its halves back: no barrier between.",
        kind="race",
        base=ROTARY,
        changes=(
            ("    y = tl.load(row + partner, mask=mask, other=0.0).to(tl.float32)\n", ""),
            ("        y = y * scale * tl.load(weight_ptr + partner, mask=mask, other=0.0).to(tl.float32)\n", ""),
            (
                "    position = tl.load(",
                "    tl.store(row + offs, x, mask=mask)\n    y = tl.load(row + partner, mask=mask, other=0.0)\n"
                "    position = tl.load(",
            ),
            (
                "    deterministic=True,",
                '    supports=lambda axes, device: None if axes["activation"] == "float32" else "it is for fp32",\n'
                "    deterministic=True,",
            ),
        ),
        finder="race",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/issues/52415",
        title="[Bug] XPU qnorm/rope kernel: overlapping stores in one program corrupt the KV cache "
        "nondeterministically",
        happened="A head was stored unrotated, and rotated parts over it by other threads: whoever came last stayed.",
        kind="race",
        base=ROTARY,
        changes=(
            (
                "    tl.store(row + offs, out.to(q_ptr.dtype.element_ty), mask=mask)\n",
                "    tl.store(row + offs, x.to(q_ptr.dtype.element_ty), mask=mask)\n"
                "    turned = y * cos + tl.where(is_first, x, -x) * sin\n"
                "    tl.store(row + partner, turned.to(q_ptr.dtype.element_ty), mask=mask & rotated)\n",
            ),
        ),
        finder="race",
    ),
    Bug(
        link="https://github.com/triton-lang/triton/issues/1097",
        title="Implicit barrier semantics in Triton",
        happened="A program stored a row and loaded one element of it back, which another thread was still to store.",
        kind="race",
        base=RECOVERED,
        changes=(
            (
                "    best = tl.argmax(tl.where(mask, probs / noise, -1.0), axis=0)\n",
                "    best = tl.argmax(tl.where(mask, probs / noise, -1.0), axis=0)\n"
                "    tl.store(out_ptr + token * stride_out_t + offs, probs / noise, mask=mask)\n"
                "    best = tl.where(tl.load(out_ptr + token * stride_out_t + best) >= 0, best, 0)\n"
                "    tl.debug_barrier()\n",
            ),
        ),
        finder="race",
    ),
)
