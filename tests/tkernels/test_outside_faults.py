"""Every rule that an outside file breaks is said in one pass, with its line; nonsense harms itself alone."""

from pathlib import Path

import pytest

from tests.tkernels.outside import write_variant
from tkernels import OPS, outside
from tkernels.trial_launch import find_launch_faults

FIRST = """
import torch, triton
import triton.language as tl
from tkernels import Config, Run, Variant

@triton.jit
def my_kernel(out_ptr, q_ptr, k_ptr, stride_q_b, D: tl.constexpr, BLOCK: tl.constexpr):
    pass

def launch(run, out, q, k_cache, v_cache, block_table, context_lens, scale):
    run.launch(my_kernel, (q.shape[0],), out_ptr=out, q_prt=q, k_ptr=k_cache, BLOCK=16, num_warps=8)

VARIANT = Variant(
    wins="never",
    launch=launch,
    default={"sm90": Config()},
    key=("Hqq", "B"),
    deterministic=True,
    batch_invariant=True,
)
"""
"""A first decode variant: what its author learnt in five tries."""

SAID = [
    (6, "its kernel must be named paged_decode_first (found my_kernel)"),
    (10, "launch has no block_tables; it takes 'block_table', which is none of it; did you mean 'block_tables'?"),
    (11, "my_kernel has no parameter 'q_prt'; did you mean 'q_ptr'?"),
    (11, "num_warps is the config's: say it in Config(num_warps=...)"),
    (11, "my_kernel is not given q_ptr, stride_q_b, D"),
    (16, "default must have an entry for every other architecture, named ''"),
    (16, "default names no architecture: 'sm90'; there is sm_90 and its like, gfx942, interpreter, ''"),
    (17, "key names no axis of paged_decode: ['Hqq']; there is B, "),
    (17, "a batch-invariant variant whose config depends on B needs sum_order"),
]

GRID = (
    "run.launch(\n        swiglu_doubled, (tokens,),",
    "run.launch(\n        swiglu_doubled, lambda meta: (tokens,),",
)
NONSENSE = {
    "plain_launch": (
        ("    run.launch(\n        swiglu_doubled, (tokens,),", "    swiglu_doubled[(tokens,)]("),
        "launch through run.launch(kernel, grid, name=...), not through kernel[grid](...)",
    ),
    "wins_is_a_number": (('wins="never"', "wins=3"), "wins must be a sentence, got 3"),
    "claims_in_words": (("deterministic=True", 'deterministic="yes"'), "deterministic must be True or False, got"),
    "launch_is_text": (("launch=launch", 'launch="launch"'), "launch must be a function, got 'launch'"),
    "neither": (("launch=launch, ", ""), "a variant has either a launcher or a function"),
    "one_config": (("configs=(Config(), Config(num_warps=8))", "configs=Config()"), "configs must be a tuple of "),
    "config_is_a_dict": (('default={"": Config()}', 'default={"": {"BLOCK": 4}}'), "default must be {architecture: "),
    "key_is_a_word": (('key=("I",)', 'key="I"'), "key must be a tuple of axes' names, got 'I'"),
    "a_claim_and_a_key": (
        (
            'key=("I",),\n    deterministic=True, batch_invariant=True',
            'key=("Q",), deterministic=True, batch_invariant=1',
        ),
        "key names no axis of swiglu: ['Q']",
    ),
    "limits_are_numbers": (('key=("I",)', 'limits={"BLOCK": 3}'), "limits must be {config value: (low, high)}, got "),
    "workspace_is_a_dict": (('key=("I",)', "workspace={}"), "workspace must be a function of (axes, config, device)"),
    "workspace_of_shapes": (('key=("I",)', 'workspace=lambda a, c, d: {"sums": (3,)}'), "workspace returns {'sums'"),
    "supports_says_no": (('key=("I",)', "supports=lambda axes, device: False"), "supports returns False, not None or"),
    "supports_what": (('key=("I",)', 'supports=lambda axes, device: axes["H"]'), "supports raises KeyError: 'H'"),
    "prepare_is_a_word": (('key=("I",)', 'prepare="interleaved"'), "prepare must be a function of the weight"),
    "parts_are_a_word": (('key=("I",)', 'parts="matmul"'), "parts must be a tuple of ops' names, got 'matmul'"),
    "config_without_it": (("FACTOR=1", 'FACTOR=run.config["FACTOR"]'), "KeyError: 'FACTOR'; its config and workspace"),
    "grid_of_meta": (GRID, "a grid is a tuple of 1 to 3 numbers, read off shapes and run.config; got <function"),
    "no_such_field": (('key=("I",)', 'keys=("I",)'), "31: a Variant has no field 'keys'; did you mean 'key'?"),
    "no_claim": (('key=("I",),\n    deterministic=True, ', ""), "30: a Variant has to say deterministic"),
    "no_name": (('wins="never", launch=launch', '"never", launch=launch'), "fields are given by name; 1 have none"),
    "block_of_three": (('{"": Config()}', '{"": Config(BLOCK=3)}'), "31: config: BLOCK must be a power of two, got 3"),
    "a_block_alone": (('{"": Config()}', '{"": Config(64)}'), "31: TypeError: Config.__init__() takes 1 positional"),
    "supports_is_silent": (('key=("I",)', 'supports=lambda axes, device: ""'), "supports returns '', not None or a"),
    "declares_another": (("VARIANT =", "variant ="), "must define VARIANT, a tkernels.Variant; it has variant"),
    "declares_a_list": (("VARIANT =", "VARIANT = []\nvariant ="), "a tkernels.Variant; its VARIANT is []"),
}  # fmt: skip


WARPS = (
    ('{"": Config()}', '{"": Config(num_warps=64, BLOCK=3), "sm90": Config(BLOCK=2.5)}'),
    ("configs=(Config(), Config(num_warps=8))", "configs=(Config(BLOCK=0),)"),
    ('key=("I",)', 'keyz=("Q",), key=("Q",), limits={"BLOCK": (16, 32)}'),
    ("FACTOR=1", "FACTR=1"),
)
"""What used to end the import, and what it hid."""
SAID_OF_WARPS = [
    (24, "swiglu_warps has no parameter 'FACTR'; did you mean 'FACTOR'?"),
    (24, "swiglu_warps is not given FACTOR"),
    (31, "config: BLOCK must be a power of two, got 3; num_warps must be at most 32, got 64"),
    (31, "config: BLOCK must be an integer of at least 1, got 2.5"),
    (31, "config: BLOCK must be an integer of at least 1, got 0"),
    (31, "a Variant has no field 'keyz'"),
    (31, "key names no axis of swiglu: ['Q']"),
    (31, "default names no architecture: 'sm90'"),
    (31, "BLOCK must be from 16 to 32, got 0"),
    (31, "BLOCK must be from 16 to 32, got 3"),
    (31, "BLOCK must be from 16 to 32, got 2.5"),
]
NAMES = ["my-own", "my own", "mineToo", "class", "2nd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_variant(tmp_path_factory.mktemp("outside").resolve())
    (folder / "paged_decode").mkdir()
    (folder / "paged_decode" / "first.py").write_text(FIRST)
    write_variant(folder, ("swiglu_doubled", "swiglu_warps"), *WARPS, name="warps")
    for name in NAMES:
        write_variant(folder, ('{"": Config()}', "{}"), name=name)
    for name, (change, _) in NONSENSE.items():
        renamed = "swiglu_doubled", f"swiglu_{name}"
        before, after = (text.replace(*renamed) for text in change)
        write_variant(folder, renamed, (before, after), name=name)
    return folder


@pytest.fixture(scope="module")
def broken(folder: Path) -> dict[Path, str]:
    return outside.broken_files([folder])


def test_all_that_a_first_variant_breaks_is_said_at_once_with_its_lines(folder: Path, broken: dict[Path, str]) -> None:
    file = folder / "paged_decode" / "first.py"
    lines = broken[file].splitlines()
    assert len(lines) == len(SAID)
    for line, (number, text) in zip(lines, SAID, strict=True):
        assert line.startswith(f"{file}:{number}: {text}"), line


def test_what_a_config_or_variant_refuses_hides_nothing(folder: Path, broken: dict[Path, str]) -> None:
    file = folder / "swiglu" / "warps.py"
    lines = broken[file].splitlines()
    for number, text in SAID_OF_WARPS:
        assert [line for line in lines if line.startswith(f"{file}:{number}: {text}")], text
    assert len(lines) == len(SAID_OF_WARPS)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_no_variant_may_have_is_said_once_beside_the_rest(
    name: str, folder: Path, broken: dict[Path, str]
) -> None:
    file = folder / "swiglu" / f"{name}.py"
    named, rest = broken[file].splitlines()
    assert named.startswith(f"{file}: the name of a variant's file: {name!r} is ")
    assert "default must have an entry for every other architecture" in rest
    assert OPS["swiglu"].fault_of_name(name) in named


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_named_with_its_fault(name: str, folder: Path, broken: dict[Path, str]) -> None:
    file = folder / "swiglu" / f"{name}.py"
    _, said = NONSENSE[name]
    assert broken[file].startswith(f"{file}:")
    assert said in broken[file]


def test_nonsense_harms_itself_alone(folder: Path, broken: dict[Path, str]) -> None:
    assert {file.stem for file in broken} == {*NONSENSE, *NAMES, "first", "warps"}
    ops = OPS.with_variants_from(folder, broken)
    assert set(ops["swiglu"].variants) == {*OPS["swiglu"].variants, "doubled"}


@pytest.mark.parametrize("op", OPS)
def test_no_fault_is_found_where_there_is_none(op: str) -> None:
    assert {name: faults for name, one in OPS[op].variants.items() if (faults := find_launch_faults(one))} == {}
