"""Slots, positions and tables that no draw reaches: what narrows or cuts them off is found, and nothing else is."""

from pathlib import Path

import pytest

from tests.tkernels.outside import write_copy
from tkernels import OPS
from tkernels.variant import Variant
from tkernels.verification.check import check_case
from tkernels.verification.draws import wide_cases
from tkernels.verification.sanitizers.base import Finding, sanitized
from tkernels.verification.sanitizers.suite import SANITIZERS

SLOT = "slot = tl.load(slots_ptr + token)"
POSITION = "position = tl.load(positions_ptr + token)"


def planted(folder: Path, original: str, *changes: tuple[str, str], first: tuple[str, ...] = ()) -> Variant:
    write_copy(folder, original, "planted", *changes, first=first)
    return OPS.with_variants_from(folder)[original.split(".")[0]].variants["planted"]


def overflows(variant: Variant) -> list[Finding]:
    return [found for found in sanitized(SANITIZERS["overflow"], variant, 6) if found is not None]


@pytest.mark.parametrize("op", ["kv_scatter.token_per_program", "qk_norm_rope_scatter.head_tile"])
def test_a_slot_that_is_narrowed_and_widened_again_is_found(op: str, tmp_path: Path) -> None:
    found = overflows(planted(tmp_path, op, (SLOT, f"{SLOT}.to(tl.int32).to(tl.int64)")))
    assert any("'k_cache' is not written where 'slots' says, beyond 2**32" in one.message for one in found)


def test_a_slot_that_is_cut_off_by_its_bits_is_found(tmp_path: Path) -> None:
    found = overflows(
        planted(tmp_path, "kv_scatter.token_per_program", (SLOT, f"{SLOT}\n    slot = (slot << 32) >> 32"))
    )
    assert any("is not written where 'slots' says" in one.message for one in found)


def test_a_launcher_that_narrows_slots_is_found(tmp_path: Path) -> None:
    assert overflows(planted(tmp_path, "kv_scatter.token_per_program", first=("slots = slots.int()",)))


def test_a_narrowed_position_whose_offset_overflows_is_found(tmp_path: Path) -> None:
    found = overflows(planted(tmp_path, "qk_norm_rope.head_tile", (POSITION, f"{POSITION}.to(tl.int32)")))
    assert any("int32 overflow" in one.message for one in found)


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("kv_scatter.token_per_program", (SLOT, f"{SLOT}\n    slot = slot + slot - slot")),
        # Positions are below 2**31, so that all of one is in 32 bits.
        ("qk_norm_rope.head_tile", (POSITION, f"{POSITION}.to(tl.int32).to(tl.int64)")),
    ],
)
def test_indices_that_keep_all_their_digits_are_not_reported(op: str, change: tuple[str, str], tmp_path: Path) -> None:
    assert [str(one) for one in overflows(planted(tmp_path, op, change))] == []


@pytest.mark.parametrize(
    ("op", "before", "after"),
    [
        (
            "paged_decode.one_pass",
            "    length = tl.load(lens_ptr + sequence)\n",
            "    length = tl.minimum(tl.load(lens_ptr + sequence), {most} * PAGE_SIZE)\n",
        ),
        (
            "paged_prefill.tensor_descriptor",
            "tl.load(table_ptr + start // PAGE_SIZE)",
            "tl.load(table_ptr + tl.minimum(start // PAGE_SIZE, {most} - 1))",
        ),
    ],
)
def test_a_kernel_that_reads_no_more_than_2048_entries_of_a_table_is_found(
    op: str, before: str, after: str, tmp_path: Path
) -> None:
    # A page before the window is one that nobody may read: that fails.
    for name, most, expected in (("cut", 2048, {"wrong", "failed"}), ("whole", 8192, {"ok"})):
        variant = planted(tmp_path / name, op, (before, after.format(most=most)))
        wide = [one for one in wide_cases(variant) if one[0].axes["N"] > 2048]
        assert wide
        assert {check_case(variant, *one, offsets=False).status for one in wide} <= expected
