"""Names are resolved against the live registry, before anything is built."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import experiments.models
from experiments.document import ExperimentError
from experiments.models import plan_model
from experiments.plan import Plan
from experiments.points import MOST_INTERPRETED_PROGRAMS, points_of
from experiments.schema import ModelSource
from tests.tkernels.outside import write_variant
from tkernels import ContractError
from tkernels.check import count_programs
from tmodel import load_config
from tmodel.presets import PRESETS
from tmodel.train import new_model

MakePlan = Callable[..., Plan]
TINY: dict[str, Any] = {"model": {"preset": "tiny"}}
PROMPTS: dict[str, Any] = {"workload": {"kind": "prompts", "prompts": ["a", "b"], "max_tokens": 4}}


@pytest.fixture(autouse=True)
def _nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(preset: str) -> Path:
        raise AssertionError(f"a plan trains {preset}")

    monkeypatch.setattr(experiments.models, "preset_path", refuse)


@pytest.mark.parametrize(
    ("keys", "place", "message"),
    [
        ({"kernels": {"paged_decode": "splitkv"}}, "kernels.paged_decode (experiment.yaml, line 5)", "'split_kv'?"),
        ({"kernels": {"paged_decod": "torch"}}, "kernels.paged_decod", "did you mean 'paged_decode'?"),
        ({"kernels": {"swiglu": {"fused": {"BLOCK_X": 8}}}}, "kernels.swiglu.fused.BLOCK_X", "there is BLOCK_"),
        ({"kernels": {"swiglu": {"torch": {"BLOCK_I": 8}}}}, "kernels.swiglu", "has no config to pin"),
        ({"kernels": {"dequant_gemm": "torch"}}, "kernels.dequant_gemm", "this model does not use that op"),
        ({"shapes": {"swiglu": [{"TT": 4}]}}, "shapes.swiglu[0].TT", "there is T, I"),
        ({"shapes": {"swiglu": [{"T": -4}]}}, "shapes.swiglu[0].T", "0 <= T"),
        ({"scheduler": {"order": "fcsf"}}, "scheduler.order", "did you mean 'fcfs'?"),
        ({"scheduler": {"prefix_cache": "hsah"}}, "scheduler.prefix_cache", "there is none"),
        ({"scheduler": {"max_model_len": 10**6}}, "scheduler.max_model_len", "longer than what the model was made for"),
        ({"model": {"preset": "tinny"}}, "model", "did you mean 'tiny'?"),
        ({"model": {"path": "nowhere"}}, "model", "is not a directory"),
        ({"device": "gpu"}, "device", "is not a device"),
        ({"variants_from": ["nowhere"]}, "variants_from[0]", "is not a folder"),
        ({**PROMPTS, "peers": ["transformer_batched"]}, "peers[0]", "did you mean 'transformers_batched'?"),
    ],
)  # fmt: skip
def test_an_unknown_name_fails_with_its_place_and_the_nearest(
    plan: MakePlan, keys: dict[str, Any], place: str, message: str
) -> None:
    with pytest.raises(ExperimentError) as caught:
        plan(**{**TINY, **keys})
    (problem,) = caught.value.problems
    assert problem.startswith(place)
    assert message in problem


def test_all_unknown_names_are_reported_at_once(plan: MakePlan) -> None:
    with pytest.raises(ExperimentError) as caught:
        plan(kernels={"swiglu": ["fusd", "torch", "fussed"], "rmsnorm": "torch"}, scheduler={"order": "lifo"})
    assert len(caught.value.problems) == 4


def test_a_workload_longer_than_the_model(plan: MakePlan) -> None:
    workload = {"kind": "synthetic", "num_requests": 1, "input_len": 1000, "output_len": {"uniform": [1, 25]}}
    with pytest.raises(ExperimentError, match="reach 1025 tokens, the model's length is 1024"):
        plan(**TINY, workload=workload)


def test_an_unsupported_arm_is_set_aside_with_its_reason(plan: MakePlan, tmp_path: Path) -> None:
    refusing = ('wins="never"', 'wins="never", supports=lambda axes, device: "only on Tuesdays"')
    write_variant(tmp_path / "mine", refusing)
    made = plan(**TINY, kernels={"swiglu": ["torch", "doubled"]}, variants_from=["mine"])
    assert list(made.unsupported) == [1]
    assert "only on Tuesdays" in made.unsupported[1]


def test_the_preset_is_known_before_it_is_trained(tmp_path: Path) -> None:
    new_model(PRESETS["tiny"], 0).save_pretrained(tmp_path)
    limits = {"max_num_tokens": 64, "max_num_seqs": 4, "max_model_len": 128, "block_size": 16, "num_blocks": 32}
    planned, trained = plan_model(ModelSource(preset="tiny"), tmp_path).config, load_config(tmp_path)
    assert planned.kernel_axes(**limits) == trained.kernel_axes(**limits)
    assert planned.vocab_size == trained.vocab_size
    assert planned.max_position_embeddings == trained.max_position_embeddings


def test_points_have_the_models_sizes_and_the_workloads_batch(plan: MakePlan) -> None:
    made = plan(**TINY, **PROMPTS, dtype="float16", scheduler={"block_size": 8})
    points = points_of(made)
    (decode,) = points["paged_decode"]
    wanted = {
        "B": 2,
        "Hq": 4,
        "Hkv": 2,
        "D": 32,
        "S": 8,
        "activation": "float16",
        "kv": "float16",
        "values": "ordinary",
    }
    assert {axis: decode.axes[axis] for axis in wanted} == wanted
    assert [(point.name, point.axes["T"]) for point in points["swiglu"]] == [("decode", 2), ("prefill", 64)]
    for op, some in points.items():
        for point in some:
            made.ops[op].contract.case(point.axes, 0)


def test_benchmark_points_are_halved_until_the_interpreter_can_take_them(plan: MakePlan) -> None:
    made = plan(kernels={"rms_norm": "row_per_program"})
    contract = made.ops["rms_norm"].contract
    variant = made.ops["rms_norm"].variants["row_per_program"]
    points = points_of(made)["rms_norm"]
    counts = [count_programs(variant, contract.case(p.axes, 0), variant.default_config("interpreter")) for p in points]
    assert max(counts) <= MOST_INTERPRETED_PROGRAMS < max(int(b["T"]) for b in contract.benchmarks.values())
    assert all(f"T={point.axes['T']}" in point.name for point in points)


def test_a_shape_that_breaks_a_constraint(plan: MakePlan) -> None:
    made = plan(kernels={"paged_decode": "torch"}, shapes={"paged_decode": [{"Hq": 3, "Hkv": 2}]})
    with pytest.raises(ContractError, match="Hq % Hkv == 0"):
        points_of(made)
