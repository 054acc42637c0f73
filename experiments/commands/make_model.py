"""`tk make-model`: a small real checkpoint and tokenizer, trained here."""

from rich.console import Console

from experiments.commands.requests import MakeModelRequest
from experiments.document import ExperimentError
from tmodel.presets import PRESETS, make_model, make_random_model
from tmodel.random_weights import RANDOM_PRESETS, num_parameters
from tsched.torch_free import suggest_name


def run(request: MakeModelRequest) -> int:
    """Makes the preset in `directory` and says how good, or how large, it became."""
    preset, directory, seed = request.preset, request.directory, request.seed
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if preset in RANDOM_PRESETS:
        make_random_model(preset, directory, seed=seed)
        console.print(
            f"{directory}: {num_parameters(RANDOM_PRESETS[preset]):,} random weights in bfloat16, no tokenizer"
        )
        return 0
    known = [*PRESETS, *RANDOM_PRESETS]
    if preset not in PRESETS:
        raise ExperimentError([f"unknown preset {preset!r}: there is {', '.join(known)}{suggest_name(preset, known)}"])
    report = make_model(preset, directory, seed=seed)
    console.print(
        f"{directory}: {report.held_out_loss:.3f} nats a token on {report.held_out_tokens:,} held-out tokens "
        f"(a bigram model: {report.bigram_loss:.3f}), trained on {report.training_tokens:,} tokens "
        f"in {report.seconds:.0f} s"
    )
    return 0
