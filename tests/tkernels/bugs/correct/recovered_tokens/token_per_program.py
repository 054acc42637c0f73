"""One program finds one token's recovery."""

import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers


@triton.jit
def recovered_tokens_token_per_program(
    out_ptr, probs_ptr, draft_ptr, noise_ptr, stride_out_t, stride_probs_b, stride_noise_t, requests, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < vocabulary
    row = probs_ptr + token % requests * stride_probs_b
    draft = tl.load(draft_ptr + token)
    noise = tl.load(noise_ptr + token * stride_noise_t + offs, mask=mask, other=1.0)
    probs = tl.load(row + offs, mask=mask & (offs != draft), other=0.0)
    best = tl.argmax(tl.where(mask, probs / noise, -1.0), axis=0)
    tl.store(out_ptr + token * stride_out_t + offs, (offs == best).to(tl.float32), mask=mask)


def launch(run: Run, out, probs, draft, noise) -> None:
    tokens, vocabulary = noise.shape
    run.launch(
        recovered_tokens_token_per_program,
        (tokens,),
        **pointers("out[t] probs[b] draft noise[t]", out, probs, draft, noise),
        requests=probs.shape[0],
        vocabulary=vocabulary,
        BLOCK=triton.next_power_of_2(vocabulary),
    )


VARIANT = Variant(
    wins="never: it is as short as can be",
    launch=launch,
    default={"": Config()},
    deterministic=True,
    batch_invariant=True,
)
