"""What the methods are for: each costs a trained model less perplexity than round-to-nearest with as many bits does."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tkernels
from experiments.quantization.evaluation import WindowReader, cut_windows, evaluate
from experiments.quantization.texts import tokenize_text
from tests.tmodel.test_train import SMALL
from tmodel.corpus import standard_library_corpus
from tmodel.presets import make_from_recipe
from tmodel.quantizers import METHODS
from tmodel.quantizers.checkpoint import choose_calibration_windows, plan_job, quantize_checkpoint

WINDOW = 64
READ_BY = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained for seconds, with a few inputs that matter most, as large language models have (Lin et al., 2024,
    section 3.1) and this one has not had the time to learn: 4 in 64 come 8 times as large to weights an 8th as large.
    """
    directory = tmp_path_factory.mktemp("trained") / "model"
    make_from_recipe(SMALL, directory, seed=0)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for norm, linears in READ_BY.items():
        salient = torch.randperm(SMALL.config["hidden_size"], generator=generator)[:4]
        weights[f"model.layers.0.{norm}.weight"][salient] *= 8
        for name in linears:
            weights[f"model.layers.0.{name}.weight"][:, salient] /= 8
    save_file(weights, directory / "model.safetensors")
    return directory


def test_each_method_costs_less_perplexity_than_rounding(dense: Path, tmp_path: Path) -> None:
    corpus = standard_library_corpus(SMALL.corpus_bytes)
    calibration, held_out = (
        tokenize_text("".join(texts)[:16_384], dense)[:8192] for texts in (corpus.training, corpus.held_out)
    )
    windows = cut_windows(held_out, WINDOW)

    def reader(directory: Path) -> WindowReader:
        return WindowReader(directory, WINDOW, device=torch.device("cpu"), dtype=torch.float32, ops=tkernels.OPS)

    reference = reader(dense)
    nats = evaluate(reference, windows).nats

    def cost(method: str, bits: int, group_size: int) -> torch.Tensor:
        """(nats more than the dense model's, nats from its distribution), a held-out token."""
        job = plan_job(dense, METHODS[method], bits, group_size)
        out = tmp_path / f"{method}-{bits}"
        quantize_checkpoint(
            replace(job, windows=choose_calibration_windows(job.config, calibration, WINDOW)), out, lambda done: None
        )
        found = evaluate(reader(out), windows, reference)
        assert found.kl is not None
        return torch.tensor((found.nats - nats, found.kl))

    # Of what rounding costs, seeds 0 to 2 were measured at 0.02 to 0.14 with GPTQ, 0.13 to 0.35 with AWQ, and 0.22 to
    # 0.43 with SqueezeLLM.
    rounding = cost("rtn", 4, 32)
    assert bool((cost("gptq", 4, 32) < 0.3 * rounding).all())
    assert bool((cost("awq", 4, 32) < 0.5 * rounding).all())
    assert bool((cost("squeezellm", 3, -1) < 0.6 * cost("rtn", 3, 32)).all())
    # In 8 bits, and the inputs of every linear too: of the dense model's perplexity 1% in e4m3, 2% in int8.
    assert float(cost("fp8", 8, -1)[0]) < math.log(1.01)
    assert float(cost("smoothquant", 8, -1)[0]) < math.log(1.02)
