"""The command that compares with other tools notices what differs; the tools themselves are its to install."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tmodel.formats.by_hand import Kind
from tests.tmodel.formats.models import write_models
from tests.tmodel.formats.written_elsewhere import KINDS, PACKERS, REQUIREMENTS, find_differences

LAYER = "model.layers.1.mlp.down_proj"


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], Path]:
    """(a quantized checkpoint, what a tool that is right decodes of it, where that is saved)."""
    quantized, dense = write_models(tmp_path, Kind("gptq", 4, 32))
    decoded = {
        name.removesuffix(".weight"): tensor.half()
        for name, tensor in load_file(dense / "model.safetensors").items()
        if name.endswith("_proj.weight")
    }
    assert len(decoded) == 14
    return quantized, decoded, tmp_path / "decoded.safetensors"


def test_equal_weights_are_equal_and_one_that_differs_is_named(
    made: tuple[Path, dict[str, torch.Tensor], Path],
) -> None:
    quantized, decoded, file = made
    save_file(decoded, file)
    assert find_differences(quantized, file) == (sum(weight.numel() for weight in decoded.values()), [])
    decoded[LAYER][3, 7] += 0.001
    save_file(decoded, file)
    (problem,) = find_differences(quantized, file)[1]
    assert f"{LAYER}: 1 of {decoded[LAYER].numel()} weights differ, the first at (3, 7)" in problem


def test_a_layer_that_only_one_has_is_named(made: tuple[Path, dict[str, torch.Tensor], Path]) -> None:
    quantized, decoded, file = made
    save_file({**{name: decoded[name] for name in decoded if name != LAYER}, "other": torch.zeros(1)}, file)
    other, missing = find_differences(quantized, file)[1]
    assert other == "other: there is no such layer"
    assert missing == f"{LAYER}: is read as quantized, which the tool denies"


def test_every_kind_has_a_packer_and_what_it_needs() -> None:
    assert {kind.packer for kind in KINDS} == REQUIREMENTS.keys()
    assert {f"pack_{packer}.py" for packer in REQUIREMENTS} == {file.name for file in PACKERS.glob("pack_*.py")}
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 13
