"""`tk check --mutate`: what it prints, and when it fails."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tkernels
import tkernels.verification.mutation.equivalent
from experiments.cli import app
from experiments.commands.mutate import problems
from tests.tkernels.outside import write_variant
from tkernels.verification.mutation.campaign import KINDS, Outcome, sampled, score, trials
from tkernels.verification.mutation.pool import KILLED, Fate

FUSED = tkernels.OPS["swiglu"].variants["fused"]
TRIAL = next(trials([FUSED]))


def ended(verdicts: dict[str, int]) -> list[Outcome]:
    fates = {verdict: Fate(TRIAL.mutant, FUSED, verdict) for verdict in verdicts}
    return [Outcome(TRIAL, fates[verdict]) for verdict, count in verdicts.items() for _ in range(count)]


@pytest.mark.slow
def test_mutants_of_one_op_as_json() -> None:
    result = CliRunner().invoke(app, ["check", "--mutate", "swiglu", "--variant", "fused", "--quota", "1", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["score"] == 1.0
    assert document["mutants"] == sum(row["verdict"] in KILLED for row in document["rows"]) >= 5
    assert {row["kind"] for row in document["rows"]} >= {"mask_dropped", "stride_swapped", "off_by_one"}
    assert {row["part"] for row in document["rows"]} == {"kernel", "launcher"}


@pytest.mark.slow
def test_a_survivor_is_shown_with_its_diff(tmp_path: Path) -> None:
    # The sum of FACTOR is 1: a factor that no check can see the loss of.
    folder = write_variant(tmp_path, ("up * FACTOR", "up * FACTOR * tl.where(mask, 1.0, 5.0)"))
    everything = list(trials([tkernels.OPS.with_variants_from(folder)["swiglu"].variants["doubled"]]))
    chosen = (seed for seed in range(100) if any(t.mutant.before == "5.0" for t in sampled(everything, 1, seed)))
    words = ["--op", "swiglu", "--variant", "doubled", "--quota", "1", "--seed", str(next(chosen))]
    result = CliRunner().invoke(app, ["check", "--mutate", *words, "--variants-from", str(folder)])
    assert result.exit_code == 1
    assert "constant changed" in result.output
    assert "survived: swiglu: swiglu_doubled" in result.output
    assert "+    out = gate / (1 + tl.exp(-gate)) * up * FACTOR * tl.where(mask, 1.0, 10.0)" in result.output


def test_a_wrong_kernel_has_no_mutants(tmp_path: Path) -> None:
    folder = write_variant(tmp_path, ("FACTOR=1", "FACTOR=2"))
    arguments = ["check", "--mutate", "swiglu", "--variant", "doubled", "--variants-from", str(folder)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "fails its own check" in result.output


def test_declared_equivalents_are_compared_with_their_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tkernels.verification.mutation.campaign.VERIFIED_CASES", 5)
    command = "check --mutate --verify-equivalent quantize_tokens --variant row_per_program --json"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert len(rows) == 3  # two of its own, and one of what ops share
    assert all(row["same"] and row["cases"] == 5 and len(row["why"]) > 10 for row in rows)


@pytest.mark.parametrize(
    ("verdicts", "whole", "complaint"),
    [
        ({"value": 60, "crash": 40}, True, ""),
        ({"value": 99, "survived": 1}, True, ""),
        ({"value": 98, "survived": 2}, True, "kernels: 98.0% killed, 99% wanted"),
        ({"value": 99, "does_not_compile": 50, "same_code": 50}, True, "99 mutants, at least 100 wanted"),
        ({"value": 9}, False, ""),
        ({"does_not_compile": 9}, False, "kernels: 0.0% killed, 99% wanted"),
    ],
)
def test_when_it_fails(verdicts: dict[str, int], whole: bool, complaint: str) -> None:
    outcomes = ended(verdicts)
    assert ", ".join(problems(outcomes, score(outcomes), whole)) == complaint


def test_kernels_do_not_carry_launchers() -> None:
    launcher = next(trial for trial in trials([FUSED], KINDS["launcher"]))
    missed = Outcome(launcher, Fate(launcher.mutant, FUSED, "survived"))
    outcomes = [*ended({"value": 990}), missed]
    assert problems(outcomes, score(outcomes), whole=True) == ["launchers: 0.0% killed, 99% wanted"]


def test_equivalents_are_few_and_survive() -> None:
    known = tkernels.verification.mutation.equivalent.EQUIVALENT[0]
    equivalent = replace(TRIAL, equivalent=known)
    some = [Outcome(equivalent, outcome.fate) for outcome in ended({"survived": 6})]
    many = [*ended({"value": 94}), *some]
    assert "6.0% declared equivalent" in ", ".join(problems(many, score(many), whole=True))
    killed = [*ended({"value": 99}), Outcome(equivalent, Fate(TRIAL.mutant, FUSED, "value", "max error"))]
    assert "declared equivalent, but killed" in ", ".join(problems(killed, score(killed), whole=True))
