"""A model from outside the tree whose layers keep a state: tokens as in a plain loop over the whole sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tmodel import architectures_with, bytes_per_state, kv_bytes_per_block, load_config
from tsched import LLM, SamplingParams

OUTSIDE = Path(__file__).parent / "outside"
VOCAB, HIDDEN, HEADS, LAYERS, EPS = 61, 32, 2, 3, 1e-6
STEM = [(7 * i + 3) % VOCAB for i in range(40)]
PROMPTS = [STEM[:1], STEM[:9], STEM[:21], [*STEM[:17], 5, 6], STEM[:33], [*STEM[:33], 1, 2, 3]]
ONES = {"temperature": 0, "ignore_eos": True}


def save_model(directory: Path, attention_every: int) -> dict[str, torch.Tensor]:
    """A model of random weights, which are returned in float64."""
    config = {
        "architectures": ["GatedRecurrenceForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "attention_every": attention_every,
        "max_position_embeddings": 96,
        "dtype": "float64",
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    shapes = load_config(directory, architectures_with([OUTSIDE])).tensors()
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * (1.0 if "embed" in name else 0.4)
        for name, shape in shapes.items()
    }
    save_file(weights, directory / "model.safetensors")
    return weights


def plain_logits(weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """[vocab] after `tokens`, all of which are computed, one after the other, with nothing kept."""
    hidden, dim = weights["model.embed_tokens.weight"][tokens], HIDDEN // HEADS  # [T, H]
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        x = F.rms_norm(hidden, (HIDDEN,), weights[f"{name}.norm.weight"], EPS)
        q, k, v = ((x @ weights[f"{name}.mixer.{part}_proj.weight"].T).view(-1, HEADS, dim) for part in "qkv")
        decay = weights.get(f"{name}.mixer.decay_proj.weight")
        if decay is None:
            q, k = _rotated(q), _rotated(k)
            mixed = F.scaled_dot_product_attention(*(part.transpose(0, 1)[None] for part in (q, k, v)), is_causal=True)[
                0
            ].transpose(0, 1)
        else:
            state, out = torch.zeros(HEADS, dim, dim, dtype=torch.float64), []
            for t, gate in enumerate((x @ decay.T).sigmoid()):
                state = gate[:, None, None] * state + k[t][:, :, None] * v[t][:, None, :]
                out.append((q[t][:, None, :] @ state)[:, 0] * dim**-0.5)
            mixed = torch.stack(out)
        hidden = hidden + mixed.flatten(1) @ weights[f"{name}.mixer.o_proj.weight"].T
    last = F.rms_norm(hidden[-1], (HIDDEN,), weights["model.norm.weight"], EPS)
    return last @ weights["lm_head.weight"].T


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    half = heads.shape[-1] // 2
    angles = torch.outer(
        torch.arange(heads.shape[0], dtype=torch.float32), 10000.0 ** -(torch.arange(half, dtype=torch.float32) / half)
    ).double()[:, None]
    first, second = heads.split(half, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def plain_tokens(weights: dict[str, torch.Tensor], prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain_logits(weights, tokens).argmax()))
    return tokens[len(prompt) :]


def make_llm(directory: Path, **options: Any) -> LLM:
    defaults = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 4, "max_model_len": 80}
    return LLM(directory, architectures_from=[OUTSIDE], device="cpu", **defaults | options)


def tokens_of(llm: LLM, count: int) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=count, **ONES))
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module", params=[0, 2], ids=["all recurrent", "with attention"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("recurrence") / "model"
    weights = save_model(directory, request.param)
    expected = [plain_tokens(weights, prompt, 20) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) > 20, "a model that repeats itself proves little"
    return directory, expected


@pytest.mark.parametrize("prefix_cache", ["none", "hash", "radix"])
@pytest.mark.parametrize("is_late", [False, True], ids=["in turn", "overlap and recorded steps"])
def test_tokens_are_those_of_a_plain_loop(model: Any, prefix_cache: str, is_late: bool) -> None:
    directory, expected = model
    llm = make_llm(directory, prefix_cache=prefix_cache, overlap=is_late, cuda_graphs=is_late)
    for _ in range(2):  # the second time the prompts are there
        assert tokens_of(llm, 20) == expected
    stats = llm.stats()
    assert stats.num_states > 0
    assert stats.num_used_states == 0
    if prefix_cache != "none":
        assert stats.prefix_cache.hit_tokens > 60
        assert stats.num_kept_states > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_tokens_are_the_same_where_requests_give_way(model: Any, preemption: str) -> None:
    directory, expected = model
    config = load_config(directory, architectures_with([OUTSIDE]))
    block, state = (count(config, 4, torch.float64) for count in (kv_bytes_per_block, bytes_per_state))
    swap_bytes = 2**20 if preemption == "swap" else 0
    llm = make_llm(
        directory, prefix_cache="hash", preemption=preemption, swap_bytes=swap_bytes,
        kv_cache_bytes=20 * block + 7 * state,
    )  # fmt: skip
    assert tokens_of(llm, 20) == expected
    stats = llm.stats()
    if block == 0:
        assert stats.num_preemptions == 0, "a request that runs needs no more memory than it has"
    else:
        assert stats.num_preemptions > 0
        assert (stats.num_blocks_swapped_in > 0) == (preemption == "swap")


def test_samples_of_one_prompt_share_its_state(model: Any) -> None:
    directory, _ = model
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True)
    alone = make_llm(directory, max_num_seqs=1)
    expected = [
        list(alone.generate([STEM[:22]], params.derive_sample_params(index))[0].outputs[0].token_ids)
        for index in range(3)
    ]
    assert expected[0] != expected[1]
    llm = make_llm(directory, prefix_cache="hash")
    outputs = llm.generate([STEM[:22]], params)[0].outputs
    assert [list(output.token_ids) for output in outputs] == expected
    assert llm.stats().num_forks == 2
    assert llm.stats().num_prefill_tokens < 2 * 22
