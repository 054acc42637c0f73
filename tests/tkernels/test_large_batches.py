"""Launchers and kernels that decide by the size of a batch of up to 1,024 how a member is computed: found; others are
silent.
"""

import inspect

import pytest

from tests.tkernels.outside import write_copy
from tkernels import OPS
from tkernels.ops.paged_decode._attend import attend_keys
from tkernels.registry import Registry
from tkernels.verification.sanitizers.base import Finding, sanitized
from tkernels.verification.sanitizers.suite import SANITIZERS

PINNED = "run = type(run)(run.device, run.axes, run.config.pinned({pins}), run.workspace, run.door)"
EXTRA = (
    ("FACTOR=1,", "FACTOR=1, extra={extra},"),
    ("width, FACTOR: ", "width, extra{kind}, FACTOR: "),
    ("* up * FACTOR\n", "* up * (1 + extra * 1e-6)\n"),
)


def adding(extra: str, kind: str = "") -> tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]:
    """A swiglu whose results are off by `extra` millionths."""
    return "swiglu.doubled", (), tuple((old, new.format(extra=extra, kind=kind)) for old, new in EXTRA)


def summing(order: str) -> tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]:
    """A rms_norm that adds up its blocks from the last to the first where `order` says so, in its kernel.

    It may ask for `tokens`, which the launcher gives it as a plain number.
    """
    return (
        "rms_norm.two_pass",
        (),
        (
            ("stride_out_t, hidden, eps, B", "stride_out_t, hidden, eps, tokens, B"),
            ("        eps=eps,\n", "        eps=eps,\n        tokens=tokens,\n"),
            (
                "    for start in range(0, hidden, BLOCK_H):\n        offs = start + tl.arange(0, BLOCK_H)\n"
                "        x = tl.load(x_ptr + offs, mask=offs < hidden, other=0.0)",
                "    blocks = tl.cdiv(hidden, BLOCK_H)\n    for block in range(0, blocks):\n"
                f"        offs = tl.where({order}, blocks - 1 - block, block) * BLOCK_H + tl.arange(0, BLOCK_H)\n"
                "        x = tl.load(x_ptr + offs, mask=offs < hidden, other=0.0)",
            ),
        ),
    )


def attending(order: str) -> tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]:
    """A paged_decode that goes through its keys from the last to the first where `order` says so, in its kernel."""
    loop = "    for start in range(begin, end, BLOCK_N):\n"
    source = inspect.getsource(attend_keys.fn).replace("attend_keys", "attend_either_way")
    assert loop in source
    either = (
        "    blocks = tl.cdiv(end - begin, BLOCK_N)\n    for block in range(0, blocks):\n"
        f"        start = begin + tl.where({order}, blocks - 1 - block, block) * BLOCK_N\n"
    )
    kernel = "@triton.jit\ndef paged_decode_one_pass("
    return (
        "paged_decode.one_pass",
        (),
        (
            ("acc, m, l = attend_keys(", "acc, m, l = attend_either_way("),
            ("    attend_keys,\n", "    fp16_codes,\n    fp16_queries,\n"),
            ("from tkernels import Config", "from tkernels.language import dot\nfrom tkernels import Config"),
            (kernel, f"{source.replace(loop, either)}\n\n{kernel}"),
        ),
    )


Planted = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]
PLANTED: dict[str, Planted] = {
    # As many splits as fill a device that has enough sequences from 24 on.
    "splits_from_24": (
        "paged_decode.split_kv",
        ("if q.shape[0] >= 24:", "    " + PINNED.format(pins='{"MIN_BLOCKS": 64}')),
        (),
    ),
    "block_from_65": ("rms_norm.two_pass", ("if x.shape[0] > 64:", "    " + PINNED.format(pins='{"BLOCK_H": 16}')), ()),
    "warps_from_100": (
        "rms_norm.row_per_program",
        ("if x.shape[0] >= 100:", "    " + PINNED.format(pins='{"num_warps": 16}')),
        (),
    ),
    # No sum, and yet a tile of two rows gives its second one other bits.
    "tile_of_the_batch": (
        "swiglu.fused",
        (PINNED.format(pins='{"BLOCK_T": min(4, triton.next_power_of_2(gate_up.shape[0]))}'),),
        (
            (
                "    out = swiglu_of(gate, up, limit, CLAMPED)",
                "    out = (swiglu_of(gate, up, limit, CLAMPED) * (1 + 1e-6 * (BLOCK_T > 2)))",
            ),
        ),
    ),
    "scalar_from_512": adding("1 if tokens >= 512 else 0"),
    "constexpr_from_40": adding("int(tokens > 39)", ": tl.constexpr"),
    "between_90_and_110": adding("int(90 < tokens < 110)"),
    "where_rows_are_wide": adding("int(tokens > 20 and width > 1000)"),
    "sums_backwards_from_65": summing("tokens > 64"),
    "sums_backwards_between_100_and_200": summing("(tokens > 100) & (tokens < 200)"),
    "sums_backwards_from_1000": summing("tokens >= 1000"),
    "attends_backwards_from_65": attending("tl.num_programs(0) > 64"),
    "attends_backwards_from_512": attending("tl.num_programs(0) > 511"),
    "fills_the_device": adding("max(1, 96 // tokens)"),
    "split_of_inputs": (
        "scaled_matmul.split_k",
        (),
        (("    splits = triton.cdiv(", "    inputs_of_split *= 1 + (tokens >= 30)\n    splits = triton.cdiv("),),
    ),
}

SILENT: dict[str, Planted] = {
    # Its elements have nothing to do with each other: the same bits in a tile of any size, by any number of warps.
    "tile_of_an_elementwise_kernel": (
        "swiglu.fused",
        (PINNED.format(pins='{"BLOCK_T": min(16, triton.next_power_of_2(gate_up.shape[0]))}'),),
        (),
    ),
    "warps_of_an_elementwise_kernel": (
        "swiglu.fused",
        ("if gate_up.shape[0] >= 100:", "    " + PINNED.format(pins='{"num_warps": 8}')),
        (),
    ),
    "persistent": ("swiglu.grid_stride", (), ()),
    "constexpr_of_the_batch": adding("triton.next_power_of_2(tokens) * 0", ": tl.constexpr"),
    "another_constexpr": adding("(tokens > 16) * 0", ": tl.constexpr"),
    "unused_scalar": adding("(tokens > 16) * 0"),
    "more_launches": (
        "swiglu.doubled",
        (
            "if out.shape[0] > 20:",
            "    launch(run, out[:20], gate_up[:20])",
            "    out, gate_up = out[20:], gate_up[20:]",
        ),
        (),
    ),
    "tiles": ("rms_norm.rows_per_program", (), ()),
    "sums_backwards": summing("tokens > 0"),
    "attends_backwards": attending("tl.num_programs(0) > 0"),
    "last_row_first": (
        "rms_norm.two_pass",
        (),
        (("    row = tl.program_id(0)", "    row = (tl.num_programs(0) - 1 - tl.program_id(0))"),),
    ),
    "in_middle_first": (
        "rms_norm.two_pass",
        (),
        (
            (
                "    row = tl.program_id(0)",
                "    row = ((tl.program_id(0) + tl.num_programs(0) // 2) % tl.num_programs(0))",
            ),
        ),
    ),
}


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    folder = tmp_path_factory.mktemp("planted")
    for name, (original, first, changes) in {**PLANTED, **SILENT}.items():
        write_copy(folder, original, name, *changes, first=first)
    return OPS.with_variants_from(folder)


def findings(ops: Registry, planted: Planted, name: str, examples: int) -> list[Finding]:
    variant = ops[planted[0].split(".")[0]].variants[name]
    return [found for found in sanitized(SANITIZERS["batch"], variant, examples) if found is not None]


@pytest.mark.parametrize("name", PLANTED)
def test_what_a_large_batch_changes_is_found(name: str, ops: Registry) -> None:
    assert findings(ops, PLANTED[name], name, 1)


@pytest.mark.parametrize("name", SILENT)
def test_what_grows_with_the_batch_and_decides_nothing_is_not_reported(name: str, ops: Registry) -> None:
    assert [str(one) for one in findings(ops, SILENT[name], name, 2)] == []
