"""A real model on the tests' device: with a GPU, graphs, streams and pinned copies; else what stands for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import DEVICE
from tsched import LLM, SamplingParams

PROMPTS = [[(5 * i + j) % 299 + 1 for j in range(3 + 4 * i)] for i in range(7)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=3),
    SamplingParams(seed=3, max_tokens=20, top_k=20, top_p=0.9),
    SamplingParams(seed=4, max_tokens=16, repetition_penalty=1.4, frequency_penalty=0.3),
    SamplingParams(temperature=0, max_tokens=30, min_tokens=6, stop_token_ids=[17, 40]),
    SamplingParams(temperature=0, max_tokens=25, stop=["e", "s"]),
    SamplingParams(temperature=2.0, max_tokens=18, min_p=0.02),
]


def serve(checkpoint: Path, **options: bool) -> list[tuple[list[int], str, str]]:
    llm = LLM(
        checkpoint, dtype="float32", device=DEVICE, max_num_seqs=5, max_num_batched_tokens=16, block_size=4,
        kv_cache_bytes=30 * 4 * 2 * 2 * 2 * 16 * 4, **options,
    )  # fmt: skip
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.stats().num_used_blocks == 0
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_overlap_and_graphs_change_no_token(checkpoint: Path, overlap: bool, cuda_graphs: bool) -> None:
    plain = serve(checkpoint, overlap=False, cuda_graphs=False)
    assert len({reason for *_, reason in plain}) == 2
    assert serve(checkpoint, overlap=overlap, cuda_graphs=cuda_graphs) == plain
