"""`tk quantize`: a dense checkpoint becomes a quantized one, in a format that others read too."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.commands.requests import QuantizeRequest
from experiments.document import ExperimentError
from experiments.planning.models import named_model
from experiments.quantization.texts import read_text, tokenize_text
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
    if request.out.exists() and (not request.out.is_dir() or any(request.out.iterdir())):
        raise FileExistsError(
            f"{request.out} exists and is not an empty directory; a checkpoint is written to a new one"
        )
    model = named_model(request.source, "IN", request.architectures_from)
    source = model.directory()
    method = METHODS[request.method]
    group_size = request.group_size
    if group_size is None:
        group_size = DEFAULT_GROUP_SIZE if method.grouped else -1
    try:
        job = _add_windows(plan_job(source, method, request.bits, group_size, model.architectures), request)
        console = Console(stderr=True)
        columns = (TextColumn("quantizing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[done]}", style="dim"), console=console) as progress:
            task = progress.add_task("quantizing", total=job.num_steps, done="")
            quantize_checkpoint(job, request.out, lambda done: progress.update(task, advance=1, done=done))
    except QuantizerError as error:
        raise ExperimentError([str(error)]) from None
    before, after = _count_bytes(source), _count_bytes(request.out)
    Console(markup=False, highlight=False, soft_wrap=True).print(
        f"{request.out}: {method.name}, {request.bits} bits, {after / 1e6:,.2f} MB of weights, {after / before:.2f} of "
        f"{source.name}'s {before / 1e6:,.2f} MB"
    )
    return 0


def _add_windows(job: Job, request: QuantizeRequest) -> Job:
    """The job with its calibration windows, where its method looks at any."""
    if job.method.walk == "none":
        return job
    if request.calibration is None:
        raise QuantizerError(f"{job.method.name} needs --calibration, a file of text like what the model will read")
    tokens = tokenize_text(read_text(request.calibration, "--calibration"), job.source)
    longest = job.config.max_position_embeddings
    window = min(DEFAULT_WINDOW, longest) if request.window is None else request.window
    return replace(job, windows=choose_calibration_windows(job.config, tokens, window))


def _count_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))
