"""matmul: every tile is computed once, by enough programs, and a row's bits do not depend on the rows around it."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tkernels import OPS, Config, Kernel
from tkernels.contract import Axes, ContractError, Int
from tkernels.device import INTERPRETER, TARGETS
from tkernels.ops.matmul.auto import ALGORITHMS
from tkernels.ops.matmul.split_k import split_inputs
from tkernels.ops.served_models import SERVED_MODELS
from tkernels.tuning import NEAREST

VARIANTS = OPS["matmul"].variants
TRITON = [name for name, v in VARIANTS.items() if v.kind == "triton"]
MANY_ROWS = [name for name in TRITON if VARIANTS[name].supports({"M": 80}, INTERPRETER) is None]
META = torch.device("meta")


def taking_tokens(*sizes: tuple[int, int]) -> Iterator[tuple[str, int, int]]:
    """(variant, tokens, outputs) where the variant takes so many tokens."""
    for variant in TRITON:
        for tokens, outputs in sizes:
            if VARIANTS[variant].supports({"M": tokens}, INTERPRETER) is None:
                yield variant, tokens, outputs


@pytest.mark.parametrize(
    ("variant", "tokens", "outputs"), [*taking_tokens((1, 1), (1, 50), (16, 64), (33, 96), (80, 50), (40, 33))]
)
def test_fewer_programs_than_tiles_cover_every_tile_once(variant: str, tokens: int, outputs: int) -> None:
    # Products and sums of these are exact, and so is their fp16 result.
    x, weight = (torch.randint(-3, 4, (rows, 8)).half() for rows in (tokens, outputs))
    assert torch.equal(VARIANTS[variant](x, weight), x @ weight.t())


@pytest.mark.parametrize("variant", ["gemv", "split_k"])
def test_every_split_of_the_inputs_counts_once_and_the_bias_once(variant: str) -> None:
    """As exact as above; the interpreter's device has four multiprocessors, and tiles of 32 inputs."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-3, 4, (rows, 250), generator=generator).half() for rows in (1, 20))
    bias = torch.arange(20).half()
    axes = {"M": 1, "N": 20, "K": 250}
    needed = VARIANTS[variant].workspace(axes, VARIANTS[variant].default_config(INTERPRETER.arch), INTERPRETER)
    assert needed["partial"].shape[0] == 4
    assert torch.equal(VARIANTS[variant](x, weight, bias=bias), x @ weight.t() + bias)


@pytest.mark.parametrize("variant", [name for name in MANY_ROWS if VARIANTS[name].batch_invariant] + ["split_k"])
def test_a_row_alone_and_in_a_batch_has_the_same_bits(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 104, generator=generator).bfloat16() for rows in (37, 24))
    whole = VARIANTS[variant](x, weight)
    for row in (0, 15, 16, 36):
        assert torch.equal(VARIANTS[variant](x[row : row + 1], weight), whole[row : row + 1])


@pytest.mark.parametrize(
    ("x", "weight", "arch", "reason"),
    [
        (torch.zeros(2, 8).half(), torch.zeros(4, 8).half(), "sm_90", None),
        (torch.zeros(2, 8).half(), torch.zeros(4, 8).half(), "sm_89", "from sm_90 on; this is sm_89"),
        (torch.zeros(2, 8), torch.zeros(4, 8), "sm_90", "fp32 products run on FMA units"),
        (torch.zeros(2, 9).half()[:, :8], torch.zeros(4, 8).half(), "sm_90", "x's address and row stride"),
        (torch.zeros(17).half()[1:].view(2, 8), torch.zeros(4, 8).half(), "sm_90", "x's address and row stride"),
        (torch.zeros(2, 8).half(), torch.zeros(4, 12).half()[:, :8], "sm_90", "weight's address and row stride"),
    ],
)
def test_what_a_tensor_descriptor_cannot_copy_is_refused_with_the_reason(
    x: torch.Tensor, weight: torch.Tensor, arch: str, reason: str | None
) -> None:
    contract = OPS["matmul"].contract
    bound, _ = contract.bind_axes(contract.bind_arguments((x, weight), {}))
    for variant in ("tensor_descriptor", "overlapped"):
        got = VARIANTS[variant].supports(bound, TARGETS[arch])
        assert (got is None) if reason is None else (got is not None and reason in got)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_widths_that_differ_are_refused_with_both_named(variant: str) -> None:
    with pytest.raises(ContractError, match="matmul.*weight"):
        VARIANTS[variant](torch.zeros(2, 8), torch.zeros(4, 9))


def programs_of(variant: str, axes: Axes, arch: str) -> int:
    """Programs that a variant launches for bf16 matrices, by its launcher as it is, on a device that is not there."""
    facts, contract = TARGETS[arch], OPS["matmul"].contract
    counted = []

    def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        counted.append(math.prod(grid))

    x, weight = (torch.empty(int(axes[rows]), int(axes["K"]), dtype=torch.bfloat16, device=META) for rows in "MN")
    arguments = contract.bind_arguments((x, weight), {})
    bound, _ = contract.bind_axes(arguments)
    outputs, config = contract.allocate_outputs(bound, arguments, META), VARIANTS[variant].default_config(arch)
    Kernel(VARIANTS[variant], NEAREST, {}, door).launch_into(outputs, arguments, bound, META, facts, config)
    return sum(counted)


@pytest.mark.parametrize("layer", SERVED_MODELS["Qwen3-4B"].linears)
@pytest.mark.parametrize(("variant", "tokens"), [("auto", 1), ("gemv", 1), ("split_k", 1), ("auto", 2), ("auto", 64)])
def test_every_multiprocessor_has_a_program_at_decode(variant: str, tokens: int, layer: str) -> None:
    outputs, inputs = SERVED_MODELS["Qwen3-4B"].linears[layer]
    assert programs_of(variant, {"M": tokens, "N": outputs, "K": inputs}, "sm_90") >= TARGETS["sm_90"].multiprocessors


@pytest.mark.parametrize("arch", TARGETS)
def test_the_inputs_are_split_by_the_weight_alone_in_whole_tiles(arch: str) -> None:
    facts, config = TARGETS[arch], VARIANTS["split_k"].default_config(arch)
    for model in SERVED_MODELS.values():
        for outputs, inputs in model.linears.values():
            per_split = split_inputs(outputs, inputs, config, facts)
            assert per_split % config["BLOCK_K"] == 0
            splits = -(-inputs // per_split)
            for tokens in (1, 17, 64):
                axes = {"M": tokens, "N": outputs, "K": inputs}
                tiles = -(-tokens // config["BLOCK_TOKENS"]) * -(-outputs // config["BLOCK_N"])
                assert programs_of("split_k", axes, arch) == tiles * splits
                needed = VARIANTS["split_k"].workspace(axes, config, facts)
                assert (needed["partial"].shape == (splits, tokens, outputs)) if splits > 1 else not needed


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({"M": 0}, "tensor_descriptor"),
        ({"M": 1}, "gemv"),
        ({"M": 2}, "split_k"),
        ({"M": 64}, "split_k"),
        ({"M": 65}, "tensor_descriptor"),
        ({"M": 511}, "tensor_descriptor"),
        ({"M": 512}, "overlapped"),
        ({"M": 512, "activation": "float32"}, "persistent"),
        ({"M": 512, "weight_aligned": False}, "persistent"),
        ({"M": 65, "x_aligned": False}, "persistent"),
        ({"M": 1, "weight_aligned": False}, "gemv"),
    ],
)
def test_auto_goes_by_tokens_and_by_what_hardware_can_copy(change: Axes, chosen: str) -> None:
    axes = {"N": 2560, "K": 4096, "activation": "bfloat16", "weight": "bfloat16", **change}
    assert ALGORITHMS.chosen(axes, VARIANTS["auto"].default[""], TARGETS["sm_90"]).name == chosen
    older = ALGORITHMS.chosen(axes, VARIANTS["auto"].default[""], TARGETS["sm_80"]).name
    assert older == (chosen if chosen in ("gemv", "split_k") else "persistent")


@pytest.mark.parametrize(("variant", "most"), [("gemv", 1), ("split_k", 64)])
def test_more_tokens_than_a_variant_is_for_are_refused_with_the_number(variant: str, most: int) -> None:
    assert VARIANTS[variant].supports({"M": most}, INTERPRETER) is None
    assert f"not M = {most + 1}" in (VARIANTS[variant].supports({"M": most + 1}, INTERPRETER) or "")


def test_every_product_of_the_served_models_is_timed_in_every_class_of_tokens() -> None:
    """The classes between which the fastest config or algorithm may change; a head has no prefill's tokens."""
    rows = OPS["matmul"].contract.axis_by_name["M"]
    assert isinstance(rows, Int)
    points = {(one["N"], one["K"], one["M"]) for one in OPS["matmul"].contract.benchmarks.values()}
    assert len(points) == len(OPS["matmul"].contract.benchmarks), "a point is there twice"
    for model in SERVED_MODELS.values():
        for layer, product in model.linears.items():
            classes = [rows.size_class(int(m)) for n, k, m in sorted(points, key=str) if (n, k) == product]
            expected = rows.class_labels[:-1] if layer == "head" else rows.class_labels
            assert sorted(classes) == sorted(expected)
