"""GPTQ here and in GPTQModel, on the same weights, text and settings: KL divergence from the dense model of each.

python -m tests.tmodel.quantizers.beside_gptqmodel FOLDER [--seeds 0 1 2] [--bits 2 3 4]

FOLDER keeps GPTQModel's environment (pip installs it, and an index must be in reach), the models that are trained for
seconds from each seed, and what was quantized of them. Both checkpoints are read by the same kernels on the same
held-out text. The last column is ours over GPTQModel's; the command fails where one is above 1.02.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import tkernels
from experiments.quantization.evaluation import WindowReader, cut_windows, evaluate
from experiments.quantization.texts import tokenize_text
from tests.tmodel.formats.tools.decoded import CHECKPOINT
from tests.tmodel.formats.written_elsewhere import find_environment, run_packer
from tests.tmodel.test_train import SMALL
from tmodel.corpus import standard_library_corpus
from tmodel.presets import make_from_recipe
from tmodel.quantizers import METHODS
from tmodel.quantizers.checkpoint import Job, choose_calibration_windows, plan_job, quantize_checkpoint

WINDOW, GROUP_SIZE, TOKENS, MOST = 64, 32, 8192, 1.02
SETTINGS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "act-order": ({"act_order": "inputs"}, {"desc_act": True, "sym": False}),
    "groups": ({"act_order": "groups"}, {"desc_act": False, "sym": False, "act_group_aware": True}),
    "groups, symmetric": (
        {"act_order": "groups", "symmetric": True},
        {"desc_act": False, "sym": True, "act_group_aware": True},
    ),
    "groups, search": (
        {"act_order": "groups"},
        {"desc_act": False, "sym": False, "act_group_aware": True, "mse": 2.4},
    ),
}
"""What both are told alike: (options here, QuantizeConfig's). Methods here search and sweep unless told otherwise;
GPTQModel searches where it is told `mse`."""


def read(directory: Path) -> WindowReader:
    return WindowReader(directory, WINDOW, device=torch.device("cpu"), dtype=torch.float32, ops=tkernels.OPS)


def quantize_here(job: Job, options: Mapping[str, Any], out: Path) -> Path:
    """Quantizes with this house's method; `out` is made anew, for the method may have changed."""
    shutil.rmtree(out, ignore_errors=True)
    quantize_checkpoint(replace(job, method=job.method.with_options(options)), out, lambda done: None)
    return out


def quantize_there(job: Job, options: Mapping[str, Any], out: Path, python: Path) -> Path:
    """Quantizes with GPTQModel; SystemExit with its words where it fails."""
    if not (out / CHECKPOINT / "config.json").exists():
        assert job.windows is not None
        file = out.with_name(f"{out.name}-windows.safetensors")
        save_file({"windows": job.windows[:, :-1].contiguous()}, file)
        told = {
            "bits": job.bits,
            "group_size": job.group_size,
            "damp_percent": 0.05,
            "calibration": str(file.resolve()),
            **options,
        }
        done = run_packer("gptqmodel", python, job.source, out, told)
        if done.returncode:
            raise SystemExit(f"GPTQModel failed:\n{done.stderr.strip()[-3000:]}")
    return out / CHECKPOINT


def compare_seed(folder: Path, seed: int, widths: list[int], python: Path) -> list[float]:
    """Prints a row for each setting and number of bits; returns ours over GPTQModel's of each."""
    source = folder / f"seed{seed}"
    if not source.exists():
        make_from_recipe(SMALL, source, seed=seed)
    corpus = standard_library_corpus(SMALL.corpus_bytes)
    calibration, held_out = (
        tokenize_text("".join(texts)[: 2 * TOKENS], source)[:TOKENS] for texts in (corpus.training, corpus.held_out)
    )
    windows, dense = cut_windows(held_out, WINDOW), read(source)
    ratios = []
    for bits in widths:
        planned = plan_job(source, METHODS["gptq"], bits, GROUP_SIZE)
        job = replace(planned, windows=choose_calibration_windows(planned.config, calibration, WINDOW))
        for name, (ours, theirs) in SETTINGS.items():
            out = folder / f"seed{seed}-{bits}bit-{name.replace(', ', '-')}"
            made = quantize_here(job, ours, out.with_name(f"{out.name}-ours")), quantize_there(job, theirs, out, python)
            mine, other = (evaluate(read(one), windows, dense).kl or 0.0 for one in made)
            ratios.append(mine / other)
            print(
                f"seed {seed}, {bits} bits, {name}: KL {mine:.5f}, GPTQModel {other:.5f}, {mine / other:.3f}",
                flush=True,
            )
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 3, 4])
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    python = find_environment(asked.folder / "environments", "gptqmodel")
    if python is None:
        return 1
    ratios = [ratio for seed in asked.seeds for ratio in compare_seed(asked.folder, seed, asked.bits, python)]
    print(f"ours over GPTQModel's: {max(ratios):.3f} at most, {sum(ratios) / len(ratios):.3f} in the mean")
    return int(max(ratios) > MOST)


if __name__ == "__main__":
    sys.exit(main())
