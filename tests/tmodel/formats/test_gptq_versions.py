"""Which of GPTQ's two versions a checkpoint is: one answer for all of it, never found in silence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tmodel.conftest import WriteCheckpoint
from tests.tmodel.formats.by_hand import Kind, as_torch, linear, settings
from tests.tmodel.formats.models import SHAPE, write_models
from tests.tmodel.formats.test_layouts import INPUTS, OUTPUTS, saved
from tests.tmodel.packed import load
from tkernels.quantized.weight import dequantize
from tmodel import ConfigError, WeightError, load_config
from tmodel.formats import GPTQ, FormatWarning, parse_format
from tmodel.weights import Checkpoint

GPTQ_4 = settings(Kind("gptq", 4, 32))


def layers(directory: Path, **kinds: Kind) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """A checkpoint of linears, one for each name, and their dense weights."""
    tensors: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for seed, (name, kind) in enumerate(kinds.items()):
        parts, weight = linear(kind, OUTPUTS, INPUTS, np.random.default_rng(seed))
        tensors |= as_torch(parts, f"{name}.")
        dense[name] = torch.from_numpy(weight)
    return saved(directory, tensors), dense


def read(quantization: Any, checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return dequantize(quantization.read(checkpoint, name, OUTPUTS, INPUTS), torch.float64)


@pytest.mark.parametrize(("is_in", "said"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_one_layer_that_tells_decides_for_all_and_says_so_once(is_in: str, said: str, tmp_path: Path) -> None:
    """Also for the layers that are read before it, and those of other bits."""
    kinds = {"a": Kind(is_in, 4, 32), "k": Kind(is_in, 4, 32, symmetric=True), "v": Kind(is_in, 8, 32)}
    checkpoint, dense = layers(tmp_path, **kinds, z=Kind(is_in, 4, 32, symmetric=True))
    dynamic = {"+:[kz]": {"sym": True}, "v": {"bits": 8}}
    quantization = parse_format({**GPTQ_4, "checkpoint_format": said, "dynamic": dynamic})
    with pytest.warns(FormatWarning) as warned:
        decoded = {name: read(quantization, checkpoint, name) for name in dense}
    assert all(torch.equal(decoded[name], dense[name]) for name in dense)
    (warning,) = warned
    assert f"tensor 'k.qzeros' is of checkpoint_format {is_in}, not {said} as its config says" in str(warning.message)
    assert "Tensors that tell so: 2. The whole checkpoint is read as" in str(warning.message)


def test_layers_that_tell_opposite_things_are_refused(tmp_path: Path) -> None:
    one, other = (Kind(version, 4, 32, symmetric=True) for version in ("gptq", "gptq_v2"))
    checkpoint, _ = layers(tmp_path, a=Kind("gptq", 4, 32), b=one, c=other)
    message = (
        r"model\.safetensors: tensor 'b\.qzeros' is of checkpoint_format gptq \(all 7 at 4 bits\), but 'c\.qzeros' of "
        r"gptq_v2 \(all 8 at 4 bits\): a checkpoint must be of one"
    )
    for name in ("a", "b", "c"):
        with pytest.raises(WeightError, match=message):
            read(GPTQ(bits=4, group_size=32, sym=False), checkpoint, name)


def test_words_that_fit_both_versions_are_what_the_config_says(tmp_path: Path) -> None:
    checkpoint, dense = layers(tmp_path, a=Kind("gptq_v2", 4, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(read(parse_format({**GPTQ_4, "checkpoint_format": "gptq_v2"}), checkpoint, "a"), dense["a"])
        assert not torch.equal(read(parse_format(GPTQ_4), checkpoint, "a"), dense["a"])


def test_a_model_warns_once(tmp_path: Path) -> None:
    quantized, _ = write_models(
        tmp_path, Kind("gptq_v2", 4, 32, symmetric=True), {**GPTQ_4, "sym": True, "checkpoint_format": "gptq"}
    )
    with pytest.warns(FormatWarning, match="Tensors that tell so: 14") as warned:
        load(quantized, torch.float32)
    assert len([warning for warning in warned if warning.category is FormatWarning]) == 1


def test_zero_points_of_no_layer_are_still_unexpected(tmp_path: Path) -> None:
    checkpoint, _ = layers(tmp_path, a=Kind("gptq", 4, 32), b=Kind("gptq", 4, 32))
    read(parse_format(GPTQ_4), checkpoint, "a")
    with pytest.raises(WeightError, match=r"unexpected tensor .*'b\.qzeros'"):
        checkpoint.refuse_unused()


def test_two_names_of_the_format_that_disagree(tmp_path: Path) -> None:
    both = {**GPTQ_4, "checkpoint_format": "gptq", "format": "gptq_v2"}
    (tmp_path / "unclear").mkdir()
    checkpoint, _ = layers(tmp_path / "unclear", a=Kind("gptq_v2", 4, 32))
    with pytest.raises(WeightError, match="says checkpoint_format gptq and format gptq_v2, and no qzeros .* must go"):
        read(parse_format(both), checkpoint, "a")
    checkpoint, dense = layers(tmp_path, a=Kind("gptq_v2", 4, 32), b=Kind("gptq_v2", 4, 32, symmetric=True))
    message = r"is of checkpoint_format gptq_v2, of gptq \(checkpoint_format\) and gptq_v2 \(format\) its config says"
    with pytest.warns(FormatWarning, match=message):
        assert torch.equal(read(parse_format(both), checkpoint, "a"), dense["a"])


@pytest.mark.parametrize(("first", "second"), [("gptq_v2", "gptq_v2"), ("gptq_v2", None), (None, "gptq_v2")])
def test_two_names_of_the_format_that_agree(first: str | None, second: str | None) -> None:
    found = parse_format({**GPTQ_4, "checkpoint_format": first, "format": second})
    assert found == parse_format({**GPTQ_4, "checkpoint_format": "gptq_v2"})


@pytest.mark.parametrize("changes", [{"format": "marlin"}, {"checkpoint_format": "marlin", "format": "gptq"}])
def test_an_unknown_format_beside_a_known_one(write_checkpoint: WriteCheckpoint, changes: dict[str, str]) -> None:
    directory = write_checkpoint({}, **{**SHAPE, "quantization_config": {**GPTQ_4, **changes}})
    with pytest.raises(ConfigError, match=r"config\.json: .*format: .*'gptq' or 'gptq_v2', got 'marlin'"):
        load_config(directory)
