"""`tk quantize`: a dense checkpoint becomes a quantized one, in a format that others read too."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from experiments.commands.output import progress_bar
from experiments.commands.requests import QuantizeRequest
from experiments.document import ExperimentError
from experiments.planning.models import named_model
from experiments.quantization.texts import read_text, tokenize_text
from tkernels.files import check_new_folder
from tmodel.quantizers import METHODS
from tmodel.quantizers.checkpoint import Job, choose_calibration_windows, plan_job, quantize_checkpoint
from tmodel.quantizers.unfinished import QuantizerError
from tsched.torch_free import suggest_name

DEFAULT_WINDOW = 512
DEFAULT_GROUP_SIZE = 128


def run(request: QuantizeRequest) -> int:
    """Writes the checkpoint and says how much smaller it is."""
    if request.method not in METHODS:
        hint = suggest_name(request.method, METHODS)
        raise ExperimentError([f"--method: unknown method {request.method!r}: there is {', '.join(METHODS)}{hint}"])
    check_new_folder(request.out, "a checkpoint")
    try:
        job = _plan(request)
        with progress_bar("quantizing", job.num_steps, stays=True) as update:
            quantize_checkpoint(job, request.out, lambda done: update(advance=1, doing=done))
    except QuantizerError as error:
        raise ExperimentError([str(error)]) from None
    before, after = _count_bytes(job.source), _count_bytes(request.out)
    Console(markup=False, highlight=False, soft_wrap=True).print(
        f"{request.out}: {request.method}, {request.bits} bits, {after / 1e6:,.2f} MB of weights, "
        f"{after / before:.2f} of {job.source.name}'s {before / 1e6:,.2f} MB"
    )
    return 0


def _plan(request: QuantizeRequest) -> Job:
    """The job, with its calibration windows where its method looks at any."""
    model = named_model(request.source, "IN", request.architectures_from)
    method = METHODS[request.method].with_options(_parse_options(request.options))
    group_size = request.group_size
    if group_size is None:
        group_size = DEFAULT_GROUP_SIZE if method.grouped else -1
    job = plan_job(model.directory(), method, request.bits, group_size, model.architectures)
    if method.walk == "none":
        for option, given in (("--calibration", request.calibration), ("--window", request.window)):
            if given is not None:
                raise QuantizerError(f"{option} {given}: {method.name} looks at no text; leave it out")
        return job
    if request.calibration is None:
        raise QuantizerError(f"{method.name} needs --calibration, a file of text like what the model will read")
    tokens = tokenize_text(read_text(request.calibration, "--calibration"), job.source)
    window = min(DEFAULT_WINDOW, job.config.max_position_embeddings) if request.window is None else request.window
    return replace(job, windows=choose_calibration_windows(job.config, tokens, window))


def _parse_options(given: Iterable[str]) -> dict[str, Any]:
    """Name -> value of each "name=YAML value"; QuantizerError for what is none, or a name that comes twice."""
    parsed: dict[str, Any] = {}
    for one in given:
        name, sign, value = one.partition("=")
        if not sign or not name:
            raise QuantizerError(f"--option {one}: must be name=value, as in --option damping=0.1")
        if name in parsed:
            raise QuantizerError(f"--option {one}: {name} is given twice")
        try:
            parsed[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise QuantizerError(f"--option {one}: {value!r} is no YAML value") from None
    return parsed


def _count_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))
