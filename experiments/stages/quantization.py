"""The model as a quantization method leaves it: how well it predicts, what it weighs, how fast it serves."""

import statistics
from pathlib import Path
from typing import Any

from experiments.planning.requests import requests_of
from experiments.quantization.evaluation import WindowReader, evaluate
from experiments.quantization.models import QuantizedModel, Texts, list_quantized_models, make_checkpoint, read_texts
from experiments.runs.rows import Row, Status
from experiments.runs.table import spread
from experiments.serving.rounds import Server, interleaved
from experiments.stages.context import Context, labels_of, one_line, plan_settings
from experiments.stages.engine import interpreted_ops, rounds_of
from experiments.stages.timed_llm import TimedLLM
from tkernels import SelectionError

CACHE = "quantized"
"""The folder of quantized checkpoints, beside the run's: another run finds them there."""


def run(context: Context) -> None:
    """Records the row of one model: of the dense one, checkpoint 0, or of one that is quantized, which is made first
    where it is not in the cache.
    """
    plan, report = context.plan, context.report
    quantization = plan.experiment.quantization
    assert plan.model is not None
    assert quantization is not None
    number = context.task.checkpoint
    one = None if number == 0 else list_quantized_models(quantization)[number - 1]
    which = {"arm": labels_of(plan, plan.arms[0]), "settings": plan_settings(plan)}
    common = {**context.common(**which), **settings_of(one)}
    try:
        source = plan.model.directory()
        report.say("texts")
        texts = read_texts(quantization, plan.folder, source)
        directory = source if one is None else make_checkpoint(one, plan.model, texts, context.cache, report.say)
        report.say("reading")
        context.record(_Judge(context, source, texts).row(one, directory, common))
    except Exception as error:
        status: Status = "unsupported" if isinstance(error, SelectionError) else "failed"
        context.record(Row(stage="quantization", **common, status=status, reason=one_line(error)))


def settings_of(one: QuantizedModel | None) -> dict[str, Any]:
    """A row's fields that say which model it is of; None is the dense one."""
    return {"method": "dense", "bits": None, "group_size": None} if one is None else dict(vars(one))


class _Judge:
    """Judges a model beside the dense one."""

    def __init__(self, context: Context, source: Path, texts: Texts) -> None:
        self.context = context
        self.texts = texts
        self.arm = context.plan.arms[0]
        self.dense = self._reader(source)
        served = next(iter(context.plan.workloads), None)
        self.requests = None if served is None else requests_of(served.workload, self.dense.config.vocab_size)
        self.engine = None if self.requests is None else self._engine(source)

    def row(self, one: QuantizedModel | None, directory: Path, common: dict[str, Any]) -> Row:
        """The row of the model in `directory`; `one` None is the dense one."""
        reader = self.dense if one is None else self._reader(directory)
        found = evaluate(reader, self.texts.windows, None if one is None else self.dense)
        return Row(
            stage="quantization",
            **common,
            status="ok",
            num_tokens=found.num_tokens,
            window=found.window,
            nats=found.nats,
            perplexity=found.perplexity,
            kl=found.kl,
            top1_agreement=found.top1_agreement,
            disk_bytes=sum(file.stat().st_size for file in directory.glob("*.safetensors")),
            memory_bytes=reader.model.weight_bytes,
            **self._speed(one, directory),
        )

    def _reader(self, directory: Path) -> WindowReader:
        plan = self.context.plan
        window = self.texts.windows.shape[1] - 1
        assert plan.model is not None
        return WindowReader(
            directory,
            window,
            device=plan.device,
            dtype=plan.dtype,
            ops=plan.ops,
            architectures=plan.model.architectures,
        )

    def _engine(self, directory: Path) -> TimedLLM:
        return TimedLLM(directory, tuning=self.context.tuning, **self.context.plan.engine_options(self.arm))

    def _speed(self, one: QuantizedModel | None, directory: Path) -> dict[str, Any]:
        """The row's figures of time, in turns with the dense model."""
        unknown = dict.fromkeys(("tokens_per_s", "tokens_per_s_iqr", "speedup"))
        if self.engine is None:
            return {**unknown, "speed_reason": "there is no workload to serve: not measured"}
        engine = self.engine if one is None else self._engine(directory)
        slow = sorted({*interpreted_ops(engine), *interpreted_ops(self.engine)})
        if slow:
            return {**unknown, "speed_reason": f"{', '.join(slow)} interpreted on a CPU: not measured"}
        self.context.report.say("rounds")
        servers = [self._server(each) for each in dict.fromkeys((engine, self.engine))]
        rates: list[list[float]] = []
        for rounds in interleaved(servers, self.context.plan.experiment.repeats, lambda: None):
            if isinstance(rounds, Exception):
                raise rounds
            rates.append([served.tokens_per_s for served in rounds])
        mine, dense = rates[0], rates[-1]
        return {
            "tokens_per_s": statistics.median(mine),
            "tokens_per_s_iqr": spread(mine),
            "speedup": statistics.median(a / b for a, b in zip(mine, dense, strict=True)),
            "speed_reason": None,
        }

    def _server(self, engine: TimedLLM) -> Server:
        assert self.requests is not None
        return rounds_of(engine, self.requests, self.arm.batching, "quantization")
