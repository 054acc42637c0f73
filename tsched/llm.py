"""Offline serving of a Hugging Face directory: `LLM(model, kernels={...}).generate(prompts, params)`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tsched.engine import Request
from tsched.outputs import RequestOutput
from tsched.prompts import Prompt, Salt, one_each, split_prompts
from tsched.sampling_params import SamplingParams
from tsched.scheduler import RefusedError
from tsched.served_model import Prepared, ServedModel, joint_error, joint_metrics

_PATIENCE_S = 2.0  # work shorter than this needs no progress bar


class LLM(ServedModel):
    """Serves lists of prompts to their ends. Not for use by two threads at once. The arguments are ServedModel's.

    llm = LLM("path/to/Qwen3-0.6B", prefix_cache="none")
    (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
    print(output.outputs[0].text)
    """

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: Salt | Sequence[Salt] = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Serve `prompts` (a text, a list of token ids, or a list of such) to their ends; outputs come in the
        prompts' order.

        params: None is SamplingParams(). cache_salt: only requests of one salt share cached prefixes. Each is one for
        all, or a list of one each. progress: show a bar where the work is long and stderr a terminal. A request that
        cannot be served has finish_reason "error" and says why in `error`; the others finish.
        """
        entries = split_prompts(prompts)
        arrival = time.perf_counter()
        each_params = one_each("params", params, len(entries), SamplingParams, default=SamplingParams())
        salts: list[Salt] = one_each("cache_salt", cache_salt, len(entries), str, bytes, default=b"")
        asked = [
            self._prepare(next(self._request_ids), entry, one, arrival, cache_salt=salt)
            for entry, one, salt in zip(entries, each_params, salts, strict=True)
        ]
        started: dict[int, list[Request]] = {}
        refused: dict[int, RequestOutput] = {}
        try:
            for place, prepared in enumerate(asked):
                try:
                    started[place] = self._start(prepared)
                except RefusedError as error:
                    refused[place] = self._refused(prepared, str(error), time.perf_counter())
            self._run(sum(map(len, started.values())), progress)
        except BaseException:
            for requests in started.values():
                for request in requests:
                    self._engine.abort(request.sequence.id)
            raise
        return [
            refused[place] if place in refused else self._output(prepared, started[place])
            for place, prepared in enumerate(asked)
        ]

    def _run(self, total: int, progress: bool) -> None:
        """Step until nothing is left, with a bar once that takes long."""
        engine = self._engine
        started = time.perf_counter()
        while engine.has_unfinished and time.perf_counter() - started < _PATIENCE_S:
            engine.step()
        if not engine.has_unfinished:
            return
        console = Console(stderr=True)
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(
            *columns, TextColumn("{task.fields[rate]}"), console=console, disable=not (progress and console.is_terminal)
        ) as bar:
            task = bar.add_task("generate", total=total, completed=total - engine.num_unfinished, rate="")
            before = engine.stats().num_output_tokens
            resumed = time.perf_counter()
            while engine.has_unfinished:
                if engine.step():
                    rate = (engine.stats().num_output_tokens - before) / (time.perf_counter() - resumed)
                    bar.update(task, completed=total - engine.num_unfinished, rate=f"{rate:.0f} tokens/s")

    def _output(self, prepared: Prepared, requests: list[Request]) -> RequestOutput:
        return RequestOutput(
            prepared.request_id,
            prepared.text,
            prepared.token_ids,
            [self._completion(index, request) for index, request in enumerate(requests)],
            joint_metrics(requests),
            error=joint_error(requests),
        )
