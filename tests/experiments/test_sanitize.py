"""`tk check --sanitize`, as a user meets it."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from experiments.cli import app
from tests.tkernels.outside import write_variant

NARROW = ("tl.program_id(0).to(tl.int64)", "tl.program_id(0)")


def tk(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_a_clean_outside_variant_gets_a_row_per_sanitizer(tmp_path: Path) -> None:
    write_variant(tmp_path)
    result = tk("check", "--sanitize", "all", "--op", "swiglu", "--variant", "doubled", "--examples", 1, "--json",
                "--variants-from", tmp_path)  # fmt: skip
    rows = json.loads(result.stdout)
    assert result.exit_code == 0
    assert [row["sanitizer"] for row in rows] == ["address", "overflow", "order", "batch", "poison", "guard", "tuning"]
    assert {(row["verdict"], row["cases"]) for row in rows} == {("ok", 1)}


def test_a_finding_fails_and_its_replay_finds_it_again(tmp_path: Path) -> None:
    write_variant(tmp_path, NARROW)
    result = tk("check", "--sanitize", "order,overflow", "--variant", "doubled", "--json", "--variants-from", tmp_path)
    assert result.exit_code == 1
    order, overflow = json.loads(result.stdout)
    assert (order["verdict"], overflow["verdict"]) == ("ok", "finding")
    finding = overflow["findings"][0]
    assert "int32 overflow" in finding["message"]
    replay = shlex.split(finding["replay"])
    assert replay[:4] == ["tk", "check", "--sanitize", "overflow"]
    again = tk(*replay[1:], "--json")
    assert again.exit_code == 1
    (row,) = json.loads(again.stdout)
    assert (row["cases"], row["findings"]) == (1, [finding])
    printed = tk(*replay[1:])
    assert finding["replay"] in printed.stdout
    assert "1 with findings" in printed.stdout


def test_what_a_sanitizer_cannot_judge_is_said_with_its_reason() -> None:
    result = tk("check", "--sanitize", "address,batch,poison", "--op", "swiglu", "--variant", "torch", "--json")
    assert result.exit_code == 0
    address, batch, poison = json.loads(result.stdout)
    assert (address["verdict"], address["cases"]) == ("not applicable", 0)
    assert address["reason"] == "it launches no kernel of ours"
    assert batch["reason"] == "it does not claim to be batch-invariant"
    assert poison["verdict"] == "ok"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sanitize", "ordr"), "--sanitize: unknown sanitizer 'ordr': there is address, batch"),
        (("--sanitize", "order", "--op", "swiglu", "--axes", "U=3"), "swiglu has no axis 'U'"),
        (("--sanitize", "order", "--op", "swiglu", "--variant", "fusd"), "did you mean 'fused'?"),
    ],
)
def test_sanitize_refuses_what_it_does_not_know(arguments: tuple[str, ...], message: str) -> None:
    result = tk("check", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
