"""tiny-moe beside tiny, which multiplies each token by as many weights: held-out losses of both, as a table.

A seed decides both models' first weights and the order of the text, which is the same for both. A seed in which the
experts do not lower the loss exits with 1; experts that do not share the tokens are refused as by `tk make-model`:

python -m tests.tmodel.moe_against_dense
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import torch

from tmodel import PRESETS, Recipe, TrainingReport
from tmodel.corpus import standard_library_corpus
from tmodel.train import new_model, train_on

DENSE, EXPERTS = PRESETS["tiny"], PRESETS["tiny-moe"]


def count_parameters(recipe: Recipe) -> tuple[int, int, int]:
    """(all, those that a token is multiplied by or looked up in, the routers' among the latter); a tied head counts
    once.
    """
    with torch.device("meta"):
        parameters = dict(new_model(recipe, 0).named_parameters())
    active = {
        name: p.numel() * recipe.config["num_experts_per_tok"] // len(p) if p.ndim == 3 else p.numel()
        for name, p in parameters.items()
    }
    routers = sum(number for name, number in active.items() if name.endswith("mlp.gate.weight"))
    return sum(p.numel() for p in parameters.values()), sum(active.values()), routers


def train_timed(recipe: Recipe, seed: int) -> tuple[TrainingReport, float]:
    """(what the model became, seconds of CPU that it took, the tokenizer's included)"""
    started = time.process_time()
    *_, report = train_on(standard_library_corpus(recipe.corpus_bytes), recipe, seed)
    return report, time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tmodel.moe_against_dense", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=DENSE.num_steps, help="of training, of either model")
    arguments = parser.parse_args()
    for name, recipe in (("tiny", DENSE), ("tiny-moe", EXPERTS)):
        held, active, routers = count_parameters(recipe)
        print(f"{name}: {held:,} parameters, {active:,} active for a token, {routers:,} of them in routers")
    columns = ["seed", "tiny", "tiny-moe", "lower by", "entropy of the load, by layer", "tiny, CPU", "tiny-moe, CPU"]
    print(f"\n| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|", flush=True)
    all_lower = True
    for seed in arguments.seeds:
        (dense, dense_s), (experts, experts_s) = (
            train_timed(replace(recipe, num_steps=arguments.steps), seed) for recipe in (DENSE, EXPERTS)
        )
        lower = dense.held_out_loss - experts.held_out_loss
        all_lower &= lower > 0
        entropies = ", ".join(f"{entropy:.3f}" for entropy in experts.load_entropies or ())
        losses = f"{dense.held_out_loss:.4f} | {experts.held_out_loss:.4f} | {lower:.4f}"
        print(f"| {seed} | {losses} | {entropies} | {dense_s:.0f} s | {experts_s:.0f} s |", flush=True)
    sys.exit(0 if all_lower else 1)


if __name__ == "__main__":
    main()
