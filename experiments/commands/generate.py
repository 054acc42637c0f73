"""`tk generate`: one prompt, continued by a model with chosen kernels."""

import sys

from experiments.commands.choices import open_registry
from experiments.commands.requests import GenerateRequest
from experiments.document import ExperimentError
from experiments.option_flags import parse_kernels
from experiments.planning.models import open_architectures
from tsched import LLM, SamplingParams


def run(request: GenerateRequest) -> int:
    """Prints the continuation on stdout."""
    ops = open_registry(request.variants_from)
    open_architectures(request.architectures_from)  # what is wrong with a folder names the flag
    try:
        params = SamplingParams(**request.sampling)
        llm = LLM(
            request.model,
            kernels=parse_kernels(request.kernels),
            ops=ops,
            architectures_from=request.architectures_from,
            **request.engine,
        )
    except ValueError as error:  # what LLM refuses: names it does not know, weights that do not fit
        raise ExperimentError([str(error)]) from None
    if llm.prepare_report.bytes_after:
        print(f"[{llm.prepare_report}]", file=sys.stderr)
    (output,) = llm.generate(request.prompt, params)
    if output.error is not None:
        raise ExperimentError([output.error])
    (continuation,) = output.outputs
    print(continuation.text)
    print(f"[{len(continuation.token_ids)} tokens, finished by {continuation.finish_reason}]", file=sys.stderr)
    return 0
