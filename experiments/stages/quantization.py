"""The model as a quantization method leaves it: how well it predicts, what it weighs, how fast it serves."""

import statistics
from pathlib import Path
from typing import Any

from experiments.planning.requests import requests_of
from experiments.quantization.evaluation import WindowReader, evaluate
from experiments.quantization.models import make_checkpoint, read_texts
from experiments.runs.rows import Status
from experiments.runs.table import spread
from experiments.serving.rounds import interleaved
from experiments.stages.context import Context, describe_error, quantized_model
from experiments.stages.engine import interpreted_ops, rounds_of
from experiments.stages.timed_llm import TimedLLM
from tkernels import SelectionError


def run(context: Context) -> None:
    """Records the row of one model: of the dense one, checkpoint 0, or of one that is quantized, which is made first
    where it is not in the cache.
    """
    try:
        columns = _judge(context)
    except Exception as error:
        status: Status = "unsupported" if isinstance(error, SelectionError) else "failed"
        context.record(status, reason=describe_error(error))
    else:
        context.record(**columns)


def _judge(context: Context) -> dict[str, Any]:
    """The figures of the task's model, beside the dense one's."""
    plan, model = context.plan, quantized_model(context.plan, context.task)
    assert plan.experiment.quantization is not None
    assert plan.model is not None
    source = context.directory
    context.say("texts")
    texts = read_texts(plan.experiment.quantization, plan.folder, source)
    directory = source if model is None else make_checkpoint(model, plan.model, texts, context.cache, context.say)
    context.say("reading")
    window = texts.windows.shape[1] - 1
    dense, *quantized = (
        WindowReader(
            folder,
            window,
            device=plan.device,
            dtype=plan.dtype,
            ops=plan.ops,
            architectures=plan.model.architectures,
        )
        for folder in dict.fromkeys((source, directory))
    )
    reader = quantized[0] if quantized else dense
    found = evaluate(reader, texts.windows, dense if quantized else None)
    return {
        "num_tokens": found.num_tokens,
        "window": found.window,
        "nats": found.nats,
        "perplexity": found.perplexity,
        "kl": found.kl,
        "top1_agreement": found.top1_agreement,
        "disk_bytes": sum(file.stat().st_size for file in directory.glob("*.safetensors")),
        "memory_bytes": reader.model.weight_bytes,
        **_time(context, directory, source),
    }


def _time(context: Context, directory: Path, source: Path) -> dict[str, Any]:
    """How fast the model in `directory` serves the first workload, in turns with the dense one in `source`."""
    plan, arm = context.plan, context.plan.arms[0]
    unknown = dict.fromkeys(("tokens_per_s", "tokens_per_s_iqr", "speedup"))
    if not plan.workloads:
        return {**unknown, "speed_reason": "there is no workload to serve: not measured"}
    folders = dict.fromkeys((directory, source))
    engines = [TimedLLM(folder, tuning=context.tuning, **plan.engine_options(arm)) for folder in folders]
    if slow := sorted({op for engine in engines for op in interpreted_ops(engine)}):
        return {**unknown, "speed_reason": f"{', '.join(slow)} interpreted on a CPU: not measured"}
    context.say("rounds")
    requests = requests_of(plan.workloads[0].requests, engines[0].config.vocab_size)
    servers = [rounds_of(engine, requests, arm.batching, "quantization") for engine in engines]
    rounds = interleaved(servers, plan.experiment.repeats, lambda: None)
    rates = [[served.tokens_per_s for served in mine] for mine in rounds]
    mine, dense = rates[0], rates[-1]
    return {
        "tokens_per_s": statistics.median(mine),
        "tokens_per_s_iqr": spread(mine),
        "speedup": statistics.median(a / b for a, b in zip(mine, dense, strict=True)),
        "speed_reason": None,
    }
