"""Every launcher compiles for a GPU that is not there, and no two variants are the same code under two names."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.verification import ahead_of_time
from tkernels.verification.ahead_of_time import CompilationError, activate, compile_for
from tkernels.verification.inspection import compile as compiling
from tkernels.verification.inspection.rows import CompiledKernel

TRITON = [f"{op.name}.{v.name}" for op in OPS.values() for v in op.variants.values() if v.kind == "triton"]


@pytest.fixture(scope="module")
def compiled() -> list[CompiledKernel]:
    return compile_for(["sm_90"], TRITON)


@pytest.mark.slow
def test_every_variant_compiles_for_sm_90(compiled: list[CompiledKernel]) -> None:
    for_sm_100 = [row for row in compiled if (row.op, row.variant) == ("paged_prefill", "warp_specialized")]
    assert [row.status for row in for_sm_100] == ["unsupported"]
    assert [f"{row.kernel}: {row.reason}" for row in compiled if row.status != "ok" and row not in for_sm_100] == []
    assert {f"{row.op}.{row.variant}" for row in compiled} == set(TRITON)


@pytest.mark.slow
def test_no_two_variants_compile_to_the_same_code(compiled: list[CompiledKernel]) -> None:
    """All kernels of a variant together: fused experts launch the sort's, and add up by one."""
    codes: dict[str, set[str]] = {}
    for row in compiled:
        if OPS[row.op].variants[row.variant].kernels:  # `auto` has no code of its own: it picks among the others'
            codes.setdefault(f"{row.op}.{row.variant}", set()).add(row.code)
    owners: dict[frozenset[str], list[str]] = {}
    for name, found in codes.items():
        owners.setdefault(frozenset(found), []).append(name)
    assert not [names for names in owners.values() if len(names) > 1]


@pytest.mark.slow
def test_split_kv_is_two_kernels_and_the_last_arriver_one(compiled: list[CompiledKernel]) -> None:
    kernels = {variant: [row.kernel for row in compiled if (row.op, row.variant) == ("paged_decode", variant)]
               for variant in ("split_kv", "last_arriver")}  # fmt: skip
    assert kernels == {
        "split_kv": ["paged_decode_split_kv_part", "paged_decode_split_kv_reduce"],
        "last_arriver": ["paged_decode_last_arriver"],
    }


@pytest.mark.slow
def test_the_same_code_under_another_name_is_seen_and_another_target_gives_other_code(tmp_path: Path) -> None:
    write_variant(tmp_path)
    write_variant(tmp_path, ("swiglu_doubled", "swiglu_again"), name="again")
    names = ["swiglu.doubled", "swiglu.again"]
    first, second = compile_for(["sm_90"], names, ops=OPS.with_variants_from(tmp_path))
    assert first.code == second.code
    (other,) = compile_for(["gfx942"], names[:1], ops=OPS.with_variants_from(tmp_path))
    assert other.status == "ok"
    assert other.code != first.code


def test_a_kernel_that_does_not_compile_is_a_row_with_its_reason(tmp_path: Path) -> None:
    write_variant(tmp_path, ("tl.exp(-gate)", "tl.no_such_function(-gate)"))
    (row,) = compile_for(["sm_90"], ["swiglu.doubled"], ops=OPS.with_variants_from(tmp_path))
    assert row.status == "failed"
    assert "no_such_function" in row.reason


def test_ctrl_c_waits_for_no_compilation(tmp_path: Path) -> None:
    write_variant(tmp_path)
    sleeps = ("    tokens, width", "    import time; time.sleep(100)\n    tokens, width")
    write_variant(tmp_path, ("swiglu_doubled", "swiglu_sleeps"), sleeps, name="sleeps")
    came: list[float] = []

    def interrupt(*_: object) -> None:
        came.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    names = ["swiglu.doubled", "swiglu.sleeps"]
    with pytest.raises(KeyboardInterrupt):
        compile_for(["sm_90"], names, ops=OPS.with_variants_from(tmp_path), on_whole=interrupt)
    assert time.monotonic() - came[0] < 10


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CompilationError, match="unknown architecture 'sm_1': there is sm_80"):
        compile_for(["sm_1"], ["swiglu.fused"])


def test_a_tool_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "nvdisasm", lambda: Path("/nowhere/nvdisasm"))
    with pytest.raises(RuntimeError, match="/nowhere/nvdisasm is missing, and inspection needs it"):
        activate("sm_90")


def test_a_compilation_that_does_not_end_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time, "KERNEL_SECONDS", 0.05)
    rows = compile_for(["sm_90"], ["swiglu.fused", "rms_norm.row_per_program"], points=("engine", "fp8"))
    assert {(row.op, row.point) for row in rows} >= {("swiglu", "engine"), ("rms_norm", "engine")}
    assert {row.status for row in rows if row.point == "engine"} == {"failed"}
    words = "timeout: it took longer than 0.05 s; is a block of its config far too large?"
    assert {row.reason for row in rows if row.point == "engine"} == {words}


def test_what_ends_a_compiler_is_a_row_and_its_other_points_go_on(tmp_path: Path) -> None:
    dies = "    import os; os._exit(3) if out.dtype == torch.float16 else None\n    tokens, width = out.shape\n"
    write_variant(tmp_path, ("    tokens, width = out.shape\n", dies))
    axes = {"activation": "float16"}
    (row,) = compile_for(["sm_90"], ["swiglu.doubled"], ops=OPS.with_variants_from(tmp_path), axes=axes)
    assert (row.status, row.reason) == ("failed", "its process left with exit status 3")
    (row,) = compile_for(["sm_90"], ["swiglu.doubled"], ops=OPS.with_variants_from(tmp_path))
    assert row.status == "ok"
