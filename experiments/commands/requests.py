"""What each command of `tk` is asked: a frozen record whose fields are its options, with their help. Needs no torch.

The command line is made of these records, and the module of each command takes its own. The docstring is the help.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from experiments.document import ExperimentError
from experiments.option_flags import Given, OptionFlags
from experiments.sampling import FLAG_KEYS, SamplingFlags
from tsched.options import SCHEDULER_OPTIONS
from tsched.serving.limits import LIMITS

A_MODEL = (
    "a Hugging Face directory, a trained preset as in tiny, a hub id (owner/name or owner/name@revision), or random "
    "weights as in random:Qwen3-0.6B"
)
ModelName = Annotated[str, Option(metavar="MODEL", help=f"{A_MODEL[0].upper()}{A_MODEL[1:]}.")]
Op = Annotated[str | None, Option(help="Only this op.")]
VariantName = Annotated[str | None, Option(help="Only variants of this name.")]
Json = Annotated[bool, Option("--json", help="Machine-readable output on stdout.")]
VariantsFrom = Annotated[
    list[Path],
    Option("--variants-from", metavar="DIR", help="A folder of more variants, <op>/<variant>.py. Repeatable."),
]
ArchitecturesFrom = Annotated[
    list[Path],
    Option("--architectures-from", metavar="DIR", help="A folder of more architectures, <name>.py. Repeatable."),
]
Overrides = Annotated[
    list[str],
    Option("--set", metavar="key=value", help="Override a key, as in scheduler.block_size=32. Repeatable."),
]


@dataclass(frozen=True)
class OpsRequest:
    """List every op and variant: what runs here, and when it should win. Of one op: all that a variant has to know."""

    op: Annotated[str | None, Argument(metavar="[OP]", help="The page of this op.")] = None
    as_json: Json = False
    variants_from: VariantsFrom = field(default_factory=list)


@dataclass(frozen=True)
class NewRequest:
    """Write the file of a new variant, which is right as it stands, and an experiment that runs it."""

    op: Annotated[str, Argument(metavar="OP", help="The op that it computes; tk ops lists them.")]
    name: Annotated[str, Argument(metavar="NAME", help="The variant's name, in lower case as a Python name.")]
    folder: Annotated[Path, Option("--in", metavar="FOLDER", help="Of variants, <op>/<variant>.py; made where new.")]
    start: Annotated[
        str | None,
        Option("--from", metavar="VARIANT", help="The variant to start from: the op's default, or else its simplest."),
    ] = None


@dataclass(frozen=True)
class CheckRequest:
    """Check variants against the float64 oracle, put them under the sanitizers, or plant faults in them."""

    only: Annotated[str | None, Argument(metavar="[OP]", help="Only this op; --op says the same.")] = None
    op: Op = None
    variant: VariantName = None
    examples: Annotated[
        int | None, Option(min=1, help="Cases to draw for each variant: 20, or each sanitizer's own number.")
    ] = None
    seed: Annotated[int, Option(min=0, help="Of the first case; the next has the next seed.")] = 0
    axes: Annotated[
        str | None, Option(metavar="a=b,c=d", help="Axes to hold; all of an op's axes replay one case.")
    ] = None
    config: Annotated[str | None, Option(metavar="k=v,...", help="Config values to hold.")] = None
    call: Annotated[
        Path | None, Option(metavar="FILE", help="Replay this call, which tk diverge kept, on variants of its op.")
    ] = None
    sanitize: Annotated[
        str | None, Option(metavar="all|NAME,...", help="Look for what results do not show, instead.")
    ] = None
    keep_going: Annotated[
        bool, Option("--keep-going", help="Show all failures of a variant, not the first three alone.")
    ] = False
    mutate: Annotated[bool, Option("--mutate", help="Plant faults in kernels and launchers: is each noticed?")] = False
    quota: Annotated[int, Option(min=1, help="With --mutate: mutants of each op and kind of fault.")] = 10
    verify_equivalent: Annotated[
        bool, Option("--verify-equivalent", help="With --mutate: compare the bits of declared equivalents.")
    ] = False
    as_json: Json = False
    variants_from: VariantsFrom = field(default_factory=list)

    @property
    def chosen_op(self) -> str | None:
        """The op by either of its two names."""
        if None not in (self.only, self.op) and self.only != self.op:
            raise ExperimentError([f"{self.only} and --op {self.op}: these are two ops; name one"])
        return self.only or self.op


@dataclass(frozen=True)
class BenchRequest:
    """Time variants and peers where they are right, beside each other and the roofline."""

    op: Op = None
    variant: Annotated[str | None, Option(help="Only variants (and peers) of this name.")] = None
    axes: Annotated[
        str | None, Option(metavar="a=b,c=d", help="Axes to hold, over a realistic point's; without it, all of those.")
    ] = None
    launch: Annotated[str, Option(metavar="eager|graph", help="On CUDA: launched each time, or replayed.")] = "eager"
    l2: Annotated[str, Option("--l2", metavar="cold|warm", help="On CUDA: the L2 cache before a sample.")] = "cold"
    samples: Annotated[int, Option(min=2, help="Of each variant at each point.")] = 20
    as_json: Json = False
    variants_from: VariantsFrom = field(default_factory=list)


@dataclass(frozen=True)
class TuneRequest:
    """Time the configs that the device's lockfile does not have yet, and keep them there."""

    op: Op = None
    variant: VariantName = None
    shapes: Annotated[
        list[str],
        Option(metavar="POINT|a=b,c=d", help="A realistic point's name, or axes. Repeatable; all by default."),
    ] = field(default_factory=list)
    device: Annotated[str, Option(help="cuda, or cuda:1.")] = "cuda"
    dry_run: Annotated[
        bool, Option("--dry-run", help="List the point at which each class of sizes is tuned; needs no GPU.")
    ] = False
    variants_from: VariantsFrom = field(default_factory=list)


@dataclass(frozen=True)
class GpuReportRequest:
    """Measure all that needs a GPU, the most valuable first: checks, tuning, timings beside peers, the engine."""

    out: Annotated[Path, Option(metavar="DIR", help="The report's folder; one that was begun, or its home/, goes on.")]
    minutes: Annotated[
        str,
        Option(metavar="N", help="The time that it may take; with --dry-run of several commands, as in 9,9,9."),
    ] = "9"
    device: Annotated[str, Option(help="cuda, or cuda:1.")] = "cuda"
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be done; needs no GPU.")] = False

    @property
    def lengths(self) -> list[float]:
        """Of the commands, in minutes; ExperimentError where they are none."""
        lengths = [_as_minutes(part) for part in self.minutes.split(",")]
        found = [length for length in lengths if length is not None]
        if len(found) < len(lengths) or (len(found) > 1 and not self.dry_run):
            several = "or, with --dry-run, those of several commands, as in 9,9,9"
            raise ExperimentError([f"--minutes {self.minutes}: must be a number from 0.1, {several}"])
        return found


def _as_minutes(text: str) -> float | None:
    """A number of at least 0.1 that is finite; None where it is none."""
    try:
        return value if 0.1 <= (value := float(text)) < math.inf else None
    except ValueError:
        return None


@dataclass(frozen=True)
class ResultsTableRequest:
    """The performance table, made of experiments/results/."""

    update: Annotated[Path | None, Option(metavar="FILE", help="Write it between the file's markers.")] = None


@dataclass(frozen=True)
class InspectRequest:
    """Compile every kernel for GPUs that are not there: registers, spills, occupancy, instructions, access widths."""

    op: Op = None
    variant: VariantName = None
    arch: Annotated[str | None, Option(metavar="sm_90,...", help="Only these architectures.")] = None
    axes: Annotated[str | None, Option(metavar="a=b,c=d", help="Axes to hold, over a realistic point's.")] = None
    dump: Annotated[
        str | None, Option(metavar="ptx|sass", help="Print the kernels' code instead (amdgcn for gfx942).")
    ] = None
    diff: Annotated[
        tuple[str, str] | None,
        Option(metavar="A B", help="Rows that differ: two outputs of --json, or two variants of --op."),
    ] = None
    update_expected: Annotated[
        bool, Option("--update-expected", help="Write the expected table of this Triton version.")
    ] = False
    predict: Annotated[
        str | None, Option(metavar="H100,...", help="Modelled times on these GPUs instead; nothing of it is measured.")
    ] = None
    against: Annotated[
        Path | None, Option(metavar="RUN", help="With --predict: how well it ranks what this folder's run measured.")
    ] = None
    as_json: Json = False
    variants_from: VariantsFrom = field(default_factory=list)


@dataclass(frozen=True)
class RunRequest:
    """Run an experiment: check, time, serve and compare every arm, each in processes of its own."""

    file: Annotated[Path, Argument(help="The experiment's YAML.", metavar="FILE")]
    overrides: Overrides = field(default_factory=list)
    out: Annotated[
        Path | None,
        Option(
            metavar="DIR", help="The run folder, new or empty, or one that was cut off; runs/<name>-... by default."
        ),
    ] = None
    resume: Annotated[
        Path | None, Option(metavar="RUN", help="Go on with this run, which was cut off: what it has is kept.")
    ] = None
    full: Annotated[
        bool | None,
        Option("--full/--no-full", help="The sizes of its section `full`, or not; by default where it is CUDA."),
    ] = None
    yes: Annotated[bool, Option("--yes", help="However many arms there are.")] = False
    executor: Annotated[
        str, Option(metavar="local|ray", help="Tasks here, one after the other, or over a Ray cluster.")
    ] = "local"


@dataclass(frozen=True)
class ProfileRequest:
    """Where the first arm's steps spend their time, by phase, layer and op: by Nsight Systems, or recorded here."""

    file: Annotated[Path | None, Argument(help="The experiment's YAML.", metavar="[EXPERIMENT]")] = None
    overrides: Overrides = field(default_factory=list)
    nsys_export: Annotated[
        Path | None, Option(metavar="FILE", help="Read this instead: nsys export's .sqlite, or nsys stats' .csv.")
    ] = None
    proton: Annotated[bool, Option("--proton", help="With Triton's own profiler, on a GPU.")] = False
    ncu: Annotated[str | None, Option(metavar="OP.VARIANT", help="One launch of a kernel under Nsight Compute.")] = None
    out: Annotated[
        Path | None, Option(metavar="DIR", help="A folder, new or empty; profiles/<name>-... by default.")
    ] = None
    as_json: Json = False


@dataclass(frozen=True)
class ReportRequest:
    """What a run found: the verdict, tables and pictures, in one HTML file that needs no network."""

    folder: Annotated[Path, Argument(metavar="RUN", help="The run's folder.")]
    form: Annotated[
        str, Option("--format", metavar="html|md|json", help="A file in the folder, or text on stdout.")
    ] = "html"


@dataclass(frozen=True)
class RunsRequest:
    """List the runs in a folder: when, where, of which code, and whether they ended."""

    folder: Annotated[Path, Argument(metavar="[FOLDER]", help="Where the runs are.")] = Path("runs")
    as_json: Json = False


@dataclass(frozen=True)
class CompareRequest:
    """Say of every figure whether it is better, worse or within noise: runs beside the first, or one run's arms."""

    folders: Annotated[list[Path], Argument(metavar="RUN...", help="Run folders; of a single one, its arms.")]
    across: Annotated[
        list[str],
        Option(metavar="WHAT", help="Allow another device, dtype, model, threads or workload. Repeatable."),
    ] = field(default_factory=list)
    as_json: Json = False


@dataclass(frozen=True)
class RepeatRequest:
    """Run a run's resolved experiment again, and say what changed: verdicts, rows, circumstances."""

    folder: Annotated[Path, Argument(metavar="RUN", help="The folder of a run.")]
    out: Annotated[
        Path | None, Option(metavar="DIR", help="The new run's folder, new or empty; runs/<name>-... by default.")
    ] = None


@dataclass(frozen=True)
class MakeModelRequest:
    """Train a small real model on Python's own sources (one to three minutes), or write large random weights."""

    directory: Annotated[Path, Argument(metavar="DIR", help="Where to write it; new or empty.")]
    preset: Annotated[
        str, Option(help="One that is trained, or random weights of a published shape, as in Qwen3-0.6B.")
    ] = "tiny"
    seed: Annotated[int, Option(min=0, max=2**63 - 1, help="Of the weights and of the order of the text.")] = 0


@dataclass(frozen=True)
class SimulateRequest:
    """Drive the real scheduler and prefix caches with a trace and a roofline: no model, no GPU."""

    trace: Annotated[
        str,
        Option(
            metavar="FILE|synthetic:N[:P]",
            help="Azure .csv, Mooncake .jsonl, or N generated requests, of priorities 0 to P - 1. Priorities are a "
            ".jsonl line's key 'priority', 0 without one, or synthetic:N:P's, the lower number first; an Azure trace "
            "has none.",
        ),
    ]
    policy: Annotated[str, Option(metavar="NAME,...", help="Prefix caches, side by side.")] = ",".join(
        SCHEDULER_OPTIONS["prefix_cache"].choices
    )
    gpu: Annotated[str, Option(help="Whose roofline gives the time of a step.")] = "H100"
    model: Annotated[str, Option(metavar="NAME|DIR", help="A Hugging Face directory, or a published model's name.")] = (
        "Llama-3.1-8B"
    )
    pool_blocks: Annotated[
        str | None, Option(metavar="N,...|unbounded", help="Pool sizes; what the GPU holds by default.")
    ] = None
    page_size: Annotated[
        str | None, Option(metavar="N,...|contiguous", help="Tokens a block; the trace's own (16, 512) by default.")
    ] = None
    rate: Annotated[float | None, Option(min=1e-6, help="Requests a second, in the mean.")] = None
    speedup: Annotated[float | None, Option(min=1e-6, help="Arrivals this many times as dense.")] = None
    limit: Annotated[int | None, Option(min=1, help="Only the trace's first requests.")] = None
    architectures_from: ArchitecturesFrom = field(default_factory=list)
    as_json: Json = False
    engine: Annotated[
        Given,
        OptionFlags(
            # There is no device, nothing is computed or drawn; block sizes and prefix caches are lists.
            [
                one
                for one in SCHEDULER_OPTIONS
                if one not in ("block_size", "prefix_cache", "overlap", "cuda_graphs", "sampling", "shared_prefixes")
            ],
            aliases={
                "max_num_batched_tokens": "--budget",
                "kv_cache_bytes": "--kv-bytes",
                "swap_bytes": "--host-bytes",
            },
            usual={"max_model_len": "the trace's longest", "swap_bytes": "as much as the pool"},
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerateRequest:
    """Continue a prompt with a model and the kernels of your choice."""

    model: ModelName
    prompt: Annotated[str, Option(help="The text to continue.")]
    kernels: Annotated[list[str], Option(metavar="op=variant", help="A variant for an op. Repeatable.")] = field(
        default_factory=list
    )
    variants_from: VariantsFrom = field(default_factory=list)
    architectures_from: ArchitecturesFrom = field(default_factory=list)
    sampling: Annotated[
        Mapping[str, Any], SamplingFlags(["max_tokens", *FLAG_KEYS], usual={"max_tokens": 64, "temperature": 0.0})
    ] = field(default_factory=dict)
    engine: Annotated[Given, OptionFlags(["dtype", "device", *SCHEDULER_OPTIONS])] = field(default_factory=dict)


@dataclass(frozen=True)
class ServeRequest:
    """Serve a model to OpenAI's clients: /v1/completions, /v1/chat/completions, /v1/models. Ctrl-C ends it."""

    model: Annotated[
        str,
        Argument(
            metavar="MODEL|FILE.yaml",
            help=f"{A_MODEL[0].upper()}{A_MODEL[1:]}. Or an experiment, whose model, kernels and scheduler are served.",
        ),
    ]
    host: Annotated[str, Option(help="The address to listen at; 0.0.0.0 is all of this machine's.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8000
    name: Annotated[str | None, Option(help="What clients call the model; its own name by default.")] = None
    api_key_file: Annotated[
        Path | None, Option(metavar="FILE", help="Keys that may ask, a YAML list of {key, tenant, priority, admin}.")
    ] = None
    chat_template: Annotated[
        Path | None, Option(metavar="FILE", help="A jinja2 template in the place of the model's own.")
    ] = None
    kernels: Annotated[list[str], Option(metavar="op=variant", help="A variant for an op. Repeatable.")] = field(
        default_factory=list
    )
    variants_from: VariantsFrom = field(default_factory=list)
    architectures_from: ArchitecturesFrom = field(default_factory=list)
    engine: Annotated[Given, OptionFlags(["dtype", "device", *SCHEDULER_OPTIONS])] = field(default_factory=dict)
    limits: Annotated[Given, OptionFlags([*LIMITS], LIMITS, "Limits")] = field(default_factory=dict)


_ARM = "default, transformers, or kernels, op=variant,op=variant"


@dataclass(frozen=True)
class DivergeRequest:
    """Where two sets of kernels, or one and transformers, part: the first layer, op, row, element, and a replay."""

    first: Annotated[str, Argument(metavar="A", help=f"An arm: {_ARM}.")]
    second: Annotated[str, Argument(metavar="B", help="Another.")]
    model: ModelName
    prompts: Annotated[
        list[str], Option("--prompt", metavar="TEXT", help="A text to read. Repeatable; drawn tokens by default.")
    ] = field(default_factory=list)
    max_tokens: Annotated[int, Option(min=0, help="Tokens that the first kernels add to each.")] = 8
    out: Annotated[
        Path | None, Option(metavar="DIR", help="For captured calls, new or empty; diverged-... by default.")
    ] = None
    variants_from: VariantsFrom = field(default_factory=list)
    architectures_from: ArchitecturesFrom = field(default_factory=list)
    as_json: Json = False
    engine: Annotated[Given, OptionFlags(["dtype", "device"])] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalRequest:
    """Perplexity on a text, and, against a dense model, KL divergence and how often the likeliest token agrees."""

    model: ModelName
    text: Annotated[Path, Option(metavar="FILE", help="What it has to predict.")]
    reference: Annotated[str | None, Option(metavar="MODEL", help="A dense model, to compare distributions with.")] = (
        None
    )
    window: Annotated[
        int | None, Option(min=1, metavar="TOKENS", help="Tokens read at once: 2048, or the model's length.")
    ] = None
    architectures_from: ArchitecturesFrom = field(default_factory=list)
    as_json: Json = False


@dataclass(frozen=True)
class QuantizeRequest:
    """Write a quantized checkpoint of a dense one: GPTQ's format (rtn, gptq), AWQ's, SqueezeLLM's or, of 8-bit weights
    and inputs, compressed-tensors' (smoothquant, fp8).
    """

    source: Annotated[str, Argument(metavar="IN", help=f"Dense: {A_MODEL}.")]
    out: Annotated[Path, Argument(metavar="OUT", help="Where to write it; new or empty.")]
    method: Annotated[str, Option(metavar="rtn|gptq|awq|squeezellm|smoothquant|fp8", help="How codes are chosen.")]
    bits: Annotated[int, Option(help="Of a code: 2, 3, 4 or 8; awq: 4; squeezellm: 3 or 4; smoothquant, fp8: 8.")]
    group_size: Annotated[
        int | None, Option(help="Inputs that share a scale; -1 is all. 128, or -1 where a method has no groups.")
    ] = None
    options: Annotated[
        list[str],
        Option(
            "--option",
            metavar="name=value",
            help="What else the method is told: of gptq damping, act_order, search, sweeps, symmetric, "
            "checkpoint_format. Repeatable.",
        ),
    ] = field(default_factory=list)
    calibration: Annotated[
        Path | None, Option(metavar="TEXT", help="A file of text like what the model will read; not for rtn, fp8.")
    ] = None
    window: Annotated[
        int | None, Option(min=1, metavar="TOKENS", help="Tokens of it read at once: 512, or the model's length.")
    ] = None
    architectures_from: ArchitecturesFrom = field(default_factory=list)


@dataclass(frozen=True)
class ConvertRequest:
    """Turn a checkpoint of Python pickles, pytorch_model.bin or SqueezeLLM's own, into safetensors that are served."""

    source: Annotated[
        Path,
        Argument(metavar="IN", help="config.json and pytorch_model.bin, parts of it with their index, or a pickle."),
    ]
    out: Annotated[Path, Argument(metavar="OUT", help="Where to write it; new or empty.")]
    architectures_from: ArchitecturesFrom = field(default_factory=list)
