"""The faults that change nothing, each with the reason. `tk check --mutate --verify-equivalent` compares the bits."""

from dataclasses import dataclass
from itertools import permutations

from tkernels.verification.mutation.faults import Mutant


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


_NO_ROWS = "a tile that begins where its sequence ends has no rows: every store is masked"
_SKIPPED = "what heads past the last are divided by is not stored"
_EMPTY = "what -inf is compared with decides nothing: exp2 of -inf less any finite origin is 0"
_NOT_STORED = "what is computed in rows behind an expert's last, and in columns behind the last, is not stored"
_COMBINED = "pointers('out[t] products[p] experts[t] combine[t]', out, run.workspace['products'], experts, combine)"
_WHOLE_ROWS = "products and results are both made here, without room between rows, and have as many columns"
_WHOLE_SHIFT = "a shift by all bits leaves the sign in each, as one by all but one does, where it is interpreted"
_REPEATED = "in steps of one, every program computes all tiles from its own on: too often, and each time the same"


def _steps_of_one(op: str, function: str) -> Equivalent:
    return Equivalent(op, function, "axis_swapped", "0", "1", _REPEATED, nth=1)


def _after_a_sum(op: str, function: str, nth: int = 0) -> Equivalent:
    why = "the sum or maximum before it orders all threads too, where its own barrier waits for global memory as well"
    return Equivalent(op, function, "order_weakened", "tl.debug_barrier()", "None", why, nth)


def _skipped_scale(op: str, function: str) -> Equivalent:
    return Equivalent(op, function, "constant_changed", "1.0", "float('nan')", _SKIPPED)


def _no_rows(function: str) -> Equivalent:
    inside, at_the_end = "first_row < queries * GROUP", "first_row <= queries * GROUP"
    return Equivalent("paged_prefill", function, "mask_shifted", inside, at_the_end, _NO_ROWS)


def _largest_in_any_dtype(function: str, load: str, op: str = "quantize_tokens") -> Equivalent:
    why = "the largest absolute value is exact in any dtype, and what it is compared with or multiplied by is fp32"
    return Equivalent(op, function, "cast_removed", f"{load}.to(tl.float32)", load, why)


def _swapped_terms(op: str, layout: str, tensors: str) -> Equivalent:
    before, swapped = f"pointers('{layout}', {tensors})", tensors.replace("x, residual", "residual, x")
    reason = "x and residual are added, and a sum has the same bits in either order"
    return Equivalent(op, "launch", "tensors_swapped", before, f"pointers('{layout}', {swapped})", reason)


_ROW = "quantize_tokens_row_per_program"

EQUIVALENT: tuple[Equivalent, ...] = (
    _steps_of_one("matmul", "matmul_persistent"),
    _steps_of_one("matmul", "matmul_tensor_descriptor"),
    _steps_of_one("matmul", "matmul_overlapped"),
    _steps_of_one("gate_up_swiglu", "gate_up_swiglu_paired_tiles"),
    _skipped_scale("kv_scatter", "kv_scatter_token_per_program_heads"),
    _skipped_scale("qk_norm_rope_scatter", "qk_norm_rope_scatter_head_tile_rotate"),
    _skipped_scale("qk_norm_rope_scatter", "qk_norm_rope_scatter_head_tile_copy"),
    Equivalent(
        "logprobs", "read_span", "mask_shifted", "logits > largest", "logits >= largest",
        "of two equal logits each weighs 1 beside the other",
    ),
    Equivalent(
        "logprobs", "log_of_sum", "mask_shifted", "rest < _SMALL", "rest <= _SMALL",
        "log(1 + 2**-26) is 2**-26 in fp32, whichever way it is found",
    ),
    Equivalent(
        "logprobs", "find_least", "mask_shifted", "reached > limit", "reached >= limit",
        "further guesses only raise the key, past none that are to be kept",
    ),
    Equivalent(
        "logprobs", "list_tokens", "mask_dropped", "inside & (keys >> 32 >= least >> 32)", "inside",
        "what else the chosen parts hold is not among the largest of the longer list either",
    ),
    _after_a_sum("logprobs", "store_row"),
    _after_a_sum("logprobs", "store_row", nth=1),
    _after_a_sum("logprobs", "logprobs_row_per_program"),
    _after_a_sum("sample", "sample_candidates"),
    _after_a_sum("sample", "sample_candidates", nth=1),
    Equivalent("merge_states", "merge_states_head_tile", "constant_changed", "0.0", "1.0", _EMPTY),
    Equivalent("paged_prefill", "paged_prefill_packed_gqa_attend", "constant_changed", "0.0", "1.0", _EMPTY),
    Equivalent(
        "paged_prefill", "paged_prefill_packed_gqa_store", "mask_dropped", "tl.load(sinks_ptr + heads, mask=mask_m)",
        "tl.load(sinks_ptr + heads)", "a row past the last is of one of the group's heads too, and is not stored",
    ),
    Equivalent("shared", "beside_sinks", "constant_changed", "0.0", "1.0", _EMPTY),
    Equivalent(
        "shared", "tanh_of", "mask_shifted", "x < 0.0", "x <= 0.0",
        "0 is of the other branch, as all that is near it",
    ),
    Equivalent(
        "sample", "find_reach", "cast_removed", "(-largest + top).to(tl.int64, bitcast=True)", "-largest + top",
        "which tokens are listed decides what is read, and no token",
    ),
    *(
        Equivalent(
            "cascade_decode", "cascade_decode_one_launch_attend", kind, before, after,
            "codes are converted in another layout, each to the same number",
        )
        for kind, before, after in (
            ("constant_changed", "64", "65"),
            ("mask_shifted", "BLOCK_M < 64", "BLOCK_M <= 64"),
        )
    ),
    Equivalent(
        "paged_decode", "fp16_queries", "constant_changed", "1.1754943508222875e-38", "2.350988701644575e-38",
        "a row of subnormal numbers is divided by a power of two more, and multiplied by it again",
    ),
    Equivalent(
        "paged_decode", "attend_keys", "constant_changed", "8", "9",
        "codes are converted in another layout, each to the same number",
    ),
    Equivalent(
        "paged_decode", "fp16_queries", "cast_removed", "q.to(tl.float32)", "q",
        "the largest absolute value is exact in any dtype, and the division widens",
    ),
    Equivalent(
        "paged_decode", "paged_decode_split_kv_part", "mask_shifted", "split < used", "split <= used",
        "the part of a split without keys is written where the reduction never looks",
    ),
    _largest_in_any_dtype(_ROW, "tl.load(x_ptr + row * stride_x_m + offs, mask=mask, other=0.0)"),
    _largest_in_any_dtype(
        "quantize_groups_group_tile", "tl.load(x_ptr + row * stride_x_m + offs, mask=mask[:, None])", "quantize_groups"
    ),
    Equivalent(
        "quantize_tokens", _ROW, "constant_changed", "0.0", "float('nan')",
        "a maximum passes over NaN, and codes of what is masked off are not stored",
    ),
    Equivalent(
        "dequant_gemm", "dequant_gemm_gemv_difference", "mask_shifted",
        "FIELD * WIDTH + BITS <= 23", "FIELD * WIDTH + BITS < 23",
        "a field that just fits is shifted down, and is the same number there",
    ),
    Equivalent(
        "paged_prefill", "order_of_query_tile", "factor_dropped", "config['BLOCK_M'] // config.num_warps",
        "config['BLOCK_M']", "a number of rows comes with one number of warps, so that both tell configs apart alike",
    ),
    _no_rows("paged_prefill_packed_gqa"),
    _no_rows("paged_prefill_tensor_descriptor"),
    _no_rows("paged_prefill_warp_specialized"),
    _swapped_terms(
        "add_rms_norm", "out[t] new_residual x[t] residual[t] weight", "out, new_residual, x, residual, weight"
    ),
    Equivalent(
        "dequant_gemm", "axes_of", "factor_dropped", "weight.places - inputs", "weight.places",
        "a call's axes are the contract's; `auto` asks these what takes the weight, which no padding decides",
    ),
    Equivalent(
        "route", "route_rows_per_program", "constant_changed", "0.0", "1.0",
        "of numbers that are all equal the choice is the same, whichever they are",
    ),
    *(
        Equivalent("logprobs", function, "constant_changed", "31", "32", _WHOLE_SHIFT)
        for function in ("make_keys", "logits_of")
    ),
    Equivalent(
        "sort_by_expert", "load_bins", "constant_changed", "1", "2", "below 0 every number says that nobody computes it"
    ),
    Equivalent(
        "sort_by_expert", "rank_bins", "off_by_one", "tl.arange(0, BLOCK)", "tl.arange(0, BLOCK) + 1",
        "which of two is before the other does not depend on where counting starts",
    ),
    Equivalent(
        "sort_by_expert", "store_tiles", "constant_changed", "0", "1",
        "what is computed for places behind the last tile is not stored", nth=2,
    ),
    Equivalent(
        "sort_by_expert", "MOST_PAIRS", "number_changed", "4096", "4097",
        "one pair more is as right: the limit is of time alone",
    ),
    Equivalent(
        "sort_by_expert", "experts_tile", "number_changed", "1", "2",
        "at most the tile is twice as wide, with zeros in the other half",
    ),
    *(
        Equivalent("grouped_matmul", function, kind, before, after, _NOT_STORED, nth)
        for function, kind, before, after, nth in (
            ("expert_code_sums", "mask_dropped", "mask_m[:, None] & mask_k[None, :]", "mask_k[None, :]", 0),
            ("expert_sums", "mask_dropped", "mask_m[:, None] & mask_k", "mask_k", 0),
            (
                "grouped_matmul_tensor_descriptor", "mask_dropped", "mask_m[:, None] & (offs_k < inputs)[None, :]",
                "(offs_k < inputs)[None, :]", 0,
            ),
            (
                "expert_block_sums", "mask_dropped",
                "tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None], other=0.0)",
                "tl.load(x_ptrs + offs_k[None, :])", 0,
            ),
            ("expert_block_sums", "constant_changed", "0.0", "float('nan')", 0),
            ("expert_block_sums", "constant_changed", "0", "2147483647", 0),
            ("row_times_blocks", "constant_changed", "0", "2147483647", 0),
            ("with_bias", "constant_changed", "0.0", "float('nan')", 0),
            ("row_and_bias", "constant_changed", "0.0", "float('nan')", 0),
            ("row_times_expert", "constant_changed", "0.0", "float('nan')", 2),
            ("grouped_matmul_dequant_gemv", "constant_changed", "0.0", "float('nan')", 0),
        )
    ),
    _steps_of_one("grouped_matmul", "grouped_matmul_persistent"),
    _steps_of_one("grouped_matmul", "grouped_matmul_tensor_descriptor"),
    Equivalent(
        "grouped_matmul", "grouped_matmul_combine", "constant_changed", "1", "2", "below 0 every number is nobody's"
    ),
    *(
        Equivalent("grouped_matmul", "grouped_matmul_combine", "stride_swapped", before, after, _WHOLE_ROWS)
        for before, after in permutations(("stride_products_p", "stride_out_t"))
    ),
    Equivalent(
        "grouped_matmul", "combine_products", "stride_changed", _COMBINED,
        "(lambda given: {**given, 'stride_out_t': given['stride_products_p'], "
        f"'stride_products_p': given['stride_out_t']}})({_COMBINED})",
        _WHOLE_ROWS,
    ),
    Equivalent(
        "grouped_matmul", "combine_products", "ceiling_lost", "triton.next_power_of_2(outputs)",
        "max(1, triton.next_power_of_2(outputs) // 2)", "a row is cut into as many blocks as it takes",
    ),
    Equivalent(
        "grouped_matmul", "DENSE_BITS", "number_changed", "0", "1", "any number that is no width tells them apart"
    ),
    Equivalent(
        "grouped_matmul", "row_arguments", "number_changed", "8", "9", "a word has 4, 8 or 16 codes",
    ),
    Equivalent(
        "grouped_matmul", "row_times_codes", "cast_removed", "x.to(tl.float32)", "x", "the product with fp32 widens it"
    ),
    Equivalent(
        "grouped_matmul", "blocks", "number_changed", "4096", "4097",
        "divided by a power of two from 16 on it is as much",
    ),
    Equivalent(
        "step_inputs", "launch", "number_changed", "1", "2",
        "a block holds more than one token, so that one and two take as many", nth=1,
    ),
    Equivalent("shared", "too_wide", "branch_negated", "instead", "not instead", "only a refusal's words differ"),
)  # fmt: skip
