"""A model over other kernels shares what does not change, prepares again what does, and calls the new ones alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tkernels
from tests.tmodel.conftest import WriteCheckpoint
from tests.tmodel.formats import by_hand, eight_bits, models
from tests.tmodel.mixtures import MIXTURE, SMALL, mixture_tensors
from tests.tmodel.packed import Driver, in_one_go, load
from tkernels import KernelSet, SelectionError
from tkernels.quantized.stacked import StackedWeight
from tkernels.quantized.weight import QuantizedWeight
from tkernels.selection import Choices
from tmodel import Batch, Limits, Model, kernel_axes, load_config, with_kernels
from tmodel.decoders.experts import ExpertsLayer
from tmodel.decoders.pre_norm import PreNormModel
from tmodel.layers import ExpertsMLP, PagedAttention

LIMITS = Limits(max_num_tokens=64, max_num_seqs=4, max_model_len=60, block_size=16, num_blocks=32)


def select(directory: Path, choices: Choices) -> KernelSet:
    axes = kernel_axes(load_config(directory), LIMITS)
    return tkernels.select(choices, device="cpu", dtype=torch.float32, axes=axes)


def loaded(directory: Path, choices: Choices) -> PreNormModel:
    model = load(directory, torch.float32, choices)
    assert isinstance(model, PreNormModel)
    return model


def logits(model: PreNormModel) -> torch.Tensor:
    return Driver(model, [torch.arange(9)], torch.float32).run(in_one_go([9]))[0]


def downs(model: PreNormModel) -> list[QuantizedWeight]:
    weights = [layer.mlp.down.weight for layer in model.layers]  # type: ignore[union-attr]
    assert all(isinstance(weight, QuantizedWeight) for weight in weights)
    return weights


def experts(model: PreNormModel) -> ExpertsMLP:
    mlp = model.layers[0].mlp
    assert isinstance(mlp, ExpertsLayer)
    return mlp.experts


def test_a_quantized_weight_is_prepared_for_the_kernel_that_reads_it(tmp_path: Path) -> None:
    directory, _ = models.write_models(tmp_path, by_hand.Kind("gptq", 4, 32), num_hidden_layers=1)
    plain = loaded(directory, {"dequant_gemm": "torch"})
    swapped = with_kernels(plain, select(directory, {"dequant_gemm": "auto"}))
    assert isinstance(swapped, PreNormModel)
    assert [one.order for one in downs(plain)] == ["sequential"]
    (made,), (expected,) = downs(swapped), downs(loaded(directory, {"dequant_gemm": "auto"}))
    assert made.order == expected.order == "interleaved"
    assert torch.equal(made.packed, expected.packed)
    assert swapped.embedding is plain.embedding
    with pytest.raises(SelectionError, match="variant 'torch' reads its weights in another layout than 'auto'"):
        with_kernels(swapped, select(directory, {"dequant_gemm": "torch"}))


@pytest.mark.parametrize("choices", [{"moe_mlp": "dequant_padded_tiles"}, {"moe_mlp": "auto"}], ids=str)
def test_quantized_experts_are_prepared_for_the_kernel_that_reads_them(choices: dict[str, str], tmp_path: Path) -> None:
    fields = {**MIXTURE, "num_hidden_layers": 1, "moe_intermediate_size": 32, "hidden_size": 32}
    directory, _ = models.write_models(tmp_path, by_hand.Kind("gptq", 4, 32, act_order=True), **fields)
    plain = loaded(directory, {"moe_mlp": "torch"})
    swapped = with_kernels(plain, select(directory, choices))
    assert isinstance(swapped, PreNormModel)
    anew = loaded(directory, choices)
    mine, expected = experts(swapped), experts(anew)
    for one, other in ((mine.gate_up, expected.gate_up), (mine.down, expected.down)):
        assert isinstance(one, StackedWeight)
        assert isinstance(other, StackedWeight)
        assert one.order == other.order == "interleaved"
        assert torch.equal(one.packed, other.packed)
    assert [one.order for one in (experts(plain).gate_up, experts(plain).down)] == ["sequential"] * 2  # type: ignore[union-attr]
    torch.testing.assert_close(logits(swapped), logits(plain), rtol=1e-4, atol=1e-3)
    with pytest.raises(SelectionError, match="kernels.moe_mlp: variant 'torch' reads its weights in another layout"):
        with_kernels(swapped, select(directory, {"moe_mlp": "torch"}))


@pytest.mark.parametrize("kind", ["dense", "e4m3"])
def test_experts_without_codes_in_words_are_swapped_back_and_forth(
    kind: str, write_checkpoint: WriteCheckpoint, tmp_path: Path
) -> None:
    """Their layout is what checkpoints have, whichever variant ran before."""
    if kind == "dense":
        directory = write_checkpoint(mixture_tensors({**SMALL, **MIXTURE}), **MIXTURE)
    else:
        fields = {**MIXTURE, "num_hidden_layers": 1, "moe_intermediate_size": 128, "hidden_size": 128}
        directory, _ = eight_bits.write_models(tmp_path, eight_bits.Kind("fp8", "float", "block"), **fields)
    plain = loaded(directory, {"moe_mlp": "torch"})
    tiles = {"dense": "padded_tiles", "e4m3": "fp8_padded_tiles"}[kind]
    swapped: Model = plain
    for name in ("auto", tiles, "auto", "composed", "torch"):
        swapped = with_kernels(swapped, select(directory, {"moe_mlp": name}))
        assert isinstance(swapped, PreNormModel)
        assert experts(swapped).moe_mlp.variant.name == name
        assert experts(swapped).gate_up is experts(plain).gate_up
        torch.testing.assert_close(logits(swapped), logits(plain), rtol=1e-4, atol=1e-3)


def test_kernels_of_inputs_and_of_codes_are_both_new(tmp_path: Path) -> None:
    """A layer of 8 bits holds one in a partial and one beside it."""
    kind = eight_bits.Kind("compressed-tensors", "int", "tensor", static=True)
    directory, _ = eight_bits.write_models(tmp_path, kind, num_hidden_layers=1)
    model = loaded(directory, {})
    other = select(directory, {})
    swapped = with_kernels(model, other)
    assert isinstance(swapped, PreNormModel)
    matmul: Any = swapped.layers[0].mlp.down.matmul  # type: ignore[union-attr]
    assert matmul.quantize.func is other.kernels["quantize_tokens"]
    assert matmul.matmul is other.kernels["scaled_matmul"]
    assert torch.equal(logits(swapped), logits(model))


def test_a_kernel_in_a_partials_keywords_is_new_too(tmp_path: Path) -> None:
    directory, _ = models.write_models(tmp_path, by_hand.Kind("gptq", 4, 32), num_hidden_layers=1)
    old, new = select(directory, {}), select(directory, {})
    model: Any = SimpleNamespace(norm=partial(print, norm=old.kernels["rms_norm"]), names={"a": 1})
    swapped: Any = with_kernels(model, new)
    assert swapped.norm.keywords == {"norm": new.kernels["rms_norm"]}
    assert swapped.names is model.names


def test_every_kernel_of_attention_is_told_the_host_s_bound_of_contexts() -> None:
    """Else its launch would go by the table's width."""
    told: list[tuple[str, Mapping[str, Any]]] = []

    def kernel(name: str) -> Any:
        def attend(q: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
            told.append((name, keywords))
            return q

        return attend

    batch = Batch(
        token_ids=torch.zeros(4, dtype=torch.int64),
        positions=torch.zeros(4, dtype=torch.int64),
        slots=torch.zeros(4, dtype=torch.int64),
        block_tables=torch.zeros(2, 8, dtype=torch.int32),
        context_lens=torch.tensor([9, 3], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
        num_decodes=1,
        max_context_len=9,
        logit_indices=torch.arange(4),
    )
    kernels: Any = SimpleNamespace(paged_decode=kernel("decode"), paged_prefill=kernel("prefill"))
    cache, q = torch.zeros(1), torch.arange(4.0)
    assert torch.equal(PagedAttention(kernels, batch, 0.5)(q, cache, cache, 7), q)
    expected = {"max_context_len": 9, "window": 7}
    assert sorted(told, key=lambda call: call[0]) == [("decode", expected), ("prefill", expected)]
