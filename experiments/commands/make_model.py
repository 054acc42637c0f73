"""`tk make-model`: a small real checkpoint and tokenizer, trained here."""

from pathlib import Path

from rich.console import Console

from experiments.document import ExperimentError, nearest
from tmodel.presets import PRESETS, make_model


def run(preset: str, directory: Path, seed: int) -> int:
    """Trains the preset into `directory` and says how good it became."""
    if preset not in PRESETS:
        raise ExperimentError([f"unknown preset {preset!r}: there is {', '.join(PRESETS)}{nearest(preset, PRESETS)}"])
    report = make_model(preset, directory, seed=seed)
    Console(markup=False, highlight=False, soft_wrap=True).print(
        f"{directory}: {report.held_out_loss:.3f} nats a token on {report.held_out_tokens:,} held-out tokens "
        f"(a bigram model: {report.bigram_loss:.3f}), trained on {report.training_tokens:,} tokens "
        f"in {report.seconds:.0f} s"
    )
    return 0
