"""Names are resolved against the live registry, before anything is built."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import tkernels
import tmodel.model_names
from experiments.document import ExperimentError
from experiments.planning.models import plan_model
from experiments.planning.plan import Plan
from experiments.planning.points import MOST_INTERPRETED_PROGRAMS, points_of
from experiments.schema import ModelSource
from tests.tkernels.outside import write_variant
from tests.tmodel.formats.by_hand import Kind
from tests.tmodel.formats.models import write_models
from tkernels.verification.draws import count_programs
from tmodel import Limits, kernel_axes, load_config
from tmodel.presets import PRESETS
from tmodel.train import new_model

MakePlan = Callable[..., Plan]
TINY: dict[str, Any] = {"model": {"preset": "tiny"}}
PROMPTS: dict[str, Any] = {"workload": {"kind": "prompts", "prompts": ["a", "b"], "max_tokens": 4}}


@pytest.fixture(autouse=True)
def _nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(preset: str) -> Path:
        raise AssertionError(f"a plan trains {preset}")

    monkeypatch.setattr(tmodel.model_names, "preset_path", refuse)


@pytest.mark.parametrize(
    ("keys", "place", "message"),
    [
        (
            {"kernels": {"paged_decode": "splitkv"}},
            "kernels.paged_decode (experiment.yaml, line 5, column 3)",
            "'split_kv'?",
        ),
        ({"kernels": {"paged_decod": "torch"}}, "kernels.paged_decod", "did you mean 'paged_decode'?"),
        ({"kernels": {"swiglu": {"fused": {"BLOCK_X": 8}}}}, "kernels.swiglu.fused.BLOCK_X", "there is BLOCK_"),
        ({"kernels": {"swiglu": {"torch": {"BLOCK_I": 8}}}}, "kernels.swiglu", "has no config to pin"),
        ({"kernels": {"dequant_gemm": "torch"}}, "kernels.dequant_gemm", "this model does not use that op"),
        (
            {"kernels": {"cascade_decode": "torch"}, "scheduler": {"shared_prefixes": [True, False]}},
            "kernels.cascade_decode",
            "this model calls it with scheduler.shared_prefixes: true, which not every arm has",
        ),
        ({"shapes": {"swiglu": [{"TT": 4}]}}, "shapes.swiglu[0].TT", "there is T, I"),
        ({"shapes": {"swiglu": [{"T": -4}]}}, "shapes.swiglu[0].T", "0 <= T"),
        ({"scheduler": {"order": "fcsf"}}, "scheduler.order", "did you mean 'fcfs'?"),
        (
            {"scheduler": {"prefix_cache": "hsah"}},
            "scheduler.prefix_cache",
            "one of 'hash', 'none', 'radix', got 'hsah'; did",
        ),
        ({"scheduler": {"block_size": 17}}, "scheduler.block_size", "that is a power of two, got 17"),
        ({"scheduler": {"block_size": [16, 512]}}, "scheduler.block_size", "takes 1 to 256"),
        ({"scheduler": {"kv_cache_bytes": 10}}, "scheduler.kv_cache_bytes", "a block of 16 tokens takes 16384"),
        ({"scheduler": {"preemption": "swap"}}, "scheduler.swap_bytes", "one of 16 tokens takes 16384 bytes, got 0"),
        ({"scheduler": {"decode_share": 1.0}}, "scheduler.decode_share", "of at least 0 and below 1, got 1.0"),
        ({"scheduler": {"chunked_prefill": False, "max_chunk_tokens": 8}}, "scheduler", "they need chunked_prefill"),
        (
            {"scheduler": {"chunked_prefill": [True, False], "max_num_batched_tokens": 8}},
            "scheduler",
            "must be at least max_model_len",
        ),
        (
            {"scheduler": {"kv_cache_bytes": 10**6, "kv_cache_fraction": 0.5}},
            "scheduler.kv_cache_fraction",
            "give one",
        ),
        ({"scheduler": {"kv_cache_fraction": 0}}, "scheduler.kv_cache_fraction", "above 0 and at most 1, got 0"),
        ({"scheduler": {"kv_cache_fraction": 1e-9}}, "scheduler.kv_cache_fraction", "a block of 16 tokens takes 16384"),
        ({"scheduler": {"max_num_seqs": 10**9}}, "scheduler", "the tables of these do not fit this machine's memory"),
        ({"scheduler": {"max_num_seqs": 10**20}}, "scheduler.max_num_seqs", "at least 1 and below 2**31, got 1"),
        ({"scheduler": {"max_num_batched_tokens": 10**20}}, "scheduler.max_num_batched_tokens", "below 2**31, got"),
        (
            {"scheduler": {"preemption": "swap", "swap_bytes": 10**18}},
            "scheduler",
            "61,035,156,250,000 swapped: the tables",
        ),
        ({"scheduler": {"max_model_len": 10**6}}, "scheduler.max_model_len", "from 1 to 1024, the model's max_pos"),
        ({"model": {"preset": "tinny"}}, "model", "did you mean 'tiny'?"),
        ({"model": {"path": "nowhere"}}, "model", "is not a directory"),
        ({"device": "gpu"}, "device", "is not a device"),
        ({"variants_from": ["nowhere"]}, "variants_from[0]", "is not a folder"),
        ({**PROMPTS, "peers": ["transformer_batched"]}, "peers[0]", "did you mean 'transformers_batched'?"),
    ],
)
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


def test_weights_cut_short_are_found_by_the_plan(plan: MakePlan, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(checkpoint / "config.json")
    whole = (checkpoint / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ExperimentError, match=r"model .*model\.safetensors: truncated: tensor 'model\."):
        plan(model={"path": str(tmp_path)}, **PROMPTS)


def test_the_preset_is_known_before_it_is_trained(tmp_path: Path) -> None:
    new_model(PRESETS["tiny"], 0).save_pretrained(tmp_path)
    limits = Limits(max_num_tokens=64, max_num_seqs=4, max_model_len=128, block_size=16, num_blocks=32)
    planned, trained = plan_model(ModelSource(preset="tiny"), tmp_path).config, load_config(tmp_path)
    assert kernel_axes(planned, limits) == kernel_axes(trained, limits)
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


def test_a_quantized_model_has_a_point_for_every_kind_of_its_weights(plan: MakePlan, tmp_path: Path) -> None:
    quantized, _ = write_models(tmp_path, Kind("gptq", 3, -1))
    made = plan(model={"path": str(quantized)}, **PROMPTS)
    points = points_of(made)
    assert {point.name for point in points["dequant_gemm"]} == {
        "decode K=128 group_size=128",
        "decode K=256 group_size=256",
    }
    for point in points["dequant_gemm"]:
        assert (point.axes["bits"], point.axes["order"]) == (3, "sequential")  # as it is loaded
        made.ops["dequant_gemm"].contract.case(point.axes, 0)
    assert "gate_up_swiglu" not in points


def test_a_batch_is_halved_until_the_interpreter_can_take_it(plan: MakePlan) -> None:
    workload = {"kind": "synthetic", "num_requests": 64, "input_len": 32, "output_len": 4}
    made = plan(**TINY, workload=workload, kernels={"rms_norm": ["torch", "row_per_program"]}, device="cpu")
    variant = made.ops["rms_norm"].variants["row_per_program"]
    points = {op: {point.name: point.axes for point in some} for op, some in points_of(made).items()}
    assert points["add_rms_norm"]["prefill"]["T"] == 64 * 32  # torch's alone: nothing is interpreted
    case = variant.contract.case(points["rms_norm"]["prefill"], 0)
    programs = count_programs(variant, case, variant.default_config("interpreter"))
    assert MOST_INTERPRETED_PROGRAMS / 2 < programs <= MOST_INTERPRETED_PROGRAMS


def test_a_launcher_that_exits_does_not_end_the_planning(plan: MakePlan, tmp_path: Path) -> None:
    before = "    tokens, width = out.shape\n"
    write_variant(tmp_path / "mine", (before, f"{before}    raise SystemExit(0)\n"))
    made = plan(**TINY, **PROMPTS, kernels={"swiglu": "doubled"}, variants_from=["mine"], device="cpu")
    assert [point.name for point in points_of(made)["swiglu"]] == ["decode", "prefill"]


@pytest.mark.parametrize(("pool_bytes", "sequences"), [(None, 4), (1 << 30, 4), (12 * 16384, 3)])
def test_a_points_pool_just_covers_it(plan: MakePlan, pool_bytes: int | None, sequences: int) -> None:
    workload = {"kind": "synthetic", "num_requests": 4, "input_len": 40, "output_len": 40}
    scheduler = {"block_size": 16, **({"kv_cache_bytes": pool_bytes} if pool_bytes else {})}
    made = plan(**TINY, workload=workload, scheduler=scheduler, device="cpu")
    points = points_of(made)
    (decode,), (prefill,) = points["paged_decode"], points["paged_prefill"]
    for point in (decode, prefill):
        assert (point.axes["B"], point.axes["N"], point.axes["P"]) == (sequences, 4, 4 * sequences)
    assert [int(point.axes["P"]) for point in points["kv_scatter"]] == [1, -(-sequences * 40 // 16)]


def test_a_swept_page_size_is_a_point_of_its_own(plan: MakePlan) -> None:
    points = points_of(plan(**TINY, **PROMPTS, scheduler={"block_size": [8, 16]}))
    assert [(point.name, point.axes["S"]) for point in points["paged_decode"]] == [("decode", 8), ("decode S=16", 16)]
    assert [point.name for point in points["rms_norm"]] == ["decode", "prefill"]


def test_a_hub_model_is_its_configuration_first_and_never_a_pickle(
    plan: MakePlan, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def fetch(hub_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        fetched.append((hub_id, revision, allow_patterns))
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    made = plan(model={"hub": "someone/something"})
    assert fetched == [("someone/something", None, ["*.json"])]
    assert made.model is not None
    assert made.model.directory() == checkpoint
    hub_id, commit, patterns = fetched[1]
    assert (hub_id, commit) == ("someone/something", checkpoint.name)
    assert "model.safetensors" in patterns
    assert not any("bin" in pattern or "pt" in pattern for pattern in patterns)


@pytest.mark.parametrize("op", tkernels.OPS)
def test_a_kernel_only_experiment_has_a_point_for_every_op(op: str, plan: MakePlan) -> None:
    made = plan(kernels={op: list(tkernels.OPS[op].variants)}, dtype="bfloat16")
    points = points_of(made)[op]
    assert points
    for point in points:
        contract = made.ops[op].contract
        assert set(point.axes) == set(contract.axis_by_name)
        assert point.axes.get("activation", "bfloat16") == "bfloat16"
        contract.check_axes(point.axes)


def test_a_shape_may_have_a_dtype_of_its_own(plan: MakePlan) -> None:
    shapes = {"paged_decode": [{"B": 1, "activation": "float16"}]}
    (point,) = points_of(plan(kernels={"paged_decode": "torch"}, shapes=shapes, dtype="bfloat16"))["paged_decode"]
    assert (point.name, point.axes["B"]) == ("B=1,activation=float16", 1)
    assert (point.axes["activation"], point.axes["kv"]) == ("float16", "float16")


def test_a_shape_that_breaks_a_constraint(plan: MakePlan) -> None:
    with pytest.raises(ExperimentError, match=r"shapes.paged_decode\[0\] \(.*, line 6, column 5\): Hq % Hkv == 0"):
        plan(kernels={"paged_decode": "torch"}, shapes={"paged_decode": [{"Hq": 3, "Hkv": 2}]})


def test_shapes_of_which_one_says_more_all_have_a_name(plan: MakePlan) -> None:
    shapes = {"swiglu": [{"T": 2, "I": 8}, {"T": 2, "I": 8, "activation": "float16"}]}
    points = points_of(plan(kernels={"swiglu": "torch"}, shapes=shapes))["swiglu"]
    assert [point.name for point in points] == ["T=2,I=8", "activation=float16"]


def test_a_shape_may_leave_its_pages_open(plan: MakePlan) -> None:
    shapes = {"paged_prefill": [{"B": 2, "T": 8, "S": 16}]}
    (point,) = points_of(plan(kernels={"paged_prefill": "torch"}, shapes=shapes))["paged_prefill"]
    assert point.axes["B"] == 2


def test_parts_are_picked_only_where_an_arm_composes_them(plan: MakePlan) -> None:
    made = plan(**TINY, kernels={"gate_up_swiglu": ["composed", "torch"], "swiglu": ["torch", "fused"]})
    assert [sorted(op for op in made.running(arm) if "swiglu" in op) for arm in made.arms] == [
        ["gate_up_swiglu", "swiglu"], ["gate_up_swiglu", "swiglu"], ["gate_up_swiglu"], ["gate_up_swiglu"]
    ]  # fmt: skip
    assert [pick.variant for pick in made.picks["swiglu"]] == ["torch", "fused"]
    assert made.ranges["swiglu"]["I"] == made.ranges["gate_up_swiglu"]["I"]
    assert list(made.unsupported) == [2, 3]
    assert "does not call its part swiglu, for which 'fused' is chosen" in made.unsupported[3]
    alone = plan(**TINY, kernels={"gate_up_swiglu": "torch"})
    assert "swiglu" not in alone.picks
    assert [pick.variant for pick in alone.picks["kv_scatter"]] == ["torch"]


def test_a_part_that_no_arm_calls_is_refused(plan: MakePlan) -> None:
    with pytest.raises(ExperimentError, match=r"kernels.swiglu.*no arm calls it, for it is a part of gate_up_swiglu"):
        plan(**TINY, kernels={"gate_up_swiglu": "torch", "swiglu": "fused"})
