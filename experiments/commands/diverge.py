"""`tk diverge`: where two arms part on one model, by how much, and a call that replays it."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.commands.choices import open_registry
from experiments.commands.output import print_json, progress_bar
from experiments.commands.requests import DivergeRequest
from experiments.divergence.captured_call import CapturedCall, save_call
from experiments.divergence.finding import LETTERS, Arm, Divergence, Logits, Rounding, WrongPart, find_divergence
from experiments.divergence.reading import FoundWrong, Token
from experiments.document import ExperimentError
from experiments.option_flags import engine_options, parse_kernels
from experiments.planning.models import named_model
from experiments.reporting.table_style import make_table
from experiments.runs.rows import is_odd
from tkernels.files import check_new_folder
from tkernels.inputs import dtype_name
from tkernels.launch import Kernel
from tkernels.verification.check import outside_folder, replay_captured
from tmodel import ModelPlan
from tsched.execution.placement import find_device, find_dtype
from tsched.requests.tokenizer import load_tokenizer

DRAWN = (24, 9)
"""Tokens of the prompts that are drawn where none is given: several pages, and less than one."""

_BETWEEN_CHOICES = re.compile(r",(?![^{]*})")  # no comma between the values of a config


def run(request: DivergeRequest) -> int:
    """Prints what differs, keeps the first wrong call of each arm, and returns 1 where anything is wrong."""
    arms = _parse_arm("A", request.first), _parse_arm("B", request.second)
    if arms == (None, None):
        raise ExperimentError(["A and B are transformers both: one must be kernels of this engine"])
    options = engine_options(request.engine)
    try:
        device = find_device(options.device)
    except ValueError as error:
        raise ExperimentError([f"--device {request.engine['device']}: {error}"]) from None
    if request.out is not None:
        check_new_folder(request.out, "what is kept")
    ops = open_registry(request.variants_from)
    plan = named_model(request.model, "--model", request.architectures_from)
    prompts = _read_prompts(request, plan)
    dtype = find_dtype(options.dtype, plan.config.dtype)
    steps = (request.max_tokens + 2) * sum(arm is not None for arm in arms) + 4 * (None in arms)
    with progress_bar("reading", steps) as update:
        found = find_divergence(
            arms, plan, prompts, request.max_tokens, device=device, dtype=dtype, ops=ops,
            advance=lambda done: update(advance=1, doing=done),
        )  # fmt: skip
    out = request.out or Path(f"diverged-{secrets.token_hex(3)}")
    wrong = {letter: _keep_call(letter, one, out) for letter, one in found.wrong_calls.items()}
    about = {"model": request.model, "dtype": dtype_name(dtype), "device": str(device)}
    if request.as_json:
        arms_as_given = dict(zip(LETTERS, (request.first, request.second), strict=True))
        print_json(_without_odd({**about, "arms": arms_as_given, **_as_json(found), "wrong_calls": wrong}))
    else:
        title = f"A: {request.first}, B: {request.second}, on {request.model}, {about['dtype']}"
        _print(Console(), title, found, wrong)
    return 0 if found.is_rounding else 1


def _parse_arm(letter: str, text: str) -> Arm:
    """The arm that "transformers", "default" or "op=variant,op=variant" means."""
    if text in ("transformers", "default"):
        return None if text == "transformers" else {}
    if "=" not in text:
        raise ExperimentError([f"{letter} {text}: an arm is default, transformers, or op=variant,op=variant"])
    return parse_kernels(_BETWEEN_CHOICES.split(text), letter)


def _read_prompts(request: DivergeRequest, plan: ModelPlan) -> list[list[int]]:
    """Each prompt's tokens; ExperimentError where one has none, or more than the model can read."""
    most = plan.config.max_position_embeddings
    longest = most - request.max_tokens
    if not request.prompts:
        generator = torch.Generator().manual_seed(0)
        lengths = [min(length, longest) for length in DRAWN]
        if min(lengths) < 1:
            raise ExperimentError(
                [f"--max-tokens {request.max_tokens}: {plan.name} reads {longest + request.max_tokens}"]
            )
        return [torch.randint(plan.config.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    tokenizer = load_tokenizer(plan.directory())
    if tokenizer is None:
        raise ExperimentError([f"--prompt: {plan.name} has no tokenizer; without --prompt, tokens are drawn"])
    prompts = [list(tokenizer(text)["input_ids"]) for text in request.prompts]
    for text, tokens in zip(request.prompts, prompts, strict=True):
        if not 1 <= len(tokens) <= longest:
            rule = f"with --max-tokens {request.max_tokens} the model reads from 1 to {longest}"
            raise ExperimentError([f"--prompt {text!r}: {len(tokens)} tokens; {rule}"])
    return prompts


def _keep_call(letter: str, found: FoundWrong, out: Path) -> dict[str, Any]:
    """Writes a wrong call into the folder, and tells of it as --json does."""
    call, variant = found.call, found.call.kernel.variant
    folder, verdict = outside_folder(variant), found.call.verdict
    told = {
        "step": found.step,
        "layer": found.layer,
        "part": found.part,
        "op": variant.contract.name,
        "variant": call.kernel.label,
        "output": call.output,
        "index": list(verdict.index),
        "token": found.token,
        "expected": verdict.expected,
        "got": verdict.got,
        "ratio": max(verdict.max_ratio, verdict.rms_ratio or 0.0),
        "reason": call.reason,
    }
    file = out / f"{letter}.{variant.contract.name}.{variant.name}.safetensors"
    out.mkdir(parents=True, exist_ok=True)
    save_call(
        CapturedCall(variant.contract.name, variant.name, _config_of(call.kernel, call.arguments), call.arguments), file
    )
    return {**told, "replay": replay_captured(file, variant.name, folder)}


def _config_of(kernel: Kernel, arguments: Mapping[str, Any]) -> Any:
    """What the call was launched with; None of a variant that has no configs."""
    if kernel.variant.launch is None:
        return None
    return kernel.config(*kernel.variant.contract.bind_axes(arguments))


def _as_json(found: Divergence) -> dict[str, Any]:
    """All but the wrong calls, whose tensors are no JSON."""
    return {
        "sequences": [list(sequence) for sequence in found.sequences],
        "logits": asdict(found.logits),
        "differences": [asdict(one) for one in found.differences],
        "rounding": [asdict(one) for one in found.rounding],
        "wrong_part": None if found.wrong_part is None else asdict(found.wrong_part),
    }


def _without_odd(value: Any) -> Any:
    """The value with null for each number that JSON has not: what a NaN is away from anything."""
    if isinstance(value, Mapping):
        return {name: _without_odd(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_odd(one) for one in value]
    return None if is_odd(value) else value


_CAPTION = (
    "What the first linear layer of each layer gets: the rms of what differs, over the rms of B (or of float64). It is "
    "the sum of all that differs before."
)


def _print(console: Console, title: str, found: Divergence, wrong: Mapping[str, Mapping[str, Any]]) -> None:
    console.print(make_table(title, ("logits", ""), _logits_rows(found.logits)))
    columns = ["A to B", "largest"]
    if found.differences[0].from_exact is not None:
        columns += ["A to float64", "B to float64"]
    rows = [
        (one.place, *(f"{value:.2g}" for value in (one.apart, one.largest, *(one.from_exact or ()))))
        for one in found.differences
    ]
    console.print(make_table("Apart, place by place", ("place", *columns), rows, right=columns, caption=_CAPTION))
    if found.rounding:
        console.print(_rounding_table(found.rounding))
    for line in _verdict(found, wrong):
        console.print(Text(line), soft_wrap=True)


def _rounding_table(rounding: Sequence[Rounding]) -> Table:
    """The places that are not bit-equal."""
    rows = [(*one.place, f"{one.other:,} of {one.elements:,}") for one in rounding if one.other]
    caption = f"Of {len(rounding)} places; those that are not here are bit-equal."
    title = "Rounded otherwise than by transformers, on the same inputs"
    return make_table(title, ("place", "side", "values"), rows, right=("values",), caption=caption)


def _logits_rows(logits: Logits) -> Iterator[tuple[str, str]]:
    first = ""
    if logits.first_other is not None and logits.likeliest is not None and logits.leads is not None:
        leads = " and ".join(f"{lead:.3g}" for lead in logits.leads)
        tokens = " and ".join(map(str, logits.likeliest))
        first = f"; first not after {_token_text(logits.first_other)}: tokens {tokens}, ahead by {leads}"
    yield "top-1 agrees", f"{logits.top1} of {logits.rows}{first}"
    yield "top-5 agrees", f"{logits.top5} of {logits.rows}"
    at = f"after {_token_text(logits.largest_at)}, of token {logits.largest_of}"
    yield "largest difference", f"{logits.largest:.3g}, {at}"


def _token_text(token: Token) -> str:
    return f"token {token[1]} of prompt {token[0]}"


def _verdict(found: Divergence, wrong: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong, a line each, or that nothing is."""
    for letter, one in wrong.items():
        where = ", ".join(filter(None, (one["step"], one["layer"], one["part"])))
        yield f"{letter} is wrong: {where}: {one['op']}.{one['variant']}: {one['reason']}"
        row = "" if one["token"] is None else f" ({_token_text(one['token'])})"
        yield f"  {one['output']}{one['index']}{row}: expected {one['expected']:.9g}, got {one['got']:.9g}"
        yield f"  error / allowed = {one['ratio']:.3g}; replay: {one['replay']}"
    if found.wrong_part is not None:
        yield from _wrong_part_lines(found.wrong_part, is_kernel=bool(wrong))
    if found.is_rounding:
        yield "Nothing is wrong: all is as near to float64, on its own inputs, as the error rule asks."


def _wrong_part_lines(part: WrongPart, *, is_kernel: bool) -> Sequence[str]:
    name, side = part.place
    lines = [
        f"From the same inputs, transformers and this engine first differ at the {side} of {name}:",
        f"  [{part.element}] of {_token_text(part.token)}: transformers in float64 {part.expected:.9g}, here "
        f"{part.got:.9g}; error / allowed = {part.ratio:.3g}",
    ]
    if not is_kernel:
        lines.append(
            "  Every kernel is right on its own arguments: the weights or the architecture's description differ there."
        )
    return lines
