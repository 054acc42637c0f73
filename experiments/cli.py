"""`tk`, the command line. Commands are imported when they are called: `tk --help` loads no torch."""

import inspect as signatures
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from experiments.commands import requests
from experiments.commands.requests import Json, ModelName
from experiments.engine_flags import Given, takes_engine_options
from experiments.exits import end, import_torch
from tsched.options import SCHEDULER_OPTIONS

app = typer.Typer(
    name="tk",
    help="Interchangeable Triton kernels for LLM inference: list, check, serve and compare them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RequestT = TypeVar("RequestT")

VariantsFrom = Annotated[
    list[Path] | None,
    typer.Option("--variants-from", metavar="DIR", help="A folder of more variants, <op>/<variant>.py. Repeatable."),
]


def add_command(
    name: str, request: type[RequestT], *, needs_torch: bool = True, first: Callable[[RequestT], None] | None = None
) -> None:
    """Adds a command: its options are the fields of `request`, and `run` of its module in `commands` takes the record.

    Args:
        first: what refuses a record before torch is imported.
    """

    def run(asked: RequestT) -> int:
        if first is not None:
            first(asked)
        if needs_torch:
            import_torch()
        status: int = import_module(f"experiments.commands.{name.replace('-', '_')}").run(asked)
        return status

    def command(**given: Any) -> None:
        end(run, request(**given))

    kind = signatures.Parameter.KEYWORD_ONLY
    options: tuple[Field[Any], ...] = fields(request)  # type: ignore[arg-type]  # any frozen dataclass
    parameters = [
        signatures.Parameter(one.name, kind, default=_default_of(one), annotation=one.type) for one in options
    ]
    command.__signature__ = signatures.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.type for one in options}
    command.__doc__ = request.__doc__
    app.command(name)(command)


def _default_of(option: Field[Any]) -> Any:
    if option.default_factory is not MISSING:
        return option.default_factory()
    return signatures.Parameter.empty if option.default is MISSING else option.default


def _refuse_profile(asked: requests.ProfileRequest) -> None:
    from experiments.planning.layout import refuse_unsound

    if asked.file is not None:
        refuse_unsound(asked.file, asked.overrides)


def _exit(command: Callable[..., int], *arguments: object) -> None:
    """Runs a command that needs torch."""
    import_torch()
    end(command, *arguments)


add_command("ops", requests.OpsRequest)
add_command("check", requests.CheckRequest)
add_command("bench", requests.BenchRequest)
add_command("tune", requests.TuneRequest)
add_command("gpu-report", requests.GpuReportRequest)
add_command("results-table", requests.ResultsTableRequest)
add_command("run", requests.RunRequest, needs_torch=False)
add_command("profile", requests.ProfileRequest, first=_refuse_profile)
add_command("report", requests.ReportRequest, needs_torch=False)
add_command("runs", requests.RunsRequest, needs_torch=False)
add_command("compare", requests.CompareRequest, needs_torch=False)
add_command("repeat", requests.RepeatRequest)
add_command("make-model", requests.MakeModelRequest)
add_command("quantize", requests.QuantizeRequest)
add_command("convert", requests.ConvertRequest)


@app.command()
def inspect(
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    variant: Annotated[str | None, typer.Option(help="Only variants of this name.")] = None,
    arch: Annotated[str | None, typer.Option(metavar="sm_90,...", help="Only these architectures.")] = None,
    axes: Annotated[
        str | None, typer.Option(metavar="a=b,c=d", help="Axes to hold, over the op's last benchmark point.")
    ] = None,
    dump: Annotated[
        str | None, typer.Option(metavar="ptx|sass", help="Print the kernels' code instead (amdgcn for gfx942).")
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Rows that differ: two outputs of --json, or two variants of --op."),
    ] = None,
    update_expected: Annotated[
        bool, typer.Option("--update-expected", help="Write the expected table of this Triton version.")
    ] = False,
    as_json: Json = False,
    variants_from: VariantsFrom = None,
) -> None:
    """Compile every kernel for GPUs that are not there: registers, spills, occupancy, instructions, access widths."""
    from experiments.commands.inspect import Request, run

    _exit(run, Request(op, variant, arch, axes, dump, diff, update_expected, variants_from or []), as_json)


@app.command()
@takes_engine_options(
    [name for name in SCHEDULER_OPTIONS if name not in ("block_size", "prefix_cache", "overlap", "cuda_graphs")],
    aliases={"max_num_batched_tokens": "--budget", "kv_cache_bytes": "--kv-bytes", "swap_bytes": "--host-bytes"},
    usual={"max_model_len": "the trace's longest", "swap_bytes": "as much as the pool"},
)
def simulate(
    trace: Annotated[
        str,
        typer.Option(
            metavar="FILE|synthetic:N[:P]",
            help="Azure .csv, Mooncake .jsonl, or N generated requests, of priorities 0 to P - 1. Priorities are a "
            ".jsonl line's key 'priority', 0 without one, or synthetic:N:P's, the lower number first; an Azure trace "
            "has none.",
        ),
    ],
    prefix_cache: Annotated[
        str, typer.Option("--policy", metavar="NAME,...", help="Prefix caches, side by side.")
    ] = ",".join(SCHEDULER_OPTIONS["prefix_cache"].choices),
    gpu: Annotated[str, typer.Option(help="Whose roofline gives the time of a step.")] = "H100",
    model: Annotated[str, typer.Option(metavar="NAME|DIR", help="A model's shape, or a Hugging Face directory's.")] = (
        "Llama-3.1-8B"
    ),
    pool_blocks: Annotated[
        str | None, typer.Option(metavar="N,...|unbounded", help="Pool sizes; what the GPU holds by default.")
    ] = None,
    block_size: Annotated[
        str | None,
        typer.Option(
            "--page-size",
            metavar="N,...|contiguous",
            help="Tokens a block; the trace's own (16, 512) by default.",
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Requests a second, in the mean.")] = None,
    speedup: Annotated[float | None, typer.Option(min=1e-6, help="Arrivals this many times as dense.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the trace's first requests.")] = None,
    as_json: Json = False,
    *,
    engine: Given,
) -> None:
    """Drive the real scheduler and prefix caches with a trace and a roofline: no model, no GPU."""
    from experiments.commands.simulate import Request, run

    asked = Request(
        trace=trace,
        prefix_caches=prefix_cache,
        gpu=gpu,
        model=model,
        pool_blocks=pool_blocks,
        block_sizes=block_size,
        rate=rate,
        speedup=speedup,
        limit=limit,
        engine=engine,
    )
    _exit(run, asked, as_json)


@app.command()
@takes_engine_options(["dtype", "device", *SCHEDULER_OPTIONS])
def generate(
    model: ModelName,
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    kernels: Annotated[
        list[str] | None, typer.Option(metavar="op=variant", help="A variant for an op. Repeatable.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the fewest tokens of this much probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens this likely relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 avoids tokens already there.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Above 0 avoids tokens of the output.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each occurrence.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends the output. Repeatable.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")] = False,
    variants_from: VariantsFrom = None,
    *,
    engine: Given,
) -> None:
    """Continue a prompt with a model and the kernels of your choice."""
    from experiments.commands.generate import Request, run

    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "stop": tuple(stop or ()),
        "seed": seed,
        "ignore_eos": ignore_eos,
    }
    _exit(run, Request(model, prompt, kernels or [], variants_from or [], sampling, engine))


@app.command("eval")
def evaluate(
    model: ModelName,
    text: Annotated[Path, typer.Option(metavar="FILE", help="What it has to predict.")],
    reference: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A dense model, to compare distributions with.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Tokens read at once: 2048, or the model's length.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Perplexity on a text, and, against a dense model, KL divergence and how often the likeliest token agrees."""
    from experiments.commands.eval import Request, run

    _exit(run, Request(model, text, reference, window), as_json)


def main() -> None:
    """The console command `tk`."""
    app()


if __name__ == "__main__":
    main()
