"""`deterministic` and `batch_invariant` are attacked for every variant that claims them, from the registry alone.

Here with one draw each; `tk check --sanitize order,batch` takes more, of every config.
"""

from itertools import islice
from pathlib import Path

import pytest
import torch

import tkernels
from tests.conftest import DEVICE
from tests.tkernels.outside import write_variant
from tkernels.batching import lay_out_like
from tkernels.contract import unpack
from tkernels.inputs import clone_inputs, widen_floats
from tkernels.verification.calls import first_difference, wanted_outputs
from tkernels.verification.draws import drawn_cases
from tkernels.verification.sanitizers.base import sanitized, unfit_reason
from tkernels.verification.sanitizers.batch import draw_surroundings
from tkernels.verification.sanitizers.suite import SANITIZERS

VARIANTS = [(op.name, variant.name) for op in tkernels.OPS.values() for variant in op.variants.values()]
CLAIMS = {"order": "deterministic", "batch": "batch_invariant"}
ATTACKED = [
    (sanitizer, op, variant)
    for sanitizer, claim in CLAIMS.items()
    for op, variant in VARIANTS
    if getattr(tkernels.OPS[op].variants[variant], claim)
]


@pytest.mark.parametrize(("sanitizer", "op", "variant"), ATTACKED)
def test_a_claim_survives_its_attack(sanitizer: str, op: str, variant: str) -> None:
    subject = tkernels.OPS[op].variants[variant]
    assert unfit_reason(SANITIZERS[sanitizer], subject) is None
    (found,) = islice(sanitized(SANITIZERS[sanitizer], subject, examples=1, seed=100, device=DEVICE), 1)
    assert found is None, str(found)


@pytest.mark.parametrize("op", tkernels.OPS)
def test_every_op_has_a_triton_variant_that_claims_both(op: str) -> None:
    variants = [v for v in tkernels.OPS[op].variants.values() if v.kind == "triton"]
    assert any(v.deterministic and v.batch_invariant for v in variants)


@pytest.mark.parametrize("op", tkernels.OPS)
def test_members_are_independent_by_definition(op: str) -> None:
    """The reference itself, in float64: a batching that mixed members up would blame the kernels."""
    contract = tkernels.OPS[op].contract
    batching = contract.batching
    assert batching is not None

    def results(inputs: dict) -> tuple[dict, dict]:
        mine = clone_inputs(inputs)
        returned = unpack(contract.reference(**mine))
        return mine, dict(zip(wanted_outputs(contract, mine), returned, strict=True)) | {
            n: mine[n] for n in contract.writes
        }

    compared = 0
    for case, _ in drawn_cases(tkernels.OPS[op].variants["torch"], 25, seed=5):
        inputs = widen_floats(contract.bind_arguments((), case.inputs))
        count = batching.count(inputs)
        if count == 0:
            continue
        alone = batching.part(*results(batching.take(inputs, [count - 1])), 0)
        batches = [(inputs, count - 1), (batching.loosen(inputs), count - 1)]
        batches += [
            (batching.take(inputs, picks), at) for _, picks, at in draw_surroundings(count - 1, count, case.seed)
        ]
        for batch, position in batches:
            part = batching.part(*results(batch), position)
            assert part.keys() == alone.keys()
            for name, expected in alone.items():
                torch.testing.assert_close(part[name].double(), expected.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
                compared += 1
    assert compared > 20


def test_surroundings_put_the_member_where_they_say() -> None:
    seen = set()
    for seed in range(40):
        for words, picks, position in draw_surroundings(2, 4, seed):
            assert picks[position] == 2
            assert len(picks) <= 32
            seen.add(len(picks) if words.startswith("repeated") else words)
    assert {2, 32, "after the others"} <= seen


@pytest.mark.parametrize(
    "like",
    [
        torch.zeros(3, 8)[:, :5],  # padded rows
        torch.zeros(2, 3, 4).transpose(0, 1),  # head-major
        torch.zeros(2, 1, 4).transpose(0, 1),  # head-major, one row
        torch.zeros(40)[5:9],
    ],
)
@pytest.mark.parametrize("count", [0, 1, 4])
def test_rows_are_laid_out_as_they_were_and_surrounded_by_poison(like: torch.Tensor, count: int) -> None:
    rows = torch.arange(count * like[0].numel(), dtype=torch.float32).view(count, *like.shape[1:])
    copy = lay_out_like(rows, like)
    assert torch.equal(copy, rows)
    assert copy.storage_offset() % 16 == like.storage_offset() % 16
    whole = torch.empty(0).set_(copy.untyped_storage())
    assert int(whole.isnan().sum()) == whole.numel() - rows.numel()
    if like.shape[0] == 3 and count > 1:
        assert [a > b for a, b in zip(copy.stride(), copy.stride()[1:], strict=False)] == [
            a > b for a, b in zip(like.stride(), like.stride()[1:], strict=False)
        ]


def test_bits_tell_zeros_apart_and_nan_equals_itself() -> None:
    nan = torch.tensor([1.0, float("nan")])
    assert first_difference({"x": nan}, {"x": nan.clone()}) is None
    assert first_difference({"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])}) == "x[0] is -0, not 0"


def test_a_liar_whose_bits_depend_on_program_order_is_found(tmp_path: Path) -> None:
    changes = [
        ("out_ptr, gate_up_ptr,", "out_ptr, count_ptr, gate_up_ptr,"),
        ("out_ptr=out,", 'out_ptr=out, count_ptr=run.workspace["count"],'),
        ("* up * FACTOR\n", "* up * (1 + 1e-6 * tl.atomic_add(count_ptr, 1))\n"),
        ("Run, Variant", "Buffer, Run, Variant"),
        ("key=", 'workspace=lambda axes, config, device: {"count": Buffer((1,), torch.int32, zeroed=True)}, key='),
    ]
    variant = tkernels.OPS.with_variants_from(write_variant(tmp_path, *changes))["swiglu"].variants["doubled"]
    found = [f for f in sanitized(SANITIZERS["order"], variant, 8) if f is not None]
    assert found
    assert "with its programs reversed" in found[0].message


@pytest.mark.parametrize(
    "launcher",
    [
        "FACTOR=1, extra=1e-6 if tokens > 1 else 0.0,",  # the size of the batch
        "FACTOR=1, extra=1e-6 * (tokens % 16 == 0),",  # a block that only some batches fill
    ],
)
def test_a_liar_whose_bits_depend_on_the_batch_is_found(launcher: str, tmp_path: Path) -> None:
    changes = [
        ("FACTOR=1,", launcher),
        ("width, FACTOR: ", "width, extra, FACTOR: "),
        ("* up * FACTOR\n", "* up * (1 + extra)\n"),
    ]
    variant = tkernels.OPS.with_variants_from(write_variant(tmp_path, *changes))["swiglu"].variants["doubled"]
    found = [f for f in sanitized(SANITIZERS["batch"], variant, 12) if f is not None]
    assert found
    assert "against its bits alone" in found[0].message


def test_a_liar_whose_config_depends_on_the_batch_does_not_register(tmp_path: Path) -> None:
    with pytest.raises(tkernels.VariantError, match="batch-invariant variant's config may not depend on T"):
        tkernels.OPS.with_variants_from(write_variant(tmp_path, ('key=("I",)', 'key=("I", "T")')))
