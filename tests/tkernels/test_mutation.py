"""The mutation engine on a small kernel of its own, planted in a folder as an outsider would."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tkernels
from tkernels.variant import Variant
from tkernels.verification.accuracy import LUCK, Verdict
from tkernels.verification.check import CheckResult
from tkernels.verification.draws import drawn_cases
from tkernels.verification.mutation import campaign, worker
from tkernels.verification.mutation.campaign import compared, joined, outcomes, pieces, sampled, score, trials
from tkernels.verification.mutation.equivalent import Equivalent
from tkernels.verification.mutation.faults import KERNEL_KINDS, ORDER_WEAKENED, Mutant, mutants
from tkernels.verification.mutation.pool import Fate, MutationError, Pool, task
from tkernels.verification.mutation.ttir import without_order

HELPER = """
import triton
import triton.language as tl


@triton.jit
def squares_of(x):
    \"\"\"x + 1 is not a fault here, nor is "mask=".\"\"\"
    return x * x
"""

PLANTED = """
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant

sys.path.insert(0, str(Path(__file__).parent.parent))
from planted_helper import squares_of


@triton.jit
def rms_norm_planted(out_ptr, x_ptr, weight_ptr, stride_x_t, stride_out_t, hidden, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    zero = 3
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in tl.range(0, hidden, BLOCK, num_stages=3):
        offs = start + tl.arange(0, BLOCK) + 3 - zero
        x = tl.load(x_ptr + row * stride_x_t + offs, mask=offs < hidden, other=0.0, eviction_policy="evict_last")
        squares += squares_of(x.to(tl.float32))
    norm_scale = tl.rsqrt(tl.sum(squares, axis=0) / hidden + eps)
    for start in tl.range(0, hidden, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < hidden
        x = tl.load(x_ptr + row * stride_x_t + offs, mask=mask).to(tl.float32)
        weight = tl.load(weight_ptr + offs, mask=mask).to(tl.float32)
        out = tl.where(mask, x * norm_scale * weight, 5.0)  # what no store takes: an equivalent
        tl.store(out_ptr + row * stride_out_t + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    tokens, hidden = x.shape
    run.launch(
        rms_norm_planted, (tokens,), out_ptr=out, x_ptr=x, weight_ptr=weight, stride_x_t=x.stride(0),
        stride_out_t=out.stride(0), hidden=hidden, eps=eps, BLOCK=128,
    )


VARIANT = Variant(
    wins="never", launch=launch, default={"": Config()}, configs=(Config(),), deterministic=True, batch_invariant=True,
)
"""

WEIGHT = "tl.load(weight_ptr + offs, mask=mask).to(tl.float32)"
SPECIAL = ("5.0", WEIGHT)
PLANTED_KINDS = {*KERNEL_KINDS} - {ORDER_WEAKENED}
"""Its programs share nothing; what orders programs is weakened in tests/tkernels/test_races.py."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "rms_norm").mkdir()
    (folder / "planted_helper.py").write_text(HELPER)
    (folder / "rms_norm" / "planted.py").write_text(PLANTED)
    return folder


@pytest.fixture(scope="module")
def variant(folder: Path) -> Variant:
    return tkernels.OPS.with_variants_from(folder)["rms_norm"].variants["planted"]


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[Pool]:
    with Pool(ops=tkernels.OPS.with_variants_from(folder)) as started:
        yield started


@pytest.fixture(scope="module")
def fates(variant: Variant, pool: Pool) -> list[Fate]:
    """What became of one mutant of each kind, of one more where the compiler has a say too, and of the equivalent."""
    everything = list(trials([variant], KERNEL_KINDS))
    compiled = [trial for trial in everything if trial.mutant.kind in ("axis_swapped", "cast_removed")]
    chosen = sampled(everything, 1, seed=0)
    others = [*sampled(compiled, 2, seed=0), *(trial for trial in everything if trial.mutant.before in SPECIAL)]
    chosen += [trial for trial in others if trial not in chosen]
    return [outcome.fate for outcome in outcomes(pool, chosen, seed=0)]


def test_every_kind_is_planted_and_killed(fates: list[Fate]) -> None:
    assert {fate.mutant.kind for fate in fates if fate.killed} == PLANTED_KINDS
    assert {fate.verdict for fate in fates if fate.killed} == {"value", "crash"}


def test_only_the_equivalent_survives(fates: list[Fate]) -> None:
    assert [fate.mutant.before for fate in fates if fate.verdict == "survived"] == ["5.0"]


def test_what_the_compiler_refuses_does_not_count(fates: list[Fate]) -> None:
    refused = [fate for fate in fates if fate.verdict == "does_not_compile"]
    assert {fate.mutant.kind for fate in refused} == {"axis_swapped"}  # the sum over the only dim
    assert not any(fate.counts or fate.killed for fate in refused)


def test_a_cast_that_promotion_puts_back_is_the_same_code(fates: list[Fate]) -> None:
    same = [fate for fate in fates if fate.verdict == "same_code"]
    assert WEIGHT in [fate.mutant.before for fate in same]
    assert not any(fate.counts or fate.killed for fate in same)


def test_hints_shapes_and_docstrings_are_no_faults(variant: Variant, folder: Path) -> None:
    found = [trial.mutant for trial in trials([variant], KERNEL_KINDS)]
    assert all(
        "num_stages=3" in m.source and "evict_last" in m.source and "tl.zeros((BLOCK,)" in m.source for m in found
    )
    assert list(mutants(folder / "planted_helper.py", frozenset(["squares_of"]))) == []


def test_a_diff_shows_the_fault_and_nothing_else(variant: Variant) -> None:
    mutant = next(m for m in mutants(variant.file, frozenset(["rms_norm_planted"])) if m.before == "5.0")
    changed = [line for line in mutant.diff.splitlines()[2:] if line.startswith(("+", "-"))]
    assert [line[0] for line in changed] == ["-", "+"]
    assert changed[0].replace("5.0", "10.0")[1:] == changed[1][1:]
    assert "# what no store takes" in mutant.diff


def by_hand(variant: Variant, *changes: tuple[str, str]) -> Mutant:
    source = variant.file.read_text()
    for before, after in changes:
        assert before in source
        source = source.replace(before, after)
    return Mutant("kernel", "by_hand", variant.file, "rms_norm_planted", 1, "", "", 0, source)


def test_a_loop_without_end_is_a_crash(variant: Variant, pool: Pool) -> None:
    endless = by_hand(variant, ("    zero = 3\n", "    zero = 3\n    while zero > 0:\n        zero = 3\n"))
    answer = pool.ask({**task("check", endless, variant, seed=0), "seconds": 1.0})
    assert answer["verdict"] == "crash"
    assert "time-out" in answer["reason"]


def test_a_segmentation_fault_ends_only_the_mutant(variant: Variant, pool: Pool) -> None:
    dying = by_hand(variant, ("import torch\n", "import ctypes\nimport torch\nctypes.string_at(0)\n"))
    answer = pool.ask(task("check", dying, variant, seed=0))
    assert (answer["verdict"], answer["reason"]) == ("crash", "signal SIGSEGV")
    assert pool.ask(task("check", None, variant, seed=0))["verdict"] == "survived"


def test_the_original_survives(variant: Variant, pool: Pool) -> None:
    assert pool.ask(task("check", None, variant, seed=3))["verdict"] == "survived"


def declared(before: str, after: str) -> Equivalent:
    return Equivalent("rms_norm", "rms_norm_planted", "constant_changed", before, after, "never stored")


def test_declared_equivalents_are_proved_by_their_bits(variant: Variant, pool: Pool) -> None:
    claims = (declared("5.0", "10.0"), replace(declared("0.0", "float('nan')"), reason="a lie"))
    claimed = [t for t in trials([variant], declared=claims) if t.equivalent is not None]
    assert len(claimed) == 2
    right, wrong = sorted(claimed, key=lambda t: t.mutant.before, reverse=True)
    ended = list(outcomes(pool, [right, wrong], seed=0, compiled=False))
    assert [o.column for o in ended] == ["equivalent", "value"]
    assert [o.wrong for o in ended] == [False, True]
    total = score(ended)
    assert (total.counted, total.killed, total.equivalent, total.share) == (2, 1, 1, 1.0)
    same, different = joined([right, wrong], list(compared(pool, [right, wrong], 20, seed=0)))
    assert (same.cases, same.reason) == (20, "")
    assert different.reason


def test_comparisons_come_in_parts(variant: Variant, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "COMPARED_AT_ONCE", 8)
    claims = (declared("5.0", "10.0"), declared("0.0", "float('nan')"))
    claimed = [t for t in trials([variant], declared=claims) if t.equivalent is not None]
    parts = list(compared(pool, claimed, 20, seed=0))
    assert [part.cases for part in parts] == [8, 8, 8, 8, 4, 4]
    assert len(parts) == pieces(claimed, 20)
    for whole in joined(claimed, parts):
        same = whole.trial.mutant.before == "5.0"
        assert (whole.cases == 20, not whole.reason) == (same, same)


def test_samples_keep_to_their_quota_and_seed(variant: Variant) -> None:
    everything = list(trials([variant], KERNEL_KINDS))
    chosen = sampled(everything, 2, seed=7)
    kinds = [trial.mutant.kind for trial in chosen]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        kind: min(2, sum(trial.mutant.kind == kind for trial in everything)) for kind in dict.fromkeys(kinds)
    }
    assert set(kinds) == PLANTED_KINDS
    assert chosen == sampled(everything, 2, seed=7)
    assert chosen != sampled(everything, 2, seed=8)


def test_the_order_of_pure_operations_is_no_difference() -> None:
    load, widen = "%1 = tt.load %arg0 : f16", "%{} = arith.extf %1 : f16 to f32"
    first = "\n".join([load, widen.format(2), "%3 = tt.load %arg1 : f32", "%4 = arith.addf %2, %3 : f32"])
    later = "\n".join([load, "%2 = tt.load %arg1 : f32", widen.format(3), "%4 = arith.addf %3, %2 : f32"])
    other = later.replace("addf %3, %2", "addf %2, %2")
    store = "\ntt.store %arg2, %4 : f32"
    assert without_order(first + store) == without_order(later + store)
    assert without_order(first + store) != without_order(other + store)


def result_of(status: str, reason: str = "", *ratios: float) -> CheckResult:
    verdicts = {"out": Verdict(max(ratios) <= 1, ratios[0], ratios[1])} if ratios else {}
    return CheckResult("swiglu", "fused", {}, 0, None, status, reason, verdicts)


LUCKY = [result_of("ok", "", 0.5, 0.5), result_of("wrong", "", 0.9, 1.2), result_of("wrong", "", LUCK, 0.3)]
UNLUCKY = [
    result_of("wrong", "", LUCK + 1, 0.3),
    result_of("wrong", "", 1.0, LUCK + 1),
    result_of("wrong", "", float("inf"), 0.5),
    result_of("wrong", "memory outside what the op writes was changed"),
    result_of("failed", "AddressError"),
]


@pytest.mark.parametrize("result", [*LUCKY, *UNLUCKY], ids=str)
def test_an_original_has_mutants_where_all_that_is_against_it_may_be_luck(
    result: CheckResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One case far beyond the rule is enough, and so is one exception."""
    variant = tkernels.OPS["swiglu"].variants["fused"]
    (drawn, *_) = drawn_cases(variant, 1)
    results = iter([LUCKY[0]] * 3 + [result] + [LUCKY[0]] * 2 + [result])
    monkeypatch.setattr(worker, "check_case", lambda *_, **__: next(results))
    monkeypatch.setattr(worker.gc, "freeze", lambda: None)
    monkeypatch.setattr(worker.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(worker, "_limited", lambda _: None)
    assert bool(worker.Cases(tkernels.OPS).warm(variant, [drawn] * worker.WARM_CASES)) == (result in UNLUCKY)
    answer = worker._killed(variant, {"plain": [drawn]}, 1.0, lambda _: None)
    pool = Pool()
    monkeypatch.setattr(pool, "ask", lambda _: answer)
    if result in UNLUCKY:
        with pytest.raises(MutationError, match="fails its own check"):
            pool._is_fair(variant, 0, {}, "plain")
    else:
        assert pool._is_fair(variant, 0, {}, "plain") == (result is LUCKY[0])
