"""What a layer's tensors say against each other, its config, or the dtype they are loaded in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tmodel.formats.by_hand import Kind, as_torch, awq_words, linear, settings
from tests.tmodel.formats.models import write_models
from tests.tmodel.formats.test_layouts import INPUTS, OUTPUTS, saved
from tests.tmodel.packed import load
from tkernels.quantized.outliers import outliers_from
from tkernels.quantized.weight import QuantizedWeight, dequantize
from tmodel import WeightError
from tmodel.formats import AWQ, SqueezeLLM, parse_format

AWQ_4 = Kind("awq", 4, 32)
SYMMETRIC = Kind("compressed-tensors", 4, 32, symmetric=True)


def tensors_of(kind: Kind) -> dict[str, torch.Tensor]:
    return as_torch(linear(kind, OUTPUTS, INPUTS, np.random.default_rng(0))[0], "a.b.")


def read_lookup(directory: Path, tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
    return SqueezeLLM(wbits=4).read(saved(directory, tensors), "a.b", OUTPUTS, INPUTS)


def test_values_at_one_place_whose_sum_is_infinite(tmp_path: Path) -> None:
    tensors = tensors_of(Kind("squeezellm", 4))
    tensors["a.b.cols"].fill_(7)
    tensors["a.b.vals"].fill_(3e38)
    with pytest.raises(WeightError, match=r"'a\.b\.vals' gives one place several .* beyond the range of float32"):
        read_lookup(tmp_path, tensors)
    one = torch.tensor([1, 1])
    with pytest.raises(ValueError, match="Outliers: the values at one place add up beyond the range of torch.float32"):
        outliers_from(one, one, torch.tensor([3e38, 3e38]), (4, 6))


@pytest.mark.parametrize("name", ["vals", "full_rows"])
def test_values_that_the_table_s_dtype_cannot_hold(name: str, tmp_path: Path) -> None:
    tensors = tensors_of(Kind("squeezellm", 4))
    tensors["a.b.lookup_table"] = tensors["a.b.lookup_table"].half()
    read_lookup(tmp_path, tensors)
    tensors[f"a.b.{name}"].view(-1)[3] = 1e6
    with pytest.raises(WeightError, match=rf"{tmp_path}.*'a\.b\.{name}' has values beyond the range of float16, the"):
        read_lookup(tmp_path, tensors)


def test_values_at_one_place_are_one_value_before_the_table_s_is_added(tmp_path: Path) -> None:
    tensors = tensors_of(Kind("squeezellm", 4))
    rows, row = tensors["a.b.rows"], 5
    tensors["a.b.full_row_indices"][0] = row
    first, last = int(rows[row]), int(rows[row + 1])
    assert last - first > 5
    cols, vals = tensors["a.b.cols"][first:last].long(), tensors["a.b.vals"][first:last]
    weight = read_lookup(tmp_path, tensors)
    only_codes = QuantizedWeight(weight.packed, None, None, 4, -1, table=weight.table)
    whole = tensors["a.b.full_rows"][cols, 0]
    expected = dequantize(only_codes)[row, cols].double() + (vals.double() + whole.double()).float().double()
    assert torch.equal(dequantize(weight)[row, cols], expected.float())


def test_zero_points_where_the_config_says_none(tmp_path: Path) -> None:
    tensors, without = tensors_of(AWQ_4), AWQ(bits=4, group_size=32, zero_point=False)
    said = (
        r"'a\.b\.qzeros' holds zero-points from 0 to 15, but zero_point is false: all must be 8, or the tensor absent$"
    )
    with pytest.raises(WeightError, match=said):
        without.read(saved(tmp_path, tensors), "a.b", OUTPUTS, INPUTS)
    symmetric = np.full((INPUTS // 32, OUTPUTS), 8)
    tensors |= as_torch({"qzeros": awq_words(symmetric)}, "a.b.")
    assert without.read(saved(tmp_path, tensors), "a.b", OUTPUTS, INPUTS).symmetric


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weight_zero_point", "contradicts quantization_config, whose symmetric is true; asymmetric weights have zero"),
        ("weight_g_idx", "contradicts quantization_config, whose actorder is None; 'group' gives each input its group"),
    ],
)
def test_a_tensor_that_the_config_excludes(name: str, message: str, tmp_path: Path) -> None:
    more = tensors_of(Kind("compressed-tensors", 4, 32, act_order=True))
    tensors = {**tensors_of(SYMMETRIC), f"a.b.{name}": more[f"a.b.{name}"]}
    with pytest.raises(WeightError, match=rf"{tmp_path}.*'a\.b\.{name}' {message}"):
        parse_format(settings(SYMMETRIC)).read(saved(tmp_path, tensors), "a.b", OUTPUTS, INPUTS)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (3.4e38, torch.bfloat16, "scales or values beyond bfloat16's range"),
        (1e5, torch.float16, "scales or values beyond float16's range"),
        (1e-10, torch.float16, "scales that float16 rounds to 0"),
    ],
)
def test_scales_that_the_model_s_dtype_cannot_hold(
    value: float, dtype: torch.dtype, message: str, tmp_path: Path
) -> None:
    quantized, _ = write_models(tmp_path, AWQ_4)
    tensors, name = load_file(quantized / "model.safetensors"), "model.layers.0.mlp.down_proj.scales"
    scales = tensors[name].float()
    scales[0] = 0  # of a group of zeros: that is what it says
    save_file({**tensors, name: scales}, quantized / "model.safetensors")
    load(quantized, dtype)
    scales[1, 3] = value
    save_file({**tensors, name: scales}, quantized / "model.safetensors")
    load(quantized, torch.float32)
    with pytest.raises(WeightError, match=rf"layer 'model\.layers\.0\.mlp\.down_proj' has {message}; float32 holds"):
        load(quantized, dtype)


def test_a_dense_weight_that_bfloat16_cannot_hold(tmp_path: Path) -> None:
    _, dense = write_models(tmp_path, AWQ_4)
    tensors = load_file(dense / "model.safetensors")
    tensors["model.norm.weight"][0] = 3.4e38
    save_file(tensors, dense / "model.safetensors")
    with pytest.raises(WeightError, match=r"'model\.norm\.weight' has values beyond bfloat16's range"):
        load(dense, torch.bfloat16)
