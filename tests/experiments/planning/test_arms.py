"""A sweep is the product of its lists."""

import time
from itertools import product
from pathlib import Path

import pytest

from experiments.document import ExperimentError, parse_document
from experiments.planning.arms import Arm
from experiments.planning.axes import make_axis
from experiments.planning.layout import lay_out


def arms(text: str) -> list[Arm]:
    (layout,) = lay_out(parse_document(f"name: a\nmodel: {{preset: tiny}}\n{text}", "a.yaml", Path()))
    return [arm for part in layout.parts for arm in part.arms]


def test_no_list_is_one_arm() -> None:
    (arm,) = arms("kernels: {swiglu: fused}\nscheduler: {block_size: 8}")
    assert arm.labels == {"swiglu": "fused"}
    assert arm.scheduler == {"block_size": 8}
    assert arm.swept == ()
    assert arm.settings == {}


def test_kernels_and_scheduler_lists_multiply_with_the_last_fastest() -> None:
    found = arms(
        "kernels:\n  paged_decode: [torch, one_pass, {split_kv: {num_splits: [4, 8], BLOCK_N: 16}}]\n"
        "  swiglu: [torch, fused]\nscheduler: {block_size: [8, 16], max_num_seqs: 4}"
    )
    decode = ["torch", "one_pass", "split_kv[BLOCK_N=16,num_splits=4]", "split_kv[BLOCK_N=16,num_splits=8]"]
    points = [(arm.labels["paged_decode"], arm.labels["swiglu"], arm.scheduler["block_size"]) for arm in found]
    assert points == list(product(decode, ["torch", "fused"], [8, 16]))
    assert found[0].swept == ("paged_decode", "swiglu", "scheduler.block_size")
    assert found[0].settings == {"block_size": 8}


def test_pins_are_given_as_select_takes_them() -> None:
    (arm,) = arms("kernels: {paged_decode: {split_kv: {num_splits: 4}}, swiglu: torch}")
    assert arm.choices == {"paged_decode": {"split_kv": {"num_splits": 4}}, "swiglu": "torch"}


def test_a_variant_named_twice_is_one_arm() -> None:
    assert len(arms("kernels: {swiglu: [torch, torch, fused]}")) == 2


def test_sets_of_options_follow_one_another_and_batching_is_the_fastest() -> None:
    found = arms(
        "scheduler: [{block_size: [8, 16], order: fcfs}, {max_num_seqs: 4, order: fcfs}]\n"
        "batching: [static, continuous]\nkernels: {swiglu: torch}"
    )
    assert found[0].swept == ("scheduler.max_num_seqs", "scheduler.block_size", "batching")
    assert [arm.settings for arm in found] == [
        {**options, "batching": batching}
        for options in ({"block_size": 8}, {"block_size": 16}, {"max_num_seqs": 4})
        for batching in ("static", "continuous")
    ]
    assert {arm.scheduler["order"] for arm in found} == {"fcfs"}


def test_an_arm_of_several_that_has_nothing_of_what_differs() -> None:
    found = arms("scheduler: [{}, {prefix_cache: hash}]")
    assert [arm.title for arm in found] == ["defaults", "prefix_cache=hash"]
    assert arms("scheduler: {}")[0].title == "the only arm"


def test_pins_that_multiply_to_too_many_are_not_laid_out() -> None:
    pins = ", ".join(f"{pin}: {list(range(1, 101))}" for pin in ("BLOCK_N", "num_splits", "num_warps"))
    with pytest.raises(ExperimentError, match=r"kernels.paged_decode .*: the lists multiply to 1,000,000 points"):
        arms(f"kernels: {{paged_decode: {{split_kv: {{{pins}}}}}}}")


def test_a_long_list_is_soon_read() -> None:
    began = time.monotonic()
    axis = make_axis("scheduler.max_num_seqs", [index // 2 for index in range(200_000)])
    assert (len({entry["scheduler.max_num_seqs"] for entry in axis}), len(axis)) == (100_000, 200_000)
    assert time.monotonic() - began < 60
