"""Kernels that change while requests are served: which run, from which step on, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import tkernels
from tests.tmodel.formats import by_hand, eight_bits, models
from tests.tsched.async_serving import LONG, collect, joined, make_async, run
from tests.tsched.random_model import save_random_model
from tests.tsched.test_llm import PROMPTS
from tkernels import OPS, Registry
from tsched import LLM, AsyncLLM, SamplingParams

SAMPLES = SamplingParams(logprobs=1, n=2, seed=3, max_tokens=6, ignore_eos=True)
ALONE = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

HEARD = """
import functools
from tkernels import Variant
from tkernels.ops.{op}.contract import CONTRACT
CALLS = []
@functools.wraps(CONTRACT.baseline)
def compute(*args, **kwargs):
    CALLS.append(1)
    return CONTRACT.baseline(*args, **kwargs)
VARIANT = Variant(wins="never: it counts its calls", deterministic=True, batch_invariant=False, function=compute)
"""
NEGATED = HEARD.replace("return CONTRACT", "return -CONTRACT")


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """Every op with the variants `first` and `second`, which count their calls, and a SwiGLU of the other sign."""
    folder = tmp_path_factory.mktemp("variants")
    for op in OPS:
        (folder / op).mkdir()
        for name in ("first", "second"):
            (folder / op / f"{name}.py").write_text(HEARD.format(op=op))
    (folder / "gate_up_swiglu" / "negated.py").write_text(NEGATED.format(op="gate_up_swiglu"))
    return OPS.with_variants_from(folder)


def calls(ops: Registry, op: str, variant: str) -> list[int]:
    module = ops[op].variants[variant].module
    assert module is not None
    return module.CALLS


def write_random(directory: Path, architecture: str) -> Path:
    save_random_model(directory, architecture)
    return directory


def write_eight_bits(directory: Path, scales: str) -> Path:
    return eight_bits.write_models(directory, eight_bits.Kind("compressed-tensors", "float", scales))[0]


def make_kinds(dense: Path, directory: Path) -> dict[str, Path]:
    """Checkpoints whose models call every op between them."""
    return {
        "dense": dense,
        "gpt2": write_random(directory / "gpt2", "GPT2LMHeadModel"),
        "experts": write_random(directory / "experts", "Qwen3MoeForCausalLM"),
        "4 bits": models.write_models(directory / "four", by_hand.Kind("gptq", 4, 128))[0],
        "8 bits": write_eight_bits(directory / "eight", "channel"),
        "8 bits in blocks": write_eight_bits(directory / "blocks", "block"),
    }


def generate(llm: LLM, prompt: list[int]) -> list[list[int]]:
    """Of two samples that share the prompt's blocks, and of one that shares nothing."""
    return [list(one.token_ids) for params in (SAMPLES, ALONE) for one in llm.generate([prompt], params)[0].outputs]


def test_every_op_that_a_model_calls_is_swapped_and_the_text_stays(
    checkpoint: Path, tmp_path: Path, ops: Registry
) -> None:
    """`first` and `second` are bit-equal; after the swap of an op only `second` is called."""
    swapped = set()
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cuda_graphs": True, "shared_prefixes": True}
    for directory in make_kinds(checkpoint, tmp_path).values():
        llm = LLM(directory, ops=ops, max_num_seqs=4, block_size=4, **options)
        composed = {op for op in llm.arm if llm.arm[op] == "composed"}
        llm.swap_kernels({op: "first" for op in llm.arm if op not in composed})
        prompt = [token % llm.config.vocab_size for token in PROMPTS[1]]
        expected = generate(llm, prompt)
        for op in llm.arm:
            parts = dict.fromkeys(ops[op].variants["composed"].parts) if op in composed else {}
            before = llm.stats().num_steps
            assert llm.swap_kernels({op: "second", **parts}) == before
            assert llm.arm[op] == "second"
            old, new = len(calls(ops, op, "first")), len(calls(ops, op, "second"))
            assert generate(llm, prompt) == expected, op
            assert len(calls(ops, op, "second")) > new, f"{op}: nobody calls the new kernel"
            assert len(calls(ops, op, "first")) == old, f"{op}: somebody still calls the old kernel"
            llm.swap_kernels({op: "composed" if op in composed else "first", **dict.fromkeys(parts, "first")})
            swapped.add(op)
    assert swapped == set(OPS)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys and values do not depend on its MLP, so its arms' tokens follow from the text alone."""
    directory = tmp_path_factory.mktemp("one")
    save_random_model(directory, num_hidden_layers=1)
    return directory


def tokens_of(llm: LLM, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return list(llm.generate([prompt], params)[0].outputs[0].token_ids)


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_before_the_step_are_of_one_arm_and_those_from_it_on_of_the_other(
    one_layer: Path, ops: Registry, overlap: bool
) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float64", "ops": ops}
    old = LLM(one_layer, **options)
    new = LLM(one_layer, kernels={"gate_up_swiglu": "negated"}, **options)
    served = LLM(one_layer, overlap=overlap, cuda_graphs=True, **options)
    engine = served._engine
    request = engine.add(0, PROMPTS[4], LONG)
    for _ in range(9):
        engine.step()
    first = served.swap_kernels({"gate_up_swiglu": "negated"})
    assert first == served.stats().num_steps == 9
    while engine.has_unfinished:
        engine.step()
    tokens = request.sequence.output_token_ids
    before = tokens_of(old, PROMPTS[4], first)
    after = tokens_of(new, PROMPTS[4] + before, LONG.max_tokens - first)
    assert tokens == before + after
    assert tokens != tokens_of(old, PROMPTS[4], LONG.max_tokens)


def test_a_weight_is_prepared_again_for_another_layout_and_not_taken_back(tmp_path: Path) -> None:
    directory = models.write_models(tmp_path, by_hand.Kind("gptq", 4, 128), num_hidden_layers=1)[0]
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 16, "max_model_len": 32}
    prompt = [5, 11, 7]
    started = LLM(directory, kernels={"dequant_gemm": "tiled"}, **options)
    swapped = LLM(directory, kernels={"dequant_gemm": "torch"}, **options)
    swapped.swap_kernels({"dequant_gemm": "tiled"})
    assert swapped.weight_bytes == started.weight_bytes
    assert tokens_of(swapped, prompt, 1) == tokens_of(started, prompt, 1)
    swapped.swap_kernels({"dequant_gemm": {"split_k": {"num_warps": 2}}})  # of the same layout
    with pytest.raises(tkernels.SelectionError, match="'torch' reads its weights in another layout than 'split_k'"):
        swapped.swap_kernels({"dequant_gemm": "torch"})
    assert swapped.arm["dequant_gemm"] == "split_k[num_warps=2]"


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"paged_decod": "torch"}, "paged_decode"),
        ({"paged_decode": "split_k"}, "split_kv"),
        ({"paged_decode": "split_kv"}, "float64 is for the torch variants"),
        ({"merge_states": "torch"}, "does not use that op"),
        ({"rms_norm": "torch", "paged_prefill": {"packed_gqa": {"BLOCKS": 3}}}, "paged_prefill"),
        ({"gate_up_swiglu": "torch", "swiglu": "torch"}, "name one of the two"),
    ],
)
def test_a_refusal_changes_nothing(checkpoint: Path, choices: Mapping[str, Any], reason: str) -> None:
    llm = LLM(checkpoint, device="cpu", dtype="float64")
    arm, kernels, network = llm.arm, llm.kernels, llm._network
    with pytest.raises(tkernels.SelectionError, match=reason):
        llm.swap_kernels(choices)
    assert (llm.arm, llm.kernels, llm._network) == (arm, kernels, network)
    assert llm.swap_kernels({}) == 0


def test_a_choice_stays_through_other_swaps_and_none_is_the_default(checkpoint: Path, ops: Registry) -> None:
    llm = LLM(checkpoint, device="cpu", dtype="float64", ops=ops, kernels={"rms_norm": "first"})
    llm.swap_kernels({"matmul": "second"})
    assert (llm.arm["rms_norm"], llm.arm["matmul"]) == ("first", "second")
    llm.swap_kernels({"rms_norm": None})
    assert (llm.arm["rms_norm"], llm.arm["matmul"]) == ("torch", "second")


def test_swaps_under_load_drop_no_request(checkpoint: Path, ops: Registry) -> None:
    swap_under_load(checkpoint, ops, swaps=10)


@pytest.mark.slow
def test_100_swaps_under_load_drop_no_request(checkpoint: Path, ops: Registry) -> None:
    swap_under_load(checkpoint, ops, swaps=100)


def swap_under_load(checkpoint: Path, ops: Registry, swaps: int) -> None:
    """Six clients send one request after another while kernels are swapped: each gets the whole text of its prompt."""
    llm = LLM(checkpoint, device="cpu", dtype="float64", ops=ops)
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS[:6], LONG)]

    async def serve(served: AsyncLLM, client: int, done: asyncio.Event) -> int:
        count = 0
        while not done.is_set():
            parts = await collect(served.add_request(f"{client}-{count}", PROMPTS[client], LONG))
            (completion,) = joined(parts)
            assert (completion.token_ids, completion.finish_reason) == (expected[client], "length")
            count += 1
        return count

    async def main() -> None:
        async with make_async(checkpoint, kernels={}, ops=ops, overlap=True) as served:
            done = asyncio.Event()
            clients = [asyncio.create_task(serve(served, client, done)) for client in range(6)]
            arms, steps = ("first", "second", None), []
            for i in range(swaps):
                choice = arms[i % len(arms)]
                steps.append(await served.swap_kernels(dict.fromkeys(("matmul", "paged_decode", "rms_norm"), choice)))
                await asyncio.sleep(0.01)
                assert served.arm["matmul"] == (choice or "torch")
            done.set()
            counts = await asyncio.gather(*clients)
            assert steps == sorted(steps)
            assert steps[0] < steps[-1] < served.stats().num_steps
            assert min(counts) >= 1

    run(main)


def test_two_swaps_at_once_both_hold_and_a_closed_engine_refuses(checkpoint: Path, ops: Registry) -> None:
    async def main() -> None:
        async with make_async(checkpoint, kernels={}, ops=ops) as served:
            await asyncio.gather(served.swap_kernels({"matmul": "first"}), served.swap_kernels({"rms_norm": "second"}))
            assert (served.arm["matmul"], served.arm["rms_norm"]) == ("first", "second")
            with pytest.raises(tkernels.SelectionError):
                await served.swap_kernels({"matmul": "third"})
            assert served.arm["matmul"] == "first"
        with pytest.raises(RuntimeError):
            await served.swap_kernels({})

    run(main)
