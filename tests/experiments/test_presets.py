"""Every preset through what takes a model: trained ones on their own shape and tokenizer, untrained; random ones, whose
weights are large, as far as it goes without them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tkernels
import tmodel.presets
import tsched.execution.placement
from experiments.cli import app
from experiments.planning.plan import Plan
from experiments.sweep.runner import failures
from tests.experiments.conftest import Run
from tmodel import PRESETS, RANDOM_PRESETS, Limits, find_model, kernel_axes
from tmodel.corpus import standard_library_corpus
from tmodel.quantizers import METHODS
from tmodel.train import Recipe, new_model, train_tokenizer

DENSE = [name for name, recipe in PRESETS.items() if "num_experts" not in recipe.config]
"""Those that every method quantizes: experts are rounded alone."""

PROMPTS = ["def scan(line):", "import os\n"]


def tk(*arguments: Any) -> str:
    """What the command prints; it must succeed."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder where a preset is made without its training, with weights that make tokens vary."""
    texts = standard_library_corpus(300_000).training

    def make_untrained(recipe: Recipe, directory: Path, *, seed: int) -> None:
        torch.manual_seed(seed)
        tokenizer = train_tokenizer(texts, recipe.vocab_size)
        model = new_model(recipe, tokenizer.eos_token_id)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5.0) if parameter.ndim == 2 else parameter.add_(0.2 * torch.randn(parameter.shape))
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(tmodel.presets, "make_from_recipe", make_untrained)
        yield folder


def torch_and_triton(preset: str) -> dict[str, list[str]]:
    """An axis of two variants, torch's and a Triton one, for each of both attentions and another op of the model."""
    limits = Limits(max_num_tokens=64, max_num_seqs=4, max_model_len=64, block_size=16, num_blocks=16)
    called = kernel_axes(find_model(preset).config, limits)
    norm = next(name for name in called if name.endswith("_norm"))
    first = {
        name: next(v.name for v in tkernels.OPS[name].variants.values() if v.kind == "triton")
        for name in ("paged_decode", "paged_prefill", norm)
    }
    return {name: ["torch", variant] for name, variant in first.items()}


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_generated_from_judged_and_diverges_nowhere(preset: str, cache: Path, tmp_path: Path) -> None:
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    tk("generate", "--model", preset, *prompts[:2], "--max-tokens", 8, "--ignore-eos")

    arms, options = ("default", "transformers"), ("--max-tokens", 3, "--dtype", "float32", "--json")
    parted = json.loads(tk("diverge", *arms, "--model", preset, *prompts, *options, "--out", tmp_path / "calls"))
    assert (parted["wrong_part"], parted["wrong_calls"]) == (None, {})
    logits = parted["logits"]
    assert logits["top1"] == logits["top5"] == logits["rows"] >= 10
    assert 0 < logits["largest"] < 1e-4

    text = tmp_path / "text.txt"
    text.write_text("\n".join(PROMPTS * 20))
    judged = json.loads(tk("eval", "--model", preset, "--reference", preset, "--text", text, "--window", 32, "--json"))
    assert judged["num_tokens"] > 100
    assert (judged["kl"], judged["top1_agreement"]) == (pytest.approx(0, abs=1e-9), 1)


ONE_OF_ALIKE = list({tuple(torch_and_triton(preset)): preset for preset in PRESETS}.values())
"""A preset for each set of ops that presets call."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", ONE_OF_ALIKE)
def test_a_preset_says_the_same_in_every_arm_and_through_transformers(preset: str, cache: Path, run: Run) -> None:
    kernels = torch_and_triton(preset)
    folder = run(
        model={"preset": preset},
        dtype="float32",
        kernels=kernels,
        scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 16, "kv_cache_bytes": 2**20},
        workload={
            "kind": "synthetic",
            "num_requests": 3,
            "input_len": {"uniform": [4, 24]},
            "output_len": 6,
            "seed": 0,
        },
        peers=["transformers_one_at_a_time", "transformers_batched"],
        replicates=1,
        repeats=1,
    )
    assert failures(folder) == []
    assert sum(row.stage == "engine" for row in folder.rows) == 2 ** len(kernels)
    compared = [row for row in folder.rows if row.stage in ("parity", "speedup")]
    assert len(compared) == 2 ** len(kernels) - 1 + 2
    assert [(row.tokens_equal, row.requests_equal) for row in compared] == [(True, 3)] * len(compared)


@pytest.mark.parametrize("model", [*PRESETS, *(f"random:{name}" for name in RANDOM_PRESETS)])
def test_a_presets_traffic_is_simulated_without_its_weights(model: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Mixtral's weights take 93 GB, and the usual H100 has 80.
    asked = ["--trace", "synthetic:2", "--policy", "none", "--gpu", "H200", "--json"]
    (row,) = json.loads(tk("simulate", "--model", model, *asked))
    assert (row["requests"], row["finished"], row["refused"]) == (2, 2, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("method", "preset"), list(zip(METHODS, cycle(DENSE), strict=False)))
def test_a_preset_is_quantized_by_a_method_and_served_so(method: str, preset: str, cache: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(standard_library_corpus(300_000).held_out)[:4000])
    apart = {}
    for bits in sorted(METHODS[method].bits):
        out = tmp_path / str(bits)
        options = ["--method", method, "--bits", bits]
        options += [] if METHODS[method].walk == "none" else ["--calibration", text, "--window", 64]
        tk("quantize", preset, out, *options, *(("--group-size", 32) if METHODS[method].grouped else ()))
        judged = json.loads(tk("eval", "--model", out, "--reference", preset, "--text", text, "--window", 64, "--json"))
        apart[bits] = judged["kl"]
        tk("generate", "--model", out, "--prompt", PROMPTS[0], "--max-tokens", 2, "--ignore-eos")
    # A bit more is half the rounding error, and a quarter of the divergence.
    assert all(0 < kl < 1.5 * 4.0 ** (2 - min(bits, 4)) for bits, kl in apart.items()), apart
    assert list(apart.values()) == sorted(apart.values(), reverse=True)


@pytest.mark.parametrize("preset", [*PRESETS, *RANDOM_PRESETS])
def test_an_experiment_is_planned_without_weights(
    preset: str, plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tsched.execution.placement, "device_memory", lambda device: (10**12, 0))
    kernels = torch_and_triton(preset if preset in PRESETS else f"random:{preset}")
    workload = {"kind": "synthetic", "num_requests": 1, "input_len": 8, "output_len": 4}
    planned = plan(model={"preset": preset}, dtype="float32", kernels=kernels, workload=workload)
    assert len(planned.arms) == 2 ** len(kernels)
    assert planned.unsupported == {}
    assert not (tmp_path / "cache").exists()
