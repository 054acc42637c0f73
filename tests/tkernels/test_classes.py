"""Classes of the batch: their own configs, one order of sums, and a supported point at which each is tuned."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tkernels.outside import write_copy
from tkernels import OPS, Config, Tuning, VariantError
from tkernels.buckets import bucket, class_axes, class_distance, family
from tkernels.contract import Axes, Int
from tkernels.device import TARGETS
from tkernels.lockfile import Entry, lockfile, record, tuning_key
from tkernels.measurement import benchmark_points
from tkernels.preparation import axes_as_kept
from tkernels.tuning import candidates
from tkernels.tuning_session import TuningPoint, one_per_bucket
from tkernels.variant import Variant
from tkernels.verification.crossed_configs import crossed_config
from tkernels.verification.sanitizers.base import sanitized
from tkernels.verification.sanitizers.suite import SANITIZERS

H200 = TARGETS["sm_90"]
MATMUL = OPS["matmul"].variants["persistent"]
SIZES: Axes = {"N": 2560, "K": 2560, "activation": "bfloat16", "weight": "bfloat16"}

CLASSED = [v for op in OPS.values() for v in op.variants.values() if v.kind == "triton" and class_axes(v)]


def at(tokens: int) -> Axes:
    return {**SIZES, "M": tokens}


def record_times(folder: Path, tokens: int, us: Callable[[Config], float], variant: Variant = MATMUL) -> None:
    """An entry for the class of M = tokens in which every config was timed."""
    timings = tuple((config, us(config), "") for config in candidates(variant, H200.arch))
    best = min(timings, key=lambda timing: timing[1])[0]
    entry = Entry(*tuning_key(variant, bucket(variant, at(tokens))), config=best, timings=timings)
    record(lockfile(variant, H200, folder), H200, entry)


def by_depth(times: Mapping[int, float]) -> Callable[[Config], float]:
    """Microseconds by BLOCK_K and then by BLOCK_M."""
    return lambda config: times[config["BLOCK_K"]] + config["BLOCK_M"] / 1000


def test_a_bucket_names_the_class_of_the_batch_and_a_family_does_not() -> None:
    names = [bucket(MATMUL, at(tokens)).split(",")[0] for tokens in (1, 2, 16, 17, 64, 65, 256, 257, 4096)]
    assert names == ["M<=1", "M<=16", "M<=16", "M<=64", "M<=64", "M<=256", "M<=256", "M>256", "M>256"]
    assert family(MATMUL, bucket(MATMUL, at(1))) == "N<=4096,K<=4096,activation=bfloat16,weight=bfloat16"
    assert class_distance(MATMUL, bucket(MATMUL, at(1)), bucket(MATMUL, at(300))) == 4


def test_an_axis_whose_value_is_a_name_in_torch_is_no_dtype() -> None:
    decode = OPS["paged_decode"].variants["one_pass"]
    axes = {"B": 1, "lengths": "full", "activation": "bfloat16"}  # torch.full is a function
    assert "lengths" not in bucket(decode, axes)


def test_each_class_gets_its_own_config_of_the_order_of_sums_that_costs_the_least_over_all(tmp_path: Path) -> None:
    # By itself one token would take tiles 128 deep, three quarters of the time, and many rows 64 deep, a third.
    record_times(tmp_path, 1, by_depth({64: 4.0, 128: 3.0}))
    record_times(tmp_path, 2048, lambda config: {64: 100.0, 128: 300.0}[config["BLOCK_K"]] - config["BLOCK_M"] / 10)
    tuning = Tuning("frozen", tmp_path)
    one, many = (tuning.resolve(MATMUL, at(tokens), H200) for tokens in (1, 2048))
    assert (one["BLOCK_K"], many["BLOCK_K"]) == (64, 64)
    assert (one["BLOCK_M"], many["BLOCK_M"]) == (64, 128)
    assert MATMUL.sum_order is not None
    assert MATMUL.sum_order(one) == MATMUL.sum_order(many)


def test_a_variant_that_is_not_batch_invariant_gets_the_best_of_each_class(tmp_path: Path) -> None:
    free = replace(MATMUL, batch_invariant=False)
    record_times(tmp_path, 1, by_depth({64: 4.0, 128: 3.0}), free)
    record_times(tmp_path, 2048, by_depth({64: 100.0, 128: 300.0}), free)
    tuning = Tuning("nearest", tmp_path)
    assert [tuning.resolve(free, at(tokens), H200)["BLOCK_K"] for tokens in (1, 2048)] == [128, 64]


def test_a_class_without_an_entry_gets_the_nearest_ones_config(tmp_path: Path) -> None:
    record_times(tmp_path, 1, by_depth({64: 4.0, 128: 4.0}))
    record_times(tmp_path, 2048, lambda config: 200.0 - config["BLOCK_M"])
    tuning = Tuning("nearest", tmp_path)
    with pytest.warns(UserWarning, match=r"matmul.persistent \[M<=256.*config tuned with another class"):
        assert tuning.resolve(MATMUL, at(200), H200)["BLOCK_M"] == 128
    assert tuning.match(MATMUL, at(200), H200) == "another class"
    assert tuning.match(MATMUL, at(2048), H200) == "exact"


def test_a_search_keeps_the_order_that_its_first_call_settled_on(tmp_path: Path) -> None:
    assert MATMUL.sum_order is not None
    last: list[Config] = []

    def launch(config: Config) -> Callable[[], None]:
        last.append(config)
        return lambda: None

    shallow = Tuning("search", tmp_path, lambda run: by_depth({64: 1.0, 128: 2.0})(last[-1]))
    first = shallow.resolve(MATMUL, at(1), H200, launch)
    deep = replace(shallow, measure=lambda run: by_depth({64: 50.0, 128: 1.0})(last[-1]))
    second = deep.resolve(MATMUL, at(2048), H200, launch)
    assert MATMUL.sum_order(first) == MATMUL.sum_order(second)


def test_a_class_that_the_variant_does_not_know_is_named_and_left_out(tmp_path: Path) -> None:
    record_times(tmp_path, 1, by_depth({64: 4.0, 128: 4.0}))
    path = lockfile(MATMUL, H200, tmp_path)
    path.write_text(path.read_text().replace("M<=1,", "M<=2,"))
    with pytest.warns(UserWarning, match=r"M<=2.* is left out: M<=2 is none of M<=1, M<=16, M<=64, M<=256, M>256"):
        config = Tuning("nearest", tmp_path).resolve(MATMUL, at(1), H200)
    assert config == MATMUL.default_config(H200.arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("variant", CLASSED, ids=lambda v: f"{v.contract.name}.{v.name}")
def test_every_class_that_a_variant_takes_has_a_point_at_which_it_is_tuned(variant: Variant, arch: str) -> None:
    facts = TARGETS[arch]
    points = benchmark_points(variant.contract, torch.device("cuda"))
    for axis in class_axes(variant):
        for size, label in zip((*axis.classes, 4 * axis.classes[-1]), axis.class_labels, strict=True):
            asked = [axes_as_kept(variant, {**axes, axis.name: size}) for axes in points.values()]
            if all(variant.refusal(axes, facts) for axes in asked):
                continue  # it is for no call of this class
            tuned = one_per_bucket([TuningPoint(variant, name, axes) for name, axes in points.items()], facts)
            assert label in {axis.size_class(int(point.axes[axis.name])) for point in tuned}, (axis.name, label)


@pytest.mark.parametrize("variant", CLASSED, ids=lambda v: f"{v.contract.name}.{v.name}")
def test_a_point_that_stands_for_others_is_supported_and_of_the_largest_batch(variant: Variant) -> None:
    every = [TuningPoint(variant, n, a) for n, a in benchmark_points(variant.contract, torch.device("cuda")).items()]
    points = {facts: one_per_bucket(every, facts) for facts in (H200, TARGETS["sm_100"])}
    facts = next(facts for facts, found in points.items() if found)  # some variants are for one architecture alone
    chosen = {bucket(variant, point.axes): point for point in points[facts]}
    sizes = [axis.name for axis in variant.contract.axes if isinstance(axis, Int) and axis.batch]
    for point in every:
        if variant.refusal(axes_as_kept(variant, point.axes), facts) is None:
            best = chosen[bucket(variant, point.axes)]
            assert math.prod(int(best.axes[n]) for n in sizes) >= math.prod(int(point.axes[n]) for n in sizes)
    assert all(variant.refusal(axes_as_kept(variant, point.axes), facts) is None for point in chosen.values())


def test_configs_of_two_classes_differ_in_what_the_order_leaves_open() -> None:
    crossed = {f"{v.contract.name}.{v.name}": crossed_config(v, v.default_config("interpreter")) for v in CLASSED}
    persistent = crossed["matmul.persistent"]
    assert persistent is not None
    assert (persistent["BLOCK_M"], persistent["BLOCK_N"], persistent["BLOCK_K"]) == (32, 32, 32)
    assert crossed["paged_decode.one_pass"] is None  # all but the stages decides


def test_an_order_of_sums_that_leaves_out_what_decides_it_is_caught(tmp_path: Path) -> None:
    lie = ("sum_order=order_of_tile", "sum_order=lambda config: 0")
    folder = write_copy(tmp_path, "matmul.persistent", "liar", lie)
    variant = OPS.with_variants_from(folder)["matmul"].variants["liar"]
    found = [fault for fault in sanitized(SANITIZERS["batch"], variant, 12) if fault is not None]
    assert found
    assert "against its bits alone" in found[0].message


def test_a_batch_invariant_variant_with_classes_says_its_order_of_sums(tmp_path: Path) -> None:
    folder = write_copy(tmp_path, "matmul.persistent", "silent", ("    sum_order=order_of_tile,\n", ""))
    with pytest.raises(VariantError, match="config depends on M needs sum_order"):
        OPS.with_variants_from(folder)
