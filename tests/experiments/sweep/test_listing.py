"""Which tasks a sweep has, and that every row says what it is of."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.document import read_document
from experiments.planning.plan import make_sweep
from experiments.planning.points import points_of
from experiments.runs.folder import RunFolder
from experiments.sweep.listing import all_peer_tasks, check_tasks, engine_tasks, expected_tasks, replicate_key
from tests.experiments.conftest import Write
from tests.experiments.test_baselines import SMALL, SYNTHETIC, rows_of

Run = Callable[..., RunFolder]


def test_a_sweep_over_dtypes_is_one_run_whose_rows_are_told_apart(run: Run, checkpoint: Path) -> None:
    folder = run(
        model={"path": str(checkpoint)}, dtype=["float32", "bfloat16"], scheduler=SMALL, repeats=1, device="cpu",
        workload={**SYNTHETIC, "num_requests": [1, 2], "input_len": 4, "output_len": 3}, replicates=2,
    )  # fmt: skip
    engines = rows_of(folder, "engine")
    assert [(row.settings, row.replicate) for row in engines] == [
        ({"dtype": dtype, "workload.num_requests": number}, replicate)
        for replicate, order in ((0, 1), (1, -1))
        for dtype, number in [(d, n) for d in ("float32", "bfloat16") for n in (1, 2)][::order]
    ]
    for kind in ("check", "kernels"):
        rows = rows_of(folder, kind)
        assert {(row.settings["dtype"], row.dtype) for row in rows if row.dtype != "float64"} == {
            ("float32", "float32"), ("bfloat16", "bfloat16"),
        }  # fmt: skip
        about = Counter((row.task, row.point, row.replicate) for row in rows)
        assert set(about.values()) == {1}
    # of one model, what another dtype says is beside the first one's
    assert [row.settings for row in rows_of(folder, "parity")] == [
        {"dtype": "bfloat16", "workload.num_requests": number} for number in (1, 2)
    ]


def test_what_is_foretold_are_full_sizes_once_and_none_that_they_break(write: Write) -> None:
    """Where full sizes run themselves there is nothing else to foretell."""
    file = write(
        device="cpu", dtype="float32",
        kernels={"moe_mlp": ["composed", "padded_tiles"]},
        shapes={"moe_mlp": [{"T": [1, 2], "K": 1, "E": 2, "H": 8, "I": 8, "bits": 0}]},
        full={"shapes.moe_mlp": [{"T": [64, 512], "K": [2, 16], "E": 8, "H": 64, "I": 32, "bits": 0}]},
    )  # fmt: skip
    for full, wanted in ((False, ["T=64", "T=512"]), (True, [])):
        sweep = make_sweep(read_document(file, ["full.shapes.moe_mlp.0.K=2"] * full), full=full)
        tasks = check_tasks(sweep, [points_of(plan) for plan in sweep.plans])
        for task in tasks:
            assert [name.partition(",")[0] for name, _ in task.full_points] == wanted  # of 8 experts nobody has 16
            assert all(axes["E"] == 8 and axes["K"] == 2 for _, axes in task.full_points)


def test_keys_depend_on_the_experiment_alone_and_are_all_different(write: Write, checkpoint: Path) -> None:
    file = write(
        model={"path": str(checkpoint)}, dtype=["float32", "bfloat16"], scheduler={**SMALL, "block_size": [8, 16]},
        kernels={"swiglu": ["torch", {"fused": {"num_warps": [2, 4]}}]}, replicates=3, timeout=7.5,
        workload=[{**SYNTHETIC, "name": "a b"}, {**SYNTHETIC, "name": "c"}], peers=["without_kv_cache"],
    )  # fmt: skip
    keys = []
    for _ in range(2):
        sweep = make_sweep(read_document(file))
        points = [points_of(plan) for plan in sweep.plans]
        tasks = expected_tasks(sweep, points)
        keys.append([task.key for task in tasks])
    assert keys[0] == keys[1]
    assert set(Counter(keys[0]).values()) == {1}
    assert {task.timeout for task in tasks} == {7.5}
    assert "engine/fused[num_warps=2],_dtype=bfloat16,_block_size=16/a_b#2" in keys[0]
    assert "peers/dtype=float32/without_kv_cache/c#0" in keys[0]
    assert "check/dtype=float32/swiglu.fused[num_warps=4]" in keys[0]
    assert len(engine_tasks(sweep)) == 2 * 3 * 2 * 2
    first = check_tasks(sweep, points)[0]
    assert replicate_key(engine_tasks(sweep)[0], 2).endswith("#2")
    assert first.phase == "check"


@pytest.mark.parametrize(
    ("rule", "served"),
    [
        ({"scheduler.block_size": 16}, ["decode", "decode num_requests=2"]),
        ({"workload.num_requests": 2}, ["decode", "decode S=16"]),
        ({"scheduler.block_size": 16, "workload.num_requests": 2}, None),
    ],
)
def test_a_variant_is_checked_where_some_arm_calls_it(
    rule: dict[str, int], served: list[str] | None, write: Write, checkpoint: Path
) -> None:
    file = write(
        model={"path": str(checkpoint)}, kernels={"paged_decode": ["torch", "split_kv"]},
        scheduler={**SMALL, "block_size": [8, 16]}, workload={**SYNTHETIC, "num_requests": [1, 2]},
        exclude=[{"kernels.paged_decode": "split_kv", **rule}],
    )  # fmt: skip
    sweep = make_sweep(read_document(file))
    found = check_tasks(sweep, [points_of(plan) for plan in sweep.plans])
    named = {task.key: [name for name, _ in task.points] for task in found}
    every = ["decode", "decode num_requests=2", "decode S=16", "decode S=16 num_requests=2"]
    assert named["check/paged_decode.torch"] == every
    # an arm with the one and an arm with the other leave a point that both reach
    assert named["check/paged_decode.split_kv"] == (served or every[:3])
    assert all(task.serves.keys() == {name for name, _ in task.points} for task in found)
    assert named["check/swiglu.torch"] == ["decode", "prefill", "decode num_requests=2", "prefill num_requests=2"]


def test_a_variant_is_checked_although_no_workload_with_points_has_its_arms(write: Write, checkpoint: Path) -> None:
    file = write(
        model={"path": str(checkpoint)}, scheduler=SMALL, kernels={"swiglu": ["torch", "fused"]},
        workload=[{**SYNTHETIC, "name": name, "num_requests": number} for name, number in (("a", 1), ("b", 2))],
        exclude=[{"kernels.swiglu": "fused", "workload": "a"}],
    )  # fmt: skip
    sweep = make_sweep(read_document(file))
    found = check_tasks(sweep, [points_of(plan) for plan in sweep.plans])
    assert {task.key: [name for name, _ in task.points] for task in found if task.op == "swiglu"} == {
        "check/swiglu.torch": ["decode", "prefill"], "check/swiglu.fused": ["decode", "prefill"],
    }  # fmt: skip


def test_names_that_collide_get_keys_that_do_not(write: Write, checkpoint: Path) -> None:
    file = write(
        model={"path": str(checkpoint)}, scheduler=[{**SMALL}, {**SMALL}], replicates=2,
        workload=[{**SYNTHETIC, "name": name} for name in ("a b", "a_b", "a_b~2")], peers=["without_kv_cache"],
    )  # fmt: skip
    sweep = make_sweep(read_document(file))
    tasks = expected_tasks(sweep, [points_of(plan) for plan in sweep.plans])
    assert set(Counter(task.key for task in tasks).values()) == {1}
    keys = [task.key for task in all_peer_tasks(sweep)]
    assert keys == [f"peers/without_kv_cache/{name}#0" for name in ("a_b", "a_b~2", "a_b~2~2")]
    assert {replicate_key(task, 1) for task in engine_tasks(sweep)} <= {task.key for task in tasks}


def test_a_task_is_recorded_once(run: Run) -> None:
    folder = run(kernels={"swiglu": "torch"}, shapes={"swiglu": [{"T": 2, "I": 8}]})
    with pytest.raises(ValueError, match="'check/swiglu.torch' is recorded already"):
        folder.record(folder.of_task("check/swiglu.torch"))
