"""The model as each quantization method leaves it: how well it predicts, what it weighs, how fast it serves."""

import gc
import statistics
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from experiments.evaluation import WindowReader, evaluate
from experiments.quantization_report import write_plot
from experiments.quantized_models import QuantizedModel, Texts, checkpoint_of, quantized_models, texts_of
from experiments.rows import QuantizationRow, Status
from experiments.stages.context import Context, Step, one_line
from experiments.stages.engine import interpreted_ops, served_once
from experiments.stages.memory import groups_of
from experiments.stages.serving import Server, interleaved, spread
from experiments.timed_llm import TimedLLM
from experiments.workloads import requests_of
from tkernels import SelectionError

CACHE = "quantized"
"""The folder of quantized checkpoints, beside the run's: another run finds them there."""


def run(context: Context) -> None:
    """Records a row for the dense model and one for each quantized one, and draws their plot."""
    plan, quantization = context.plan, context.plan.experiment.quantization
    if plan.model is None or quantization is None:
        return
    source = plan.model.directory()
    models = quantized_models(quantization)
    cache = context.folder.path.parent / CACHE
    with context.step("quantize", 1 + len(models)) as step:
        step.say("texts")
        texts = texts_of(quantization, plan.folder, source)
        judge = _Judge(context, source, texts)
        step.say("dense")
        judge.record(None, source)
        step.advance("")
        for one in models:
            step.say(one.label)
            try:
                directory = checkpoint_of(one, source, texts, cache, partial(_say, step, one))
            except Exception as error:
                judge.fail(one, error)
            else:
                judge.record(one, directory)
            step.advance("")
    write_plot([row for row in context.folder.rows if isinstance(row, QuantizationRow)], context.folder.path)


def _say(step: Step, one: QuantizedModel, done: str) -> None:
    step.say(f"{one.label}: {done}")


class _Judge:
    """Judges models beside the dense one, whose reader and engine stay in memory; of the others, one at a time."""

    def __init__(self, context: Context, source: Path, texts: Texts) -> None:
        self.context = context
        self.texts = texts
        self.arm = context.plan.arms[0]
        ((seat, *_), *_) = groups_of(context.plan, [(0, self.arm)])
        self.options: dict[str, Any] = seat.options
        self.dense = self._reader(source)
        workload = next(iter(context.plan.experiment.workload), None)
        self.requests = None if workload is None else requests_of(workload, self.dense.config.vocab_size)
        self.engine = None if self.requests is None else self._engine(source)

    def record(self, one: QuantizedModel | None, directory: Path) -> None:
        """The row of the model in `directory`; None is the dense one."""
        try:
            reader = self.dense if one is None else self._reader(directory)
            found = evaluate(reader, self.texts.windows, None if one is None else self.dense)
            row = QuantizationRow(
                **self._common(one),
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
            del reader
        except Exception as error:
            self.fail(one, error)
        else:
            self.context.folder.record(row)
        gc.collect()

    def fail(self, one: QuantizedModel | None, error: Exception) -> None:
        status: Status = "unsupported" if isinstance(error, SelectionError) else "failed"
        self.context.folder.record(QuantizationRow(**self._common(one), status=status, reason=one_line(error)))

    def _common(self, one: QuantizedModel | None) -> dict[str, Any]:
        settings = {"method": "dense", "bits": None, "group_size": None} if one is None else vars(one)
        return {**self.context.common(arm=self.arm.labels), **settings}

    def _reader(self, directory: Path) -> WindowReader:
        plan = self.context.plan
        window = self.texts.windows.shape[1] - 1
        return WindowReader(directory, window, device=plan.device, dtype=plan.dtype, ops=plan.ops)

    def _engine(self, directory: Path) -> TimedLLM:
        plan = self.context.plan
        return TimedLLM(
            directory, kernels=self.arm.choices, dtype=plan.dtype, device=plan.device, ops=plan.ops,
            tuning=self.context.tuning, **self.options,
        )  # fmt: skip

    def _speed(self, one: QuantizedModel | None, directory: Path) -> dict[str, Any]:
        """The row's figures of time, in turns with the dense model."""
        unknown = dict.fromkeys(("tokens_per_s", "tokens_per_s_iqr", "speedup"))
        if self.engine is None:
            return {**unknown, "speed_reason": "there is no workload to serve: not measured"}
        engine = self.engine if one is None else self._engine(directory)
        slow = sorted({*interpreted_ops(engine), *interpreted_ops(self.engine)})
        if slow:
            return {**unknown, "speed_reason": f"{', '.join(slow)} interpreted on a CPU: not measured"}
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
        requests = self.requests
        assert requests is not None
        salts = (f"quantization, round {number}" for number in count())
        return lambda: served_once(engine, requests, self.arm.batching, next(salts))
