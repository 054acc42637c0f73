"""The compressed-tensors package as a referee: what it packs is read here, and it unpacks what is written here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tkernels  # noqa: F401  before transformers, which the package imports: it decides whether Triton interprets
from tests.tmodel.formats.by_hand import Kind, as_torch, linear, settings
from tests.tmodel.formats.test_layouts import INPUTS, OUTPUTS, saved
from tkernels.quantized.weight import dequantize
from tmodel.formats import parse_format
from tmodel.formats.bitstream import pack_stream, unpack_stream


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [32, 40, 33, 9])
def test_both_pack_and_unpack_alike(bits: int, count: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    middle = 2 ** (bits - 1)
    signed = torch.from_numpy(np.random.default_rng(0).integers(-middle, middle, (count, count))).to(torch.int8)
    signed[0], signed[:, -1] = middle - 1, -middle
    for dim in (0, 1):
        words = pack_to_int32(signed, bits, packed_dim=dim)  # type: ignore[arg-type]
        assert torch.equal(pack_stream(signed.short() + middle, dim, bits), words)
        assert torch.equal(unpack_stream(words, dim, bits, count).short() - middle, signed.short())
        assert torch.equal(unpack_from_int32(words, bits, signed.shape, packed_dim=dim), signed)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_package_decompresses_to_the_same_weight(
    bits: int, group_size: int, symmetric: bool, tmp_path: Path
) -> None:
    """Not where activations order the groups: its releases of today have given that up."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    kind = Kind("compressed-tensors", bits, group_size, symmetric)
    quantization = parse_format(settings(kind))
    by_hand = as_torch(linear(kind, OUTPUTS, INPUTS, np.random.default_rng(0))[0], "a.b.")
    weight = quantization.read(saved(tmp_path, by_hand), "a.b", OUTPUTS, INPUTS)
    written = quantization.encode("a.b", weight)
    written["weight_scale"] = written["weight_scale"].float()  # or the package rounds the product to float16
    scheme = QuantizationScheme.model_validate(settings(kind)["config_groups"]["group_0"])
    theirs = PackedQuantizationCompressor.decompress(written, scheme)["weight"]
    assert torch.equal(dequantize(weight, torch.float32), theirs)
