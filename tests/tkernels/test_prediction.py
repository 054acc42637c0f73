"""The model of a kernel's time: a skeleton and its walk, what the model holds to, and the kept tables."""

import errno
import json
import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tkernels import OPS
from tkernels.config import Config
from tkernels.prediction import kept
from tkernels.prediction.calls import Launch, case_without_values, make_call
from tkernels.prediction.compiled import NotKeptError, find_compiled, of_todays_code
from tkernels.prediction.foretell import Foretold, foretell
from tkernels.prediction.gpus import GPUS, UnknownGpuError, find_gpu
from tkernels.prediction.kept import CompiledFacts, Loop, match_loops
from tkernels.prediction.model import BANDWIDTH, LAUNCH_US, predict_launch
from tkernels.prediction.skeleton import SkeletonError, loading_loops, skeleton_of
from tkernels.prediction.walk import Counts, WalkError, walk
from tkernels.verification.inspection import sass
from tkernels.verification.inspection.accesses import Code

H100 = find_gpu("H100")
ROWS = kept.read(kept.table_path("sm_90"))
FORETOLD: Mapping[str, Mapping[str, Mapping[str, float]]] = json.loads((kept.FOLDER / "foretold.json").read_text())

# A program adds up its row, which begins and ends where `ends` says; the last to arrive does more.
TTIR = """
module {
  tt.func public @sums(%out: !tt.ptr<f32> {tt.divisibility = 16 : i32}, %ends: !tt.ptr<i32> loc(#loc), %width: i32) {
    %c64_i32 = arith.constant 64 : i32 loc(#loc1)
    %c1_i32 = arith.constant 1 : i32 loc(#loc1)
    %cst = arith.constant dense<0.0> : tensor<64xf32> loc(#loc1)
    %true = arith.constant true loc(#loc1)
    %row = tt.get_program_id x : i32 loc(#loc2)
    %next = arith.addi %row, %c1_i32 : i32 loc(#loc2)
    %at = tt.addptr %ends, %row : !tt.ptr<i32>, i32 loc(#loc3)
    %begin = tt.load %at : !tt.ptr<i32> loc(#loc3)
    %at_1 = tt.addptr %ends, %next : !tt.ptr<i32>, i32 loc(#loc3)
    %end = tt.load %at_1 : !tt.ptr<i32> loc(#loc3)
    %sum = scf.for %start = %begin to %end step %c64_i32 iter_args(%acc = %cst) -> (tensor<64xf32>)  : i32 {
      %x = tt.load %p : tensor<64x!tt.ptr<bf16>> loc(#loc4)
      %d = tt.dot %a, %b, %c : tensor<16x32xbf16> * tensor<32x64xbf16> -> tensor<16x64xf32> loc(#loc4)
      %m = "tt.reduce"(%x) <{axis = 0 : i32}> ({
      ^bb0(%one: f32 loc(#loc), %two: f32 loc(#loc)):
        %three = arith.addf %one, %two : f32 loc(#loc)
        tt.reduce.return %three : f32 loc(#loc)
      }) : (tensor<64xf32>) -> tensor<f32> loc(#loc5)
      scf.yield %acc : tensor<64xf32> loc(#loc4)
    } {tt.num_stages = 3 : i32} loc(#loc4)
    %count = tt.atomic_rmw add, acq_rel, gpu, %out, %c1_i32, %true : (!tt.ptr<i32>, i32, i1) -> i32 loc(#loc6)
    %is_last = arith.cmpi eq, %count, %c1_i32 : i32 loc(#loc6)
    scf.if %is_last {
      tt.store %q, %sum : tensor<64x!tt.ptr<f32>> loc(#loc7)
    } loc(#loc7)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""


def walked(ends: list[int], program: int, **options: Any) -> Counts:
    parameters, skeleton = skeleton_of(TTIR)
    assert parameters == {"out": "!tt.ptr<f32>", "ends": "!tt.ptr<i32>", "width": "i32"}
    read = lambda name, offset: ends[offset] if name == "ends" else None  # noqa: E731
    return walk(skeleton, {"width": 1}, {"out": 0, "ends": 0}, (program, 0, 0), (len(ends), 1, 1), read, **options)


def test_a_skeleton_says_how_often_loops_run_from_what_memory_holds() -> None:
    counts = walked([0, 100, 100, 700], 0)
    assert (counts.passes[0], counts.entries[0]) == (2, 1)  # 100 in steps of 64
    assert counts.work == {"loads": 2 * 128, "bfloat16": 2 * 2 * 16 * 32 * 64}
    assert walked([0, 100, 100, 700], 1).passes[0] == 0
    assert walked([0, 100, 100, 700], 2).passes[0] == 10


def test_a_branch_that_only_memory_decides_is_skipped_or_taken_as_it_is_asked() -> None:
    assert "stores" not in walked([0, 64], 0).work
    assert walked([0, 64], 0, unknown_branches=True).work["stores"] == 256


def test_bounds_that_nobody_knows_are_refused_and_so_is_text_without_a_kernel() -> None:
    _, skeleton = skeleton_of(TTIR)
    with pytest.raises(WalkError, match="start"):
        walk(skeleton, {}, {"out": 0, "ends": 0}, (0, 0, 0), (1, 1, 1), lambda name, offset: None)
    with pytest.raises(SkeletonError, match="no kernel"):
        skeleton_of("module {\n}")


SEARCHING = """
module {
  tt.func public @steps(%x: !tt.ptr<bf16> loc(#loc), %width: i32 loc("width"(#loc))) {
    %c0_i32 = arith.constant 0 : i32 loc(#loc1)
    %c1_i32 = arith.constant 1 : i32 loc(#loc1)
    %c64_i32 = arith.constant 64 : i32 loc(#loc1)
    %found:2 = scf.while (%steps = %c0_i32, %left = %width) : (i32, i32) -> (i32, i32) {
      %goes_on = arith.cmpi sgt, %left, %c0_i32 : i32 loc(#loc2)
      scf.condition(%goes_on) %steps, %left : i32, i32 loc(#loc2)
    } do {
    ^bb0(%steps_1: i32 loc("steps"(#loc9)), %left_2: i32 loc("left"(#loc9))):
      %more = arith.addi %steps_1, %c1_i32 : i32 loc(#loc3)
      %less = arith.subi %left_2, %c64_i32 : i32 loc(#loc3)
      scf.yield %more, %less : i32, i32 loc(#loc3)
    } loc(#loc2)
    scf.for %at = %c0_i32 to %found#0 step %c1_i32  : i32 {
      %tile = tt.load %p : tensor<64x!tt.ptr<bf16>> loc(#loc4)
    } loc(#loc4)
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""


def test_a_search_carries_as_many_numbers_as_its_text_has() -> None:
    _, skeleton = skeleton_of(SEARCHING)
    for width, steps in ((0, 0), (1, 1), (640, 10)):
        counts = walk(skeleton, {"width": width}, {"x": 0}, (0, 0, 0), (1, 1, 1), lambda name, offset: None)
        assert counts.passes[0] == steps
        assert counts.work.get("loads", 0) == 128 * steps


def machine_code(*lengths: int) -> Code:
    """A loop of each length, one after the other, each with one load."""
    rows, at = ['\t.section\t.text.some_kernel,"ax",@progbits'], 0
    for number, length in enumerate(lengths):
        body = ["LDG.E.128 R16, desc[UR12][R4.64]", *["FADD R1, R2, R3"] * (length - 2), f"@P0 BRA `(.L_x_{number})"]
        rows.append(f".L_x_{number}:")
        for one in body:
            rows.append(f"        /*{at:04x}*/                   {one} ;")
            at += 16
    return sass.parse("\n".join(rows) + "\n")


def test_of_more_loops_than_the_text_has_the_longest_are_its_own_in_order() -> None:
    _, one = skeleton_of(TTIR)
    two = [*one, *one]
    assert [loop.instructions for loop in match_loops(machine_code(5, 40, 8, 30), two, 2)] == [40, 30]
    assert [loop.instructions for loop in match_loops(machine_code(5, 40, 8, 30), one, 2)] == [40]
    assert [loop.instructions for loop in match_loops(machine_code(7), two, 2)] == [7, 0]
    assert match_loops(machine_code(7), [], 2) == ()


def launch_of(programs: int, bytes_moved: float) -> Launch:
    return Launch(None, (programs, 1, 1), Config(), {}, {}, {}, {}, {}, bytes_moved)


def straight(**changes: Any) -> CompiledFacts:
    """A kernel without loops, of 8 warps, of which a multiprocessor holds 8 blocks."""
    facts = CompiledFacts(
        "kernel", "sm_90", "", "", {"num_warps": 8, "num_stages": 1}, {}, (), {}, 32, 0, 200, 0, (), (),
        [["work", {"loads": 1024.0}]],
    )  # fmt: skip
    return replace(facts, **changes)


@pytest.mark.parametrize("programs", [1, 100, 132, 1056, 1057, 5000])
def test_a_time_grows_with_bytes_and_instructions_and_is_never_under_the_roofline(programs: int) -> None:
    times = []
    for moved in (0.0, 1e5, 1e7, 1e9):
        us = predict_launch(launch_of(programs, moved), straight(), H100).us
        assert us - LAUNCH_US >= moved / (H100.peaks.memory_bytes_per_s * BANDWIDTH) * 1e6 * (1 - 1e-12)
        times.append(us)
    assert times == sorted(times)
    assert times[-1] > times[0]
    slower = predict_launch(launch_of(programs, 1e5), straight(instructions=2000), H100)
    assert slower.us > times[1]


def test_one_program_more_than_a_wave_takes_another_wave() -> None:
    full = predict_launch(launch_of(8 * 132, 0.0), straight(), H100)
    more = predict_launch(launch_of(8 * 132 + 1, 0.0), straight(), H100)
    less = predict_launch(launch_of(8 * 132 - 1, 0.0), straight(), H100)
    assert (full.resident, full.waves) == (8, 1.0)
    assert more.us > full.us == less.us


def test_few_programs_wait_for_memory_and_a_pipeline_waits_less() -> None:
    _, skeleton = skeleton_of(TTIR)
    launch = replace(
        launch_of(1, 0.0),
        offsets={"out": 0, "ends": 0},
        values={"ends": torch.tensor([0, 64 * 1000], dtype=torch.int32)},
    )
    waits = straight(skeleton=skeleton, loops=(Loop(10, 0, 1.0, False),))
    ahead = straight(skeleton=skeleton, loops=(Loop(10, 0, 0.25, True),))
    one, other = (predict_launch(launch, each, H100) for each in (waits, ahead))
    assert one.bound == other.bound == "chain"
    assert one.instructions == other.instructions == 200 + 1000 * 10
    assert other.us < one.us


def test_an_unknown_gpu_is_told_which_there_are_and_letters_case_does_not_matter() -> None:
    with pytest.raises(UnknownGpuError, match="'H900'; known are H100, .*H200, A100"):
        find_gpu("H900")
    assert find_gpu("h200") is GPUS["H200"]


@pytest.mark.parametrize("name", GPUS)
def test_a_clock_follows_from_the_data_sheet(name: str) -> None:
    assert 1.2e9 < GPUS[name].clock_hz < 2.6e9


def said(op: str, variant: str, point: str, gpu: str = "H100", rows: list[CompiledFacts] = ROWS) -> Foretold:
    contract = OPS[op].contract
    case = case_without_values(contract, contract.benchmarks[point])
    return foretell(OPS[op].variants[variant], case, find_gpu(gpu), rows)


DECODE_ALONE = "B=1,context=65536"


@pytest.mark.parametrize(
    ("op", "variant", "point"),
    [
        ("paged_decode", "one_pass", DECODE_ALONE),
        ("paged_decode", "last_arriver", DECODE_ALONE),
        ("rms_norm", "row_per_program", "T=4096,H=2560"),
        ("swiglu", "fused", "T=4096,I=9728"),
    ],
)
def test_the_table_of_foretold_times_is_what_the_kept_code_gives(op: str, variant: str, point: str) -> None:
    found = said(op, variant, point)
    assert found.us is not None, found.reason
    assert found.us > (found.limit_us or 0.0) > 0
    assert FORETOLD[f"{op}.{variant}"][point]["H100"] == pytest.approx(found.us, abs=1e-3)


EXPERTS = "T=4096,Qwen3-30B-A3B"


@pytest.mark.parametrize("variant", ["padded_tiles", "persistent", "gemv_per_pair", "composed"])
def test_experts_are_never_under_the_roofline(variant: str) -> None:
    """Whose tile is which an earlier launch of the call says: without it a kernel would be foretold to do nothing."""
    for point in ("T=1,Qwen3-30B-A3B", "T=64,Qwen3-30B-A3B", EXPERTS):
        found = said("moe_mlp", variant, point)
        assert found.us is not None, found.reason
        assert found.us > (found.limit_us or 0.0) > 0


def test_tiles_that_read_a_weight_again_are_bound_by_the_cache() -> None:
    short, tall = said("moe_mlp", "padded_tiles", EXPERTS), said("moe_mlp", "persistent", EXPERTS)
    assert short.bound == "cache"
    assert (short.us or 0) > 2 * (tall.us or 0) > 0


def test_a_composed_fusion_is_what_its_parts_launch() -> None:
    """Two products among them, of other sizes."""
    variant = OPS["moe_mlp"].variants["composed"]
    case = case_without_values(variant.contract, variant.contract.benchmarks["T=64,Qwen3-30B-A3B"])
    call = make_call(variant, case, H100.facts)
    products = [axes for part, axes in call.parts if part.contract.name == "grouped_matmul"]
    assert [(axes["N"], axes["C"], axes["combine"], axes["tile"]) for axes in products] == [
        (2 * 768, 2048, False, 16), (2048, 768, True, 16)
    ]  # fmt: skip
    names = [launch.kernel.__name__ for launch in call.launches]
    assert names == [
        "sort_by_expert_one_program", "grouped_matmul_padded_tiles", "swiglu_fused", "grouped_matmul_padded_tiles",
        "grouped_matmul_combine",
    ]  # fmt: skip


@pytest.mark.parametrize("variant", ["padded_tiles", "dequant_padded_tiles", "composed"])
def test_tables_that_a_launch_makes_are_known_to_the_next(variant: str) -> None:
    op = OPS["moe_mlp"]
    axes = op.contract.benchmarks["T=64,Qwen3-30B-A3B" + ",W4" * variant.startswith("dequant")]
    case = case_without_values(op.contract, {**axes, "routing": "zipf"})
    experts = case.inputs["experts"]
    wanted = OPS["sort_by_expert"].contract.reference(experts, 128, 16)[2]
    reads = [
        one for one in make_call(op.variants[variant], case, H100.facts).launches if "tile_expert_ptr" in one.types
    ]
    assert len(reads) == 3  # what makes it, and two products
    for launch in reads[1:]:
        assert [launch.read("tile_expert_ptr", at) for at in range(len(wanted))] == wanted.tolist()


def test_several_launches_move_no_more_of_the_ops_tensors_than_the_op_does() -> None:
    """One token meets 8 of 128 experts."""
    variant = OPS["moe_mlp"].variants["gemv_per_pair"]
    case = case_without_values(variant.contract, variant.contract.benchmarks["T=1,Qwen3-30B-A3B"])
    call = make_call(variant, case, H100.facts)
    assert len(call.launches) == 2
    moved = sum(launch.bytes_moved for launch in call.launches)
    assert 0.99 * call.bytes_moved < moved < 1.01 * call.bytes_moved
    assert call.launches[0].bytes_moved == pytest.approx(2 * call.launches[1].bytes_moved, rel=0.01)


def test_what_all_programs_load_passes_the_cache_once_for_each() -> None:
    """1,000 programs that read the same megabyte."""
    compiled = straight(skeleton=[["work", {"loads": 1e6, "stores": 0.0}]])
    found = predict_launch(launch_of(1056, 1e6), compiled, H100)
    assert found.bound == "cache"
    assert found.us - LAUNCH_US == pytest.approx(1056e6 / H100.cache_bytes_per_s * 1e6)


def test_eight_programs_lose_to_hundreds() -> None:
    """What the first GPU hour is planned by: one program a KV head reads 64k keys alone, or many read their parts."""
    alone, many = said("paged_decode", "one_pass", DECODE_ALONE), said("paged_decode", "last_arriver", DECODE_ALONE)
    assert alone.launches[0].programs == 8
    assert alone.bound == "chain"
    assert many.bound == "memory"
    assert (alone.us or 0) > 8 * (many.us or 0) > 0


def test_code_that_has_changed_or_was_never_compiled_gives_no_time() -> None:
    variant = OPS["swiglu"].variants["fused"]
    case = case_without_values(variant.contract, variant.contract.benchmarks["T=4096,I=9728"])
    (launch,) = make_call(variant, case, H100.facts).launches
    own = [row for row in ROWS if row.kernel == "swiglu_fused"]
    assert not find_compiled(launch, "sm_90", own).differs
    for rows, reason in (
        ([], "not compiled for sm_90"),
        ([replace(row, source="other") for row in own], "has changed"),
        ([replace(row, config={**row.config, "num_warps": 1}) for row in own], "num_warps="),
        ([replace(row, types={}) for row in own], "out_ptr=bfloat16"),
        ([replace(row, ones=("stride_out",)) for row in own], "of 1 alone"),
    ):
        with pytest.raises(NotKeptError, match=reason):
            find_compiled(launch, "sm_90", rows)
    assert said("swiglu", "fused", "T=4096,I=9728", rows=[]).reason == "swiglu_fused was not compiled for sm_90"


def test_kept_rows_are_of_todays_code() -> None:
    assert of_todays_code(ROWS, OPS) == ROWS
    assert of_todays_code([replace(ROWS[0], source="other"), replace(ROWS[1], kernel="gone")], OPS) == []


def test_torch_is_not_modelled_and_what_a_variant_refuses_is_told_apart() -> None:
    assert "torch variant" in (said("swiglu", "torch", "T=4096,I=9728").reason or "")
    refused = said("dequant_gemm", "gemv", "M=16,N=8192,K=8192,g=128")
    assert (refused.us, refused.is_unsupported) == (None, True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kept_rows_are_whole(arch: str) -> None:
    """Each has a loop's figures for each loop of its skeleton, fits on the architecture, and reads back as it was."""
    rows = kept.read(kept.table_path(arch))
    assert len({row.key for row in rows}) == len(rows) > 30
    for row in rows:
        assert len(row.loops) == len(loading_loops(row.skeleton)), row.where
        assert row.instructions > 0
        assert kept.CompiledFacts.of(json.loads(json.dumps(row.as_json()))) == row


WHOLE = json.dumps(ROWS[0].as_json()).encode()


def damaged(**changes: Any) -> bytes:
    """A row's line with other values."""
    return json.dumps({**ROWS[0].as_json(), **changes}).encode()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"kernel":', "Expecting value"),
        (b"", "Expecting value"),
        (b"{}", "lacks 'kernel'; lacks 'arch'"),
        (b"[1]", "must be an object, got list"),
        (b"null", "must be an object, got NoneType"),
        (b"\xff" + WHOLE, "codec can't decode byte 0xff"),
        (b"[" * 100_000, "maximum recursion depth exceeded"),
        (damaged(more=1), "has 'more', which no row has"),
        (damaged(config=None), "'config' must be a config"),
        (damaged(config={"maxnreg": 999}), "'config' must be a config"),
        (damaged(registers=-1), "'registers' must be an integer from 0"),
        (damaged(ones="abc"), "'ones' must be a list of texts"),
        (damaged(types={"out_ptr": 1}), "'types' must be an object of texts"),
        (damaged(loops=[[1, 2]]), "'loops' must be a list of loops"),
        (damaged(loops=[[1, 2, float("nan"), True]]), "'loops' must be a list of loops"),
        (damaged(loops=[[1, 2, 3, True]]), "'loops' must have one for each loop of 'skeleton' that loads"),
        (damaged(skeleton=[["for", 1]]), "'skeleton' must be a skeleton"),
        (damaged(skeleton=[["work", {"loads": "all"}]]), "'skeleton' must be a skeleton"),
    ],
    ids=range(18),
)
def test_a_line_that_is_no_row_is_named_and_left_out(line: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "sm_90.jsonl"
    path.write_bytes(b"\n".join([WHOLE, line, json.dumps(ROWS[1].as_json()).encode()]) + b"\n")
    said = rf"{path}: left out: line 2: .*{why}.*; what was there is compiled again when it is needed"
    with pytest.warns(UserWarning, match=said) as warned:
        rows = kept.read(path)
    assert len(warned) == 1
    assert rows == ROWS[:2]


def test_many_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "sm_90.jsonl"
    path.write_text("{}\n" * 9)
    with pytest.warns(UserWarning, match=r"line 4: lacks 'kernel'.*; and 5 lines more; what was there"):
        assert kept.read(path) == []


def _add_one(path: Path, index: int) -> None:
    kept.add(path, [ROWS[index]])


def test_processes_that_keep_rows_at_once_lose_nothing(tmp_path: Path) -> None:
    path, context = tmp_path / "predicted" / "sm_90.jsonl", multiprocessing.get_context("fork")
    processes = [context.Process(target=_add_one, args=(path, index)) for index in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(row.key for row in kept.read(path)) == sorted(row.key for row in ROWS[:8])


def test_a_table_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sm_90.jsonl"
    _add_one(path, 0)

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*sm_90.jsonl"):
        _add_one(path, 1)
    monkeypatch.undo()
    assert kept.read(path) == ROWS[:1]
