"""`tk`, the command line. Commands are imported when they are called: `tk --help` loads no torch."""

from pathlib import Path
from typing import Annotated

import typer

from experiments.engine_flags import Given, takes_engine_options
from experiments.exits import end as _end
from experiments.exits import end_with_torch as _exit
from experiments.exits import refusing as _refusing
from experiments.recorded_cli import Json, compare, repeat, runs
from tsched.options import SCHEDULER_OPTIONS

app = typer.Typer(
    name="tk",
    help="Interchangeable Triton kernels for LLM inference: list, check, serve and compare them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

A_MODEL = "a Hugging Face directory, the preset tiny, a hub id, or random weights as in random:Qwen3-0.6B"
ModelName = Annotated[str, typer.Option(metavar="MODEL", help=f"{A_MODEL[0].upper()}{A_MODEL[1:]}.")]
VariantsFrom = Annotated[
    list[Path] | None,
    typer.Option("--variants-from", metavar="DIR", help="A folder of more variants, <op>/<variant>.py. Repeatable."),
]


@app.command()
def ops(as_json: Json = False, variants_from: VariantsFrom = None) -> None:
    """List every op and variant: what runs here, and when it should win."""
    from experiments.commands.ops import run

    _exit(run, variants_from or [], as_json)


@app.command()
def check(
    only: Annotated[str | None, typer.Argument(metavar="[OP]", help="Only this op; --op says the same.")] = None,
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    variant: Annotated[str | None, typer.Option(help="Only variants of this name.")] = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Cases to draw for each variant: 20, or each sanitizer's own number.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first case; the next has the next seed.")] = 0,
    axes: Annotated[
        str | None, typer.Option(metavar="a=b,c=d", help="Axes to hold; all of an op's axes replay one case.")
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="k=v,...", help="Config values to hold.")] = None,
    sanitize: Annotated[
        str | None, typer.Option(metavar="all|NAME,...", help="Look for what results do not show, instead.")
    ] = None,
    mutate: Annotated[bool, typer.Option("--mutate", help="Plant faults in kernels: is each one noticed?")] = False,
    quota: Annotated[int, typer.Option(min=1, help="With --mutate: mutants of each op and kind of fault.")] = 10,
    verify_equivalent: Annotated[
        bool, typer.Option("--verify-equivalent", help="With --mutate: compare the bits of declared equivalents.")
    ] = False,
    as_json: Json = False,
    variants_from: VariantsFrom = None,
) -> None:
    """Check variants against the float64 oracle, put them under the sanitizers, or plant faults in them."""
    if mutate:
        from experiments.commands import mutate as command

        asked = command.Request(only or op, variant, quota, seed, variants_from or [])
        _exit(command.verify if verify_equivalent else command.run, asked, as_json)
    from experiments.commands.check import Request, run

    _exit(run, Request(only or op, variant, examples, seed, axes, config, variants_from or [], sanitize), as_json)


@app.command()
def bench(
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    variant: Annotated[str | None, typer.Option(help="Only variants (and peers) of this name.")] = None,
    axes: Annotated[
        str | None, typer.Option(metavar="a=b,c=d", help="One point, over the op's own; without it, each of those.")
    ] = None,
    launch: Annotated[
        str, typer.Option(metavar="eager|graph", help="On CUDA: launched each time, or replayed.")
    ] = "eager",
    l2: Annotated[
        str, typer.Option("--l2", metavar="cold|warm", help="On CUDA: the L2 cache before a sample.")
    ] = "cold",
    samples: Annotated[int, typer.Option(min=2, help="Of each variant at each point.")] = 20,
    as_json: Json = False,
    variants_from: VariantsFrom = None,
) -> None:
    """Time variants and peers where they are right, beside each other and the roofline."""
    from experiments.commands.bench import Request, run

    _exit(run, Request(op, variant, axes, launch, l2, samples, variants_from or []), as_json)


@app.command()
def tune(
    op: Annotated[str | None, typer.Option(help="Only this op.")] = None,
    variant: Annotated[str | None, typer.Option(help="Only variants of this name.")] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(metavar="POINT|a=b,c=d", help="A realistic point's name, or axes. Repeatable; all by default."),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cuda:1.")] = "cuda",
    variants_from: VariantsFrom = None,
) -> None:
    """Time the configs that the device's lockfile does not have yet, and keep them there."""
    from experiments.commands.tune import Request, run

    _exit(run, Request(op, variant, shapes or [], device, variants_from or []))


@app.command("gpu-report")
def gpu_report(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The report's folder; one that was begun goes on.")],
    minutes: Annotated[float, typer.Option(min=0.1, help="The time that it may take.")] = 9.0,
    device: Annotated[str, typer.Option(help="cuda, or cuda:1.")] = "cuda",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the steps; needs no GPU.")] = False,
) -> None:
    """Measure all that needs a GPU, the most valuable first: checks, tuning, timings beside peers, the engine."""
    from experiments.commands.gpu_report import run

    _exit(run, out, minutes, device, dry_run)


@app.command("results-table")
def results_table(
    update: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it between the file's markers.")] = None,
) -> None:
    """The performance table, made of experiments/results/."""
    from experiments.commands.results_table import run

    _exit(run, update)


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
def run(
    file: Annotated[Path, typer.Argument(help="The experiment's YAML.", metavar="FILE")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="key=value", help="Override a key, as in scheduler.block_size=32. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The run folder, new or empty, or one that was cut off; runs/<name>-... by default."
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with this run, which was cut off: what it has is kept.")
    ] = None,
    full: Annotated[
        bool | None,
        typer.Option("--full/--no-full", help="The sizes of its section `full`, or not; by default where it is CUDA."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="However many arms there are.")] = False,
    executor: Annotated[
        str, typer.Option(metavar="local|ray", help="Tasks here, one after the other, or over a Ray cluster.")
    ] = "local",
) -> None:
    """Run an experiment: check, time, serve and compare every arm, each in processes of its own."""
    from experiments.planning.layout import refuse_unsound

    serves = _refusing(refuse_unsound, file, overrides or [])
    from experiments.sweep.executors import make_executor

    chosen = _refusing(make_executor, executor, serves)
    from experiments.commands.run import Request
    from experiments.commands.run import run as run_command

    _exit(run_command, Request(file, overrides or [], out, resume, full, yes, chosen))


@app.command()
def profile(
    file: Annotated[Path | None, typer.Argument(help="The experiment's YAML.", metavar="[EXPERIMENT]")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="key=value", help="Override a key, as for run. Repeatable.")
    ] = None,
    nsys_export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read this instead: nsys export's .sqlite, or nsys stats' .csv."),
    ] = None,
    proton: Annotated[bool, typer.Option("--proton", help="With Triton's own profiler, on a GPU.")] = False,
    ncu: Annotated[
        str | None, typer.Option(metavar="OP.VARIANT", help="One launch of a kernel under Nsight Compute.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder, new or empty; profiles/<name>-... by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Where the first arm's steps spend their time, by phase, layer and op: by Nsight Systems, or recorded here."""
    from experiments.planning.layout import refuse_unsound

    if file is not None:
        _refusing(refuse_unsound, file, overrides or [])
    from experiments.commands.profile import Request, run

    _exit(run, Request(file, overrides or [], nsys_export, proton, ncu, out), as_json)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    form: Annotated[
        str, typer.Option("--format", metavar="html|md|json", help="A file in the folder, or text on stdout.")
    ] = "html",
) -> None:
    """What a run found: the verdict, tables and pictures, in one HTML file that needs no network."""
    from experiments.commands.report import run

    _end(run, folder, form)


for _command in (runs, compare, repeat):
    app.command()(_command)


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


@app.command("make-model")
def make_model(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it; new or empty.")],
    preset: Annotated[
        str, typer.Option(help="One that is trained, or random weights of a published shape, as in Qwen3-0.6B.")
    ] = "tiny",
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and of the order of the text.")] = 0,
) -> None:
    """Train a small real model on Python's own sources (about a minute), or write random weights of a large one."""
    from experiments.commands.make_model import run

    _exit(run, preset, directory, seed)


@app.command()
def quantize(
    source: Annotated[str, typer.Argument(metavar="IN", help=f"Dense: {A_MODEL}.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write it; new or empty.")],
    method: Annotated[str, typer.Option(metavar="rtn|gptq|awq|squeezellm", help="How codes are chosen.")],
    bits: Annotated[int, typer.Option(help="Of a code: 2, 3, 4 or 8; awq: 4; squeezellm: 3 or 4.")],
    group_size: Annotated[
        int | None, typer.Option(help="Inputs that share a scale; -1 is all. 128, or -1 for squeezellm.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(metavar="TEXT", help="A file of text like what the model will read; not for rtn.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="Tokens of it read at once: 512, or the model's length.")
    ] = None,
) -> None:
    """Write a quantized checkpoint of a dense one: GPTQ's format (rtn, gptq), AWQ's or SqueezeLLM's."""
    from experiments.commands.quantize import Request, run

    _exit(run, Request(source, out, method, bits, group_size, calibration, window))


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


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="config.json, quant_config.json and one pickle.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write it; new or empty.")],
) -> None:
    """Turn an original SqueezeLLM checkpoint, a Python pickle of tensors, into safetensors that can be served."""
    from experiments.commands.convert import run

    _exit(run, source, out)


def main() -> None:
    """The console command `tk`."""
    app()


if __name__ == "__main__":
    main()
