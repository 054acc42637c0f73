"""What a report measures with, as far as it runs without a GPU: signatures, cases, reruns, stress, whole models."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experiments.cli import app
from experiments.commands.gpu_report import open_journal
from experiments.document import ExperimentError
from experiments.gpu_report.correctness import cases, check, rerun, signatures, stress
from experiments.gpu_report.engine import Work, compare, models, our_step, their_step
from experiments.gpu_report.journal import Journal
from tests.tkernels.outside import write_variant
from tkernels import OPS, Config, Tuning
from tkernels.contract import FLOATS
from tkernels.variant import Variant

CPU = torch.device("cpu")
AXES = {"T": 2, "I": 64, "activation": "float32", "layout": "contiguous", "values": "ordinary"}


def doubled(folder: Path, *changes: tuple[str, str]) -> Variant:
    return OPS.with_variants_from(write_variant(folder, *changes))["swiglu"].variants["doubled"]


def test_signatures_are_different_of_every_dtype_and_the_same_every_time() -> None:
    variant = OPS["swiglu"].variants["fused"]
    found = signatures(variant, CPU, 6)
    assert len({s.text for s in found}) == 6
    assert {s.axes["activation"] for s in found} == set(FLOATS)
    assert signatures(variant, CPU, 6) == found
    drawn = list(cases(variant, found[0], 5, CPU))
    assert all(case.axes[name] == value for case in drawn for name, value in found[0].axes.items())
    assert len({case.seed for case in drawn}) == 5


@pytest.mark.parametrize("changed", [False, True])
def test_a_wrong_variant_is_found_with_its_replay(tmp_path: Path, changed: bool) -> None:
    wrong = (("FACTOR=1,", "FACTOR=2,"),) if changed else ()
    variant = doubled(tmp_path, *wrong)
    fact = check(variant, signatures(variant, CPU, 1)[0], 3, CPU)
    assert fact["cases"] == 3
    if changed:
        assert fact["ok"] < 3
        assert "replay: tk check" in fact["failures"][0]
    else:
        assert (fact["ok"], fact["failures"]) == (3, [])


def test_reruns_compare_every_bit(tmp_path: Path) -> None:
    assert rerun(doubled(tmp_path / "a"), AXES, CPU, 3) == {"kind": "rerun", "runs": 3, "verdict": "ok"}
    changes = (
        ("FACTOR=1,", "FACTOR=next(COUNT),"),
        ("VARIANT =", "import itertools\nCOUNT = itertools.count(1)\nVARIANT ="),
    )
    assert rerun(doubled(tmp_path / "b", *changes), AXES, CPU, 3)["verdict"] == "3 runs gave other bits"


def test_stress_finds_other_bits_and_counters_that_were_left(tmp_path: Path) -> None:
    variant = doubled(tmp_path)
    assert stress(variant, AXES, CPU, 2)["verdict"] == "ok"
    from tkernels.workspace import Buffer

    variant.zeroed.take("arrived", Buffer((1,), torch.int32, zeroed=True), CPU).fill_(1)
    assert stress(variant, AXES, CPU, 2)["verdict"] == "counters not at zero: arrived"


TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.4,
    "tie_word_embeddings": True,
}  # fmt: skip


def test_our_model_and_transformers_compute_the_same_on_the_same_random_weights() -> None:
    works = (Work("prefill", 2, 24), Work("decode", 3, 20))
    theirs, ours = models(TINY, CPU, torch.float32, OPS, Tuning(), works)
    batch, cache = our_step(works[0], ours.config, CPU, torch.float32)
    logits = ours(batch, cache)  # [B, vocab]
    expected = their_step(works[0], theirs, ours.config, CPU)()[:, 0]
    assert torch.allclose(logits, expected, atol=1e-4)
    fact = compare("tiny", works[1], theirs, ours, CPU, torch.float32, samples=2)
    assert fact["ours_us"] > 0
    assert fact["transformers_us"] > 0
    assert (fact["work"], fact["tokens"]) == ("decode B=3, 20 tokens", 3)


def test_without_a_gpu_the_dry_run_lists_every_step_and_the_run_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    dry = runner.invoke(app, ["gpu-report", "--out", str(tmp_path / "new"), "--dry-run"])
    assert dry.exit_code == 0
    for said in (
        "device",
        "check paged_decode.split_kv",
        "time dequant_gemm.gemlite",
        "engine Qwen3-4B",
        "within 9 min",
    ):
        assert said in dry.stdout
    assert not (tmp_path / "new").exists()
    real = runner.invoke(app, ["gpu-report", "--out", str(tmp_path / "new")])
    assert real.exit_code == 2
    assert "tk gpu-report needs a CUDA device, and there is none here" in real.stderr


def test_a_dry_run_over_a_report_leaves_out_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    Journal(tmp_path).append("device", "end", status="done")
    dry = CliRunner().invoke(app, ["gpu-report", "--out", str(tmp_path), "--dry-run"])
    assert "1 steps are done" in dry.stdout
    assert "copy and read bandwidth" not in dry.stdout


def test_a_folder_of_another_device_is_refused(tmp_path: Path) -> None:
    open_journal(tmp_path, "NVIDIA H200").append("device", "fact", kind="device", name="NVIDIA H200")
    open_journal(tmp_path, "NVIDIA H200")
    with pytest.raises(ExperimentError) as error:
        open_journal(tmp_path, "NVIDIA L40S")
    assert "holds facts of NVIDIA H200" in error.value.problems[0]


def test_a_signature_names_its_config() -> None:
    from experiments.gpu_report.correctness import Signature

    assert Signature({"I": 8}, Config(BLOCK=64)).text == "I=8 [BLOCK=64,num_warps=4,num_stages=2]"
    assert Signature({"I": 8}, None).text == "I=8"
