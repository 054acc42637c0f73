"""A checkpoint's own scales of an fp8 cache: read, written through and read back, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tmodel.formats.by_hand import Kind, settings
from tests.tmodel.formats.models import SHAPE, write_models
from tests.tmodel.formats.test_models import LIMITS, served, tokens
from tests.tmodel.packed import Driver, load
from tmodel import ConfigError, WeightError, kernel_axes, load_config
from tmodel.decoders.attention import AttentionLayer
from tmodel.kv_cache import kv_bytes_per_block
from tmodel.layers import PagedAttention

KIND = Kind("compressed-tensors", 4, 32)
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
SCALES = {0: (0.125, 0.25), 1: (0.25, 0.125)}
"""Of keys and of values, by layer; powers of two, and none of the model's keys and values is 448 times as large."""


def write(directory: Path, scales: dict[int, tuple[float, float]], scheme: dict[str, Any] | None = SCHEME) -> Path:
    """The quantized model with `scales`; without a scheme also without them."""
    quantized, _ = write_models(directory, KIND, {**settings(KIND), "kv_cache_scheme": scheme})
    if scheme is not None:
        stored = load_file(quantized / "model.safetensors")
        for layer, pair in scales.items():
            for name, scale in zip(("k_scale", "v_scale"), pair, strict=True):
                stored[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale], dtype=torch.bfloat16)
        save_file(stored, quantized / "model.safetensors")
    return quantized


def run(directory: Path) -> Driver:
    """Twenty tokens of one sequence and nine of another: prefill chunks alone, one beside a decode row, decode rows."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(SHAPE["vocab_size"], (count,), generator=generator) for count in (20, 9)]
    driver = Driver(load(directory, torch.float32), sequences, torch.float32)
    driver.run([[(0, 7), (1, 7)], [(0, 12), (1, 1)], [(0, 1), (1, 1)]])
    return driver


def test_keys_and_values_are_kept_in_e4m3_times_their_scales(tmp_path: Path) -> None:
    plain, scaled = (run(write(tmp_path / name, SCALES, scheme)) for name, scheme in (("a", None), ("b", SCHEME)))
    for part, scale in enumerate(SCALES[0]):  # the first layer's keys and values are those of the dense cache
        wide, narrow = plain.cache[0][part], scaled.cache[0][part]
        assert narrow.dtype == torch.float8_e4m3fn
        written = wide.isfinite()
        assert int(written.sum()) == 29 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
        assert bool((wide[written].abs() < 448 * scale).all())
        read = narrow.float()[written] * scale
        # e4m3 has three bits after the first, and steps of 2**-9 below 2**-6.
        bound = torch.maximum(wide[written].abs() * 2**-4, torch.tensor(scale * 2**-10))
        assert bool(((read - wide[written]).abs() <= bound).all())
        assert not torch.equal(read, wide[written])


def test_a_layer_writes_and_reads_its_cache_with_its_scales() -> None:
    told: list[dict[str, Any]] = []

    class Step:
        positions = slots = torch.arange(4)
        kernels = SimpleNamespace(qk_norm_rope_scatter=lambda *parts, **keywords: told.append(keywords))

        def __call__(self, q: torch.Tensor, *parts: Any, **keywords: Any) -> torch.Tensor:
            told.append(keywords)
            return q

    scales = {"k_scale": torch.tensor([2.0]), "v_scale": torch.tensor([3.0])}
    shape: Any = SimpleNamespace(
        num_heads=1, num_kv_heads=1, head_dim=2, head_norm_eps=None, joint_norm_eps=None, window=0
    )
    as_it_is: Any = lambda x: x  # noqa: E731
    cache, step = torch.zeros(1), cast("PagedAttention", Step())
    AttentionLayer(shape, as_it_is, None, None, as_it_is, scales, {}).mix(
        torch.zeros(4, 6), step, (cache, cache), cache, cache
    )
    assert len(told) == 2
    assert all(one[name] is scale for one in told for name, scale in scales.items())


def test_scales_twice_as_large_change_next_to_nothing(tmp_path: Path) -> None:
    """A power of two that is divided out and multiplied in again moves exponents alone, but of what is nearly 0."""
    doubled = {layer: (2 * k, 2 * v) for layer, (k, v) in SCALES.items()}
    once, twice, plain = (
        run(write(tmp_path / str(index), scales, scheme)).logits
        for index, (scales, scheme) in enumerate(((SCALES, SCHEME), (doubled, SCHEME), (SCALES, None)))
    )
    for ours, theirs, wide in zip(once, twice, plain, strict=True):
        error = (ours - wide).square().mean() / wide.square().mean()
        assert float((ours - theirs).square().mean() / wide.square().mean()) < 1e-3 * float(error)
        assert 0 < float(error) < 0.02


def test_the_engine_serves_it_with_pages_a_quarter_as_large(tmp_path: Path) -> None:
    directory, wide = write(tmp_path / "a", SCALES), write(tmp_path / "b", SCALES, None)
    config = load_config(directory)
    assert 4 * kv_bytes_per_block(config, 16, torch.float32) == kv_bytes_per_block(load_config(wide), 16, torch.float32)
    for op, axes in kernel_axes(config, LIMITS).items():
        if op in ("paged_decode", "paged_prefill", "qk_norm_rope_scatter"):
            assert isinstance(axes, dict)
            assert (axes["kv"], axes["k_scale"], axes["v_scale"]) == ("float8_e4m3fn", True, True)
    llm = served(directory)
    assert all(len(made) == 8 for made in tokens(llm))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dynamic": True}, "kv_cache_scheme: dynamic: .*False, got True"),
        ({"num_bits": 4}, "kv_cache_scheme: num_bits: .*8, got 4"),
        ({"type": "int"}, "kv_cache_scheme: type: .*'float', got 'int'"),
        (
            {"strategy": "attn_head"},
            "kv_cache_scheme: strategy: .*'tensor', got 'attn_head'. Supported are 8-bit floats",
        ),
        ({"num_bits": None}, "kv_cache_scheme: num_bits: Field required"),
    ],
)
def test_another_scheme_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = write(tmp_path, SCALES, {**SCHEME, **changes})
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        load_config(directory)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "'model.layers.1.self_attn.k_scale' is missing"),
        (torch.tensor([0.0]), "'model.layers.1.self_attn.k_scale' is 0; what is cached is divided by it"),
        (torch.tensor([-1.0]), "'model.layers.1.self_attn.k_scale' is -1; what is cached is divided by it"),
        (torch.tensor([1e-45]), "'model.layers.1.self_attn.k_scale' is 1.4013e-45; what is cached is divided by it"),
        (torch.tensor([torch.nan]), r"'model.layers.1.self_attn.k_scale' has a NaN at \[0\]"),
        (
            torch.tensor([1.0, 1.0]),
            r"'model.layers.1.self_attn.k_scale' has shape \[2\], where \[1\] = \[1\] is expected",
        ),
    ],
)
def test_a_scale_that_cannot_be_meant(tmp_path: Path, value: torch.Tensor | None, message: str) -> None:
    directory, name = write(tmp_path, SCALES), "model.layers.1.self_attn.k_scale"
    stored = load_file(directory / "model.safetensors")
    del stored[name]
    save_file(stored if value is None else {**stored, name: value}, directory / "model.safetensors")
    with pytest.raises(WeightError, match=message):
        load(directory, torch.float32)


def test_a_scale_without_a_scheme_is_unexpected(tmp_path: Path) -> None:
    directory = write(tmp_path, SCALES)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]["kv_cache_scheme"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match=r"unexpected tensor 'model\.layers\.0\.self_attn\.k_scale'"):
        load(directory, torch.float32)
