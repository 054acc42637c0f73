"""A captured call comes back as it lay in memory: bits, dtypes, strides, and which tensors share it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import tkernels
from experiments.cli import app
from experiments.divergence.captured_call import CapturedCall, check_captured, load_call, save_call
from experiments.document import ExperimentError
from tkernels import Config
from tkernels.contract import Axes
from tkernels.inputs import tensors_in
from tkernels.verification.calls import same_bits
from tkernels.verification.draws import chooser


@pytest.mark.parametrize("op", tkernels.OPS)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_op_s_arguments_come_back(op: str, seed: int, tmp_path: Path) -> None:
    contract = tkernels.OPS[op].contract
    axes: Axes = contract.draw_axes(chooser(seed))
    arguments = contract.bind_arguments((), contract.case(axes, seed).inputs)
    config = Config(num_warps=8, BLOCK=64)
    save_call(CapturedCall(op, "one", config, arguments), tmp_path / "call.safetensors")
    back = load_call(tmp_path / "call.safetensors", torch.device("cpu"))
    assert (back.op, back.variant, back.config) == (op, "one", config)
    assert contract.bind_axes(back.arguments) == contract.bind_axes(arguments)
    before, after = tensors_in(arguments), tensors_in(back.arguments)
    assert len(before) == len(after) > 0
    for one, other in zip(before, after, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert same_bits(one, other)
    assert _sharing(before) == _sharing(after)


def _sharing(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """(which storage, bytes from the first tensor's begin there) of each tensor that has elements."""
    firsts: dict[int, tuple[int, int]] = {}
    places = []
    for tensor in (one for one in tensors if one.numel()):
        first, begin = firsts.setdefault(tensor.untyped_storage().data_ptr(), (len(firsts), tensor.data_ptr()))
        places.append((first, tensor.data_ptr() - begin))
    return places


def test_another_variant_prepares_the_weight_of_a_captured_call(tmp_path: Path) -> None:
    """torch's kernel takes codes in the order of a checkpoint, the Triton variants in one of their own."""
    variants = tkernels.OPS["dequant_gemm"].variants
    contract = variants["torch"].contract
    axes = contract.draw_axes(chooser(0), {"M": 3, "N": 40, "order": "sequential", "activation": "float32"})
    arguments = contract.bind_arguments((), contract.case(axes, 0).inputs)
    save_call(CapturedCall("dequant_gemm", "torch", None, arguments), tmp_path / "call.safetensors")
    call = load_call(tmp_path / "call.safetensors", torch.device("cpu"))
    for name in ("torch", "split_k"):
        result = check_captured(variants[name], call, tmp_path / "call.safetensors")
        assert result.status == "ok", result
        assert result.replay == f"tk check --call {tmp_path / 'call.safetensors'} --variant {name}"


class OwnWeight:
    """A weight that a variant made for itself."""


def test_what_has_no_place_in_the_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="a OwnWeight cannot be kept in a file; of weights there is QuantizedW"):
        save_call(CapturedCall("matmul", "one", None, {"weight": OwnWeight()}), tmp_path / "call.safetensors")


def test_a_file_that_is_no_call_is_refused(tmp_path: Path) -> None:
    def check(file: Path, *more: str) -> str:
        done = CliRunner().invoke(app, ["check", "--call", str(file), *more])
        assert done.exit_code == 2, done.output
        return done.stderr

    assert "no such file" in check(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("not tensors")
    assert "is no call that tk diverge kept" in check(tmp_path / "text.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "is no call that tk diverge kept" in check(tmp_path / "model.safetensors")
    view = {"storage": 0, "dtype": "float32", "shape": [9], "stride": [1], "offset": 0}
    about = {"op": "swiglu", "variant": "torch", "config": None, "arguments": {"gate_up": view}}
    bytes_of_one = torch.zeros(4, dtype=torch.uint8)
    save_file({"storage 0": bytes_of_one}, tmp_path / "short.safetensors", metadata={"call": json.dumps(about)})
    assert "is no call that tk diverge kept" in check(tmp_path / "short.safetensors")
    assert "it does not go with --axes" in check(tmp_path / "short.safetensors", "--axes", "T=1")
