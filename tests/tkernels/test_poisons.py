"""Faults that one poison alone shows, in memory that nobody may read: found, with the buffer and the line."""

import pytest

from tests.tkernels.outside import write_copy
from tkernels import OPS
from tkernels.registry import Registry
from tkernels.verification.sanitizers.base import Finding, sanitized
from tkernels.verification.sanitizers.suite import SANITIZERS

OUT = "    out = gate / (1 + tl.exp(-gate)) * up * FACTOR\n"
LEFT = "    left = tl.load(out_ptr + row * stride_out_t + offs, mask=mask, other=0.0).to(tl.float32)\n"
SCRATCH = (
    ("from tkernels import Config", "from tkernels import Buffer, Config"),
    ("out_ptr, gate_up_ptr,", "out_ptr, flag_ptr, part_ptr, gate_up_ptr,"),
    ("out_ptr=out,", 'out_ptr=out, flag_ptr=run.workspace["flag"], part_ptr=run.workspace["part"],'),
    (
        "deterministic=True,",
        'workspace=lambda axes, config, device: {"part": Buffer((axes["T"],), torch.float32), '
        '"flag": Buffer((axes["T"],), torch.int32)}, deterministic=True,',
    ),
)


def reading(what: str, lines: str) -> tuple[str, tuple[tuple[str, str], ...], str]:
    """A swiglu that reads what nobody may, changes `out` by it, and where a finding says that it was read."""
    return "swiglu.doubled", (*SCRATCH, (OUT, OUT + lines)), what


FLAG = "    flag = tl.load(flag_ptr + row)\n"
PLANTED = {
    # As of who waits for a count that is below nought until it is set.
    "negative_flag": reading("workspace 'flag'", FLAG + "    out = tl.where(flag < 0, 0.0, out)\n"),
    # As of generations, which are small numbers.
    "small_flag": reading("workspace 'flag'", FLAG + "    out = tl.where((flag > 0) & (flag < 100), 0.0, out)\n"),
    "negative_output": reading("output 'out'", LEFT + "    out = tl.where(left < -1.0, 0.0, out)\n"),
    "small_output": reading("output 'out'", LEFT + "    out = tl.where(tl.abs(left) < 100.0, 0.0, out)\n"),
    "part_never_stored": reading("workspace 'part'", "    out += tl.minimum(tl.load(part_ptr + row), 0.0)\n"),
    # Attention of no keys, which may be anything.
    "part_without_keys": (
        "merge_states.head_tile",
        (
            (
                "    out_rows = ",
                "    beside = tl.load(b_rows + offs_dv, mask=mask_h[:, None] & mask_dv, other=0.0).to(tl.float32)\n"
                "    merged += tl.where((weight_b == 0)[:, None] & (beside < -1.0), 1.0, 0.0)\n    out_rows = ",
            ),
        ),
        "argument 'out_b'",
    ),
}

# Right: what was never stored is loaded, and does not matter.
SILENT = {
    "masked_later": reading("", FLAG + LEFT + "    out = tl.where((flag == flag) | (left == left), out, out)\n"),
    "stored_before": reading(
        "", "    tl.store(flag_ptr + row, -1)\n" + FLAG + "    out = tl.where(flag < 0, out, 0.0)\n"
    ),
    "scratch_in_the_output": reading(
        "",
        "    tl.store(out_ptr + row * stride_out_t + offs, out.to(out_ptr.dtype.element_ty), mask=mask)\n"
        + LEFT
        + "    out = tl.where(left == left, out, out)\n",
    ),
}


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    folder = tmp_path_factory.mktemp("planted")
    for name, (original, changes, _) in {**PLANTED, **SILENT}.items():
        write_copy(folder, original, name, *changes)
    return OPS.with_variants_from(folder)


def findings(ops: Registry, original: str, name: str, examples: int) -> list[Finding]:
    variant = ops[original.split(".")[0]].variants[name]
    return [found for found in sanitized(SANITIZERS["poison"], variant, examples) if found is not None]


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_read_is_found_and_named(name: str, ops: Registry) -> None:
    original, _, what = PLANTED[name]
    found = findings(ops, original, name, 6)
    assert found
    assert f"it lies in {what}" in found[0].message
    assert f"{name}.py:" in found[0].message


@pytest.mark.parametrize("name", SILENT)
def test_what_is_loaded_and_does_not_matter_is_not_reported(name: str, ops: Registry) -> None:
    assert findings(ops, SILENT[name][0], name, 4) == []
