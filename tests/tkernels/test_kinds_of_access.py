"""Faults in what kernels and launchers touch, planted in variants whose results are right; and unusual ones without."""

from typing import NamedTuple

import pytest

from tests.tkernels.outside import write_copy
from tkernels import OPS
from tkernels.registry import Registry
from tkernels.verification.check import CheckResult, check_case
from tkernels.verification.draws import drawn_cases

STORED = "    tl.store(out_ptr + row * stride_out_t + offs, out.to(out_ptr.dtype.element_ty), mask=mask)\n"
ROW_STORED = "    tl.store(out_ptr + row * stride_out_t + offs, out, mask=mask)\n"
X_TILE = "            x = x_boxes.load([tile_m * BLOCK_M, start])  # [BLOCK_M, BLOCK_K]\n"
ROTATED = "    run.launch(qk_norm_rope_head_tile, grid, **arguments)\n"


class Planted(NamedTuple):
    """A variant to copy, what its launcher does first, what is changed in it, and what the finding says."""

    original: str
    first: tuple[str, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    message: str = ""


def touching(op: str, variant: str, body: str) -> tuple[str, str]:
    """A second kernel of one program, `<op>_<variant>_touch`, with one pointer."""
    lines = "".join(f"    {line}\n" for line in body.split("; "))
    return "def launch(", f"@triton.jit\ndef {op}_{variant}_touch(ptr):\n{lines}\n\ndef launch("


# What kernels store to and update that the op only reads; all is as it was in the end.
STORES = {
    # Scratch in the input, restored by the program that used it.
    "scratch_in_input": Planted(
        "swiglu.doubled",
        changes=(
            (
                STORED,
                "    where = gate_up_ptr + row * stride_gate_up_t + offs\n"
                "    kept = tl.load(where, mask=mask)\n"
                "    tl.store(where, (out * 0 + 1).to(gate_up_ptr.dtype.element_ty), mask=mask)\n"
                + STORED
                + "    tl.store(where, kept, mask=mask)\n",
            ),
        ),
        message="store to 'gate_up', which swiglu only reads",
    ),
    "same_bits_again": Planted(
        "rms_norm.row_per_program",
        changes=(
            (
                ROW_STORED,
                ROW_STORED + "    tl.store(weight_ptr + offs, tl.load(weight_ptr + offs, mask=mask), mask=mask)\n",
            ),
        ),
        message="store to 'weight', which rms_norm only reads",
    ),
    "atomic_read": Planted(
        "paged_decode.one_pass",
        changes=(("length = tl.load(lens_ptr + sequence)", "length = tl.atomic_add(lens_ptr + sequence, 0)"),),
        message="atomic on 'context_lens', which paged_decode only reads",
    ),
    "another_launch": Planted(
        "qk_norm_rope.head_tile",
        changes=(
            touching("qk_norm_rope", "head_tile", "kept = tl.load(ptr); tl.store(ptr, kept + 1); tl.store(ptr, kept)"),
            (ROTATED, ROTATED + "    run.launch(qk_norm_rope_head_tile_touch, (1,), ptr=cos)\n"),
        ),
        message="store to 'cos', which qk_norm_rope only reads",
    ),
    "box_stored_again": Planted(
        "matmul.tensor_descriptor",
        changes=((X_TILE, X_TILE + "            x_boxes.store([tile_m * BLOCK_M, start], x)\n"),),
        message="store to 'x', which matmul only reads",
    ),
    "by_a_view_of_bytes": Planted(
        "swiglu.doubled",
        ("run.launch(swiglu_doubled_touch, (1,), ptr=gate_up[:1].view(torch.uint8))",),
        (touching("swiglu", "doubled", "tl.store(ptr + 1, tl.load(ptr + 1))"),),
        "store to 'gate_up', which swiglu only reads",
    ),
}

COUNTER = ("def launch(", "COUNTER = torch.zeros(4, dtype=torch.int32)\nKEPT = {}\n\n\ndef launch(")
OLDER = "which was there before the call and is neither an argument of swiglu nor workspace"

# What outlives the call and is nobody's: the next call, and one beside it, begin with what is left there.
STORES |= {
    "counter_of_the_module": Planted(
        "swiglu.doubled",
        ("run.launch(swiglu_doubled_touch, (1,), ptr=COUNTER)",),
        (touching("swiglu", "doubled", "tl.atomic_add(ptr, 1)"), COUNTER),
        f"atomic on 'ptr', {OLDER}",
    ),
    "a_view_of_the_modules": Planted(
        "swiglu.doubled",
        ("run.launch(swiglu_doubled_touch, (1,), ptr=COUNTER.view(2, 2)[1:].view(torch.uint8))",),
        (touching("swiglu", "doubled", "tl.store(ptr + 1, tl.load(ptr + 1))"), COUNTER),
        f"store to 'ptr', {OLDER}",
    ),
    "kept_from_the_first_call": Planted(
        "swiglu.doubled",
        (
            "kept = KEPT.setdefault('count', torch.zeros(1, dtype=torch.int32, device=out.device))",
            "run.launch(swiglu_doubled_touch, (1,), ptr=kept)",
        ),
        (touching("swiglu", "doubled", "tl.atomic_add(ptr, 1)"), COUNTER),
        f"atomic on 'ptr', {OLDER}",
    ),
}

# What launchers write on the host, and put back.
HOST_WRITES = {
    "counted_on_the_host": Planted(
        "swiglu.doubled",
        ("COUNTER[:1].add_(1)",),
        (COUNTER,),
        "add_ writes a tensor that was there before the call and is neither an argument of swiglu nor workspace",
    ),
    "copied_into_the_modules": Planted(
        "rms_norm.row_per_program",
        ("COUNTER.copy_(torch.ones(4))",),
        (COUNTER,),
        "copy_ writes a tensor that was there before the call",
    ),
    "scaled_and_back": Planted(
        "rms_norm.row_per_program",
        ("weight.mul_(2)", "weight.div_(2)"),
        message="mul_ writes 'weight', which rms_norm only reads",
    ),
    "cleared_and_copied_back": Planted(
        "swiglu.doubled",
        ("kept = gate_up.clone()", "gate_up.zero_()", "gate_up.copy_(kept)"),
        message="zero_ writes 'gate_up', which swiglu only reads",
    ),
    "out_of_an_addition": Planted(
        "gelu.tile_per_program", ("torch.add(x, 0, out=x)",), message="writes 'x', which gelu only reads"
    ),
    "slice_assigned": Planted(
        "paged_prefill.packed_gqa",
        ("block_tables[:, :1] = block_tables[:, :1].clone()",),
        message="writes 'block_tables', which paged_prefill only reads",
    ),
    "many_at_once": Planted(
        "merge_states.head_tile",
        ("torch._foreach_neg_([lse_b, lse_a])",) * 2,
        message="writes 'lse_b', which merge_states only reads",
    ),
    # Keys and values lie in the rows of one storage with queries.
    "values_in_a_fused_row": Planted(
        "kv_scatter.token_per_program", ("v.data.add_(0)",), message="writes 'v', which kv_scatter only reads"
    ),
    "transposed_in_place": Planted("rms_norm.row_per_program", ("x.t_()", "x.t_()"), message="t_ writes 'x'"),
}

# What launchers do to what the op writes, so that nothing is as it was before; done twice it changes nothing more.
HOST_CLEARS = {
    "cache_cleared": Planted("kv_scatter.token_per_program", ("k_cache.zero_()",)),
    "last_page_cleared": Planted("copy_pages.page_parts", ("caches[0][-1:].zero_()",)),
    "heads_cut_off": Planted("qk_norm_rope.head_tile", ("q.clamp_(-0.5, 0.5)",)),
}

HOST_READS = {
    "largest_length": Planted("paged_decode.split_kv", ("longest = context_lens.max().item()",)),
    "starts_as_a_list": Planted("paged_prefill.packed_gqa", ("starts = cu_seqlens_q.tolist()",)),
    "any_slot": Planted("kv_scatter.token_per_program", ("if (slots >= 0).any():", "    pass")),
    "rows_by_a_mask": Planted("kv_scatter.token_per_program", ("kept = k[slots >= 0]",)),
    "to_the_host": Planted("kv_scatter.token_per_program", ('slots.to("cpu")',)),
    "cpu": Planted("rms_norm.row_per_program", ("first = x.cpu()",)),
    "numpy": Planted("gelu.tile_per_program", ("x.float().numpy()",)),
    "as_array": Planted("swiglu.doubled", ("import numpy", "numpy.asarray(gate_up.float())")),
    "by_a_dlpack_of_numpy": Planted(
        "paged_decode.one_pass", ("import numpy", "longest = numpy.from_dlpack(context_lens).max(initial=0)")
    ),
    "dlpack_caught": Planted(
        "swiglu.doubled",
        ("import numpy", "try:", "    numpy.from_dlpack(gate_up.float())", "except BufferError:", "    pass"),
    ),
    "printed": Planted("swiglu.doubled", ('f"{gate_up}"',)),
    "formatted": Planted("rms_norm.row_per_program", ('f"{weight.sum():.3f}"',)),
    "nonzero": Planted("merge_states.head_tile", ("torch.nonzero(lse_a)",)),
    "as_a_slice": Planted("kv_scatter.token_per_program", ("k[: slots[:1].sum()]",)),
    "copied_to_the_host": Planted(
        "rms_norm.row_per_program", ("torch.empty_like(weight, device='cpu').copy_(weight, non_blocking=True)",)
    ),
    "caught": Planted("swiglu.doubled", ("try:", "    float(gate_up.sum())", "except Exception:", "    pass")),
    "asserted": Planted("merge_states.head_tile", ("assert (lse_a < 1e30).all()",)),
    "compared": Planted("rms_norm.row_per_program", ("torch.equal(weight, torch.ones_like(weight))",)),
    "what_it_made_itself": Planted("rms_norm.row_per_program", ("torch.zeros(1, device=x.device).item()",)),
    "by_its_storage": Planted("gelu.tile_per_program", ("x.untyped_storage().tolist()",)),
}

# Right, and unusual.
SILENT = {
    "numbers_of_the_host": Planted(
        "swiglu.doubled", ("torch.tensor([2, 3]).prod().item()", "torch.arange(3).tolist()", "print(end='')")
    ),
    "alignment": Planted(
        "rms_norm.row_per_program", ("x.data_ptr() % 16", "x.to(out.device).is_contiguous()", "f'{x.shape} {x.device}'")
    ),
    "output_cleared_first": Planted("swiglu.doubled", ("out.zero_()", "out.unsqueeze(0).fill_(1)")),
    "scratch_of_its_own": Planted(
        "rms_norm.row_per_program", ("x = x.clone()", "x.add_(0)", "torch.empty_like(weight).copy_(weight)")
    ),
    "in_place_in_the_output": Planted(
        "gelu.tile_per_program",
        ("out.copy_(x)",),
        (('pointers("out[t] x[t]", out, x)', 'pointers("out[t] x[t]", out, out)'),),
    ),
    "table_by_shape": Planted(
        "swiglu.doubled",
        (
            "if gate_up.shape not in TABLES:",
            "    TABLES[gate_up.shape] = torch.arange(4, device=gate_up.device)",
            "TABLES[gate_up.shape] + TABLES[gate_up.shape]",
        ),
        (("def launch(", "TABLES = {}\n\n\ndef launch("),),
    ),
    "stored_as_words": Planted(
        "rms_norm.row_per_program",
        changes=(
            (
                ROW_STORED,
                ROW_STORED + "    words = words_ptr + row * stride_out_t + offs\n"
                "    tl.store(words, tl.load(words, mask=mask), mask=mask)\n",
            ),
            ("(out_ptr, x_ptr,", "(out_ptr, words_ptr, x_ptr,"),
            (
                'pointers("out[t] x[t] weight", out, x, weight)',
                '{**pointers("out[t] x[t] weight", out, x, weight), '
                '"words_ptr": out.view({2: torch.int16, 4: torch.int32}[out.element_size()])}',
            ),
        ),
    ),
    "caches_written_by_the_host": Planted(
        "kv_scatter.token_per_program", ("k_cache[:0].zero_()", "v_cache[:, :0].fill_(1)", "k[:1].unsqueeze_(0)")
    ),
    "by_a_dlpack": Planted(
        "swiglu.doubled", ("try:", "    torch.from_dlpack(gate_up)", "except ValueError:", "    pass")
    ),
    "products_of_torch": Planted("dequant_gemm.dequantize_then_matmul"),
    "descriptors": Planted("matmul.tensor_descriptor"),
    "counter_of_its_call": Planted(
        "swiglu.doubled",
        (
            "count = torch.zeros(4, dtype=torch.int32, device=out.device)",
            "count.add_(1)",
            "run.launch(swiglu_doubled_touch, (1,), ptr=count.view(2, 2)[1])",
            "run.launch(swiglu_doubled_touch, (1,), ptr=torch.stack([count, count]).t().contiguous())",
            "run.launch(swiglu_doubled_touch, (1,), ptr=torch.arange(4, device=out.device).expand(2, 4)[1:])",
        ),
        (touching("swiglu", "doubled", "tl.atomic_add(ptr, 1)"),),
    ),
    "table_of_the_module_that_is_read": Planted(
        "swiglu.doubled",
        (
            "run.launch(swiglu_doubled_touch, (1,), ptr=COUNTER, to=torch.empty_like(COUNTER))",
            "twice = torch.add(COUNTER, COUNTER)",
        ),
        (
            touching("swiglu", "doubled", "tl.store(to, tl.load(ptr))"),
            ("swiglu_doubled_touch(ptr)", "swiglu_doubled_touch(ptr, to)"),
            COUNTER,
        ),
    ),
}


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    folder = tmp_path_factory.mktemp("planted")
    for name, planted in {**STORES, **HOST_WRITES, **HOST_CLEARS, **HOST_READS, **SILENT}.items():
        write_copy(folder, planted.original, name, *planted.changes, first=planted.first)
    return OPS.with_variants_from(folder)


def bad_results(ops: Registry, original: str, name: str, examples: int) -> list[CheckResult]:
    variant = ops[original.split(".")[0]].variants[name]
    results = [check_case(variant, *drawn, offsets=examples > 1) for drawn in drawn_cases(variant, examples)]
    return [result for result in results if result.status != "ok"]


@pytest.mark.parametrize("name", STORES)
def test_a_store_to_what_is_only_read_is_an_error_when_it_happens(name: str, ops: Registry) -> None:
    found = bad_results(ops, STORES[name].original, name, 3)
    assert found
    assert STORES[name].message in found[0].reason
    assert f"{name}.py:" in found[0].reason


@pytest.mark.parametrize("name", [*HOST_WRITES, *HOST_READS])
def test_a_launcher_that_reads_or_writes_on_the_host_is_refused(name: str, ops: Registry) -> None:
    planted = {**HOST_WRITES, **HOST_READS}[name]
    found = bad_results(ops, planted.original, name, 1)
    assert found
    assert (planted.message or "reads a tensor's values on the host") in found[0].reason
    assert f"{name}.py:" in found[0].reason


@pytest.mark.parametrize("name", HOST_CLEARS)
def test_what_a_launcher_does_while_programs_are_counted_leaves_the_case_as_it_was(name: str, ops: Registry) -> None:
    found = bad_results(ops, HOST_CLEARS[name].original, name, 2)
    assert found
    assert {result.status for result in found} == {"wrong"}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_unusual_and_right_is_not_reported(name: str, ops: Registry) -> None:
    assert [str(one) for one in bad_results(ops, SILENT[name].original, name, 2)] == []
