"""What a run's processes plan from, and `tk repeat`: the resolved text makes the sweep that it came from."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from experiments.document import parse_document, read_document
from experiments.planning.plan import Sweep, make_sweep
from experiments.planning.points import points_of
from experiments.planning.resolved import resolved_text
from experiments.sweep.listing import expected_tasks
from tests.experiments.conftest import Write
from tests.tkernels.outside import write_variant

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 8, "kv_cache_bytes": 1 << 18}
SYNTHETIC = {"kind": "synthetic", "num_requests": 2, "input_len": 8, "output_len": 4}
BOTH = {"swiglu": ["torch", "fused"]}
MODELS = [{"path": "models/../models/a"}, {"path": "models/b/same"}, {"path": "models/c/same"}, {"path": "models/a"}]
TWO = [{**SYNTHETIC, "name": "a"}, {**SYNTHETIC, "name": "b", "num_requests": 1}]


def facts(sweep: Sweep) -> list[Any]:
    """All that tells one sweep from another."""
    points = [points_of(plan) for plan in sweep.plans]
    tasks = [asdict(task) for task in expected_tasks(sweep, points)]
    plans = [
        (plan.arms, plan.workloads, plan.dtype, plan.device, plan.unsupported, plan.variant_folders, plan.model
         and (plan.model.name, plan.model.config, plan.model.weights), plan.experiment.peers, plan.shapes)
        for plan in sweep.plans
    ]  # fmt: skip
    return [tasks, points, *plans]


@pytest.mark.parametrize(
    "keys",
    [
        {"kernels": BOTH, "dtype": ["float32", "bfloat16"], "exclude": [{"dtype": "bfloat16"}]},
        {"kernels": BOTH, "dtype": ["float32", "float16"],
         "exclude": [{"dtype": "float32", "kernels.swiglu": "torch"}]},
        {
            "kernels": {"paged_decode": ["torch", {"split_kv": {"num_splits": [2, 4, 4], "BLOCK_N": [16, 16, 32]}}]},
            "zip": [["kernels.paged_decode.split_kv.num_splits", "kernels.paged_decode.split_kv.BLOCK_N"]],
        },
        {
            "kernels": {"paged_decode": "torch"}, "shapes": {"paged_decode": [{"B": [1, 8], "N": [2, 4], "S": 16}]},
            "zip": [["shapes.paged_decode.B", "shapes.paged_decode.N"]], "exclude": [{"shapes.paged_decode.B": 8}],
        },
        {"kernels": {"swiglu": "doubled"}, "variants_from": ["mine"]},
        {"workload": TWO, "dtype": ["float32", "bfloat16"], "exclude": [{"dtype": "float32", "workload": "b"}]},
        {"workload": TWO, "exclude": [{"workload": "a"}], "peers": ["without_kv_cache"]},
        {"workload": TWO, "model": MODELS, "exclude": [{"model": "models/a", "workload": "a"}]},
        {"workload": TWO, "model": MODELS, "exclude": [{"model": ["a", "models/b/same"]}]},
        {"workload": TWO, "model": MODELS, "exclude": [{"model": "c/same"}], "zip": [["model", "dtype"]],
         "dtype": ["float32", "bfloat16", "float32", "float16"]},
        {"workload": SYNTHETIC, "kernels": BOTH, "exclude": [{"workload.input_len": 8, "kernels.swiglu": "fused"}]},
        {"workload": {**SYNTHETIC, "input_len": [8, {"uniform": [2, 4]}], "num_requests": [1, 2, 2]},
         "exclude": [{"workload.input_len": {"uniform": [2, 4]}, "workload.num_requests": 1}]},
        {"workload": {**SYNTHETIC, "num_requests": [1, 2, 2], "input_len": [8, 8, 4]},
         "zip": [["workload.num_requests", "workload.input_len"]]},
        {"workload": [{**TWO[0], "seed": [1, 2]}, TWO[1]], "scheduler": {**SMALL, "block_size": [8, 16]},
         "zip": [["workload.seed", "scheduler.block_size"]]},
        {"workload": {**SYNTHETIC, "late": {"num_requests": 1, "input_len": 4, "output_len": 2, "every": [1, 2]}}},
        {"workload": SYNTHETIC, "batching": ["continuous", "static"], "exclude": [{"batching": "static",
         "scheduler.decode_share": 0}],
         "scheduler": [SMALL, {**SMALL, "decode_share": [0, 0.5], "chunked_prefill": True}]},
        {"workload": {"kind": "prompts", "prompts": ["a", "no", "1e3"], "max_tokens": [2, 4]}, "dtype": "bfloat16"},
    ],
)  # fmt: skip
def test_the_resolved_text_is_the_sweep_that_it_came_from(
    write: Write, tmp_path: Path, checkpoint: Path, keys: dict[str, Any]
) -> None:
    write_variant(tmp_path / "mine")
    for name in ("a", "b/same", "c/same"):
        (tmp_path / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / name).symlink_to(checkpoint)
    given = {"scheduler": SMALL, "model": {"path": "models/a"}, **keys} if "workload" in keys else keys
    sweep = make_sweep(read_document(write(device="cpu", **given)))
    text = resolved_text(sweep)
    again = make_sweep(parse_document(text, "resolved.yaml", Path("/")))
    assert facts(again) == facts(sweep)
    assert resolved_text(again) == text


def test_a_model_is_called_by_as_much_of_its_directory_as_tells_it_apart(
    write: Write, tmp_path: Path, checkpoint: Path
) -> None:
    for name in ("a", "b/same", "c/same"):
        (tmp_path / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / name).symlink_to(checkpoint)
    sweep = make_sweep(read_document(write(model=MODELS, kernels=BOTH)))
    assert [plan.arms[0].settings for plan in sweep.plans] == [
        {"model": "a"}, {"model": "b/same"}, {"model": "c/same"}
    ]  # fmt: skip
    assert [plan.model and plan.model.name for plan in sweep.plans] == ["a", "same", "same"]
