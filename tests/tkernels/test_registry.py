"""Adding a variant is adding one file; a file that breaks the rules says which."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tkernels
from tests.tkernels.outside import write_variant
from tkernels import OPS, Config, UnknownNameError, VariantError, folders
from tkernels.launch import jit_door
from tkernels.names import suggest_name
from tkernels.verification.check import check_case, drawn_results

OP_NAMES = {
    "rms_norm", "add_rms_norm", "qk_norm_rope", "kv_scatter", "paged_decode", "paged_prefill", "swiglu", "matmul",
    "dequant_gemm", "qk_norm_rope_scatter", "gate_up_swiglu", "merge_states", "copy_pages", "step_inputs",
    "quantize_tokens", "scaled_matmul", "quantize_groups", "block_scaled_matmul",
    "layer_norm", "add_layer_norm", "gelu", "matmul_gelu", "sample", "logprobs", "cascade_decode",
    "route", "sort_by_expert",
}  # fmt: skip


def test_the_ops_and_their_variants_are_there() -> None:
    assert set(OPS) == OP_NAMES
    triton = [v for op in OPS.values() for v in op.variants.values() if v.kind == "triton"]
    assert len(triton) >= 10
    assert {"one_pass", "split_kv", "last_arriver"} <= set(OPS["paged_decode"].variants)
    assert all(v.file.exists() for v in triton)
    assert all(op.variants["torch"].kind == "torch" for op in OPS.values())


def test_an_outside_file_joins_a_new_registry_and_is_checked_like_any_other(tmp_path: Path) -> None:
    ops = OPS.with_variants_from(write_variant(tmp_path))
    assert "doubled" not in OPS["swiglu"].variants
    variant = ops["swiglu"].variants["doubled"]
    assert [r.status for r in drawn_results(variant, 10)] == ["ok"] * 10
    x = torch.randn(3, 8)
    torch.testing.assert_close(variant(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])


def test_an_outside_file_that_computes_something_else_is_found_wrong(tmp_path: Path) -> None:
    ops = OPS.with_variants_from(write_variant(tmp_path, ("FACTOR=1", "FACTOR=2")))
    assert "wrong" in [r.status for r in drawn_results(ops["swiglu"].variants["doubled"], 10)]


def test_a_failure_names_the_worst_element_and_the_command_that_replays_it(tmp_path: Path) -> None:
    ops = OPS.with_variants_from(write_variant(tmp_path, ("FACTOR=1", "FACTOR=2")))
    result = next(r for r in drawn_results(ops["swiglu"].variants["doubled"], 10) if r.status == "wrong")
    assert "expected" in str(result)
    assert "got" in str(result)
    assert f"--op swiglu --variant doubled --axes T={result.axes['T']}" in result.replay


SWIGLU = {"T": 2, "I": 8, "activation": "float32", "values": "ordinary"}
ONLY_WARPS = ("configs=(Config(), Config(num_warps=8))", "configs=(Config(num_warps=2),)")


def test_an_architectures_default_without_constants_is_used(tmp_path: Path) -> None:
    defaults = ('{"": Config()}', '{"": Config(), "sm_90": Config(num_warps=8)}')
    variant = OPS.with_variants_from(write_variant(tmp_path, defaults))["swiglu"].variants["doubled"]
    assert variant.default_config("sm_90") == Config(num_warps=8)
    assert variant.default_config("sm_80") == Config()


@pytest.mark.parametrize(
    ("place", "where"),
    [
        ("gate_up_ptr + row * stride_gate_up_t", "'gate_up'"),
        ("gate_up_ptr + (row + 1) * stride_gate_up_t - 1", "memory between or beyond the elements of the arguments"),
    ],
)
def test_a_write_outside_what_the_op_writes_names_the_argument(place: str, where: str, tmp_path: Path) -> None:
    """On an element of an argument, or between its rows: refused when it is made."""
    write = ("    tl.store(out_ptr", f"    tl.store({place}, 7.0)\n    tl.store(out_ptr")
    variant = OPS.with_variants_from(write_variant(tmp_path, write))["swiglu"].variants["doubled"]
    case = variant.contract.case({**SWIGLU, "layout": "padded"}, seed=0)
    result = check_case(variant, case, door=jit_door, offsets=False)
    assert result.status == "failed"
    assert result.reason.startswith(f"ReadOnlyError: store to {where}, which swiglu only reads, at ")


def test_a_config_without_constants_replaces_the_drawn_ones(tmp_path: Path) -> None:
    variant = OPS.with_variants_from(write_variant(tmp_path, ONLY_WARPS))["swiglu"].variants["doubled"]
    results = list(drawn_results(variant, 4, config=Config(num_warps=16)))
    assert [result.config for result in results] == [Config(num_warps=16)] * 4
    assert "--config num_warps=16,num_stages=2" in results[0].replay


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("out: torch.Tensor, gate_up: torch.Tensor", "gate_up: torch.Tensor, out: torch.Tensor")], "differ from the"),
        ([('default={"": Config()}', 'default={"sm_90": Config()}')], "must have an entry for every other arch"),
        ([('configs=(Config()', 'configs=(Config(BLOCK=4)')], "configs differ in their names"),
        ([("configs=(Config(), Config(num_warps=8)),", "configs=(),")], "configs must not be empty: they are what"),
        ([('wins="never"', 'wins=""')], "wins must say when this algorithm should be the fastest"),
        ([('key=("I",)', 'key=("T",)')], "batch-invariant variant's config may not depend on T"),
        ([('key=("I",)', 'key=("Q",)')], r"names no axis of swiglu: \['Q'\]"),
        ([("swiglu_doubled", "double")], "its kernel must be named swiglu_doubled"),
        ([("VARIANT =", "VARIATION =")], "must define VARIANT"),
        ([("import triton\n", "import tritone\n")], "No module named 'tritone'"),
    ],
)  # fmt: skip
def test_a_file_that_breaks_a_rule_is_refused_with_the_rule(
    tmp_path: Path, changes: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        OPS.with_variants_from(write_variant(tmp_path, *changes))


def test_a_duplicate_an_unknown_op_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VariantError, match="swiglu already has a variant 'fused'"):
        OPS.with_variants_from(write_variant(tmp_path / "a", ("swiglu_doubled", "swiglu_fused"), name="fused"))
    with pytest.raises(VariantError, match="unknown op 'swiglo'.*did you mean 'swiglu'"):
        OPS.with_variants_from(write_variant(tmp_path / "b", op="swiglo"))
    with pytest.raises(VariantError, match="is not a folder"):
        OPS.with_variants_from(tmp_path / "none")
    with pytest.raises(VariantError, match=r"swiglu is named as an op and holds doubled.py; name its parent"):
        OPS.with_variants_from(write_variant(tmp_path / "c") / "swiglu")


def test_a_syntax_error_has_its_line(tmp_path: Path) -> None:
    file = write_variant(tmp_path, ("    tokens, width =", "    tokens width =")) / "swiglu" / "doubled.py"
    with pytest.raises(VariantError) as refused:
        OPS.with_variants_from(tmp_path)
    line = next(number for number, text in enumerate(file.read_text().splitlines(), 1) if "tokens width" in text)
    assert str(refused.value) == f"{file}:{line}: cannot be imported: SyntaxError: invalid syntax"


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("fastt", ["default"], ""),
        ("sm_75", ["sm_80", "sm_90"], ""),
        ("sm90", ["sm_80", "sm_90"], "; did you mean 'sm_90'?"),
        ("splitkv", ["split_kv"], "; did you mean 'split_kv'?"),
        ("decode", ["paged_decode", "swiglu"], "; did you mean 'paged_decode'?"),
    ],
)
def test_what_is_suggested_is_close(name: str, known: list[str], said: str) -> None:
    assert suggest_name(name, known) == said


def test_an_unknown_name_lists_the_alternatives_and_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"there is last_arriver, one_pass, split_kv, torch; did you mean 'split_kv'\?"
    ):
        OPS["paged_decode"].variants["splitkv"]
    with pytest.raises(UnknownNameError, match="did you mean 'paged_decode'"):
        OPS["paged_decod"]


def test_the_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        OPS["mine"] = OPS["swiglu"]  # type: ignore[index]


def test_triton_variants_on_cpu_say_why_where_this_process_compiles() -> None:
    script = (
        "import triton, torch, tkernels\n"
        "x = torch.ones(2, 8)\n"
        "print(tkernels.OPS['swiglu'].variants['torch'](x).shape)\n"
        "tkernels.OPS['swiglu'].variants['fused'](x)\n"
    )
    import os

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    if torch.cuda.is_available():
        assert "compiles for CUDA" in done.stderr
    else:
        assert "torch.Size([2, 4])" in done.stdout
        assert "Triton was imported before tkernels" in done.stderr


def test_the_import_does_not_need_anything_set() -> None:
    assert tkernels.OPS["swiglu"].variants["fused"](torch.ones(1, 4)).shape == (1, 2)


def test_an_int32_offset_in_an_outside_file_is_found(tmp_path: Path) -> None:
    ops = OPS.with_variants_from(write_variant(tmp_path, ("tl.program_id(0).to(tl.int64)", "tl.program_id(0)")))
    results = [r for r in drawn_results(ops["swiglu"].variants["doubled"], 20) if r.status != "ok"]
    assert results
    assert all(r.status == "failed" and "int32 overflow" in r.reason for r in results)


def test_a_launcher_that_raises_is_a_failed_check(tmp_path: Path) -> None:
    ops = OPS.with_variants_from(write_variant(tmp_path, ("FACTOR=1", "FACTOR=1 // 0")))
    assert {r.status for r in drawn_results(ops["swiglu"].variants["doubled"], 5)} == {"failed"}


def test_an_outside_variants_replay_says_where_it_comes_from(tmp_path: Path) -> None:
    ops = OPS.with_variants_from(write_variant(tmp_path, ("FACTOR=1", "FACTOR=2")))
    (result,) = drawn_results(ops["swiglu"].variants["doubled"], 1)
    assert result.replay.startswith(f"tk check --variants-from {tmp_path.resolve()} --op swiglu --variant doubled ")


def test_a_file_that_exits_is_refused_like_any_broken_one(tmp_path: Path) -> None:
    with pytest.raises(VariantError, match="cannot be imported: SystemExit: 3"):
        OPS.with_variants_from(write_variant(tmp_path, ("VARIANT =", "raise SystemExit(3)\nVARIANT =")))


LISTING = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("tkernels_folders", sys.argv[1])
folders = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(folders)
print("torch" in sys.modules, folders.variant_names([folders.BUILT_IN]))
"""


def test_the_names_are_listed_without_torch() -> None:
    names = {name: list(op.variants) for name, op in OPS.items()}
    done = subprocess.run([sys.executable, "-c", LISTING, folders.__file__], capture_output=True, text=True, check=True)
    assert done.stdout == f"False {names}\n"


def test_a_file_beside_a_variant_is_one_too_unless_its_name_starts_with_an_underscore(tmp_path: Path) -> None:
    mine = write_variant(tmp_path)
    (mine / "swiglu" / "_tables.py").write_text("TABLE = (1, 2)\n")
    assert "doubled" in OPS.with_variants_from(mine)["swiglu"].variants
    assert folders.op_folders(mine)[0].variants == (mine / "swiglu" / "doubled.py",)
    (mine / "swiglu" / "tables.py").write_text("TABLE = (1, 2)\n")
    with pytest.raises(VariantError, match=r"tables.py: must define VARIANT"):
        OPS.with_variants_from(mine)
