"""What can be known of the peers without a GPU: that SDPA on gathered pages and the dense weight are the same ops."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from experiments.peers import slack_of, with_peers
from experiments.peers.dense_attention import dense_attention
from experiments.peers.flashinfer_pages import Pages, attend
from experiments.peers.serving import PeerTask, PeerUnsupportedError, make_peer
from experiments.peers.sorted_pairs import SortedPairs
from experiments.peers.transformers_generate import fastest
from experiments.peers.variants import MadeOnce, forget_made, peer_variant, refuse_other_codes
from experiments.serving.requests import Request
from experiments.serving.rounds import Served
from tkernels import OPS, UnsupportedError
from tkernels.contract import Case
from tkernels.device import TARGETS, device_facts
from tkernels.measurement import CPU_SIZE, cut_axes
from tkernels.verification.check import check_case
from tkernels.verification.draws import chooser
from tsched import SamplingParams

PAGED = {"D": 32, "Dv": 32, "Hq": 4, "Hkv": 2, "S": 8, "N": 5, "activation": "float64", "kv": "float64"}


@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_attention_on_gathered_pages_is_the_op(op: str) -> None:
    contract = OPS[op].contract
    base = next(iter(contract.benchmarks.values()))
    sizes = {"B": 3, "P": 15} | ({"T": 6} if op == "paged_prefill" else {})
    axes = cut_axes(contract, {**base, **PAGED, **sizes}, CPU_SIZE)
    assert axes is not None
    inputs = contract.case(axes, 0).inputs
    attend = dense_attention(SDPBackend.MATH)
    given = {name: inputs[name] for name in inspect.signature(attend).parameters if name in inputs}
    assert torch.allclose(attend(**given), contract.reference(**inputs), rtol=1e-12, atol=1e-12)
    with pytest.raises(UnsupportedError, match=r"contexts are \[8, 40\]"):
        attend(**{**given, "context_lens": torch.tensor([40, 8, 40], dtype=torch.int32)})


@pytest.mark.parametrize(("queries", "length", "dense"), [(3, 8, True), (8, 8, False)])
def test_a_mask_of_a_backend_without_one_of_its_own_is_made_before_the_call(
    queries: int, length: int, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a chunk behind a context; where both are as long, SDPA's own causal form serves, as it does for flash."""
    given: list[Any] = []

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **options: Any) -> torch.Tensor:
        given.append(mask)
        return torch.zeros_like(q)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", sdpa)
    pages = torch.zeros(2, 8, 1, 4, dtype=torch.bfloat16)
    tables, lengths = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([length] * 2, dtype=torch.int32)
    starts = torch.tensor([0, queries, 2 * queries], dtype=torch.int32)
    q = torch.zeros(2 * queries, 2, 4, dtype=torch.bfloat16)
    for backend, is_dense in ((SDPBackend.CUDNN_ATTENTION, dense), (SDPBackend.FLASH_ATTENTION, False)):
        attend = dense_attention(backend)
        given.clear()
        for _ in range(2):
            attend(q, pages, pages, tables, lengths, 0.5, starts)
        assert given[0] is given[1]
        assert (type(given[0]) is torch.Tensor) == is_dense
        if is_dense:
            kept = torch.ones(queries, length).tril(length - queries).bool()
            assert given[0].dtype == q.dtype
            assert torch.equal(given[0] == 0, kept)
            assert torch.equal(given[0] == -torch.inf, ~kept)
        attend(q, pages, pages, tables, lengths, 0.5, starts, causal=False)
        assert given[-1] is None


def test_what_peers_keep_is_freed_when_it_is_asked() -> None:
    made: MadeOnce[int] = MadeOnce()
    x = torch.zeros(2)
    assert [made.get({"x": x}, lambda: 1), made.get({"x": x}, lambda: 2)] == [1, 1]
    forget_made()
    assert made.get({"x": x}, lambda: 3) == 3


def test_the_dense_weight_is_the_quantized_one() -> None:
    contract = OPS["dequant_gemm"].contract
    peer = with_peers(OPS)["dequant_gemm"].variants["cublas_16bit"]
    axes = {"M": 3, "N": 16, "K": 64, "group_size": 32, "activation": "bfloat16", "weight": "bfloat16"}
    point = cut_axes(contract, {**next(iter(contract.benchmarks.values())), **axes}, CPU_SIZE)
    assert point is not None
    x, weight = (contract.case(point, 0).inputs[name] for name in ("x", "weight"))
    assert peer.function is not None
    dense = peer.prepare(weight)
    assert dense.shape == (16, 64)
    assert torch.equal(peer.function(x, dense), peer.function(x, weight))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 3}, "uniform codes of 4 bits, not uniform ones of 3"),
        ({"coding": "lookup"}, "not lookup ones of 4"),
        ({"permuted": True}, "no permuted weight"),
        ({"sparse": True}, "no sparse weight"),
        ({}, None),
    ],
)
def test_a_peer_says_which_weights_it_does_not_read(change: dict[str, object], reason: str | None) -> None:
    weight = {"bits": 4, "coding": "uniform", "permuted": False, "sparse": False, **change}
    found = refuse_other_codes(weight, TARGETS["sm_90"])
    assert found is None if reason is None else reason in str(found)
    peer = with_peers(OPS)["dequant_gemm"].variants["torch_int4"]
    sizes = {"activation": "bfloat16", "weight": "bfloat16", "group_size": 128, "N": 8, "K": 1024}
    assert peer.supports({**weight, **sizes}, TARGETS["sm_90"]) == found


def mixture(dtype: str, tokens: int, seed: int) -> Case:
    """A case of moe_mlp whose pairs all have an expert, in the shape of Qwen3-30B-A3B's, smaller."""
    contract = OPS["moe_mlp"].contract
    sizes = {"T": tokens, "K": 2, "E": 5, "H": 64, "I": 40, "activation": dtype, "weight": dtype}
    plain = {"gate_up_group_size": 0, "down_group_size": 0, "layout": "contiguous", "values": "ordinary"}
    point = {**contract.benchmarks["T=8,Qwen3-30B-A3B"], **sizes, **plain}
    return contract.case(contract.draw_axes(chooser(seed), point), seed)


@pytest.mark.parametrize("tokens", [1, 7, 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torchs_grouped_products_between_a_gather_and_a_sum_are_the_op(tokens: int, dtype: str) -> None:
    """On a CPU torch has the same function: by the rule of errors that a GPU's time waits for."""
    peer = replace(with_peers(OPS)["moe_mlp"].variants["torch_grouped_mm"], supports=lambda axes, device: None)
    case = mixture(dtype, tokens, tokens)
    result = check_case(peer, case, slack=slack_of(peer))
    assert result.status == "ok", str(result)
    case.inputs["experts"].copy_(torch.arange(2 * tokens).view(tokens, 2) % 5)  # the sorted pairs are made anew
    assert check_case(peer, case, slack=slack_of(peer)).status == "ok"


def test_sorted_pairs_are_those_of_the_op_that_sorts() -> None:
    experts = torch.tensor([[4, 1], [1, 0], [4, 3], [0, 4]], dtype=torch.int32)
    pairs = SortedPairs.of(experts, 6)
    order, starts, *_ = OPS["sort_by_expert"].contract.reference(experts, 6, 16)
    assert torch.equal(pairs.order, order)
    assert torch.equal(pairs.ends, starts[1:])
    assert torch.equal(pairs.counts, starts.diff())
    assert pairs.order[pairs.places].tolist() == list(range(8))
    assert torch.equal(pairs.tokens, order // 2)
    assert {part.dtype for part in vars(pairs).values()} == {torch.int32}


def test_triton_kernels_is_given_rows_and_places_as_its_definition_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The definition is that of its own reference: rows x[src // K] w[e] times their gammas, added up at dst // K.
    Whether the package agrees only a GPU shows.
    """

    @dataclass
    class Indx:
        src_indx: torch.Tensor
        dst_indx: torch.Tensor

    @dataclass
    class RoutingData:
        gate_scal: torch.Tensor
        expt_hist: torch.Tensor
        n_expts_tot: int
        n_expts_act: int
        expt_data: Any

    def matmul_ogs(
        x: torch.Tensor, w: torch.Tensor, bias: None, routing_data: RoutingData, gather_indx: Indx | None = None,
        scatter_indx: Indx | None = None, *, gammas: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        rows = x if gather_indx is None else x[gather_indx.src_indx // routing_data.n_expts_act]
        experts = torch.arange(routing_data.n_expts_tot).repeat_interleave(routing_data.expt_hist)
        y = torch.stack([row @ w[expert] for row, expert in zip(rows, experts, strict=True)])
        y = y if gammas is None else y * gammas[:, None]
        if scatter_indx is None:
            return y
        assert torch.equal(scatter_indx.dst_indx[scatter_indx.src_indx], torch.arange(len(y), dtype=torch.int32))
        out = y.new_zeros((len(y) // routing_data.n_expts_act, w.shape[2]))
        return out.index_add_(0, scatter_indx.dst_indx // routing_data.n_expts_act, y)

    def make_ragged_tensor_metadata(slice_sizes: torch.Tensor, n_gates: int) -> tuple[list[int], int]:
        return slice_sizes.tolist(), n_gates

    named = {"matmul_ogs": matmul_ogs, "GatherIndx": Indx, "ScatterIndx": Indx, "RoutingData": RoutingData}
    tensor = SimpleNamespace(make_ragged_tensor_metadata=make_ragged_tensor_metadata)
    for name, module in {"": SimpleNamespace(), ".matmul_ogs": SimpleNamespace(**named), ".tensor": tensor}.items():
        monkeypatch.setitem(sys.modules, f"triton_kernels{name}", module)
    peer = with_peers(OPS)["moe_mlp"].variants["triton_kernels"]
    case = mixture("float32", 7, 3)
    given = {name: case.inputs[name] for name in ("x", "experts", "weights", "gate_up", "down")}
    assert peer.function is not None
    assert torch.allclose(peer.function(**given), case.contract.reference(**case.inputs), rtol=1e-4, atol=1e-5)


def test_vllm_is_called_by_its_parameters_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused_experts(
        hidden_states: str, w1: str, w2: str, topk_weights: str, topk_ids: str, **options: Any
    ) -> tuple[str, ...]:
        return hidden_states, w1, w2, topk_weights, topk_ids

    place = "vllm.model_executor.layers.fused_moe.fused_moe"
    monkeypatch.setitem(sys.modules, place, SimpleNamespace(fused_experts=fused_experts))
    peer = with_peers(OPS)["moe_mlp"].variants["vllm"]
    assert peer.function is not None
    assert peer.function("x", "experts", "weights", "gate_up", "down") == ("x", "gate_up", "down", "weights", "experts")


@pytest.mark.parametrize("name", ["torch_grouped_mm", "vllm", "triton_kernels"])
def test_a_mixtures_peer_refuses_what_it_would_compute_otherwise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: object())
    peer, h200 = with_peers(OPS)["moe_mlp"].variants[name], TARGETS["sm_90"]
    axes = OPS["moe_mlp"].contract.benchmarks["T=1,Qwen3-30B-A3B"]
    assert peer.refusal(axes, h200) is None
    assert peer.left_out == ("gate_up_bias", "down_bias", "limit")
    changes = {"bits": (4, "dense weights"), "dropped": (True, "no pair without"), "limit": (7, "does not take limit")}
    if name == "torch_grouped_mm":
        changes |= {"activation": ("float16", "bfloat16 alone"), "I": (36, "multiples of 8")}
        assert "sm_90 and later" in str(peer.refusal(axes, replace(h200, arch="sm_80")))
        assert peer.refusal(axes, replace(h200, arch="sm_100")) is None
    for axis, (value, reason) in changes.items():
        assert reason in str(peer.refusal({**axes, axis: value}, h200))


def test_a_peer_says_what_it_needs() -> None:
    peer = peer_variant(None, abs, supports=lambda axes, device: "too large" if axes["N"] > 8 else None)
    h200, axes = TARGETS["sm_90"], {"activation": "bfloat16", "N": 8}
    assert peer.supports(axes, h200) is None
    assert peer.supports({**axes, "N": 9}, h200) == "too large"
    assert peer.supports({**axes, "activation": "float32"}, h200) == "it takes float16 and bfloat16, not float32"
    assert peer.supports(axes, replace(h200, arch="gfx942")) == "it is for NVIDIA GPUs"
    assert peer_variant("no_such_package", abs).supports(axes, h200) == "no_such_package is not installed"
    assert (peer.wins, peer.deterministic, peer.batch_invariant) == ("a peer", False, False)


def test_pages_as_flashinfer_wants_them() -> None:
    tables = torch.tensor([[5, 7, 99], [2, 99, 99], [1, 0, 3]], dtype=torch.int32)
    pages = Pages.of(tables, torch.tensor([9, 8, 17], dtype=torch.int32), page_size=8)
    assert pages.indptr.tolist() == [0, 2, 3, 6]
    assert pages.indices.tolist() == [5, 7, 2, 1, 0, 3]
    assert pages.last_page_len.tolist() == [1, 8, 1]


def test_flashinfer_plans_once_for_the_same_tensors() -> None:
    plans: list[tuple[Any, ...]] = []

    class Wrapper:
        def __init__(self, workspace: torch.Tensor) -> None:
            assert workspace.dtype == torch.uint8

        def plan(self, *given: Any, **options: Any) -> None:
            plans.append((*given, options))

        def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return q, caches[1]

    q, k, v = torch.empty(3, 4, 16), torch.empty(8, 8, 2, 16), torch.empty(8, 8, 2, 16)
    tables, lengths = torch.tensor([[5, 7]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    for _ in range(2):
        out, values = attend(Wrapper, q, (k, v), tables, lengths, 0.25, starts, causal=True)
        assert (out is q, values is v) == (True, True)
    ((first, indptr, indices, last, *sizes, options),) = plans
    assert first is starts
    assert (indptr.tolist(), indices.tolist(), last.tolist(), sizes) == ([0, 2], [5, 7], [1], [4, 2, 16, 8])
    assert options == {"sm_scale": 0.25, "q_data_type": q.dtype, "kv_data_type": k.dtype, "causal": True}
    lengths.add_(1)
    attend(Wrapper, q, (k, v), tables, lengths, 0.25)
    assert len(plans) == 2


def test_what_is_made_once_is_made_again_when_its_tensor_was_written() -> None:
    made: list[int] = []
    once: MadeOnce[int] = MadeOnce(most=2)
    x = torch.zeros(3)

    def count() -> int:
        made.append(len(made))
        return made[-1]

    assert [once.get({"x": x}, count) for _ in range(2)] == [0, 0]
    x.add_(1)
    assert once.get({"x": x}, count) == 1
    assert [once.get({"x": torch.zeros(3)}, count) for _ in range(2)] == [2, 3]
    assert once.get({"x": x}, count) == 4  # the oldest made room


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "swiglu"])
def test_torch_compile_is_the_op_wherever_there_is_a_compiler(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = with_peers(OPS)[op].variants["torch_compile"]
    device = torch.device("cpu")
    facts = device_facts(device)
    for seed, held in enumerate([{"T": 1, "activation": "float32"}, {"T": 5, "activation": "float32"}]):
        axes = variant.contract.draw_axes(chooser(seed), {**variant.axes_left_out, **held})
        case = variant.contract.case(axes, seed)
        if (reason := variant.unsupported_reason(case.axes, device, facts)) is not None:
            assert "compiler" in reason or "headers" in reason
            assert check_case(variant, case).status == "unsupported"
        else:
            assert check_case(variant, case, slack=slack_of(variant)).status == "ok"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert (
        variant.supports({}, facts) == "torch.compile needs a C++ compiler on a CPU, and there is no no-such-compiler"
    )
    old, new = (replace(facts, arch=arch) for arch in ("sm_60", "sm_90"))
    assert "sm_70" in str(variant.supports({}, old))
    assert variant.supports({}, new) is None


def test_the_fastest_settings_are_chosen_by_the_median_of_trials_in_turns() -> None:
    tried: list[int] = []

    def candidate(index: int, *seconds: float) -> Callable[[], Served]:
        left = iter(seconds)

        def serve() -> Served:
            tried.append(index)
            return Served((), 0, next(left), None)

        return serve

    # The first is slow once, the second is lucky once, and the third is hopeless: it is tried once.
    assert fastest([candidate(0, 1.4, 1.0, 1.0), candidate(1, 1.1, 1.2, 1.2), candidate(2, 1.7)]) == 0
    assert tried == [0, 1, 2, 0, 1, 0, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.5},
        {"frequency_penalty": 0.5},
        {"logprobs": 0},
        {"logits_processors": [max]},
        {"ignore_eos": False},
        {"stop": "END"},
        {"stopping_criteria": [lambda tokens, text: True]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_peer_is_asked_for_nothing_that_it_would_not_do(changes: dict[str, Any], tmp_path: Path) -> None:
    params = replace(SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), **changes)
    task = PeerTask("without_kv_cache", tmp_path, [Request([1, 2], params)], torch.device("cpu"), torch.float32)
    with pytest.raises(PeerUnsupportedError, match="only greedy requests that ask for nothing else"):
        make_peer(task)
