"""What can be known of the peers without a GPU: that SDPA on gathered pages and the dense weight are the same ops."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend

from experiments.peers import slack_of, with_peers
from experiments.peers.dense_attention import dense_attention
from experiments.peers.flashinfer_pages import Pages
from experiments.peers.installed import MadeOnce
from experiments.peers.plain_weights import only_plain
from experiments.peers.transformers_generate import fastest
from experiments.serving.rounds import Served
from tkernels import OPS, UnsupportedError
from tkernels.device import device_facts
from tkernels.measurement import CPU_SIZE, cut_axes
from tkernels.verification.check import check_case, chooser

PAGED = {"D": 32, "Dv": 32, "Hq": 4, "Hkv": 2, "S": 8, "N": 5, "activation": "float64", "kv": "float64"}


@pytest.mark.parametrize("op", ["paged_decode", "paged_prefill"])
def test_attention_on_gathered_pages_is_the_op(op: str) -> None:
    contract = OPS[op].contract
    base = next(iter(contract.benchmarks.values()))
    sizes = {"B": 3, "P": 15} | ({"T": 6} if op == "paged_prefill" else {})
    axes = cut_axes(contract, {**base, **PAGED, **sizes}, CPU_SIZE)
    assert axes is not None
    inputs = contract.case(axes, 0).inputs
    got = dense_attention(SDPBackend.MATH)(dict(inputs))
    assert torch.allclose(got, contract.reference(**inputs), rtol=1e-12, atol=1e-12)
    uneven = {**inputs, "context_lens": torch.tensor([40, 8, 40], dtype=torch.int32)}
    with pytest.raises(UnsupportedError, match=r"contexts are \[8, 40\]"):
        dense_attention(SDPBackend.MATH)(uneven)


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
    found = only_plain({"bits": 4, "coding": "uniform", "permuted": False, "sparse": False, **change})
    assert found is None if reason is None else reason in str(found)


def test_pages_as_flashinfer_wants_them() -> None:
    tables = torch.tensor([[5, 7, 99], [2, 99, 99], [1, 0, 3]], dtype=torch.int32)
    pages = Pages.of(
        {
            "block_tables": tables,
            "context_lens": torch.tensor([9, 8, 17], dtype=torch.int32),
            "k_cache": torch.empty(8, 8, 1, 4),
        }
    )
    assert pages.indptr.tolist() == [0, 2, 3, 6]
    assert pages.indices.tolist() == [5, 7, 2, 1, 0, 3]
    assert pages.last_page_len.tolist() == [1, 8, 1]


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
        case = variant.contract.case(variant.contract.draw_axes(chooser(seed), held), seed)
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
