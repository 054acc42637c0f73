"""`tk eval`: how well a model predicts a text, and how far it is from a dense one."""

import math
from dataclasses import asdict

import torch
from rich.console import Console

from experiments.commands.output import print_json, progress_bar
from experiments.commands.requests import EvalRequest
from experiments.document import ExperimentError
from experiments.planning.models import named_model
from experiments.quantization.evaluation import Evaluation, WindowReader, cut_windows, evaluate
from experiments.quantization.texts import read_text, tokenize_text
from experiments.reporting.table_style import make_table
from tkernels import OPS
from tkernels.device import first_device
from tmodel import ModelPlan

DEFAULT_WINDOW = 2048
"""Tokens a window, or as many as the model was made for: what published perplexities are measured with."""


def run(request: EvalRequest) -> int:
    """Prints a table, or one JSON object."""
    text = read_text(request.text, "--text")
    plan = named_model(request.model, "--model", request.architectures_from)
    reference = None
    if request.reference is not None:
        reference = named_model(request.reference, "--reference", request.architectures_from)
        if (quantization := reference.config.quantization) is not None:
            how = quantization.format.method
            raise ExperimentError([f"--reference {request.reference}: is quantized, by {how}; a reference is dense"])
    windows = _cut_windows(request, text, plan, reference)
    length, dtype = windows.shape[1] - 1, plan.config.dtype

    def open_reader(model: ModelPlan) -> WindowReader:
        return WindowReader(
            model.directory(), length, device=first_device(), dtype=dtype, ops=OPS, architectures=model.architectures
        )

    with progress_bar("reading windows", len(windows), stays=True) as update:
        judge = None if reference is None else open_reader(reference)
        found = evaluate(open_reader(plan), windows, judge, advance=lambda count: update(advance=count))
    if not math.isfinite(found.nats):
        message = "its logits are not finite: a kernel, the weights or the dtype's range is at fault"
        raise ExperimentError([f"--model {request.model}: {message}"])
    if request.as_json:
        names = {"model": request.model, "reference": request.reference}
        perplexities = {"perplexity": found.perplexity, "reference_perplexity": found.reference_perplexity}
        print_json({**names, **perplexities, **asdict(found)})
    else:
        _print(Console(), request, found)
    return 0


def _cut_windows(request: EvalRequest, text: str, plan: ModelPlan, reference: ModelPlan | None) -> torch.Tensor:
    """[n, window + 1] tokens of the text; one window of all of them where it is shorter."""
    longest = plan.config.max_position_embeddings
    window = min(DEFAULT_WINDOW, longest) if request.window is None else request.window
    if window > longest:
        raise ExperimentError([f"--window {window}: {plan.name} was made for {longest} tokens"])
    if reference is not None and reference.config.vocab_size != plan.config.vocab_size:
        sizes = f"{plan.config.vocab_size} and {reference.config.vocab_size}"
        raise ExperimentError([f"--reference {request.reference}: vocabularies of {sizes} tokens do not compare"])
    tokens = tokenize_text(text, plan.directory())
    if reference is not None and not torch.equal(tokens, tokenize_text(text, reference.directory())):
        raise ExperimentError([f"--reference {request.reference}: its tokenizer makes other tokens of the text"])
    if len(tokens) < 2:
        raise ExperimentError([f"--text {request.text}: {len(tokens)} tokens; there is nothing to predict"])
    return cut_windows(tokens, window) if len(tokens) > window else tokens[None]


def _print(console: Console, request: EvalRequest, found: Evaluation) -> None:
    names = ["perplexity", "nats/token"]
    rows = [[request.model, f"{found.perplexity:.4f}", f"{found.nats:.5f}"]]
    caption = f"Of {found.num_tokens:,} tokens, in windows of {found.window:,} that are each read alone."
    if request.reference is not None:
        names += ["KL, nats", "top-1 agrees"]
        rows[0] += [f"{found.kl:.5f}", f"{found.top1_agreement:.2%}"]
        rows += [[request.reference, f"{found.reference_perplexity:.4f}", f"{found.reference_nats:.5f}", "-", "-"]]
        caption += f" KL, agreement: with {request.reference}."
    console.print(make_table(str(request.text), ["model", *names], rows, right=names, caption=caption))
