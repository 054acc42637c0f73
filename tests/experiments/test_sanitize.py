"""`tk check --sanitize`, as a user meets it."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from experiments.cli import app
from experiments.commands import sanitize
from experiments.commands.choices import Subject
from experiments.commands.requests import CheckRequest
from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.contract import Axes, Case, Contract
from tkernels.verification.sanitizers.base import Sanitizer, sanitizer_cases
from tkernels.verification.sanitizers.suite import SANITIZERS

NARROW = ("tl.program_id(0).to(tl.int64)", "tl.program_id(0)")


def tk(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_a_clean_outside_variant_gets_a_row_per_sanitizer(tmp_path: Path) -> None:
    write_variant(tmp_path)
    result = tk("check", "--sanitize", "all", "--op", "swiglu", "--variant", "doubled", "--examples", 1, "--json",
                "--variants-from", tmp_path)  # fmt: skip
    rows = json.loads(result.stdout)
    assert result.exit_code == 0
    assert [row["sanitizer"] for row in rows] == [*SANITIZERS]
    # A grid of swiglu.doubled grows with T alone.
    assert {(row["sanitizer"], row["verdict"], row["cases"]) for row in rows} == {
        (name, "ok", 1 + sanitizer.grows) for name, sanitizer in SANITIZERS.items()
    }


def test_stores_far_beyond_a_tensor_are_findings_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    unmasked = [("BLOCK=triton.next_power_of_2(width)", "BLOCK=2**14"), ("element_ty), mask=mask)", "element_ty))")]
    write_variant(tmp_path, *unmasked)
    command = ("check", "--sanitize", "all", "--op", "swiglu", "--variant", "doubled", "--examples", "1", "--json",
               "--variants-from", tmp_path, "--axes", "T=2")  # fmt: skip
    ended = subprocess.run([sys.executable, "-m", "experiments.cli", *command], capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    rows = {row["sanitizer"]: row for row in json.loads(ended.stdout)}
    assert rows["address"]["findings"][0]["message"].startswith("the plain call fails: ")
    others = {(row["verdict"], row["reason"]) for name, row in rows.items() if name != "address"}
    assert others == {("not run", "the plain call failed")}
    assert ended.stderr.count("the plain call fails") == 1
    assert ended.stderr.splitlines()[-1] == "exit status 1: 1 variant has findings: swiglu.doubled (address)"


@pytest.mark.parametrize(("sanitizer", "cases"), [("address", 2), ("tuning", 2)])
def test_a_config_is_held_while_axes_are_drawn(sanitizer: str, cases: int, tmp_path: Path) -> None:
    changes = [("FACTOR=1,", 'FACTOR=run.config["FACTOR"],'), ("Config()}", "Config(FACTOR=1)}")]
    changes += [("configs=(Config(), Config(num_warps=8)), ", ""), ("+ width + offs", "+ width + offs + FACTOR - 1")]
    write_variant(tmp_path, *changes)
    command = ("check", "--sanitize", sanitizer, "--op", "swiglu", "--variant", "doubled", "--examples", cases,
               "--json", "--variants-from", tmp_path, "--axes", "T=2,layout=contiguous")  # fmt: skip
    assert tk(*command).exit_code == 0
    (row,) = json.loads(tk(*command, "--config", "FACTOR=1000", "--keep-going").stdout)
    assert (row["cases"], len(row["findings"])) == (cases, cases)
    assert all("--config FACTOR=1000" in finding["replay"] for finding in row["findings"])


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


@pytest.mark.parametrize("axes", [{}, {"T": 2, "I": 8, "activation": "float16", "layout": "padded", "values": "tiny"}])
def test_cases_are_drawn_and_replayed_on_the_first_device(
    axes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled kernels refuse a CPU's tensors: nothing that runs on a GPU would be put under a sanitizer there."""
    there, asked = torch.device("cpu", 0), []
    case = Contract.case

    def asked_case(contract: Contract, axes: Axes, seed: int, device: torch.device | str = "cpu") -> Case:
        asked.append(device)
        return case(contract, axes, seed, device)

    monkeypatch.setattr(sanitize, "first_device", lambda: there)
    monkeypatch.setattr(Contract, "case", asked_case)
    subject = Subject(OPS["swiglu"].variants["fused"], axes, None)
    assert sanitize._draw(CheckRequest(examples=1), subject, SANITIZERS["batch"])
    assert set(asked) == {there}


def test_a_sanitizer_for_which_no_case_is_drawn_is_said_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(sanitizer: Sanitizer, *rest: Any) -> Iterator[Any]:
        return iter(()) if sanitizer.name == "order" else sanitizer_cases(sanitizer, *rest)

    monkeypatch.setattr(sanitize, "sanitizer_cases", few)
    result = tk(
        "check", "--sanitize", "order,poison", "--op", "swiglu", "--variant", "fused", "--examples", 1, "--json"
    )
    assert result.exit_code == 1
    assert [(row["verdict"], row["cases"]) for row in json.loads(result.stdout)] == [("no case", 0), ("ok", 1)]
    assert result.stderr.splitlines()[-1].endswith("the sanitizer takes: swiglu.fused: order")


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
