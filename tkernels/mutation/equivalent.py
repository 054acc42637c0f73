"""The faults that change nothing, each with the reason. `tk check --mutate --verify-equivalent` compares the bits."""

from dataclasses import dataclass

from tkernels.mutation.faults import Mutant


@dataclass(frozen=True)
class Equivalent:
    """A mutant that computes the same as its original: the `nth` `before` -> `after` of a function, and why."""

    op: str
    function: str
    kind: str
    before: str
    after: str
    reason: str
    nth: int = 0

    def is_of(self, op: str, mutant: Mutant) -> bool:
        """Whether this entry means that mutant of that op."""
        mine = (self.op, self.function, self.kind, self.before, self.after, self.nth)
        return mine == (op, mutant.function, mutant.kind, mutant.before, mutant.after, mutant.nth)


_ONE = "[1, 1] of one element either way"
_SKIPPED = "what heads past the last are divided by is not stored"
_NO_ROWS = "a tile that begins where its sequence ends has no rows: every store is masked"
_OUTPUTS = "the entry allocates both outputs, contiguous and of one shape"

EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        "add_rms_norm", "add_rms_norm_row_per_program", "stride_swapped",
        "stride_new_residual_t", "stride_out_t", _OUTPUTS,
    ),
    Equivalent(
        "add_rms_norm", "add_rms_norm_row_per_program", "stride_swapped",
        "stride_out_t", "stride_new_residual_t", _OUTPUTS,
    ),
    Equivalent(
        "qk_norm_rope", "qk_norm_rope_head_tile_rotate", "axis_swapped",
        "tl.arange(0, 1)[:, None]", "tl.arange(0, 1)[None, :]", _ONE,
    ),
    Equivalent(
        "kv_scatter", "kv_scatter_token_per_program_heads", "constant_changed",
        "1.0", "float('nan')", _SKIPPED,
    ),
    Equivalent(
        "qk_norm_rope_scatter", "qk_norm_rope_scatter_head_tile_rotate", "axis_swapped",
        "tl.arange(0, 1)[:, None]", "tl.arange(0, 1)[None, :]", _ONE,
    ),
    Equivalent(
        "qk_norm_rope_scatter", "qk_norm_rope_scatter_head_tile_rotate", "constant_changed",
        "1.0", "float('nan')", _SKIPPED,
    ),
    Equivalent(
        "qk_norm_rope_scatter", "qk_norm_rope_scatter_head_tile_copy", "constant_changed",
        "1.0", "float('nan')", _SKIPPED,
    ),
    Equivalent(
        "paged_prefill", "paged_prefill_packed_gqa_key_range", "off_by_one", "own_first + 1", "own_first",
        "a block more is read, of which no row sees a key: test_paged_prefill counts the blocks",
    ),
    Equivalent(
        "paged_prefill", "paged_prefill_packed_gqa_attend", "constant_changed", "0.0", "1.0",
        "the origin of rows that have seen nothing: from any finite one, -inf is as far",
    ),
    Equivalent(
        "paged_prefill", "paged_prefill_packed_gqa", "mask_shifted",
        "first_row < queries * GROUP", "first_row <= queries * GROUP", _NO_ROWS,
    ),
    Equivalent(
        "paged_prefill", "paged_prefill_tensor_descriptor", "mask_shifted",
        "first_row < queries * GROUP", "first_row <= queries * GROUP", _NO_ROWS,
    ),
    Equivalent(
        "matmul", "matmul_persistent", "axis_swapped", "0", "1",
        "in steps of one, every program computes all tiles from its own on: too many times, and each time the same",
        nth=1,
    ),
)  # fmt: skip
