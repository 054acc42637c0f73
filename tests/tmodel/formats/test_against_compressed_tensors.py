"""The compressed-tensors package as a referee: what it packs is read here, and it unpacks what is written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tkernels  # noqa: F401  before transformers, which the package imports: it decides whether Triton interprets
from tests.tmodel.formats import eight_bits
from tests.tmodel.formats.by_hand import Kind, as_torch, linear, settings
from tests.tmodel.formats.test_layouts import INPUTS, OUTPUTS, saved
from tests.tmodel.packed import Driver, in_one_go, load
from tkernels.quantized import scaled_weight
from tkernels.quantized.row_codes import codes_and_scales
from tkernels.quantized.weight import dequantize
from tkernels.verification.accuracy import judge
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


@pytest.mark.parametrize("kind", eight_bits.KINDS, ids=str)
def test_both_decode_8_bit_weights_alike(kind: eight_bits.Kind, tmp_path: Path) -> None:
    """compressed-tensors' own by the package, fp8 in blocks by transformers; a scale for each layer is a product."""
    from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    outputs, inputs = 256, 384
    tensors, _ = eight_bits.linear(kind, outputs, inputs, np.random.default_rng(0))
    quantization = parse_format(eight_bits.settings(kind))
    checkpoint = saved(tmp_path, {f"a.b.{name}": tensor for name, tensor in tensors.items()})
    weight = quantization.read(checkpoint, "a.b", outputs, inputs)
    assert isinstance(weight, scaled_weight.ScaledWeight)
    if kind.method == "fp8":
        theirs = Fp8Dequantize(None)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"], torch.float32)
    else:
        group = eight_bits.settings(kind)["config_groups"]["group_0"]
        theirs = NaiveQuantizationCompressor.decompress(tensors, QuantizationScheme.model_validate(group))["weight"]
    assert torch.equal(scaled_weight.dequantize(weight), theirs)


TOKENS = torch.randint(40, (1, 60), generator=torch.Generator().manual_seed(0))


def served(directory: Path, dtype: torch.dtype) -> torch.Tensor:
    return Driver(load(directory, dtype), [TOKENS[0]], dtype).run(in_one_go([60]))[0]


def load_theirs(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits[0]
    return logits


def rms(difference: torch.Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


@pytest.mark.parametrize("kind", [kind for kind in eight_bits.KINDS if kind.method != "fp8"], ids=str)
def test_logits_are_the_packages_own(kind: eight_bits.Kind, tmp_path: Path) -> None:
    """By the error rule: the oracle is the dequantized model in float64, and the natural error the package's, which
    rounds the inputs of every layer to 8 bits too. And both round them alike, but for a tie here and there, so that
    they are far nearer to each other than to the oracle.
    """
    quantized, dense = eight_bits.write_models(tmp_path, kind, model_type="qwen3")
    theirs, mine, oracle = (
        logits_of(load_theirs(quantized)),
        served(quantized, torch.float32),
        served(dense, torch.float64),
    )
    lost = rms(theirs - oracle)
    assert lost > 0.01 * rms(oracle)
    verdict = judge(mine, oracle, theirs)
    assert verdict.ok, verdict
    # Of int8 found token by token the package's scale is the largest value over 127.5, and vLLM's, as here, over 127.
    if kind.static or kind.codes == "float":
        assert rms(mine - theirs) < 0.01 * lost


def test_logits_in_int8_are_those_of_transformers_with_inputs_rounded_by_the_definition(tmp_path: Path) -> None:
    quantized, dense = eight_bits.write_models(tmp_path, eight_bits.KINDS[0], model_type="qwen3")
    model = load_theirs(dense)
    exact = logits_of(model)

    def round_inputs(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        codes, scales = codes_and_scales(inputs[0], inputs[0].abs().amax(-1), torch.int8)
        return (codes * scales.unsqueeze(-1),)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(round_inputs)
    theirs = logits_of(model)
    assert rms(served(quantized, torch.float32) - theirs) < 0.01 * rms(theirs - exact)
