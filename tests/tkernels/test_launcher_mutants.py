"""Faults in host code: which there are, how they get into a variant, and that the checks notice them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tkernels
from tkernels.ops import split_sums
from tkernels.variant import Variant
from tkernels.verification.mutation.campaign import KINDS, Trial, outcomes, sampled, trials
from tkernels.verification.mutation.pool import MutationError, Pool

TWO_LAUNCHES = """
import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.workspace import Buffer

@triton.jit
def rms_norm_parts_squares(sums_ptr, x_ptr, stride_sums_t, stride_x_t, hidden, per_part, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    end = tl.minimum((part + 1) * per_part, hidden)
    for start in range(part * per_part, end, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride_x_t + offs, mask=offs < end, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(sums_ptr + row * stride_sums_t + part, tl.sum(squares, axis=0))


@triton.jit
def rms_norm_parts(
    out_ptr, x_ptr, weight_ptr, sums_ptr, stride_out_t, stride_x_t, stride_sums_t, hidden, parts, eps,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    sums = tl.load(sums_ptr + row * stride_sums_t + offs_p, mask=offs_p < parts, other=0.0)
    scale = tl.rsqrt(tl.sum(sums, axis=0) / hidden + eps)
    for start in range(0, hidden, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < hidden
        x = tl.load(x_ptr + row * stride_x_t + offs, mask=mask).to(tl.float32)
        weight = tl.load(weight_ptr + offs, mask=mask).to(tl.float32)
        tl.store(out_ptr + row * stride_out_t + offs, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def cut(hidden, block):
    return triton.cdiv(hidden, 2 * block), 2 * block


def workspace(axes, config, device):
    return {"sums": Buffer((axes["T"], cut(axes["H"], config["BLOCK"])[0]), torch.float32)}


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    (tokens, hidden), block, sums = x.shape, run.config["BLOCK"], run.workspace["sums"]
    parts, per_part = cut(hidden, block)
    run.launch(
        rms_norm_parts_squares, (tokens, parts), **pointers("sums[t] x[t]", sums, x), hidden=hidden,
        per_part=per_part, BLOCK=block,
    )
    run.launch(
        rms_norm_parts, (tokens,), **pointers("out[t] x[t] weight sums[t]", out, x, weight, sums), hidden=hidden,
        parts=parts, eps=eps, BLOCK=block, BLOCK_P=triton.next_power_of_2(parts),
    )


VARIANT = Variant(
    wins="never", launch=launch, default={"": Config(BLOCK=32)}, configs=(Config(BLOCK=32),), workspace=workspace,
    deterministic=True, batch_invariant=True,
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launchers")
    (folder / "rms_norm").mkdir()
    (folder / "rms_norm" / "parts.py").write_text(TWO_LAUNCHES)
    return folder


@pytest.fixture(scope="module")
def variant(folder: Path) -> Variant:
    return tkernels.OPS.with_variants_from(folder)["rms_norm"].variants["parts"]


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[Pool]:
    with Pool(ops=tkernels.OPS.with_variants_from(folder)) as started:
        yield started


def launcher_trials(*variants: Variant) -> list[Trial]:
    return list(trials(variants, KINDS["launcher"]))


def test_a_launcher_is_planted_with_every_fault_that_its_code_has_room_for(variant: Variant) -> None:
    found = launcher_trials(variant)
    kinds = {trial.mutant.kind for trial in found}
    assert kinds >= {
        "grid_changed", "ceiling_lost", "stride_changed", "tensors_swapped", "scalar_changed", "workspace_changed",
        "number_changed", "factor_dropped", "declaration_lost",
    }  # fmt: skip
    assert {trial.mutant.function for trial in found} == {"launch", "cut", "workspace", "VARIANT"}
    assert all(trial.mutant.part == "launcher" for trial in found)
    assert not any("wins" in trial.mutant.before or "configs" in trial.mutant.before for trial in found)


def test_one_fault_of_each_kind_in_a_launcher_is_killed(variant: Variant, pool: Pool) -> None:
    """But for `cut`: into how many parts a row is cut is for a config to choose."""
    chosen = [trial for trial in launcher_trials(variant) if trial.mutant.function != "cut"]
    ended = list(outcomes(pool, sampled(chosen, 1, seed=0), seed=0))
    assert len(ended) >= 8
    assert [outcome.trial.mutant.name for outcome in ended if not outcome.fate.killed] == []


@pytest.mark.slow
def test_a_tile_that_no_value_shows_to_be_too_deep_is_killed_by_what_it_spills(pool: Pool) -> None:
    variant = tkernels.OPS["gate_up_swiglu"].variants["paired_tiles"]
    after = "max(block_k, 32)"
    (trial,) = [trial for trial in launcher_trials(variant) if trial.mutant.after == after]
    (ended,) = outcomes(pool, [trial], seed=0)
    assert ended.fate.verdict == "inspection"
    assert "gate_up_swiglu.paired_tiles fp32 sm_90" in ended.fate.reason
    assert "spills" in ended.fate.reason


def test_a_variant_that_does_not_keep_its_claims_has_no_mutants(tmp_path: Path) -> None:
    """How it cuts its sums follows the batch, so a fault that no value shows would be said to break the claim."""
    follows = "= cut(hidden, block if tokens < 2 else 4 * block)"
    (tmp_path / "rms_norm").mkdir()
    (tmp_path / "rms_norm" / "parts.py").write_text(TWO_LAUNCHES.replace("= cut(hidden, block)", follows))
    ops = tkernels.OPS.with_variants_from(tmp_path)
    found = launcher_trials(ops["rms_norm"].variants["parts"])
    chosen = [trial for trial in found if trial.mutant.function == "cut" and trial.mutant.kind == "number_changed"]
    with Pool(ops=ops) as pool, pytest.raises(MutationError, match="fails its own check"):
        list(outcomes(pool, chosen, seed=0))


def test_a_constant_that_other_files_import_changes_everywhere_and_the_contract_stays() -> None:
    variant = tkernels.OPS["scaled_matmul"].variants["split_k"]
    shared = Path(str(split_sums.__file__))
    script = f"""
from pathlib import Path
import tkernels
from tkernels.verification.mutation.launcher_targets import replanted
variant = tkernels.OPS["scaled_matmul"].variants["split_k"]
axes = {{"M": 65, "codes": "int8", "out": "float32"}}
text = Path({str(shared)!r}).read_text().replace("MAX_ROWS = 64", "MAX_ROWS = 65")
mutant = replanted(variant, Path({str(shared)!r}), text)
device = tkernels.device.INTERPRETER
assert variant.supports(axes, device) and not mutant.supports(axes, device)
assert mutant.contract is variant.contract and mutant.name == variant.name
"""
    assert variant.module is not None
    subprocess.run([sys.executable, "-c", script], check=True)
