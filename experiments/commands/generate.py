"""`tk generate`: one prompt, continued by a model with chosen kernels."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.commands.registry import open_registry
from experiments.document import ExperimentError
from experiments.engine_flags import Given
from tsched import LLM, SamplingParams


@dataclass(frozen=True)
class Request:
    """What `tk generate` was asked. kernels: as they were written. sampling: fields of SamplingParams."""

    model: str
    prompt: str
    kernels: Sequence[str]
    variants_from: Sequence[Path]
    sampling: Mapping[str, Any]
    engine: Given


def run(request: Request) -> int:
    """Prints the continuation on stdout."""
    ops = open_registry(request.variants_from)
    try:
        params = SamplingParams(**request.sampling)
        llm = LLM(request.model, kernels=parse_kernels(request.kernels), ops=ops, **request.engine)
    except ValueError as error:  # what LLM refuses: names it does not know, weights that do not fit
        raise ExperimentError([str(error)]) from None
    if llm.prepare_report.bytes_after:
        print(f"[{llm.prepare_report}]", file=sys.stderr)
    (output,) = llm.generate(request.prompt, params)
    if output.error is not None:
        raise ExperimentError([output.error])
    print(output.outputs[0].text)
    reason = output.outputs[0].finish_reason
    print(f"[{len(output.outputs[0].token_ids)} tokens, finished by {reason}]", file=sys.stderr)
    return 0


def parse_kernels(texts: Sequence[str]) -> dict[str, Any]:
    """ "op=variant" or "op={variant: {config value: number}}", each once."""
    choices: dict[str, Any] = {}
    for text in texts:
        op, equals, choice = text.partition("=")
        if not equals or not op.strip() or not choice.strip():
            raise ExperimentError([f"--kernels {text}: must be op=variant, as in --kernels paged_decode=split_kv"])
        if op.strip() in choices:
            raise ExperimentError([f"--kernels {text}: {op.strip()} is given twice"])
        try:
            choices[op.strip()] = yaml.safe_load(choice)
        except yaml.YAMLError as error:
            raise ExperimentError([f"--kernels {text}: not YAML: {error}"]) from None
    return choices
