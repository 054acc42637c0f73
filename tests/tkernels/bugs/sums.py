"""Bugs of kernels that add up parts: what is cleared, in which order they are added, what tuning runs."""

from tests.tkernels.bugs.bug import Bug
from tests.tkernels.bugs.races import ATOMICS, NO_CLEARING

BUGS = (
    Bug(
        link="https://github.com/triton-lang/triton/issues/2183",
        title="Matmul bug? when split_K >1",
        happened="Splits were added to an output of torch.empty, which only the autotuner's hook would have cleared.",
        kind="left uncleared",
        base=ATOMICS,
        changes=(NO_CLEARING,),
        finder="check",
    ),
    Bug(
        link="https://github.com/triton-lang/triton/issues/4217",
        title="[BUG] Using both reduction and atomic operations along with autotune makes incorrect results",
        happened="At a new shape the autotuner runs each config, and each adds its sums to what the others left.",
        kind="tuning in place",
        base=ATOMICS,
        changes=(
            (
                "    run.launch(\n        matmul_split_k_atomics, (triton",
                "    for splits in (1, splits):  # each config is tried\n      run.launch(\n"
                "        matmul_split_k_atomics, (triton",
            ),
        ),
        finder="check",
    ),
    Bug(
        link="https://github.com/triton-lang/triton/issues/6547",
        title="Using triton.autotune with the kernel updated in place will result in incorrect output",
        happened="The autotuner ran a kernel that works in place many times on the caller's own tensors.",
        kind="tuning in place",
        base="qk_norm_rope/head_per_program",
        changes=(("    run.launch(\n", "    for _ in range(3):  # each config is tried\n      run.launch(\n"),),
        finder="check",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/issues/56887",
        title="[Bug]: moe_wna16_gemm (csrc/libtorch_stable/moe/moe_wna16.cu) is not run-to-run deterministic: split-K "
        "partial sums are combined with 16-bit atomicAdd",
        happened="Parts of a sum were added up in 16 bits by atomics: other bits in every order.",
        kind="order of sums",
        base=ATOMICS,
        changes=(
            ("tl.zeros((BLOCK,), tl.float32)", "tl.zeros((BLOCK,), tl.float16)"),
            ("+ offs_n[None, :], sums, mask=mask, sem", "+ offs_n[None, :], sums.to(tl.float16), mask=mask, sem"),
            ("+ offs_n, mask=mask)\n    if bias_ptr", "+ offs_n, mask=mask).to(tl.float32)\n    if bias_ptr"),
            ('Buffer((axes["M"], axes["N"]), torch.float32)', 'Buffer((axes["M"], axes["N"]), torch.float16)'),
            ("Config(SPLITS=2)", "Config(SPLITS=4)"),
            (
                "    deterministic=False,",
                '    supports=lambda axes, device: "16 bits" if axes["activation"] != "float16" else None,\n'
                "    deterministic=True,",
            ),
        ),
        finder="order",
    ),
    Bug(
        link="https://github.com/vllm-project/vllm/pull/42240",
        title="[Bugfix][ROCm] Force splitK=0 in AiterFp8BlockScaledMMKernel for determinism",
        happened="Partial products were added up by floating-point atomics: two calls differed in their last bits.",
        kind="order of sums",
        base=ATOMICS,
        changes=(("Config(SPLITS=2)", "Config(SPLITS=4)"), ("deterministic=False", "deterministic=True")),
        finder="order",
    ),
)
