"""What is read from machine code: loops, access widths, matrix instructions, occupancy; and the gates on it."""

from dataclasses import replace
from pathlib import Path

import pytest
import triton

from tkernels import OPS, Config
from tkernels.device import TARGETS
from tkernels.verification.inspection import amdgcn, expected, gates, sass
from tkernels.verification.inspection.accesses import access_shares, elements_by_line, narrow_accesses
from tkernels.verification.inspection.compile import compile_point
from tkernels.verification.inspection.occupancy import LIMITS, occupancy, resident_blocks
from tkernels.verification.inspection.precision import lowered_precision
from tkernels.verification.inspection.rows import CompiledKernel

SASS = """\t.section\t.text.some_kernel,"ax",@progbits
\t//## File "/a/kernel.py", line 7 inlined at "/a/kernel.py", line 30
\t//## File "/a/kernel.py", line 30
        /*0000*/                   LDG.E R0, desc[UR12][R6.64] ;
.L_x_1:
\t//## File "/a/kernel.py", line 9
        /*0010*/              @!P1 LDG.E.128 R16, desc[UR12][R4.64] ;
        /*0020*/                   LDGSTS.E.BYPASS.128 [R10], desc[UR12][R38.64], P1 ;
.L_x_2:
\t//## File "/a/kernel.py", line 10
        /*0030*/                   LDG.E.U16.CONSTANT R8, desc[UR12][R4.64] ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0050*/                   STG.E.64 desc[UR4][R2.64], R6 ;
        /*0060*/               @P0 BRA `(.L_x_2) ;
        /*0070*/               @P2 BRA `(.L_x_1) ;
        /*0080*/                   HMMA.16816.F32.BF16 R4, R4, R8, RZ ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
\t.section\t.nv.info,"a",@progbits
        /*0000*/                   LDG.E.128 R0, desc[UR12][R6.64] ;
"""

TTIR = """#loc = loc("/a/kernel.py":1:0)
#loc5 = loc("k"(#loc9))
    %k = tt.load %p, %m, %z : tensor<64x128x!tt.ptr<bf16>> loc(#loc20)
    %t = tt.load %p, %m, %z : tensor<64x!tt.ptr<i32>> loc(#loc9)
    tt.store %a, %b, %c : tensor<16x!tt.ptr<f8E4M3FN>> loc(#loc8)
#loc8 = loc("/a/kernel.py":12:4)
#loc9 = loc("/a/kernel.py":10:20)
#loc10 = loc("/a/kernel.py":30:2)
#loc20 = loc(callsite(#loc5 at #loc10))
"""


def test_the_main_loop_is_the_innermost_that_loads() -> None:
    code = sass.parse(SASS)
    assert [one.opcode for one in code.main_loop()] == [
        "LDG.E.U16.CONSTANT", "HGMMA.64x64x16.F32.BF16", "STG.E.64", "BRA",
    ]  # fmt: skip
    assert access_shares(code.main_loop()) == {"8": 0.8, "2": 0.2}
    assert code.matrix_instructions == {"HGMMA": 1, "HMMA": 1}


def test_instructions_carry_the_line_of_the_callee_and_other_sections_are_left_out() -> None:
    code = sass.parse(SASS)
    assert len(code.instructions) == 10
    assert [one.line for one in code.instructions[:3]] == ["kernel.py:7", "kernel.py:9", "kernel.py:9"]
    assert [one.loads for one in code.instructions[:4]] == [4, 16, 16, 2]


def test_a_kernel_without_a_loop_that_loads_has_no_main_loop() -> None:
    assert sass.parse(SASS.split(".L_x_1:")[0] + ".L_x_3:\n        /*0090*/   BRA `(.L_x_3);\n").main_loop() == []


def test_narrow_accesses_are_those_of_small_floats_by_their_source_line() -> None:
    elements = elements_by_line(TTIR)
    assert elements == {"kernel.py:10": "bf16", "kernel.py:12": "f8E4M3FN"}
    assert narrow_accesses(sass.parse(SASS).main_loop(), elements) == ("kernel.py:10 bf16 2", "kernel.py:10 bf16 8")


LOWERED = """#loc = loc("/a/kernel.py":1:0)
    %a = tt.dot %x, %y, %a, inputPrecision = tf32 : tensor<4x8xf32> * tensor<8x4xf32> -> tensor<4x4xf32> loc(#l12)
    %b = tt.dot %x, %y, %a, inputPrecision = tf32x3 : tensor<4x8xf32> * tensor<8x4xf32> -> tensor<4x4xf32> loc(#l12)
    %c = tt.dot %x, %y, %a, inputPrecision = tf32 : tensor<4x8xbf16> * tensor<8x4xbf16> -> tensor<4x4xf32> loc(#l12)
    %d = tt.dot %x, %y, %a : tensor<4x8xf16> * tensor<8x4xf16> -> tensor<4x4xf16> loc(#l13)
    %e = tt.dot %x, %y, %a {maxNumImpreciseAcc = 32 : i32} : EIGHT -> tensor<4x4xf32> loc(#l13)
    %f = tt.dot %x, %y, %a {maxNumImpreciseAcc = 64 : i32} : EIGHT -> tensor<4x4xf32> loc(#l14)
    %g = tt.extern_elementwise %x {symbol = "__nv_fast_sinf"} : (tensor<64xf32>) -> tensor<64xf32> loc(#l15)
    %h = tt.extern_elementwise %x {symbol = "__nv_sinf"} : (tensor<64xf32>) -> tensor<64xf32> loc(#l15)
    %i = tt.elementwise_inline_asm "tanh.approx.f32 $0, $1;" {} %x : tensor<4xf32> -> tensor<4xf32> loc(#l15)
    %j = tt.elementwise_inline_asm "ex2.approx.ftz.f32 $0, $1;" {} %x : tensor<4xf32> -> tensor<4xf32> loc(#l15)
    %k = "tt.reduce"(%x) <{axis = 0 : i32}> ({
    ^bb0(%l: bf16 loc(unknown), %m: bf16 loc(unknown)):
      %n = arith.addf %l, %m : bf16 loc(#l2)
      tt.reduce.return %n : bf16 loc(#l2)
    }) : (tensor<64xbf16>) -> bf16 loc(#l20)
    %o = arith.addf %l, %m : f16 loc(#l15)
#l2 = loc("TRITON/language/standard.py":290:12)
#l12 = loc("/a/kernel.py":12:4)
#l13 = loc("/a/kernel.py":13:20)
#l14 = loc("/a/kernel.py":14:2)
#l15 = loc("/a/kernel.py":15:2)
#l16 = loc("/a/kernel.py":16:2)
#l20 = loc(callsite(#l2 at #l16))
"""


def test_what_has_fewer_digits_than_fp32_is_named_with_the_line_of_its_own_file() -> None:
    text = LOWERED.replace("TRITON", str(Path(triton.__file__).parent))
    text = text.replace("EIGHT", "tensor<4x32xf8E4M3FN> * tensor<32x4xf8E4M3FN>")
    assert lowered_precision(text, "") == (
        "kernel.py:12 product in tf32", "kernel.py:13 sums in f16", "kernel.py:14 sums in the units",
        "kernel.py:15 fast_sinf", "kernel.py:15 tanh.approx.f32", "kernel.py:16 sums in bf16",
    )  # fmt: skip
    assert lowered_precision("", "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}") == (
        "inline assembly: product in tf32",
    )


def test_amd_text_is_read_with_its_lines_and_widths() -> None:
    text = """
\t.file\t1 "/a" "kernel.py"
.LBB0_1:
\t.loc\t1 10 4 is_stmt 1              ; kernel.py:10:4
\tbuffer_load_dwordx4 v[2:5], v1, s[0:3], 0 offen
\tglobal_load_ushort v6, v[0:1], off
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
\ts_cbranch_scc1 .LBB0_1
\tglobal_store_dwordx2 v[0:1], v[2:3], off
    .vgpr_count:     96
    .private_segment_fixed_size: 24
"""
    code = amdgcn.parse(text)
    assert access_shares(code.main_loop()) == {"16": 0.8889, "2": 0.1111}
    assert narrow_accesses(code.main_loop(), {"kernel.py:10": "bf16"}) == ("kernel.py:10 bf16 2",)
    assert code.matrix_instructions == {"MFMA": 1}
    assert amdgcn.metadata(text) == {"vgpr_count": 96, "private_segment_fixed_size": 24}


@pytest.mark.parametrize(
    ("arch", "warps", "registers", "shared", "blocks"),
    [
        ("sm_80", 4, 32, 0, 16),  # 64 warps
        ("sm_80", 1, 32, 0, 32),  # 32 blocks
        ("sm_86", 4, 32, 0, 12),  # 48 warps
        ("sm_90", 4, 168, 0, 3),  # 65536 registers: 5376 a warp, 3 warps to a scheduler
        ("sm_90", 4, 255, 0, 2),
        ("sm_90", 4, 32, 72192, 3),  # 228 KB, of which each block costs 1 KB more
        ("sm_86", 4, 32, 72192, 1),
        ("sm_86", 4, 32, 102000, 0),  # 99 KB are the most
        ("sm_90", 32, 255, 0, 0),  # 32 warps of 255 registers
        ("gfx942", 4, 96, 16384, 4),  # 64 KB
        ("gfx942", 4, 183, 0, 2),  # 512 VGPRs a lane: 2 waves to a SIMD
        ("gfx942", 1, 24, 0, 16),
    ],
)  # fmt: skip
def test_blocks_on_a_multiprocessor(arch: str, warps: int, registers: int, shared: int, blocks: int) -> None:
    assert resident_blocks(LIMITS[arch], warps, registers, shared) == blocks
    assert occupancy(LIMITS[arch], warps, blocks) == warps * blocks / LIMITS[arch].warps


def test_tensor_memory_limits_blocks_too_and_every_target_has_limits() -> None:
    assert resident_blocks(LIMITS["sm_100"], 4, 32, 0, tensor_columns=256) == 2
    assert set(LIMITS) == set(TARGETS)


DECODE = CompiledKernel(
    "paged_decode", "one_pass", "paged_decode_one_pass", "sm_90", {"BLOCK_N": 64}, "ok", loop=True, spill_bytes=0,
    registers=168, loop_instructions=400, matrix_instructions={"HMMA": 32}, access_bytes={"16": 0.98, "4": 0.02},
    work="decode",
)  # fmt: skip
MATMUL = replace(
    DECODE,
    op="matmul",
    work="gemm",
    config={"BLOCK_M": 64},
    matrix_instructions={"HGMMA": 4},
    axes={"M": 2048},
    narrow=("a 2",),
)


def test_good_rows_pass_the_gates() -> None:
    assert gates.failing([DECODE, MATMUL]) == []
    assert gates.failures(replace(DECODE, status="unsupported", reason="why")) == []


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (replace(DECODE, status="failed", reason="too big"), "too big"),
        (replace(DECODE, spill_bytes=8), "spills 8 bytes"),
        (replace(DECODE, narrow=("a.py:1 bf16 2",)), "narrow (16 bytes are wanted): a.py:1 bf16 2"),
        (
            replace(DECODE, op="swiglu", work="traffic", loop=False, narrow=("a.py:1 bf16 8",)),
            "narrow (16 bytes are wanted): a.py:1 bf16 8",
        ),
        (replace(MATMUL, matrix_instructions={"HMMA": 4}), "no HGMMA"),
        (replace(MATMUL, axes={"M": 2048, "codes": "int8"}), "no IGMMA"),
        (replace(MATMUL, axes={"M": 2048, "codes": "float8_e4m3fn"}), "no QGMMA"),
        (replace(MATMUL, config={"BLOCK_M": 32}), "tile of 32 rows, 64 are the least"),
        (
            replace(DECODE, point="fp32", lowered=("a.py:1 product in tf32",)),
            "fewer digits than fp32's: a.py:1 product in tf32",
        ),
        (replace(DECODE, lowered=("a.py:1 sums in f16",)), "fewer digits than fp32's: a.py:1 sums in f16"),
        (replace(DECODE, lowered=("a.py:1 sin.approx.f32",)), "fewer digits than fp32's: a.py:1 sin.approx.f32"),
    ],
)
def test_a_row_that_fails_a_gate_is_named(row: CompiledKernel, words: str) -> None:
    assert gates.failures(row) == [words]
    assert gates.failing([row]) == [f"{row.name}: {words}"]


EARLY = """\t.section\t.text.some_kernel,"ax",@progbits
        /*0000*/              @!P1 CCTL.E.PF2 [R8] ;
        /*0010*/                   CCTL.E.PF2 [R10] ;
        /*0020*/                   ACQBULK ;
        /*0030*/                   PREEXIT ;
        /*0040*/                   CCTL.E.PF2 [R12] ;
"""


def test_how_a_kernel_that_may_begin_early_waits_is_read_from_its_code() -> None:
    assert sass.early_launch(sass.parse(EARLY)) == {"waits": 1, "prefetches": 2}
    assert sass.early_launch(sass.parse(EARLY.replace("CCTL.E.PF2", "LDG.E.128"))) == {"waits": 1}
    assert sass.early_launch(sass.parse(EARLY.replace("ACQBULK", "NOP"))) == {}
    for write in ("STG.E.128", "ATOMG.E.ADD.STRONG.GPU", "RED.E.ADD.F32", "ST.E"):
        assert sass.early_launch(sass.parse(EARLY.replace("@!P1 CCTL.E.PF2", write)))["writes"] == 1
    early = replace(DECODE, config={"launch_pdl": 1}, default=False, point="early", early_launch={"waits": 1})
    assert gates.failures(early) == []
    assert gates.failures(replace(early, early_launch={})) == ["launched early, and waits 0 times"]
    assert gates.failures(replace(early, early_launch={"waits": 2})) == ["launched early, and waits 2 times"]
    words = "writes in 2 places before it waits for the launches ahead of it"
    assert gates.failures(replace(early, early_launch={"waits": 1, "writes": 2})) == [words]
    assert gates.failures(replace(early, spill_bytes=4)) == ["spills 4 bytes"]
    assert gates.failures(replace(early, point="capped", config={"maxnreg": 128}, spill_bytes=4)) == []


def _with_early_configs() -> dict[tuple[str, str], str]:
    """(op, variant) of those that have a config that is launched early, and the text of its kernels."""
    variants = [one for op in OPS.values() for one in op.variants.values()]
    early = [one for one in variants if any(config.launch_pdl for config in one.configs or ())]
    return {(one.contract.name, one.name): one.file.read_text() for one in early}


def test_every_variant_that_may_be_launched_early_was_compiled_so_and_asks_for_its_weights_first() -> None:
    table = expected.read(expected.table_path(triton.__version__))
    for (op, variant), source in _with_early_configs().items():
        assert (op, variant, "early", 0, "sm_80") not in table
        for arch in ("sm_90", "sm_100", "sm_120"):
            row = table[op, variant, "early", 0, arch]
            assert row.status == "unsupported" or row.early_launch["waits"] == 1
            if row.status == "ok":
                assert ("prefetch_" in source) == (row.early_launch.get("prefetches", 0) > 0), row.name
    assert ("matmul", "gemv") in _with_early_configs()


def test_gates_spare_what_they_are_not_about() -> None:
    assert gates.failures(replace(DECODE, point="unaligned", spill_bytes=8, narrow=("a.py:1 bf16 2",))) == []
    assert gates.failures(replace(DECODE, default=False, spill_bytes=8)) == []
    assert gates.failures(replace(DECODE, lowered=("a.py:1 product in tf32", "a.py:1 tanh.approx.f32"))) == []
    assert gates.failures(replace(DECODE, point="fp32", spill_bytes=8)) == []
    assert gates.failures(replace(DECODE, loop=False, launch=1, narrow=("a.py:1 bf16 2",))) == []
    int8 = replace(MATMUL, axes={"M": 2048, "codes": "int8"}, matrix_instructions={"IGMMA": 4})
    assert gates.failures(int8) == []
    assert gates.failures(replace(MATMUL, axes={"M": 1}, matrix_instructions={})) == []
    assert gates.failures(replace(MATMUL, arch="sm_80", matrix_instructions={"HMMA": 4})) == []


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (replace(DECODE, status="failed", reason="why"), "failed: why"),
        (replace(DECODE, spill_bytes=16), "spills 16 bytes, 0 before"),
        (replace(DECODE, matrix_instructions={}), "lost HMMA, has no matrix instruction"),
        (replace(DECODE, narrow=("a.py:1 bf16 2",)), "narrower: bf16 2"),
        (replace(DECODE, access_bytes={"16": 0.5, "8": 0.5}), "50% of the main loop's bytes in 16-byte accesses"),
    ],
)
def test_what_got_worse_since_the_expected_table_is_said(now: CompiledKernel, words: str) -> None:
    (found,) = expected.regressions(DECODE, now)
    assert words in found
    assert expected.regressions(DECODE, DECODE) == []


def test_what_got_better_or_moved_is_no_regression() -> None:
    was = replace(DECODE, spill_bytes=16, narrow=("a.py:1 bf16 2",), registers=100, loop_instructions=500)
    assert expected.regressions(was, replace(was, narrow=("a.py:9 bf16 2",))) == []
    assert expected.regressions(was, DECODE) == []
    assert expected.regressions(replace(DECODE, status="unsupported", reason="why"), DECODE) == []


def test_a_longer_loop_is_said_of_the_same_config() -> None:
    now = replace(DECODE, loop_instructions=409)
    assert expected.longer_loop(DECODE, now) == ["its longest loop has 409 instructions, 400 before"]
    assert expected.longer_loop(DECODE, replace(DECODE, loop_instructions=408)) == []  # another order
    assert expected.longer_loop(DECODE, replace(DECODE, loop_instructions=None)) == []
    assert expected.longer_loop(replace(DECODE, loop_instructions=None), DECODE) == []
    assert expected.longer_loop(DECODE, replace(now, config={"BLOCK_N": 128})) == []


def test_the_expected_table_has_the_loop_of_every_kernel() -> None:
    rows = [row for row in expected.read(expected.table_path("3.7")).values() if row.loop]
    assert rows
    assert [row.name for row in rows if not row.loop_instructions] == []


def test_a_table_is_read_as_it_was_written_and_its_lines_are_sorted(tmp_path: Path) -> None:
    path = expected.table_path("3.7.1").name
    assert path == "triton-3.7.jsonl"
    gone = replace(DECODE, arch="gfx942", status="unsupported", reason="why", registers=None, spill_bytes=None)
    expected.write(tmp_path / path, [DECODE, gone])
    table = expected.read(tmp_path / path)
    assert [*table] == sorted(expected.key(row) for row in (DECODE, gone))
    assert not expected.changed(table[expected.key(DECODE)], DECODE)
    assert expected.read(tmp_path / "none") == {}
    spilled = replace(DECODE, spill_bytes=4)
    assert expected.changed(DECODE, spilled) == {"spill_bytes": (0, 4)}


def test_a_config_without_constants_is_compiled_and_not_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tkernels.verification.inspection.compile._launches", lambda *arguments: [arguments[4]])
    variant, config = OPS["rms_norm"].variants["row_per_program"], Config(num_warps=2)
    assert config != variant.default_config("sm_90")
    (row,) = compile_point(variant, "sm_90", "engine", config=config)
    assert (row.config, row.default) == (config.as_dict(), False)
