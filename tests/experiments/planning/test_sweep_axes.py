"""Lists that are axes, what varies together, what is left out, and what is said where that cannot be."""

from pathlib import Path
from typing import Any

import pytest

from experiments.document import ExperimentError, parse_document, read_document
from experiments.peers import with_peers
from experiments.planning.arms import Arm
from experiments.planning.layout import Layout, Part, lay_out
from experiments.planning.plan import make_sweep
from experiments.planning.points import points_of
from experiments.planning.resolved import resolved_text
from experiments.schema.names import variant_names
from tests.experiments.conftest import Write
from tests.tkernels.outside import write_variant
from tkernels import OPS

SERVED = "workload: {kind: synthetic, num_requests: [1, 8], input_len: [16, {uniform: [4, 8]}], output_len: 4}"


def layout(text: str) -> Layout:
    (found,) = lay_out(parse_document(f"name: a\n{text}", "a.yaml", Path()))
    return found


def parts(text: str) -> tuple[Part, ...]:
    return layout(text).parts


def arms(text: str) -> list[Arm]:
    (part,) = parts(f"model: {{preset: tiny}}\n{text}")
    return list(part.arms)


def problems(text: str) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        parts(f"model: {{preset: tiny}}\n{text}")
    return list(caught.value.problems)


def test_models_and_dtypes_are_parts_of_their_own() -> None:
    found = parts(
        "model: [{preset: tiny}, {hub: me/mine}]\ndtype: [float32, bfloat16]\nkernels: {swiglu: [torch, fused]}"
    )
    sides = [(part.model, part.dtype) for part in found]
    assert [(model.preset or model.hub, dtype) for model, dtype in sides if model] == [
        ("tiny", "float32"), ("tiny", "bfloat16"), ("me/mine", "float32"), ("me/mine", "bfloat16")
    ]  # fmt: skip
    assert [arm.settings for arm in found[3].arms] == [{"model": "me/mine", "dtype": "bfloat16"}] * 2
    assert found[0].arms[0].swept == ("model", "dtype", "swiglu")


def test_a_workloads_lists_are_workloads_that_every_arm_serves() -> None:
    found = arms(f"kernels: {{swiglu: [torch, fused]}}\n{SERVED}")
    assert [arm.labels["swiglu"] for arm in found] == ["torch", "fused"]
    for arm in found:
        assert arm.settings == {}
        assert [served.settings for served in arm.workloads] == [
            {"workload.num_requests": count, "workload.input_len": length}
            for count in (1, 8)
            for length in (16, {"uniform": [4, 8]})
        ]
        assert [served.workload.num_requests for served in arm.workloads] == [1, 1, 8, 8]
    assert found[0].workloads[1].title == "num_requests=1, input_len={'uniform': [4, 8]}"


def test_several_workloads_have_their_own_lists() -> None:
    (arm,) = arms(
        "workload:\n- {name: a, kind: prompts, prompts: [x], max_tokens: [4, 8]}\n"
        "- {name: b, kind: synthetic, num_requests: 2, input_len: 4, output_len: 4, late: "
        "{num_requests: 1, input_len: 4, output_len: 2, every: [1, 2]}}"
    )
    assert [(served.name, served.settings) for served in arm.workloads] == [
        ("a", {"workload.max_tokens": 4}), ("a", {"workload.max_tokens": 8}),
        ("b", {"workload.late.every": 1}), ("b", {"workload.late.every": 2}),
    ]  # fmt: skip


def test_zipped_axes_vary_together() -> None:
    found = arms(
        "kernels: {paged_decode: [torch, one_pass], swiglu: [torch, fused]}\n"
        "scheduler: {block_size: [8, 16], max_num_seqs: [1, 8]}\n"
        "zip: [[scheduler.max_num_seqs, workload.num_requests], [kernels.paged_decode, kernels.swiglu]]\n" + SERVED
    )
    labels = [(arm.labels["paged_decode"], arm.labels["swiglu"], *arm.settings.values()) for arm in found]
    assert labels == [
        (decode, swiglu, rows, page)
        for decode, swiglu in (("torch", "torch"), ("one_pass", "fused"))
        for rows, page in ((1, 8), (1, 16), (8, 8), (8, 16))
    ]
    assert all({w.workload.num_requests for w in arm.workloads} == {arm.settings["max_num_seqs"]} for arm in found)


def test_pins_of_one_variant_vary_together_and_with_a_scheduler_option() -> None:
    pins = "kernels: {paged_decode: [torch, {split_kv: {num_splits: [4, 8], BLOCK_N: [16, 32]}}]}\n"
    group = "zip: [[kernels.paged_decode.split_kv.num_splits, kernels.paged_decode.split_kv.BLOCK_N]]"
    assert [arm.labels["paged_decode"] for arm in arms(pins + group)] == [
        "torch", "split_kv[BLOCK_N=16,num_splits=4]", "split_kv[BLOCK_N=32,num_splits=8]"
    ]  # fmt: skip
    found = arms(
        "kernels: {paged_decode: {split_kv: {num_splits: [4, 8]}}}\nscheduler: {block_size: [8, 16]}\n"
        "zip: [[kernels.paged_decode.split_kv.num_splits, scheduler.block_size]]"
    )
    assert [(dict(arm.picks["paged_decode"].pins), arm.settings) for arm in found] == [
        ({"num_splits": 4}, {"block_size": 8}), ({"num_splits": 8}, {"block_size": 16})
    ]  # fmt: skip


def test_lists_with_a_value_twice_vary_together_place_by_place() -> None:
    (arm,) = arms(
        "zip: [[workload.num_requests, workload.input_len]]\n"
        "workload: {kind: synthetic, num_requests: [1, 8, 8, 8], input_len: [16, 16, 64, 64], output_len: 4}"
    )
    assert [tuple(served.settings.values()) for served in arm.workloads] == [(1, 16), (8, 16), (8, 64)]
    one, other = arms(
        "zip: [[scheduler.max_num_seqs, workload.num_requests]]\nscheduler: {max_num_seqs: [1, 8, 8]}\n"
        "workload: {kind: synthetic, num_requests: [1, 16, 64], input_len: 8, output_len: 4}"
    )
    assert [(arm.settings, [served.settings for served in arm.workloads]) for arm in (one, other)] == [
        ({"max_num_seqs": 1}, [{"workload.num_requests": 1}]),
        ({"max_num_seqs": 8}, [{"workload.num_requests": 16}, {"workload.num_requests": 64}]),
    ]  # fmt: skip


def test_what_a_rule_matches_is_left_out() -> None:
    text = (
        "dtype: [float32, bfloat16]\nmodel: {preset: tiny}\nbatching: [continuous, static]\n"
        "kernels: {paged_decode: [torch, {split_kv: {num_splits: [4, 8]}}]}\n" + SERVED
    )
    rules = (
        "exclude:\n- {dtype: float32, kernels.paged_decode: split_kv}\n"
        "- {kernels.paged_decode.split_kv.num_splits: 8}\n"
        "- {workload.num_requests: [8, 1], batching: static, dtype: bfloat16}\n"
        "- {workload.input_len: 16, dtype: float32}\n"
    )
    found = [arm for part in parts(f"{text}\n{rules}") for arm in part.arms]
    left = [(arm.dtype, arm.labels["paged_decode"], arm.batching, len(arm.workloads)) for arm in found]
    assert left == [
        ("float32", "torch", "continuous", 2), ("float32", "torch", "static", 2),
        ("bfloat16", "torch", "continuous", 4), ("bfloat16", "split_kv[num_splits=4]", "continuous", 4),
    ]  # fmt: skip


def test_a_rule_may_name_null_where_it_is_a_value() -> None:
    (arm,) = arms(
        f"scheduler: {{max_chunk_tokens: [null, 64]}}\n{SERVED}\nexclude: [{{scheduler.max_chunk_tokens: null}}]"
    )
    assert arm.scheduler["max_chunk_tokens"] == 64


def test_sizes_in_shapes_are_points() -> None:
    text = (
        "kernels: {paged_decode: torch}\nshapes: {paged_decode: [{B: [1, 8], N: 4, S: [16, 32]}, {B: 2, N: [1, 2]}]}\n"
    )
    rest = "zip: [[shapes.paged_decode.B, shapes.paged_decode.S]]\nexclude: [{shapes.paged_decode.N: 1}]"
    plain, ruled = layout(text), layout(text + rest)
    assert [tuple(point.values.values()) for point in plain.shapes["paged_decode"]] == [
        (1, 4, 16), (1, 4, 32), (8, 4, 16), (8, 4, 32), (2, 1), (2, 2)
    ]  # fmt: skip
    assert [tuple(point.values.values()) for point in ruled.shapes["paged_decode"]] == [
        (1, 4, 16), (8, 4, 32), (2, 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zip: [[scheduler.block_size, dtype]]", "zip[0] (a.yaml, line 5, column 7): what varies together must have"),
        ("zip: [[scheduler.block_sise, dtype]]", "is no axis here: there is model, dtype, kernels.paged_decode,"),
        ("zip: [[scheduler.block_sise, dtype]]", "did you mean 'scheduler.block_size'?"),
        ("zip: [[dtype]]", "zip[0] (a.yaml, line 5, column 7): must be a list of at least 2"),
        ("zip: [[dtype, dtype]]", "'dtype' is there twice"),
        ("zip: [[dtype, batching], [dtype, kernels.paged_decode]]", "'dtype' is in two groups"),
        (
            "zip: [[kernels.paged_decode.split_kv.num_splits, dtype]]",
            "only where nothing else of 'kernels.paged_decode'",
        ),
        ("zip: [[dtype, shapes.paged_decode.B]]", "is of arms and shapes"),
        (
            "exclude: [{dtype: float23}]",
            "no arm has 'float23' there: there is float32, bfloat16; did you mean 'float32'?",
        ),
        ("exclude: [{scheduler.block: 8}]", "'scheduler.block' is no axis here"),
        (
            "exclude: [{dtype: float32}, {dtype: bfloat16}]",
            "exclude (a.yaml, line 5, column 1): the rules leave nothing",
        ),
        ("exclude: [{kernels.paged_decode: torch, kernels.paged_decode.split_kv.num_splits: 4}]", "matches no arm"),
        ("exclude: [{shapes.swiglu.T: 4}]", "'shapes.swiglu.T' is no axis here"),
        ("exclude: [{}]", "must be a mapping of at least 1"),
        ("exclude: [{workload: prompts}]", "exclude[0] (a.yaml, line 5, column 11): 'workload' is no axis here"),
        ("exclude: [{dtype: null}]", "no arm has None there: there is float32, bfloat16"),
        ("exclude: [{dtype: float32, batching: []}]", "exclude[0].batching (a.yaml, line 5, column 28): no arm has []"),
        (
            "shapes: {swiglu: [{T: [2, 4], I: 8}]}\nexclude: [{shapes.swiglu.T: 5}]",
            "exclude[0].shapes.swiglu.T (a.yaml, line 6, column 12): no shape has 5 there: there is 2, 4",
        ),
        (
            "shapes: {swiglu: [{T: 2, I: 8}, {T: 4, I: 16}]}\nexclude: [{shapes.swiglu.T: 2, shapes.swiglu.I: 16}]",
            "exclude[0] (a.yaml, line 6, column 11): matches no shape: none has all of these together",
        ),
        (
            f"shapes: {{swiglu: [{{T: {[*range(1, 200)]}, I: {[*range(1, 200)]}}}]}}",
            "shapes.swiglu[0] (a.yaml, line 5, column 19): the lists multiply to 39,601 points; 10,000 are",
        ),
    ],
)
def test_what_zip_and_exclude_refuse(text: str, message: str) -> None:
    found = problems(
        "dtype: [float32, bfloat16]\nkernels: {paged_decode: [torch, {split_kv: {num_splits: [4, 8]}}]}\n"
        f"{text}\nscheduler: {{block_size: [8, 16, 32]}}\nbatching: [continuous]\n"
    )
    assert any(message in line for line in found), found


def test_too_many_points_are_not_laid_out() -> None:
    lists = ", ".join(f"{key}: {list(range(1, 60))}" for key in ("swap_bytes", "max_num_seqs", "max_chunk_tokens"))
    (problem,) = problems(f"scheduler: {{{lists}}}")
    assert "multiply to 205,379 points" in problem
    found = problems(f"scheduler: {{{lists}, order: lifo}}\nkernels: {{swiglu: fusd}}")
    assert [line.partition(" (")[0] for line in found] == ["the experiment", "scheduler.order", "kernels.swiglu"]


def test_a_value_of_a_list_is_refused_at_its_own_place() -> None:
    text = "dtype: [float32, float23]\nscheduler: {block_size: 0, order: fcsf}\n"
    found = problems(text + SERVED.replace("8]", "0]", 1))
    assert [line.partition(": ")[0] for line in found] == [
        "dtype[1] (a.yaml, line 3, column 18)",
        "scheduler.block_size (a.yaml, line 4, column 13)",
        "scheduler.order (a.yaml, line 4, column 28)",
        "workload.num_requests[1] (a.yaml, line 5, column 47)",
    ]


def test_the_full_sizes_are_checked_everywhere_and_taken_where_they_are_asked_for(write: Write, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"kernels": {"swiglu": ["torch", "fused"]}, "shapes": {"swiglu": [{"T": 2, "I": 8}]}}
    file = write(**keys, full={"shapes.swiglu": [{"T": [16, 32], "I": 8}], "dtype": "bfloat16"})
    small, full = (make_sweep(read_document(file), full=wanted) for wanted in (None, True))
    assert not small.is_full or small.plans[0].device.type == "cuda"
    assert [point.axes["T"] for point in points_of(full.plans[0])["swiglu"]] == [16, 32]
    assert full.plans[0].dtype_name == "bfloat16"
    again = make_sweep(parse_document(resolved_text(full), "resolved.yaml", Path("/")))
    assert points_of(again.plans[0]) == points_of(full.plans[0])
    with pytest.raises(ExperimentError, match=r"full.dtype|dtype \(experiment.yaml, line"):
        make_sweep(read_document(write(**keys, full={"dtype": "bfloat61"})))


def test_a_point_says_which_workloads_and_pages_it_is_of(write: Write) -> None:
    keys: dict[str, Any] = {"model": {"preset": "tiny"}, "device": "cpu", "kernels": {"swiglu": ["torch", "fused"]}}
    lengths = {"kind": "synthetic", "input_len": 8, "output_len": 4}
    file = write(
        **keys, scheduler={"block_size": [8, 16]}, shapes={"swiglu": [{"T": 2, "I": 8}]},
        workload=[
            {**lengths, "name": "some", "num_requests": [1, 2]}, {**lengths, "name": "same", "num_requests": 2},
            {**lengths, "name": "other", "num_requests": 3},
        ],
    )  # fmt: skip
    points = points_of(make_sweep(read_document(file)).plans[0])
    one = {"workload": "some", "workload.num_requests": 1}
    two = [{"workload": "some", "workload.num_requests": 2}, {"workload": "same"}]
    assert {point.name: list(point.serves) for point in points["swiglu"]} == {
        "decode": [one], "prefill": [one], "decode num_requests=2": two, "prefill num_requests=2": two, "T=2,I=8": [],
    }  # fmt: skip
    assert [point.serves for point in points["paged_decode"]] == [
        tuple({**served, "block_size": page} for served in serves) for page in (8, 16) for serves in ([one], two)
    ]


def test_the_resolved_sweep_resolves_to_the_same_arms(write: Write, tmp_path: Path) -> None:
    file = write(
        model=[{"preset": "tiny"}], dtype=["float32", "bfloat16"], kernels={"swiglu": ["torch", "fused"]}, device="cpu",
        workload={"kind": "synthetic", "num_requests": [1, 2], "input_len": 8, "output_len": [4, 8]},
        zip=[["workload.num_requests", "workload.output_len"]],
        exclude=[{"dtype": "float32", "kernels.swiglu": "fused"}],
    )  # fmt: skip
    sweep = make_sweep(read_document(file))
    again = make_sweep(parse_document(resolved_text(sweep), "resolved.yaml", Path("/")))
    assert [plan.arms for plan in again.plans] == [plan.arms for plan in sweep.plans]
    assert [len(plan.arms) for plan in sweep.plans] == [1, 2]
    assert sweep.num_arms == 6


def test_names_told_from_folders_are_the_registrys(tmp_path: Path) -> None:
    write_variant(tmp_path / "mine")
    ops = with_peers(OPS).with_variants_from(tmp_path / "mine")
    assert variant_names([tmp_path / "mine"]) == {name: list(op.variants) for name, op in ops.items()}
