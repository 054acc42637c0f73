"""Every layout, against weights written by hand and decoded in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.tmodel.formats.by_hand import KINDS, Kind, as_torch, linear, settings
from tkernels.quantized.weight import dequantize
from tmodel.formats import parse_format
from tmodel.weights import Checkpoint

OUTPUTS, INPUTS = 32, 256


def saved(directory: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, directory / "model.safetensors")
    return Checkpoint(directory, device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_layer_is_read_and_written_bit_for_bit(kind: Kind, tmp_path: Path) -> None:
    tensors, dense = linear(kind, OUTPUTS, INPUTS, np.random.default_rng(0))
    by_hand = as_torch(tensors, "a.b.")
    quantization = parse_format(settings(kind))
    with saved(tmp_path, by_hand) as checkpoint:
        weight = quantization.read(checkpoint, "a.b", OUTPUTS, INPUTS)
        checkpoint.refuse_unused()
    assert weight.bits == kind.bits
    assert weight.symmetric == kind.symmetric
    assert (weight.permutation is not None) == (kind.act_order and kind.group_size != -1)
    assert torch.equal(dequantize(weight, torch.float64), torch.from_numpy(dense))
    assert torch.equal(dequantize(weight, torch.float32), torch.from_numpy(dense).float())

    written = {f"a.b.{suffix}": tensor for suffix, tensor in quantization.encode("a.b", weight).items()}
    if kind.method == "squeezellm":  # full rows are written as what they are read as, among the other values
        with saved(tmp_path, written) as checkpoint:
            again = quantization.read(checkpoint, "a.b", OUTPUTS, INPUTS)
        assert torch.equal(dequantize(again, torch.float64), torch.from_numpy(dense))
        return
    assert written.keys() == by_hand.keys()
    for name, tensor in by_hand.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name], tensor), name
