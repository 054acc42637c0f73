"""Mixtures of experts: what of their files is refused, what they call, and that nobody but kernels reads a routing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tkernels
from tests.tkernels.simulated_cuda import DEVICE, SimulatedCuda
from tests.tmodel.conftest import WriteCheckpoint
from tests.tmodel.formats.by_hand import Kind, settings
from tests.tmodel.mixtures import MIXTURE, SMALL, mixture_tensors
from tests.tmodel.packed import Driver, in_chunks, load
from tkernels.ops.moe_mlp import contract as moe_mlp
from tkernels.ops.route import contract as route
from tkernels.runtime import CudaRuntime
from tmodel import ConfigError, Limits, WeightError, kernel_axes, load_config, with_kernels
from tmodel.decoders.experts import Experts, ExpertsLayer
from tmodel.decoders.pre_norm import PreNormModel
from tmodel.layers import ExpertsMLP
from tmodel.loading import parse_config
from tmodel.random_weights import num_parameters

QWEN3, MIXTRAL, OLMOE = "Qwen3MoeForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM"
GPT_OSS = "GptOssForCausalLM"
LIMITS = Limits(max_num_tokens=64, max_num_seqs=4, max_model_len=60, block_size=8, num_blocks=32)


def of(architecture: str, **fields: Any) -> dict[str, Any]:
    heads = {"head_dim": 4} if architecture == OLMOE else {}
    return {**SMALL, "architectures": [architecture], **heads, **fields}


@pytest.mark.parametrize("architecture", [QWEN3, MIXTRAL, OLMOE, GPT_OSS])
def test_the_number_of_experts_has_two_names(architecture: str) -> None:
    one = parse_config(of(architecture))
    raw = of(architecture, num_local_experts=4)
    assert parse_config(raw) == one
    del raw["num_experts"]
    assert parse_config(raw) == parse_config({**raw, "num_experts": None}) == one
    with pytest.raises(ConfigError, match="num_experts is 4, but num_local_experts 8; the two are one field"):
        parse_config(of(architecture, num_local_experts=8))
    del raw["num_local_experts"]
    with pytest.raises(ConfigError, match="num_experts: Field required"):
        parse_config(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (of(QWEN3, num_experts_per_tok=5), "num_experts_per_tok is 5, but there are 4 experts"),
        (of(MIXTRAL, num_experts_per_tok=0), "num_experts_per_tok: .*greater than 0"),
        (of(OLMOE, num_experts=0), "num_experts: .*greater than 0"),
        (of(QWEN3, num_experts=[4]), "num_experts: .*integer"),
        (of(QWEN3, num_experts=[4], num_local_experts={}), r"num_experts is \[4\], but num_local_experts \{\}"),
        (of(QWEN3, num_hidden_layers=2**10, num_experts=2**7), "num_hidden_layers=1024 with num_experts=128 are more"),
        (of(QWEN3, shared_expert_intermediate_size=8), "shared_expert_intermediate_size is 8; .*no shared experts"),
        (of(MIXTRAL, n_shared_experts=1), "n_shared_experts is 1; .*no shared experts"),
        (of(QWEN3, n_group=8, topk_group=4), "n_group is 8; .*no groups of them"),
        (of(OLMOE, topk_method="noaux_tc"), "topk_method is 'noaux_tc'"),
        (of(QWEN3, scoring_func="sigmoid"), "scoring_func is 'sigmoid'; .*no other scores than softmax's"),
        (of(QWEN3, routed_scaling_factor=2.5), "routed_scaling_factor is 2.5"),
        (of(QWEN3, decoder_sparse_step=0), "decoder_sparse_step: .*greater than 0"),
        (of(QWEN3, mlp_only_layers=[0.5]), r"mlp_only_layers\.0: .*integer"),
        (of(QWEN3, hidden_act="gelu"), "hidden_act: .*'silu'"),
        (of(QWEN3, layer_types=["sliding_attention"] * 2), "sliding_window=None the 2 layers are all full_attention"),
        (of(MIXTRAL, layer_types=["full_attention"]), "sliding_window=None the 2 layers are all full_attention"),
        (of(MIXTRAL, sliding_window=7, layer_types=["full_attention"] * 2), "sliding_window=7 the 2 layers are all sl"),
        (of(OLMOE, clip_qkv=8.0), "clip_qkv is 8.0; clipped queries, keys and values are not supported"),
        (of(OLMOE, head_dim=16), "head_dim is 16; the norms of OLMoE's queries and keys are made for .* = 4"),
    ],
)  # fmt: skip
def test_what_would_be_another_model_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(raw)


def test_neutral_fields_of_other_mixtures_are_read() -> None:
    neutral = {"n_shared_experts": None, "n_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0}
    assert parse_config(of(QWEN3, **neutral)) == parse_config(of(QWEN3))


EXPERT = "model.layers.1.mlp.experts"
Change = Callable[[dict[str, torch.Tensor]], object]


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def with_shape(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.layers.0.mlp.gate.weight"), r"'model\.layers\.0\.mlp\.gate\.weight' is missing"),
        (with_shape("model.layers.1.mlp.gate.weight", 5, 16), r"mlp\.gate\.weight' has shape \[5, 16\].*\[4, 16\]"),
        (without(f"{EXPERT}.3.up_proj.weight"), r"experts\.3\.up_proj\.weight' is missing"),
        (with_shape(f"{EXPERT}.2.down_proj.weight", 16, 25), r"experts\.2\.down_proj.* \[16, 25\].* \[16, 24\]"),
        (with_shape(f"{EXPERT}.4.down_proj.weight", 16, 24),
         r"layers\.1\.mlp\.experts\.4\.down_proj.* is of expert 4, counted from 0, but .* there are 4"),
        (with_shape("model.layers.0.mlp.shared_expert.up_proj.weight", 24, 16), "unexpected tensor .*shared_expert"),
        (with_shape("model.layers.0.mlp.gate.e_score_correction_bias", 4), "unexpected tensor .*e_score_correction"),
    ],
)  # fmt: skip
def test_weights_that_are_not_the_models_are_refused(
    write_checkpoint: WriteCheckpoint, change: Change, message: str
) -> None:
    tensors = mixture_tensors(SMALL)
    change(tensors)
    with pytest.raises(WeightError, match=message):
        load(write_checkpoint(tensors, **MIXTURE), torch.float32)


def test_experts_are_one_allocation_in_the_order_of_their_numbers(write_checkpoint: WriteCheckpoint) -> None:
    tensors = mixture_tensors(SMALL)
    model = load(write_checkpoint(tensors, **MIXTURE), torch.float32)
    assert isinstance(model, PreNormModel)
    mlp = model.layers[1].mlp
    assert isinstance(mlp, ExpertsLayer)
    gate_up, down = mlp.experts.gate_up, mlp.experts.down
    for expert in range(4):
        gate, up, its_down = (tensors[f"{EXPERT}.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        assert torch.equal(gate_up[expert], torch.cat((gate, up)))  # type: ignore[index]
        assert torch.equal(down[expert], its_down)  # type: ignore[index]
    assert model.weight_bytes == 4 * sum(tensor.numel() for tensor in tensors.values()) == 4 * num_parameters(SMALL)


def test_layers_with_and_without_experts() -> None:
    def sparse(**fields: Any) -> list[int]:
        tensors = parse_config(of(QWEN3, num_hidden_layers=6, **fields)).tensors()
        dense = [index for index in range(6) if f"model.layers.{index}.mlp.up_proj.weight" in tensors]
        assert all(tensors[f"model.layers.{index}.mlp.up_proj.weight"] == (24, 16) for index in dense)
        found = [index for index in range(6) if f"model.layers.{index}.mlp.gate.weight" in tensors]
        assert sorted([*dense, *found]) == list(range(6))
        return found

    assert sparse() == [0, 1, 2, 3, 4, 5]
    assert sparse(mlp_only_layers=[0, 4, 9]) == [1, 2, 3, 5]
    assert sparse(decoder_sparse_step=2) == [1, 3, 5]
    assert sparse(decoder_sparse_step=3, mlp_only_layers=[2]) == [5]
    assert sparse(decoder_sparse_step=7) == []


TOKENS = (1, 64)
ROUTE = {"T": TOKENS, "K": 2, "E": 4, "normalize": True, "sigmoid": False, "bias": False}
SIZES = {"T": TOKENS, "K": 2, "E": 4, "gate_up_bias": False, "down_bias": False, "limit": 0}


def coded(name: str, bits: int, group_size: int, *, permuted: Any = False) -> dict[str, Any]:
    """What says how a weight is stored; only the tensors tell whether zero-points are kept."""
    symmetric = (False, True) if bits else True
    axes = {"padding": 0, "group_size": group_size, "symmetric": symmetric, "permuted": permuted}
    return {"bits": bits, "coding": "uniform", **{f"{name}_{axis}": value for axis, value in axes.items()}}


def test_what_a_mixture_calls() -> None:
    axes = kernel_axes(parse_config({**SMALL, "mlp_only_layers": [0]}), LIMITS)
    assert axes["route"] == ROUTE
    assert axes["moe_mlp"] == {**SIZES, "H": 16, "I": 24, **coded("gate_up", 0, 0), **coded("down", 0, 0)}
    assert axes["gate_up_swiglu"] == {"T": TOKENS, "H": 16, "I": 24}
    # q, k and v are 128 outputs of 16 inputs, o 16 of 64, a dense layer's down 16 of 24, the router 4 and the head 40.
    assert axes["matmul"] == {"M": TOKENS, "N": (4, 128), "K": (16, 64), "bias": False}
    every = kernel_axes(parse_config(SMALL), LIMITS)
    assert "gate_up_swiglu" not in every
    assert "swiglu" not in every
    dense = kernel_axes(parse_config({**SMALL, "decoder_sparse_step": 3}), LIMITS)
    assert not {"route", "moe_mlp"} & dense.keys()


def test_norms_of_all_heads_are_called_at_their_widths() -> None:
    axes = kernel_axes(parse_config(of(OLMOE, norm_topk_prob=False, num_key_value_heads=2)), LIMITS)
    assert axes["rms_norm"] == {"T": TOKENS, "H": (8, 16)}
    assert axes["add_rms_norm"] == {"T": TOKENS, "H": 16}
    assert axes["qk_norm_rope_scatter"]["q_weight"] is False  # type: ignore[call-overload]
    assert axes["route"]["normalize"] is False  # type: ignore[call-overload]


def test_what_a_quantized_mixture_calls(write_checkpoint: WriteCheckpoint) -> None:
    wide = {**MIXTURE, "hidden_size": 64, "moe_intermediate_size": 128}
    quantization = settings(Kind("gptq", 4, 32, act_order=True))
    first_dense = {**quantization, "dynamic": {r"-:.*layers\.0\.mlp": {}, r"+:.*down_proj": {"group_size": 64}}}
    config = load_config(write_checkpoint({}, **wide, quantization_config=first_dense))
    axes = kernel_axes(config, LIMITS)
    sizes = {**SIZES, "H": 64, "I": 128}
    assert axes["moe_mlp"] == (
        {**sizes, **coded("gate_up", 0, 0), **coded("down", 0, 0)},
        {**sizes, **coded("gate_up", 4, 32, permuted=(False, True)), **coded("down", 4, 64, permuted=(False, True))},
    )
    assert {one["K"] for one in axes["dequant_gemm"]} == {64}  # type: ignore[index]  # of attention alone
    assert axes["matmul"]["N"] == (4, 40)  # type: ignore[call-overload]


def test_what_gpt_oss_calls() -> None:
    axes = kernel_axes(parse_config(of(GPT_OSS, sliding_window=9, swiglu_limit=6.5)), LIMITS)
    biased = {"gate_up_bias": True, "down_bias": True, "limit": 7}
    assert axes["route"] == ROUTE
    assert axes["moe_mlp"] == {**SIZES, **biased, "H": 16, "I": 24, **coded("gate_up", 0, 0), **coded("down", 0, 0)}
    for op in ("paged_decode", "paged_prefill"):
        assert axes[op]["sinks"] is True  # type: ignore[call-overload]
        assert axes[op]["window"] == (0, 9)  # type: ignore[call-overload]
    assert axes["matmul"]["bias"] == (False, True)  # type: ignore[call-overload]  # the head has none


def test_gates_and_ups_of_one_tensor_are_put_apart(write_checkpoint: WriteCheckpoint) -> None:
    fields = {**MIXTURE, "architectures": [GPT_OSS]}
    tensors = mixture_tensors({**SMALL, **fields})
    model = load(write_checkpoint(tensors, **fields), torch.float32)
    assert isinstance(model, PreNormModel)
    mlp = model.layers[1].mlp
    assert isinstance(mlp, ExpertsLayer)
    experts = mlp.experts
    stored, bias = tensors[f"{EXPERT}.gate_up_proj"], tensors[f"{EXPERT}.gate_up_proj_bias"]  # [E, K, 2 I], [E, 2 I]
    gates_ups = torch.cat((stored[:, :, ::2], stored[:, :, 1::2]), dim=2)
    assert torch.equal(experts.gate_up, gates_ups.transpose(1, 2))  # type: ignore[arg-type]
    assert torch.equal(experts.down, tensors[f"{EXPERT}.down_proj"].transpose(1, 2))  # type: ignore[arg-type]
    assert torch.equal(experts.gate_up_bias, torch.cat((bias[:, ::2], bias[:, 1::2]), dim=1))  # type: ignore[arg-type]
    assert torch.equal(experts.down_bias, tensors[f"{EXPERT}.down_proj_bias"])  # type: ignore[arg-type]
    assert experts.limit == 7.0


def logits(model: PreNormModel) -> torch.Tensor:
    sequences = [torch.arange(11), torch.arange(20, 25)]
    return torch.cat(Driver(model, sequences, torch.float32).run(in_chunks([11, 5], 4)))


@pytest.mark.parametrize("architecture", [QWEN3, GPT_OSS])
def test_another_kernel_computes_the_same_experts(architecture: str, write_checkpoint: WriteCheckpoint) -> None:
    fields = {**MIXTURE, "architectures": [architecture]}
    tensors = {name: 0.3 * one for name, one in mixture_tensors({**SMALL, **fields}).items()}
    directory = write_checkpoint(tensors, **fields)
    model = load(directory, torch.float32)
    assert isinstance(model, PreNormModel)
    limits = Limits(max_num_tokens=64, max_num_seqs=4, max_model_len=60, block_size=16, num_blocks=32)
    axes = kernel_axes(load_config(directory), limits)
    kernels = tkernels.select({"moe_mlp": "composed"}, device="cpu", dtype=torch.float32, axes=axes)
    swapped = with_kernels(model, kernels)
    assert isinstance(swapped, PreNormModel)
    old, new = model.layers[0].mlp, swapped.layers[0].mlp
    assert isinstance(old, ExpertsLayer)
    assert isinstance(new, ExpertsLayer)
    assert new.route is kernels.kernels["route"]
    assert new.experts.moe_mlp is kernels.kernels["moe_mlp"]
    assert new.experts.gate_up is old.experts.gate_up
    torch.testing.assert_close(logits(swapped), logits(model), rtol=0, atol=1e-5)


class Product:
    """A router without a kernel's checks of its device."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def test_what_was_recorded_with_one_routing_is_replayed_with_another() -> None:
    """On a simulated device, which refuses a capture in which the host waits for a value or asks for one. It computes
    with torch; that launchers read no value shows where they are compiled, from tensors without any.
    """
    shape = Experts(16, 8, num_experts=6, top_k=2, normalize=True, rounded=True)
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).bfloat16()

    router, gate_up, down = drawn(6, 16), drawn(6, 16, 16), drawn(6, 16, 8)
    steps = [drawn(9, 16) for _ in range(5)]

    def layer(place: Mapping[str, Any]) -> ExpertsLayer:
        weights = [one.to(**place) for one in (router, gate_up, down)]
        mlp = ExpertsMLP(moe_mlp.baseline, *weights[1:])  # type: ignore[arg-type]
        return ExpertsLayer(shape, Product(weights[0]), route.baseline, mlp)  # type: ignore[arg-type]

    on_host = [layer({})(x) for x in steps]
    chosen = [route.baseline(F.linear(x, router), 2)[0] for x in steps]
    assert len({tuple(one.flatten().tolist()) for one in chosen}) == len(steps)
    with SimulatedCuda() as cuda:
        runtime = CudaRuntime(DEVICE, cuda)
        on_device, sent = layer({"device": DEVICE}), [x.to(DEVICE) for x in steps]
        anew = [on_device(x) for x in sent]
        given = sent[0].clone()
        replay = runtime.make_recorder().record(lambda: on_device(given))
        replayed = []
        waits = list(cuda.waits)
        for x in sent:
            given.copy_(x)
            replayed.append(replay().clone())
        assert cuda.waits == waits
        for one, same, host in zip(replayed, anew, on_host, strict=True):
            assert torch.equal(one.cpu(), same.cpu())
            torch.testing.assert_close(one.cpu(), host, rtol=2e-2, atol=2e-2)
