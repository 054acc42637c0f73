"""Bugs of attention kernels and of what merges their parts."""

from tests.tkernels.bugs.bug import Bug

_DECODE = "paged_decode/group_per_program"
_STAGES = "paged_decode/two_stages"
_PREFILL = "paged_prefill/sequence_per_program"
_MERGE = "merge_states/token_per_program"

BUGS = (
    Bug(
        link="https://github.com/vllm-project/vllm/pull/47671",
        title="[Bugfix] Fix int32 overflow in triton_decode_attention page offsets",
        happened="Page numbers, loaded as int32, times the page stride passed 2**31 in a large pool: wild addresses.",
        kind="32-bit offset",
        base=_DECODE,
        changes=(("mask=live, other=0).to(tl.int64)", "mask=live, other=0)"),),
        finder="check",
    ),
    Bug(
        link="https://github.com/sgl-project/sglang/pull/32087",
        title="Fix Triton SWA decode window dropping the oldest in-window key",
        happened="Every decode step past the window left its oldest key out: a window size less one, less one again.",
        kind="window",
        base=_DECODE,
        changes=(("tl.maximum(length - window, 0)", "tl.maximum(length - (window - 1), 0)"),),
        finder="check",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/pull/30887",
        title="[Bugfix] [Kernel] Triton attention kernels: mask out V blocks that fall outside sliding window",
        happened="Values before the window were loaded and multiplied by weights of 0; some of those pages held NaN.",
        kind="window",
        base=_DECODE,
        changes=(
            (
                "mask=live[:, None] & mask_dv[None, :], other=0.0)",
                "mask=(keys < length)[:, None] & mask_dv[None, :], other=0.0)",
            ),
            (
                "keys // PAGE_SIZE, mask=live, other=0)",
                "keys // PAGE_SIZE, mask=keys < length, other=0)",
            ),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/pull/39148",
        title="[BugFix][Attention] Fix NaN in Triton merge_attn_states when both LSEs are -inf",
        happened="Of two empty parts the largest log-sum-exp is -inf, and -inf - -inf is NaN.",
        kind="empty part",
        base=_MERGE,
        changes=(
            ("shift = tl.where(empty, 0.0, largest)", "shift = largest"),
            ("tl.where(empty, 1.0, total)[:, None]", "total[:, None]"),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/sgl-project/sglang/issues/40903",
        title="[Bug] DeepSeek chunked-prefix prefill merges base-2 LSE into a natural-log merge_state_v2 (silent "
        "accuracy loss on every prefix-cache hit)",
        happened="One side's log-sum-exp was in base 2, the other's natural: parts were merged with wrong weights.",
        kind="log-sum-exp",
        base=_MERGE,
        changes=(
            ("weight_a = tl.exp(lse_a - shift)", "weight_a = tl.exp2(lse_a - shift)"),
            ("weight_b = tl.exp(lse_b - shift)", "weight_b = tl.exp2(lse_b - shift)"),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/Dao-AILab/flash-attention/pull/978",
        title="Fix +/-inf in LSE returned by forward",
        happened="A query without keys got a log-sum-exp of +inf, which outweighs every other part when merged.",
        kind="log-sum-exp",
        base=_DECODE,
        changes=(
            (
                "heads, m + tl.log(total), mask=mask_g)",
                'heads, tl.where(length > 0, m + tl.log(total), float("inf")), mask=mask_g)',
            ),
        ),
        finder="wide",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/issues/42494",
        title="[Bug]: FA2 paged-KV may read stale block-table tail entries",
        happened="Table entries past a sequence's end, left by another sequence, were followed into the cache.",
        kind="stale table",
        base=_DECODE,
        changes=(
            ("keys // PAGE_SIZE, mask=live, other=0)", "keys // PAGE_SIZE)"),
            (
                "k = tl.load(k_rows[:, None] + offs_d[None, :], mask=live[:, None] & mask_d[None, :], other=0.0)",
                "k = tl.load(k_rows[:, None] + offs_d[None, :], mask=mask_d[None, :], other=0.0)",
            ),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/triton-lang/triton/issues/621",
        title="FlashAttention implementation gives wrong output when head dim != 64",
        happened="The head size stood as 64 in the kernel: of wider heads only the first 64 dims were multiplied.",
        kind="head size",
        base=_DECODE,
        changes=(("        HEAD_DIM=dim,", "        HEAD_DIM=min(dim, 64),"),),
        finder="check",
    ),
    Bug(
        link="https://github.com/sgl-project/sglang/pull/1281",
        title="[triton] Support head_dim not 2^n in triton extend and decode attention",
        happened="Blocks were as wide as a head, and a head of 96 is no power of two.",
        kind="head size",
        base=_DECODE,
        changes=(("BLOCK_D=triton.next_power_of_2(dim),", "BLOCK_D=dim,"),),
        finder="check",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/pull/47188",
        title="[Kernel][Bugfix] TRITON_MLA fix silent accuracy drop with dynamic num_kv_splits for SWA",
        happened="The first stage left splits outside the window empty; the second merged what was in their scratch.",
        kind="empty part",
        base=_STAGES,
        changes=(("    if window is not None:\n        visible = tl.minimum(length, window)\n", ""),),
        finder="check",
    ),
    Bug(
        link="https://github.com/sgl-project/sglang/issues/2465",
        title="[Bug] potential correctness with triton-attention-num-kv-splits > 1",
        happened="A short prompt leaves splits without keys, and their parts, never written, were merged.",
        kind="empty part",
        base=_STAGES,
        changes=(("if split * per_split < visible:", "if split < tl.minimum(visible, SPLITS):"),),
        finder="check",
    ),
    Bug(
        link="https://github.com/flashinfer-ai/flashinfer/pull/5262",
        title="fix(cascade): handle empty states consistently across merge paths",
        happened="The running maximum began at a finite number: what has no keys got a finite log-sum-exp.",
        kind="empty part",
        base=_STAGES,
        changes=(('m = tl.full((), float("-inf"), tl.float32)', "m = tl.full((), -5e4, tl.float32)"),),
        finder="check",
    ),
    Bug(
        link="https://github.com/flashinfer-ai/flashinfer/issues/4051",
        title="[Bug]: Cascade state merging returns NaN when all input states are empty",
        happened="exp2(-inf - -inf) of states that are all empty made NaN of both the output and the log-sum-exp.",
        kind="empty part",
        base=_DECODE,
        changes=(
            (
                "range(first // BLOCK_N * BLOCK_N, length, BLOCK_N)",
                "range(first // BLOCK_N * BLOCK_N, tl.maximum(length, 1), BLOCK_N)",
            ),
            ("total = tl.where(length > 0, total, 1.0)", "total = total"),
        ),
        finder="wide",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/pull/49294",
        title="[Bugfix][Attention] Ignore empty MLA context chunks during merge",
        happened="A chunk without keys came with a finite log-sum-exp: undefined output was merged as if it counted.",
        kind="log-sum-exp",
        base=_DECODE,
        changes=(
            (
                "heads, m + tl.log(total), mask=mask_g)",
                "heads, tl.where(length > 0, m + tl.log(total), 0.0), mask=mask_g)",
            ),
        ),
        finder="wide",
    ),
    Bug(
        link="https://github.com/sgl-project/sglang/issues/20389",
        title="[Bug] Triton attention illegal memory access for large token count",
        happened="A sequence's first token, loaded as int32, times the query stride passed 2**31 in a long batch.",
        kind="32-bit offset",
        base=_PREFILL,
        changes=(("tokens = (begin + rows // GROUP).to(tl.int64)", "tokens = begin + rows // GROUP"),),
        finder="check",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/pull/18100",
        title="[Bugfix][ROCm] fix the power of 2 exception from triton_unified_attention.py when running llama4 models "
        "and unit test fix",
        happened="A tile was as many rows as tokens times heads of a group: 3 x 5 is no power of two.",
        kind="head groups",
        base=_PREFILL,
        changes=(
            ('BLOCK_M=run.config["BLOCK_M"],', "BLOCK_M=max(1, 16 // (heads // heads_kv)) * (heads // heads_kv),"),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/pull/23424",
        title="[Bugfix] Fixing division by zero in triton_attn if query_heads/kv_heads > 16",
        happened="Tokens of a tile were 16 // group: none where a group has 20 heads, and the grid divided by it.",
        kind="head groups",
        base=_PREFILL,
        changes=(
            (
                "(context_lens.shape[0], heads_kv),",
                "(context_lens.shape[0], heads_kv, min(1, triton.cdiv(q.shape[0], 16 // (heads // heads_kv)))),",
            ),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/issues/53257",
        title="[Bug] DeepSeek-V4-Flash: non-deterministic output at temperature=0, rate scales with concurrency",
        happened="How the keys were split depended on how many rows shared the batch: other sums, other tokens.",
        kind="batch variance",
        base=_STAGES,
        changes=(('heads // heads_kv, run.config["SPLITS"], run', "heads // heads_kv, 1 + (sequences == 1), run"),),
        finder="batch",
    ),
    Bug(
        link="https://github.com/flashinfer-ai/flashinfer/issues/2424",
        title="[Feature Request] qo_len Invariant CTA Sizes",
        happened="Tiles were chosen by the batch's average number of queries: alone a request got others.",
        kind="batch variance",
        base=_PREFILL,
        changes=(("        BLOCK_N=16,", "        BLOCK_N=16 if q.shape[0] > 16 * context_lens.shape[0] else 32,"),),
        finder="batch",
    ),
)
