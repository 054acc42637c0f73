"""`smoothquant` and `fp8`: transformers reads what they write, and computes what is served."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.tmodel.packed import Driver, in_one_go, load
from tests.tmodel.quantizers.test_checkpoint import WINDOW, silently
from tests.tmodel.quantizers.test_layers import layers_of
from tests.tmodel.test_parity import random_model
from tkernels.verification.accuracy import judge
from tmodel.quantizers import METHODS
from tmodel.quantizers.calibration import collect_largest, forward
from tmodel.quantizers.checkpoint import choose_calibration_windows, plan_job, quantize_checkpoint
from tmodel.quantizers.layers import layer_groups
from tmodel.quantizers.method import Layer
from tmodel.quantizers.smoothquant import smooth_layer


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("dense"), hidden_size=64, intermediate_size=96)


@pytest.mark.parametrize("method", ["smoothquant", "fp8"])
def test_transformers_reads_it_and_computes_what_is_served(method: str, dense: Path, tmp_path: Path) -> None:
    """By the error rule: the oracle is the dense model, and the natural error transformers' with the same codes."""
    from transformers import AutoModelForCausalLM

    job = plan_job(dense, METHODS[method], 8, -1)
    tokens = torch.randint(97, (20 * WINDOW,), generator=torch.Generator().manual_seed(0))
    windows = choose_calibration_windows(job.config, tokens, WINDOW)
    out = tmp_path / "out"
    quantize_checkpoint(dataclasses.replace(job, windows=windows), out, silently)

    def served(directory: Path, dtype: torch.dtype) -> torch.Tensor:
        return Driver(load(directory, dtype), [tokens[:50]], dtype).run(in_one_go([50]))[0]

    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(tokens[:50].unsqueeze(0)).logits[0]
    oracle = served(dense, torch.float64)
    assert not torch.allclose(theirs.double(), oracle, rtol=1e-4, atol=1e-4)  # it does compute with the codes
    verdict = judge(served(out, torch.float32), oracle, theirs)
    assert verdict.ok, verdict


def test_smoothing_leaves_the_layers_function_as_it_is_and_its_inputs_smaller(dense: Path) -> None:
    layers, (weights, _) = layers_of(dense, torch.float32, WINDOW)
    hidden = torch.randn((4, WINDOW, 64), generator=torch.Generator().manual_seed(0))
    layer = Layer(0, layer_groups(layers.config, 0), weights, torch.float32, layers, hidden)
    largest = collect_largest(layers, weights, 0, hidden)
    made, changed, scales = smooth_layer(layer, largest)
    expected = forward(layers, weights, 0, hidden)
    torch.testing.assert_close(forward(layers, made, 0, hidden), expected, rtol=1e-4, atol=1e-4)
    assert set(changed) == {"input_layernorm.weight", "post_attention_layernorm.weight"}
    smoothed = collect_largest(layers, made, 0, hidden)
    for place, group in enumerate(layer.groups):
        assert not torch.equal(scales[place], torch.ones_like(scales[place]))
        torch.testing.assert_close(smoothed[place], largest[place] / scales[place], rtol=1e-4, atol=1e-6)
        if not (group.fed_by and group.fed_by.rows):  # inputs of one row share a scale
            by_weight = torch.cat([weights[f"{name}.weight"] for name in group.names]).double() * scales[place]
            torch.testing.assert_close(smoothed[place], by_weight.abs().amax(0), rtol=1e-3, atol=1e-5)
