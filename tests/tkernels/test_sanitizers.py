"""Each sanitizer fires on a planted bug and stays silent on a clean kernel."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.tkernels.outside import DOUBLED, write_copy, write_variant
from tkernels import OPS
from tkernels.config import Config
from tkernels.inputs import poisoned_views
from tkernels.launch import Kernel
from tkernels.variant import Variant
from tkernels.verification.addresses import sanitizing_door
from tkernels.verification.check import drawn_results
from tkernels.verification.draws import drawn_cases
from tkernels.verification.sanitizers import reuse
from tkernels.verification.sanitizers.base import Finding, sanitized, sanitizer_cases, unfit_reason
from tkernels.verification.sanitizers.guard import crash_of
from tkernels.verification.sanitizers.huge_sizes import check_sizes
from tkernels.verification.sanitizers.suite import SANITIZERS


@triton.jit
def copy_kernel(out_ptr, x_ptr, n, stride_t, extra, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride_t + offs + extra, mask=offs < n, other=0.0)
    tl.store(out_ptr + row * n + offs, x, mask=offs < n)


@triton.jit
def gather_kernel(out_ptr, x_ptr, index_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + tl.load(index_ptr + offs)))


@triton.jit
def box_kernel(out_ptr, box, row, BLOCK: tl.constexpr):
    offs = tl.arange(0, 2)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out_ptr + offs, box.load([row, 0]))


@triton.jit
def multiply_kernel(out_ptr, factor, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, (offs + 1) * factor)


@triton.jit
def endless_kernel(out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    low = tl.full((), 0, tl.int32)
    while low < 1:
        low = tl.minimum(low + tl.sum(tl.load(out_ptr + offs)), 0)


def run_copy(rows: int, columns: int, extra: int) -> torch.Tensor:
    x, _ = poisoned_views([torch.ones(rows, columns), torch.full((rows, 2), float("nan"))], dim=1)
    out = torch.zeros(rows, columns)
    arguments = {"out_ptr": out, "x_ptr": x, "n": columns, "stride_t": x.stride(0), "extra": extra, "BLOCK": 8}
    sanitizing_door(copy_kernel, (rows,), arguments, Config())
    return out


def test_a_clean_kernel_is_silent_and_runs() -> None:
    assert torch.equal(run_copy(3, 5, extra=0), torch.ones(3, 5))


def test_the_gap_between_the_rows_of_a_view_is_outside_it() -> None:
    said = "copy_kernel: load of 4 bytes outside every argument, 1 lanes; the first is at byte .* between its elements"
    with pytest.raises(triton.runtime.errors.InterpreterError, match=said):
        run_copy(3, 5, extra=1)  # one element past a row, still inside the allocation


@pytest.mark.parametrize("extra", [-1, 7, 10**9])
def test_an_access_before_or_far_past_a_tensor_is_caught_before_it_is_made(extra: int) -> None:
    with pytest.raises(triton.runtime.errors.InterpreterError, match="outside every argument"):
        run_copy(3, 5, extra)


def test_a_bad_index_in_an_indirect_load_is_caught() -> None:
    index = torch.arange(8)
    index[3] = 1_000_000
    arguments = {"out_ptr": torch.empty(8), "x_ptr": torch.ones(8), "index_ptr": index, "BLOCK": 8}
    with pytest.raises(triton.runtime.errors.InterpreterError, match="load of 4 bytes outside every argument, 1 lanes"):
        sanitizing_door(gather_kernel, (1,), arguments, Config())


@pytest.mark.parametrize(
    ("rows", "row", "message"),
    [
        (4, 0, ""),
        (4, 3, ""),  # the second row of the box leaves the shape, and is not read
        (4, 4, "box load wholly outside its descriptor's shape"),
        (4, -2, "box load wholly outside its descriptor's shape"),
        (6, 3, "load of 4 bytes outside every argument"),  # a descriptor of more rows than there are
    ],
)
def test_what_a_descriptor_reads_is_checked_against_the_tensor_under_it(rows: int, row: int, message: str) -> None:
    x, _ = poisoned_views([torch.ones(4, 8), torch.full((4, 4), float("nan"))], dim=1)
    descriptor = TensorDescriptor(x, [rows, 8], [x.stride(0), 1], [2, 8])
    out = torch.full((2, 8), 5.0)
    arguments = {"out_ptr": out, "box": descriptor, "row": row, "BLOCK": 8}
    if message:
        with pytest.raises(triton.runtime.errors.InterpreterError, match=message):
            sanitizing_door(box_kernel, (1,), arguments, Config())
    else:
        sanitizing_door(box_kernel, (1,), arguments, Config())
        assert torch.equal(out[:, 0], torch.tensor([1.0, 1.0 if row < 3 else 0.0]))


def test_a_loop_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tkernels.interpreter.accesses.MAX_ACCESSES", 100)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="its loop does not end"):
        sanitizing_door(endless_kernel, (1,), {"out_ptr": torch.zeros(8, dtype=torch.int32), "BLOCK": 8}, Config())


def test_int32_overflow_is_caught_and_int64_is_not() -> None:
    def run(factor: int, dtype: torch.dtype) -> None:
        out = torch.zeros(8, dtype=dtype)
        sanitizing_door(multiply_kernel, (1,), {"out_ptr": out, "factor": factor, "BLOCK": 8}, Config())

    run(2**27, torch.int32)
    run(2**33, torch.int64)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="int32 overflow"):
        run(2**30, torch.int32)


LOADED = "up = tl.load(gate_up_ptr + row * stride_gate_up_t + width + offs, mask=mask, other=0.0).to(tl.float32)"
BEYOND = "    beyond = tl.load(gate_up_ptr + row * stride_gate_up_t + 2 * width).to(tl.float32)\n"
LEFT = "    left = tl.load(out_ptr + row * stride_out_t).to(tl.float32)\n"
STORED = "    out = gate / (1 + tl.exp(-gate)) * up * FACTOR\n"
TOKENS = [("FACTOR=1,", "FACTOR=1, tokens=tokens,"), ("width, FACTOR: ", "width, tokens, FACTOR: ")]
BLOCKS = [("FACTOR=1,", 'FACTOR=run.config["FACTOR"],'), ("Config()}", "Config(FACTOR=1)}")]

SHAPE = "    tokens, width = out.shape\n"
SEEN = "    gate_up = KEPT.setdefault({key}, gate_up.clone())\n"


def remembering(key: str) -> list[tuple[str, str]]:
    """A launcher that keeps what it once got under a key."""
    return [("def launch(", "KEPT = {}\n\n\ndef launch("), (SHAPE, SHAPE + SEEN.format(key=key))]


# What is planted in a kernel whose results pass the check, and the sanitizer that must find it.
PLANTED: list[tuple[str, list[tuple[str, str]], str]] = [
    # One element past the row, where the next row or nothing lies.
    ("address", [(STORED, BEYOND + STORED)], "outside every argument"),
    ("overflow", [("tl.program_id(0).to(tl.int64)", "tl.program_id(0)")], "int32 overflow"),
    # All programs store to one element: each its own value, the last one stays.
    (
        "race",
        [*TOKENS, (STORED, STORED + "    tl.store(out_ptr + (tokens - 1) * stride_out_t, tl.sum(up) * row)\n")],
        "nothing orders two accesses",
    ),
    # Each program reads what the one before it may or may not have written by now.
    (
        "order",
        [
            (
                STORED,
                "    before = tl.load(out_ptr + tl.maximum(row - 1, 0) * stride_out_t).to(tl.float32)\n"
                + STORED
                + "    out *= tl.where(before == before, 1.0, 1.0 + 1.0e-6)\n",
            )
        ],
        "with its programs reversed",
    ),
    # The lanes of one store: each its own value to one element, which the right one overwrites.
    (
        "race",
        [(STORED, STORED + "    tl.store(out_ptr + row * stride_out_t + offs * 0, gate, mask=mask)\n")],
        "of threads of program",
    ),
    # In a batch of one, another order of rounding.
    ("batch", [*TOKENS, (STORED, STORED + "    out *= tl.where(tokens > 1, 1.0 + 1.0e-6, 1.0)\n")], "its bits alone"),
    # The last member of a batch is not like the others.
    (
        "batch",
        [*TOKENS, (STORED, STORED + "    out *= tl.where(row == tokens - 1, 1.0, 1.0 + 1e-6)\n")],
        "its bits alone",
    ),
    # A comparison hides NaN, which the output held before anything was stored there.
    ("poison", [(STORED, LEFT + STORED + "    out = tl.where(left > 1e20, 0.0, out)\n")], "where nobody may read"),
    ("guard", [(STORED, BEYOND + STORED + "    out = tl.where(beyond > 1e20, 0.0, out)\n")], "died of SIGSEGV"),
    # Cases come to lie where others lay: then the first call is wrong already.
    ("reuse", remembering("gate_up.untyped_storage().data_ptr()"), "is not as in fresh ones|after a call with other"),
    (
        "reuse",
        remembering("(gate_up.data_ptr(), gate_up._version)"),
        "is not as in fresh ones|after a call with other",
    ),
    ("reuse", remembering("gate_up.shape"), "after a call with other values"),
    # What seems to be there already is not stored again.
    (
        "reuse",
        [
            (
                STORED,
                "    there = tl.load(out_ptr + row * stride_out_t + offs, mask=mask, other=0.0).to(tl.float32)\n"
                + STORED
                + "    mask = mask & (there != there)\n",
            )
        ],
        "is not as in fresh ones",
    ),
    (
        "tuning",
        [*BLOCKS, ("(Config(), Config(num_warps=8))", "(Config(FACTOR=1), Config(FACTOR=2))")],
        "alone, the config is wrong",
    ),
]


WALKED = """@triton.jit
def walked(out_ptr, gate_up_ptr, stride_gate_up_t, stride_out_t, width, tokens, offs, mask):
    for back in range(0, tokens):
        row = (tokens - 1 - back){factor}
        gate = tl.load(gate_up_ptr + row * width * 2 + offs, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + row * width * 2 + width + offs, mask=mask, other=0.0).to(tl.float32)
        out = gate / (1 + tl.exp(-gate)) * up
        tl.store(out_ptr + row * width + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


"""
WALKING = [
    ("width, FACTOR: ", "width, tokens, FACTOR: "),
    ("FACTOR=1,", "FACTOR=1, tokens=tokens,"),
    ("(tokens,), out_ptr", "(min(tokens, 1),), out_ptr"),
    ("    row = tl.program_id(0).to(tl.int64)\n", ""),
    (
        DOUBLED[DOUBLED.index("    gate = tl") : DOUBLED.index("\n\n\ndef launch")],
        "    walked(out_ptr, gate_up_ptr, stride_gate_up_t, stride_out_t, width, tokens, offs, mask)",
    ),
]
"""One program walks all rows backwards, in a helper."""


def load(folder: Path, *changes: tuple[str, str]) -> Variant:
    return OPS.with_variants_from(write_variant(folder, *changes))["swiglu"].variants["doubled"]


def findings(name: str, variant: Variant, examples: int = 8) -> list[Finding]:
    return [finding for finding in sanitized(SANITIZERS[name], variant, examples) if finding is not None]


@pytest.mark.parametrize("name", SANITIZERS)
def test_a_clean_variant_is_not_reported(name: str, tmp_path: Path) -> None:
    assert unfit_reason(SANITIZERS[name], load(tmp_path)) is None
    assert findings(name, load(tmp_path)) == []


@pytest.mark.parametrize(("name", "changes", "message"), PLANTED, ids=[f"{p[0]}{i}" for i, p in enumerate(PLANTED)])
def test_a_planted_bug_is_found(name: str, changes: list[tuple[str, str]], message: str, tmp_path: Path) -> None:
    found = findings(name, load(tmp_path, *changes), 12)
    assert found
    assert re.search(message, found[0].message)
    assert found[0].replay.startswith(f"tk check --sanitize {name} --variants-from {tmp_path} --op swiglu")


@pytest.mark.parametrize(
    "first",
    [
        "eps = KEPT.setdefault((x.data_ptr(), x.shape), eps)",
        "x = KEPT.setdefault((x.data_ptr(), x.shape, eps), x.clone())",
        "LAST[:] = LAST if LAST[:1] == [(x.data_ptr(), x.shape, eps)] else [(x.data_ptr(), x.shape, eps), x.clone()]; "
        "x = LAST[1]",
    ],
    ids=["a number is remembered", "rows are remembered by a number too", "of the last call alone"],
)
def test_reuse_finds_what_is_remembered_of_a_number_or_by_it(first: str, tmp_path: Path) -> None:
    changes = ("def launch(", "KEPT, LAST = {}, []\n\n\ndef launch(")
    write_copy(tmp_path, "rms_norm.row_per_program", "remembering", changes, first=[first])
    variant = OPS.with_variants_from(tmp_path)["rms_norm"].variants["remembering"]
    # Of shapes that an earlier case had at the same address the first call is wrong already.
    found = findings("reuse", variant, 8)
    words = "is not as in fresh ones|after a call with other"
    assert any(re.search(words, finding.message) for finding in found)


def test_configs_that_only_a_compiler_tells_apart_get_one_draw_and_the_default_is_among_them(tmp_path: Path) -> None:
    given = (
        "Config(FACTOR=2), Config(FACTOR=2, num_warps=8), Config(FACTOR=1, num_stages=3), Config(FACTOR=2, maxnreg=32)"
    )
    variant = load(tmp_path, *BLOCKS, ("(Config(), Config(num_warps=8))", f"({given})"))
    configs = [config for _, config in sanitizer_cases(SANITIZERS["batch"], variant)]
    assert configs == [Config(FACTOR=1), Config(FACTOR=2)]
    assert variant.default_config("interpreter") == configs[0]


def test_reuse_takes_no_case_that_has_no_other_of_its_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variant = load(tmp_path)
    found = reuse._alike_case
    monkeypatch.setattr(reuse, "_alike_case", lambda case: None if case.axes["T"] == 1 else found(case))
    assert 1 not in {case.axes["T"] for case, _ in sanitizer_cases(SANITIZERS["reuse"], variant, 8)}
    monkeypatch.setattr(reuse, "_alike_case", lambda case: None)
    assert list(sanitizer_cases(SANITIZERS["reuse"], variant, 8)) == []


def test_a_planted_order_dependence_passes_the_oracle_and_not_the_sanitizer(tmp_path: Path) -> None:
    _, changes, _ = PLANTED[3]
    variant = load(tmp_path, *changes)
    # The next row's first element may be NaN in the poisoned output, and a factor of 1 + 1e-6 is within fp32's error.
    assert {r.status for r in drawn_results(variant, 10, fixed={"activation": "float16"})} == {"ok"}
    assert findings("order", variant)


def test_a_variant_that_claims_nothing_is_held_to_the_oracle_in_every_order(tmp_path: Path) -> None:
    _, changes, _ = PLANTED[3]
    honest = [("deterministic=True, batch_invariant=True", "deterministic=False, batch_invariant=False")]
    variant = load(tmp_path, *changes, *honest)
    assert [f for f in sanitized(SANITIZERS["order"], variant, 8, fixed={"activation": "float16"}) if f] == []
    assert unfit_reason(SANITIZERS["batch"], variant) == "it does not claim to be batch-invariant"


def test_a_search_on_the_callers_own_tensors_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = OPS["qk_norm_rope"].variants["head_tile"]
    assert findings("tuning", variant, 2) == []
    original = Kernel.on_clones

    def on_the_callers(self: Kernel, *args: object) -> Callable[[Config], Callable[[], None]]:
        careless = replace(self.variant, _contract=replace(self.variant.contract, writes=(), consumes=()))
        return original(replace(self, variant=careless), *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Kernel, "on_clones", on_the_callers)
    assert "its tensors were tuned on" in findings("tuning", variant, 2)[0].message


def test_a_search_that_ends_at_a_config_too_large_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class NotOutOfResources(Exception):
        pass

    monkeypatch.setattr("tkernels.tuning.OutOfResources", NotOutOfResources)
    assert "OutOfResources" in findings("tuning", load(tmp_path))[0].message


@pytest.mark.parametrize("tensor", ["out", "gate_up"])
def test_an_int32_offset_built_from_a_size_is_found_where_the_size_is_large(tensor: str, tmp_path: Path) -> None:
    stride = f"row * stride_{tensor}_t"
    wide = "row * width" if tensor == "out" else "row * width * 2"
    narrow = wide.replace("row", "tl.program_id(0)")
    axes = {"layout": "contiguous"}
    assert not any(sanitized(SANITIZERS["overflow"], load(tmp_path / "wide", (stride, wide)), 8, fixed=axes))
    variant = load(tmp_path / "narrow", (stride, narrow))
    found = [f for f in sanitized(SANITIZERS["overflow"], variant, 8, fixed=axes) if f is not None]
    assert any("int32 overflow" in finding.message and "at T = " in finding.message for finding in found)
    assert {r.status for r in drawn_results(variant, 8, fixed=axes)} == {"ok"}


@pytest.mark.parametrize(("factor", "found"), [(".to(tl.int64)", False), ("", True)])
def test_a_program_that_walks_a_huge_batch_in_a_helper_is_ended_there(factor: str, found: bool, tmp_path: Path) -> None:
    """The last rows first: an int32 offset overflows before the program has done enough."""
    helper = WALKED.format(factor=factor)
    variant = load(tmp_path, ("@triton.jit\n", helper + "@triton.jit\n"), *WALKING)
    messages = [
        finding.message
        for finding in sanitized(SANITIZERS["overflow"], variant, 4, fixed={"layout": "contiguous"})
        if finding is not None
    ]
    assert any("int32 overflow" in message and "at T = " in message for message in messages) == found
    assert found or not messages


def test_float_atomics_touch_no_memory_where_offsets_are_faked(tmp_path: Path) -> None:
    added = ("tl.store(out_ptr", "tl.atomic_add(out_ptr")
    assert not any(sanitized(SANITIZERS["overflow"], load(tmp_path, added), 6, fixed={"activation": "float32"}))


@pytest.mark.parametrize(
    ("op", "variant"), [(o.name, v.name) for o in OPS.values() for v in o.variants.values() if v.launch]
)
def test_no_offset_overflows_at_sizes_of_two_billion_elements(op: str, variant: str) -> None:
    subject = OPS[op].variants[variant]
    grown = {
        axis
        for case, config in drawn_cases(subject, 4, max_programs=64)
        if config is not None
        for axis in check_sizes(subject, case, config)
    }
    cannot = op in ("copy_pages", "step_inputs", "sort_by_expert", "grouped_matmul") or variant in (
        "gemv",
        "lookup_gemv",
        "split_k",
    )
    assert bool(grown & {"T", "M", "B"}) != cannot


def test_an_int32_offset_into_an_integer_tensor_is_found(tmp_path: Path) -> None:
    original = OPS["paged_prefill"].variants["packed_gqa"]
    source, offset = original.file.read_text(), "tables_ptr + sequence * stride_table_b"
    assert offset in source
    narrow = source.replace(offset, offset.replace("sequence", "sequence.to(tl.int32)"))
    (tmp_path / "paged_prefill").mkdir()
    (tmp_path / "paged_prefill" / "narrow.py").write_text(narrow.replace("packed_gqa", "narrow"))
    variant = OPS.with_variants_from(tmp_path)["paged_prefill"].variants["narrow"]
    assert any("int32 overflow" in finding.message for finding in findings("overflow", variant, 4))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: None, None),
        (lambda: torch.zeros(1).as_strided((1,), (1,), 2**40).sum(), "RuntimeError"),
        (lambda: __import__("os").kill(__import__("os").getpid(), 11), "died of SIGSEGV"),
        (lambda: __import__("time").sleep(30), "did not end within 1 s"),
    ],
)
def test_a_child_reports_how_it_ended(function: Callable[[], None], message: str | None) -> None:
    said = crash_of(function, seconds=1)
    assert said is None if message is None else message in str(said)
