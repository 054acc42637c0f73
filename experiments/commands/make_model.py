"""`tk make-model`: a small real checkpoint and tokenizer, trained here, or random weights of a large one."""

from rich.console import Console

from experiments.commands.requests import MakeModelRequest
from experiments.exits import check_name
from tmodel.presets import PRESETS, make_model, make_random_model
from tmodel.random_weights import RANDOM_PRESETS, num_parameters


def run(request: MakeModelRequest) -> int:
    """Makes the preset in `directory` and says how good, or how large, it became."""
    check_name("--preset", request.preset, [*PRESETS, *RANDOM_PRESETS])
    if request.preset in RANDOM_PRESETS:
        make_random_model(request.preset, request.directory, seed=request.seed)
        number = num_parameters(RANDOM_PRESETS[request.preset])
        made = f"{number:,} random weights in bfloat16, no tokenizer"
    else:
        report = make_model(request.preset, request.directory, seed=request.seed)
        made = (
            f"{report.held_out_loss:.3f} nats a token on {report.held_out_tokens:,} held-out tokens "
            f"(a bigram model: {report.bigram_loss:.3f}), trained on {report.training_tokens:,} tokens "
            f"in {report.seconds:.0f} s"
        )
        if report.load_entropies is not None:
            entropies = ", ".join(f"{entropy:.2f}" for entropy in report.load_entropies)
            made += f"; the entropy of the experts' load is {entropies} of the largest, by layer"
    Console(markup=False, highlight=False, soft_wrap=True).print(f"{request.directory}: {made}")
    return 0
