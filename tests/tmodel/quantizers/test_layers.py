"""A model layer by layer against the whole of it, and what calibration collects against its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.tmodel.test_parity import random_model
from tmodel import Architectures, load_config
from tmodel.json_files import read_json
from tmodel.quantizers.calibration import choose_windows, collect_inputs, forward, head_gradient, sensitivities
from tmodel.quantizers.layers import (
    TransformersLayers,
    Weights,
    layer_groups,
    layer_tensors,
    linear_names,
    outer_tensors,
)
from tmodel.weights import Checkpoint

S = 20
SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads, biased": {"heads": (4, 2), "attention_bias": True},
    "windows": {"heads": (6, 2), "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
}


@pytest.fixture(params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return random_model(tmp_path, torch.float64, **SHAPES[request.param])


def transformers_model(directory: Path) -> Any:
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float64)


def windows() -> torch.Tensor:
    return torch.randint(97, (3, S + 1), generator=torch.Generator().manual_seed(0))


def layers_of(
    directory: Path, dtype: torch.dtype, num_tokens: int, architectures: Architectures | None = None
) -> tuple[TransformersLayers, list[Weights]]:
    """The model's layers for windows of num_tokens, and the weights of each."""
    config = load_config(directory, architectures)
    with Checkpoint(directory, device="cpu", dtype=dtype) as checkpoint:
        weights = [
            {name: checkpoint.tensor(f"{config.layer_prefix(i)}{name}", shape) for name, shape in tensors.items()}
            for i, tensors in enumerate(layer_tensors(config, i) for i in range(config.num_layers))
        ]
        outer = {name: checkpoint.tensor(name, shape) for name, shape in outer_tensors(config).items()}
    return TransformersLayers(config, read_json(directory / "config.json"), num_tokens, outer), weights


def test_everything_is_as_transformers_and_autograd_have_it(directory: Path) -> None:
    tokens = windows()
    layers, weights = layers_of(directory, torch.float64, S)
    groups = layer_groups(layers.config, 0)
    linears = linear_names(groups)
    hidden = [layers.embed(tokens[:, :-1])]
    for i, own in enumerate(weights):
        hidden.append(forward(layers, own, i, hidden[-1]))
    logits = layers.logits(hidden[-1])

    model = transformers_model(directory)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.removeprefix("model.layers.0.") in linears:
            module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].detach()}))
    theirs = model(input_ids=tokens[:, :-1]).logits
    torch.testing.assert_close(logits, theirs.detach(), rtol=1e-12, atol=1e-12)

    found = collect_inputs(layers, weights[0], 0, hidden[0])
    assert found.keys() == set(range(4))
    for place, group in enumerate(groups):
        x = seen[f"model.layers.0.{group.names[0]}"].flatten(0, 1)
        torch.testing.assert_close(found[place].second_moment, x.t() @ x, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[place].mean_abs, x.abs().mean(0), rtol=1e-9, atol=1e-9)
    assert collect_inputs(layers, weights[0], 0, hidden[0], [1]).keys() == {1}

    expected = dict.fromkeys(linears, 0.0)
    for window in tokens:
        model.zero_grad()
        out = model(input_ids=window[None, :-1]).logits[0]
        F.cross_entropy(out, window[1:], reduction="sum").backward()
        for name in linears:
            expected[name] += model.get_parameter(f"model.layers.0.{name}.weight").grad.square() / len(tokens)
    gradient = head_gradient(layers, hidden[-1], tokens[:, 1:])
    _, gradient = sensitivities(layers, weights[1], 1, hidden[1], gradient)
    minded, _ = sensitivities(layers, weights[0], 0, hidden[0], gradient)
    for name in linears:
        scale = expected[name].abs().max()
        torch.testing.assert_close(minded[name] / scale, expected[name] / scale, rtol=1e-6, atol=1e-8)


def test_weights_that_are_handed_in_are_used(directory: Path) -> None:
    layers, weights = layers_of(directory, torch.float64, S)
    hidden = layers.embed(windows()[:, :-1])
    changed = {name: torch.zeros_like(tensor) for name, tensor in weights[0].items()}
    assert torch.equal(layers(changed, 0, hidden), hidden)
    assert not torch.equal(layers(weights[0], 0, hidden), hidden)


def test_windows_are_spread_over_the_text() -> None:
    assert choose_windows(torch.arange(11), 5).tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    many = choose_windows(torch.arange(1_000_000), 512)
    assert many.shape == (128, 513)
    assert int(many[0, 0]) == 0
    assert int(many[-1, 0]) > 980_000
    with pytest.raises(ValueError, match="5 tokens do not make one window of 5"):
        choose_windows(torch.arange(5), 5)
