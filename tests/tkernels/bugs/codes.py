"""Bugs of weights stored as short codes, and of what is stored in fp8."""

from tests.tkernels.bugs.bug import Bug

_GEMM = "dequant_gemm/code_by_code"

BUGS = (
    Bug(
        link="https://github.com/vllm-project/vllm/pull/38966",
        title="fix(gptq): auto-detect v1/v2 zero-point format from actual weights",
        happened="Zero-points of format v2 were read as v1's, which are stored less one: every weight was a step off.",
        kind="zero-points",
        base=_GEMM,
        changes=(("mask=mask, other=0).to(tl.int32)", "mask=mask, other=0).to(tl.int32) + 1"),),
        finder="check",
    ),
    Bug(
        link="https://github.com/ModelCloud/GPTQModel/issues/2350",
        title="[BUG] Zero Point Calculation Error in `unpack_reorder_pack` for ExLlamaV2 AWQ Asymmetric Quantization",
        happened="Zero-points were packed less one: 0 became -1, and of that the low four bits are 15.",
        kind="zero-points",
        base=_GEMM,
        changes=(
            (
                "mask=mask, other=0).to(tl.int32)",
                "mask=mask, other=0).to(tl.int32)\n            zeros = ((zeros - 1) & 15) + 1",
            ),
        ),
        finder="check",
    ),
)
