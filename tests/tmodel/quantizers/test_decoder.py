"""The decoder in plain torch against transformers', and what calibration collects against its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.tmodel.test_parity import random_model
from tmodel import load_config
from tmodel.quantizers.calibration import choose_windows, forward, head_gradient, see_inputs, sensitivities
from tmodel.quantizers.decoder import GROUPS, LINEARS, decoder_for, layer_shapes
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


def test_everything_is_as_transformers_and_autograd_have_it(directory: Path) -> None:
    config, tokens = load_config(directory), windows()
    decoder = decoder_for(config, S, torch.float64)
    with Checkpoint(directory, device="cpu", dtype=torch.float64) as checkpoint:
        layers = [
            {name: checkpoint.tensor(f"model.layers.{i}.{name}", shape) for name, shape in layer_shapes(config).items()}
            for i in range(config.num_layers)
        ]
        embedding = checkpoint.tensor("model.embed_tokens.weight", (97, config.fields.hidden_size))
        norm = checkpoint.tensor("model.norm.weight", (config.fields.hidden_size,))
        head = checkpoint.tensor("lm_head.weight", (97, config.fields.hidden_size))
    hidden = [embedding[tokens[:, :-1]]]
    for i, weights in enumerate(layers):
        hidden.append(forward(decoder, weights, i, hidden[-1]))
    logits = F.rms_norm(hidden[-1], norm.shape, norm, config.fields.rms_norm_eps) @ head.t()

    model = transformers_model(directory)
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.removeprefix("model.layers.0.") in LINEARS:
            module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0].detach()}))
    theirs = model(input_ids=tokens[:, :-1]).logits
    # transformers computes its norms' mean in float32, whatever the dtype.
    torch.testing.assert_close(logits, theirs.detach(), rtol=1e-4, atol=1e-4)

    found = see_inputs(decoder, layers[0], 0, hidden[0])
    for group, names in enumerate(GROUPS):
        x = seen[f"model.layers.0.{names[0]}"].flatten(0, 1)
        torch.testing.assert_close(found[group].second_moment, x.t() @ x, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(found[group].mean_abs, x.abs().mean(0), rtol=1e-4, atol=1e-5)
    assert see_inputs(decoder, layers[0], 0, hidden[0], [1]).keys() == {1}

    expected = dict.fromkeys(LINEARS, 0.0)
    for window in tokens:
        model.zero_grad()
        out = model(input_ids=window[None, :-1]).logits[0]
        F.cross_entropy(out, window[1:], reduction="sum").backward()
        for name in LINEARS:
            expected[name] += model.get_parameter(f"model.layers.0.{name}.weight").grad.square() / len(tokens)
    gradient = head_gradient(norm, head, config.fields.rms_norm_eps, hidden[-1], tokens[:, 1:])
    _, gradient = sensitivities(decoder, layers[1], 1, hidden[1], gradient)
    minded, _ = sensitivities(decoder, layers[0], 0, hidden[0], gradient)
    for name in LINEARS:
        scale = expected[name].abs().max()
        torch.testing.assert_close(minded[name] / scale, expected[name] / scale, rtol=1e-3, atol=1e-4)


def test_windows_are_spread_over_the_text() -> None:
    assert choose_windows(torch.arange(11), 5).tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    many = choose_windows(torch.arange(1_000_000), 512)
    assert many.shape == (128, 513)
    assert int(many[0, 0]) == 0
    assert int(many[-1, 0]) > 980_000
    with pytest.raises(ValueError, match="5 tokens do not make one window of 5"):
        choose_windows(torch.arange(5), 5)
