"""All faults of a round at once: what is wrong in one place hides nothing that is wrong in another."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.document import ExperimentError, parse_document
from experiments.planning.layout import refuse_unsound
from experiments.planning.plan import make_sweep

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
quantization: {methods: {gptk: {bits: 4}}, text: nowhere.txt}
zip: [[scheduler.block_sise, dtype]]
repeats: none
full: {workload.7.input_len: 3, full.dtype: float32}
"""

ROUND_ONE = {
    "dtype (a.yaml, line 3, column 1)": "unknown value 'float23'",
    "variants_from[0] (a.yaml, line 4, column 17)": "nowhere is not a folder",
    "kernels.swiglu[0] (a.yaml, line 5, column 20)": "'fused'? (unless it is in the folder that is missing)",
    "scheduler.max_num_seqs (a.yaml, line 7, column 13)": "max_num_seqs must be an integer of at least 1 and below",
    "scheduler.block_size[1] (a.yaml, line 7, column 47)": "that is a power of two, got 17",
    "scheduler.order (a.yaml, line 7, column 73)": "order must be one of 'fcfs', 'priority', got 'lifo'",
    "workload[1].num_requests (a.yaml, line 10, column 34)": "greater than or equal to 1, got 0",
    "quantization.text (a.yaml, line 11, column 44)": "nowhere.txt: no such file",
    "zip[0] (a.yaml, line 12, column 7)": "did you mean 'scheduler.block_size'?",
    "repeats (a.yaml, line 13, column 1)": "must be a whole number, got 'none'",
    "full.workload.7.input_len (a.yaml, line 14, column 8)": "workload is a list of 2",
    "full.full.dtype (a.yaml, line 14, column 33)": "is not one of the sizes",
    "--set kernels.swiglu.9=torch": "kernels.swiglu is a list of 2",
    "--set name": "must be key=value",
}

SOUND = (
    ("dtype: float23", "dtype: float32"),
    ("variants_from: [nowhere]", "variants_from: []"),
    ("fusd", "fused"),
    ("max_num_seqs: 0", "max_num_seqs: 4"),
    ("17", "512"),
    ("lifo", "fcfs"),
    ("num_requests: 0", "num_requests: 1"),
    (", text: nowhere.txt", ""),
    ("zip: [[scheduler.block_sise, dtype]]", "zip: []"),
    ("repeats: none", "repeats: 1"),
    ("full: {workload.7.input_len: 3, full.dtype: float32}", "full: {}"),
)

ROUND_TWO = {
    "kernels.dequant_gemm (a.yaml, line 5, column 35)": "this model does not use that op",
    "kernels.paged_decode.split_kv.num_spilts (a.yaml, line 5, column 82)": "did you mean 'num_splits'?",
    "shapes.swiglu[1].U (a.yaml, line 6, column 34)": "unknown axis 'U': there is T, I",
    "shapes.paged_decode[0] (a.yaml, line 6, column 57)": "Hq % Hkv == 0 does not hold for Hkv = 2, Hq = 3",
    "scheduler.block_size[1] (a.yaml, line 7, column 47)": "512 tokens a page, but paged_decode takes 1 to 256",
    "scheduler.max_model_len (a.yaml, line 7, column 53)": "from 1 to 1024, the model's max_position_embeddings, got",
    "workload[0] (a.yaml, line 9, column 3)": "reach 2008 tokens, the model's length is 1024",
    "quantization.methods.gptk (a.yaml, line 11, column 26)": "did you mean 'gptq'?",
}


def faults(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ExperimentError) as caught:
        make_sweep(parse_document(text, "a.yaml", Path(), overrides))
    return list(caught.value.problems)


def sound(text: str) -> str:
    """MANY with all that is wrong in round one put right."""
    for wrong, right in SOUND:
        text = text.replace(wrong, right)
    return text


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [(MANY, ("kernels.swiglu.9=torch", "name"), ROUND_ONE), (sound(MANY), (), ROUND_TWO)],
    ids=["one", "two"],
)
def test_every_fault_of_a_round_is_said_at_once(
    text: str, overrides: tuple[str, ...], expected: dict[str, str]
) -> None:
    found = faults(text, *overrides)
    for start, message in expected.items():
        assert [line for line in found if line.startswith(f"{start}:") and message in line], (start, found)
    assert len(found) == len(expected), found


def test_the_faults_of_the_full_sizes_are_said_with_the_others() -> None:
    text = "name: a\nkernels: {swiglu: fusd}\nfull:\n  dtype: float23\n  kernels.swiglu: {fused: {BLOCK_X: 8}}\n"
    assert [line.partition(": ")[0] for line in faults(text)] == [
        "kernels.swiglu (a.yaml, line 2, column 11)", "dtype (a.yaml, line 4, column 3)"
    ]  # fmt: skip
    (problem,) = faults(text.replace("fusd", "fused").replace("float23", "float32"))
    assert problem.startswith("kernels.swiglu.fused.BLOCK_X (a.yaml, line 5, column 28): unknown config value")


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
    text = (
        f"name: a\nmodel: {model}\nkernels: {{paged_decode: trch}}\nquantization: {{methods: {{gptq: {{bits: 0}}}}}}\n"
    )
    found = faults(text)
    assert [line.partition(" (")[0] for line in found if not line.startswith("model")] == [
        "kernels.paged_decode", "quantization.methods.gptq.bits"
    ]  # fmt: skip
    assert sum(line.startswith("model") for line in found) == 1


def test_a_configuration_that_cannot_be_read_hides_nothing_that_is_not_about_it(tmp_path: Path) -> None:
    text = f"name: a\nmodel: {{path: {tmp_path}}}\ndtype: float32\nkernels: {{paged_decode: torch}}\n"
    text += "shapes: {paged_decode: [{Hq: 3, Hkv: 2}]}\nquantization: {methods: {gptk: {bits: 4}}}\n"
    assert [line.partition(" (")[0] for line in faults(text)] == [
        "model", "shapes.paged_decode[0]", "quantization.methods.gptk"
    ]  # fmt: skip


def test_lengths_below_the_models_are_no_bound_of_each_other() -> None:
    text = "name: a\nmodel: {preset: tiny}\nscheduler: {max_model_len: [64, 128]}\n"
    assert len(make_sweep(parse_document(text, "a.yaml", Path())).plans[0].arms) == 2


@pytest.mark.parametrize(
    ("text", "is_early"),
    [
        ("kernels: {swiglu: fusd}\nscheduler: {block_size: 16, kv_cache_bytes: 1048576}", True),
        ("kernels: {swiglu: fusd}\nscheduler: {block_size: 17}", True),
        ("kernels: {swiglu: fusd, dequant_gemm: torch}", True),
        ("kernels: {swiglu: fus}\nworkload: {kind: synthetic, num_requests: 1, input_len: 8, output_len: 2000}", True),
        ("kernels: {swiglu: {fusd: {BLOCK_X: 4}}}\nshapes: {swiglu: [{T: 4, U: 8}]}", True),
        ("kernels: {swiglu: fused}\nscheduler: {block_size: 512}", False),
        ("kernels: {swiglu: fused}", False),
    ],
)  # fmt: skip
def test_round_one_refuses_alone_what_it_finds(text: str, is_early: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"name: a\nmodel: {{preset: tiny}}\n{text}\n")
    early: tuple[str, ...] = ()
    try:
        refuse_unsound(file, [])
    except ExperimentError as error:
        early = error.problems
        assert list(early) == faults(file.read_text())
    assert bool(early) == is_early


def test_round_one_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(sound(MANY))
    command = (
        "import sys; from pathlib import Path; from experiments.planning.layout import refuse_unsound; "
        "refuse_unsound(Path(sys.argv[1]), []); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", command, tmp_path / "a.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
