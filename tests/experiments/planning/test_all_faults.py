"""Every fault at once: what is wrong in one place hides nothing that is wrong in another."""

from pathlib import Path

import pytest
import torch

from experiments.document import ExperimentError, parse_document
from experiments.planning.early import CALLED, refuse_early
from experiments.planning.engine_options import kernel_ranges
from experiments.planning.models import plan_model
from experiments.planning.plan import make_sweep
from experiments.schema import ModelSource
from tkernels import OPS
from tkernels.selection import with_parts

MANY = """name: many
model: {preset: tiny}
dtype: float23
variants_from: [nowhere]
kernels: {swiglu: [fusd, torch], dequant_gemm: torch, paged_decode: {split_kv: {num_spilts: 4}}}
shapes: {swiglu: [{T: 4, I: 8}, {U: 3}], paged_decode: [{Hq: [4, 3], Hkv: 2}]}
scheduler: {max_num_seqs: 0, block_size: [16, 17], max_model_len: 4096, order: lifo}
workload:
- {name: long, kind: synthetic, num_requests: 2, input_len: 2000, output_len: 8}
- {name: wrong, kind: synthetic, num_requests: 0, input_len: 8, output_len: 8}
quantization: {methods: {gptk: {bits: 4}}}
zip: [[scheduler.block_sise, dtype]]
repeats: none
full: {workload.7.input_len: 3, full.dtype: float32}
"""

EXPECTED = {
    "dtype (a.yaml, line 3, column 1)": "unknown value 'float23'",
    "variants_from[0] (a.yaml, line 4, column 17)": "nowhere is not a folder",
    "kernels.swiglu[0] (a.yaml, line 5, column 20)": "'fused'? (unless it is in the folder that is missing)",
    "kernels.dequant_gemm (a.yaml, line 5, column 34)": "this model does not use that op",
    "kernels.paged_decode.split_kv.num_spilts (a.yaml, line 5, column 81)": "did you mean 'num_splits'?",
    "shapes.swiglu[1].U (a.yaml, line 6, column 34)": "unknown axis 'U': there is T, I",
    "shapes.paged_decode[0] (a.yaml, line 6, column 57)": "Hq % Hkv == 0 does not hold for Hkv = 2, Hq = 3",
    "scheduler.max_num_seqs (a.yaml, line 7, column 13)": "greater than or equal to 1, got 0",
    "scheduler.block_size[1] (a.yaml, line 7, column 47)": "17 tokens a page, but it must be a power of two",
    "scheduler.max_model_len (a.yaml, line 7, column 52)": "longer than what the model was made for, 1024",
    "scheduler.order (a.yaml, line 7, column 73)": "unknown order 'lifo'",
    "workload[0] (a.yaml, line 9, column 3)": "reach 2008 tokens, the model's length is 1024",
    "workload[1].num_requests (a.yaml, line 10, column 34)": "greater than or equal to 1, got 0",
    "quantization.methods.gptk (a.yaml, line 11, column 26)": "did you mean 'gptq'?",
    "repeats (a.yaml, line 13, column 1)": "must be a whole number, got 'none'",
    "full.workload.7.input_len (a.yaml, line 14, column 8)": "workload is a list of 2",
    "full.full.dtype (a.yaml, line 14, column 33)": "is not one of the sizes",
    "--set kernels.swiglu.9=torch": "kernels.swiglu is a list of 2",
    "--set name": "must be key=value",
}


def faults(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        make_sweep(parse_document(text, "a.yaml", Path(), overrides))
    return list(caught.value.problems)


def test_every_fault_is_said_at_once() -> None:
    # a group that is wrong leaves open what is left out: without it
    found = faults(MANY.replace("zip: [[scheduler.block_sise, dtype]]", ""), "kernels.swiglu.9=torch", "name")
    for start, message in EXPECTED.items():
        assert [line for line in found if line.startswith(f"{start}:") and message in line], (start, found)
    assert len(found) == len(EXPECTED), found


def test_where_a_rule_is_wrong_only_what_no_rule_leaves_out_is_said() -> None:
    found = faults(MANY)
    assert any(line.startswith("zip[0]") for line in found)
    assert any(line.startswith("scheduler.max_model_len") for line in found)  # of all arms
    assert not any("17 tokens a page" in line for line in found)  # of some


def test_a_shape_that_breaks_a_constraint_is_said_at_its_place_in_every_entry() -> None:
    text = "name: a\nkernels: {paged_decode: torch}\nshapes:\n  paged_decode:\n"
    text += "  - {Hq: [4, 3, 5], Hkv: 2}\n  - {Hq: 4}\n  - {Hq: 3, Hkv: 2}\n"
    assert [(line.partition(": ")[0], line.partition(": ")[2]) for line in faults(text)] == [
        (
            "shapes.paged_decode[0] (a.yaml, line 5, column 5)",
            "Hq % Hkv == 0 does not hold for Hkv = 2, Hq = 3; 1 more of its points breaks a constraint",
        ),
        ("shapes.paged_decode[2] (a.yaml, line 7, column 5)", "Hq % Hkv == 0 does not hold for Hkv = 2, Hq = 3"),
    ]


@pytest.mark.parametrize("model", ["{preset: tinny}", "{presett: tiny}", "{path: nowhere}", "tiny"])
def test_a_model_that_is_wrong_hides_nothing_that_is_not_about_it(model: str) -> None:
    text = f"name: a\nmodel: {model}\nkernels: {{paged_decode: torch}}\nshapes: {{paged_decode: [{{Hq: 3, Hkv: 2}}]}}\n"
    found = faults(text + "quantization: {methods: {gptk: {bits: 4}}, text: nowhere.txt}\n")
    assert [line.partition(" (")[0] for line in found if not line.startswith("model")] == [
        "shapes.paged_decode[0]", "quantization.methods.gptk", "quantization.text"
    ]  # fmt: skip
    assert sum(line.startswith("model") for line in found) == 1


def test_lengths_below_the_models_are_no_bound_of_each_other() -> None:
    text = "name: a\nmodel: {preset: tiny}\nscheduler: {max_model_len: [64, 128]}\n"
    assert len(make_sweep(parse_document(text, "a.yaml", Path())).plans[0].arms) == 2


@pytest.mark.parametrize(
    ("text", "is_early"),
    [
        ("kernels: {swiglu: fusd}\nscheduler: {block_size: 16, kv_cache_bytes: 1048576}", True),
        ("kernels: {swiglu: fusd}\nscheduler: {block_size: 17}", False),
        ("kernels: {swiglu: fusd, dequant_gemm: torch}", False),
        ("kernels: {swiglu: fusd}\nscheduler: {max_model_len: 2048}", False),
        ("kernels: {swiglu: fusd}\nscheduler: {kv_cache_bytes: 100}", False),
        ("kernels: {swiglu: fus}\nworkload: {kind: synthetic, num_requests: 1, input_len: 8, output_len: 2}", True),
        ("kernels: {swiglu: fus}\nworkload: {kind: synthetic, num_requests: 1, input_len: 8, output_len: 2000}", False),
        ("kernels: {swiglu: fused}", False),
    ],
)  # fmt: skip
def test_what_needs_no_torch_is_refused_before_it(text: str, is_early: bool, tmp_path: Path) -> None:
    """And only where what is said early is all that there is to say."""
    file = tmp_path / "a.yaml"
    file.write_text(f"name: a\nmodel: {{preset: tiny}}\n{text}\n")
    early: tuple[str, ...] = ()
    try:
        refuse_early(file, [])
    except ExperimentError as error:
        early = error.problems
        assert list(early) == faults(file.read_text())
    assert bool(early) == is_early


def test_the_ops_that_every_preset_calls(tmp_path: Path) -> None:
    model = plan_model(ModelSource(preset="tiny"), tmp_path)
    axes = kernel_ranges(model, {}, torch.float32)
    for op, whole in CALLED.items():
        alone = {whole or op: axes[whole or op]}
        assert op in axes or op in with_parts(alone, {}, OPS, torch.device("cpu"))
