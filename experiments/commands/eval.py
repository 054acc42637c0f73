"""`tk eval`: how well a model predicts a text, and how far it is from a dense one."""

import json
from dataclasses import asdict

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tkernels
from experiments.commands.requests import EvalRequest
from experiments.document import ExperimentError
from experiments.planning.models import named_model
from experiments.quantization.evaluation import Evaluation, WindowReader, cut_windows, evaluate
from experiments.quantization.texts import read_text, tokenize_text
from experiments.reporting.table_style import add_row, new_table
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
    windows = cut_windows(tokens, window) if len(tokens) > window else tokens[None]
    if windows.shape[1] < 2:
        raise ExperimentError([f"--text {request.text}: {len(tokens)} tokens; there is nothing to predict"])
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    length = windows.shape[1] - 1

    def reader(model: ModelPlan, dtype: torch.dtype) -> WindowReader:
        return WindowReader(
            model.directory(), length, device=device, dtype=dtype, ops=tkernels.OPS, architectures=model.architectures
        )

    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("windows"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("reading", total=len(windows))
        dtype = plan.config.dtype
        judge = None if reference is None else reader(reference, dtype)
        found = evaluate(reader(plan, dtype), windows, judge, advance=lambda count: progress.advance(task, count))
    if request.as_json:
        print(json.dumps({"model": request.model, "reference": request.reference, "perplexity": found.perplexity,
                          **asdict(found)}))  # fmt: skip
    else:
        _print(Console(), request, found)
    return 0


def _print(console: Console, request: EvalRequest, found: Evaluation) -> None:
    right = ["perplexity", "nats/token", *(["KL, nats", "top-1 agrees"] if found.kl is not None else [])]
    table = new_table(f"{request.text}", ["model", *right], right)
    cells = [f"{found.perplexity:.4f}", f"{found.nats:.5f}"]
    if found.kl is not None and found.top1_agreement is not None:
        cells += [f"{found.kl:.5f}", f"{found.top1_agreement:.2%}"]
    add_row(table, request.model, *cells)
    table.caption = f"Of {found.num_tokens:,} tokens, in windows of {found.window} that are each read alone." + (
        f" KL, agreement: with {request.reference}." if found.kl is not None else ""
    )
    table.caption_justify = "left"
    console.print(table)
