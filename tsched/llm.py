"""Offline serving of a Hugging Face directory: `LLM(model, kernels={...}).generate(prompts, sampling_params)`."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tsched.execution.beam_search import BeamSearch, BeamSearchParams
from tsched.execution.request import Request, count_cached_tokens, joint_error, joint_metrics
from tsched.execution.served_model import ServedModel, Swaps
from tsched.requests.errors import ArgumentError, ArgumentTypeError, RefusedError, RequestFault, UsageError
from tsched.requests.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tsched.requests.prompts import Conversation, PreparedRequest, Prompt, Salt, broadcast_to_prompts, split_prompts
from tsched.requests.sampling_params import SamplingParams
from tsched.requests.vllm_names import take_unused_arguments

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")


def use_alone(
    method: Callable[Concatenate[LLM, ParametersT], ResultT],
) -> Callable[Concatenate[LLM, ParametersT], ResultT]:
    """Refuses calls of a method while the LLM is in use: two threads on one engine would break it."""

    @functools.wraps(method)
    def call(llm: LLM, *arguments: ParametersT.args, **named: ParametersT.kwargs) -> ResultT:
        if not llm._in_use.acquire(blocking=False):
            asking = threading.current_thread().name
            raise UsageError(
                f"this LLM is in use, so it cannot {method.__name__} for thread {asking!r} now: "
                "one thread uses it at a time. AsyncLLM serves requests as they come"
            )
        try:
            return method(llm, *arguments, **named)
        finally:
            llm._in_use.release()

    return call


UseTqdm = bool | Callable[..., Any]
"""Whether to show a bar, or what makes one as tqdm does."""

_PATIENCE_S = 2.0  # work shorter than this needs no progress bar


class LLM(ServedModel):
    """Serves lists of prompts to their ends. `__init__` lists its options.

    One thread uses it at a time: another's call is refused meanwhile, with a UsageError. AsyncLLM serves several.
    `close()` frees the device's memory, and so does the end of a `with`:

        with LLM("path/to/Qwen3-0.6B", prefix_cache="none") as llm:
            (output,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
            print(output.outputs[0].text)
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @use_alone
    def close(self) -> None:
        """Frees the device's memory: weights, caches and recorded steps. Any later use is refused with a UsageError.

        Raises:
            UsageError: This is in use.
        """
        if not self._is_closed:
            self._free()

    @take_unused_arguments
    @use_alone
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: Salt | Sequence[Salt] = None,
        use_tqdm: UseTqdm = True,
    ) -> list[RequestOutput]:
        """Serves `prompts` to their ends.

        Args:
            prompts: A text, a list of token ids, a Conversation, or a list of such.
            sampling_params: One for all prompts, or a list of one each; None is SamplingParams().
            priority: The same; lower goes first, with order="priority".
            cache_salt: The same; only requests of one salt share cached prefixes.
            use_tqdm: Whether to show a progress bar where the work is long and stderr is a terminal. A callable makes
                the bar, as tqdm does of `total` and `desc`.

        Returns:
            The outputs in the prompts' order. A request that cannot be served has finish_reason "error" and says why in
            `error`; the others finish.

        Raises:
            ArgumentTypeError: An argument has another type.
            ArgumentError: A list has another length than `prompts`, or a priority is too large.
            UsageError: This is in use, by another thread or by a callback's own call, or closed.
        """
        engine, entries = self._engine, split_prompts(prompts)
        params = broadcast_to_prompts(
            "sampling_params", sampling_params, len(entries), SamplingParams, default=SamplingParams()
        )
        asked = self._prepare_all(entries, params, priority, cache_salt)
        started: dict[int, list[Request]] = {}
        refused: dict[int, RequestOutput] = {}
        try:
            for place, prepared in enumerate(asked):
                try:
                    started[place] = self._start(prepared)
                except RefusedError as error:
                    refused[place] = self._make_refused_output(prepared, str(error), time.perf_counter())
            self._run(sum(map(len, started.values())), use_tqdm)
        except BaseException:
            for requests in started.values():
                for request in requests:
                    engine.abort(request.sequence.id)
            raise
        return [
            refused[place] if place in refused else self._output(prepared, started[place])
            for place, prepared in enumerate(asked)
        ]

    @take_unused_arguments
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: Salt | Sequence[Salt] = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continues a conversation, or each of several, that the checkpoint's chat template makes a prompt of.

        Args:
            messages: The messages of one conversation, or a list of such, see Conversation, like what is not said here.
            sampling_params: As in `generate`, like `use_tqdm`, `priority`, `cache_salt`, what is returned and raised.
            chat_template: The text of a template in the place of the checkpoint's.
            chat_template_kwargs: More of the template's variables.
        """
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            kind = type(messages).__name__
            raise ArgumentTypeError(f"messages must be a list of messages, or a list of such lists, got {kind}")
        several: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        conversations = [
            Conversation(one, add_generation_prompt, continue_final_message, chat_template, chat_template_kwargs or {})
            for one in several
        ]
        return self.generate(
            conversations, sampling_params, priority=priority, cache_salt=cache_salt, use_tqdm=use_tqdm
        )

    @take_unused_arguments
    @use_alone
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: Salt | Sequence[Salt] = None,
    ) -> list[RequestOutput]:
        """Finds the best completions of each of `prompts`, see tsched.execution.beam_search.

        Args:
            prompts: As in `generate`, like `priority` and `cache_salt`.
            params: How many completions to find, and how.

        Returns:
            The outputs in the prompts' order, each with `params.beam_width` completions, the best first, by their
            `cumulative_logprob`.

        Raises:
            ArgumentTypeError: An argument has another type.
            ArgumentError: beam_width is above max_num_seqs, or as in `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise ArgumentTypeError(f"params must be BeamSearchParams, got {type(params).__name__}")
        max_num_seqs = self.max_num_seqs
        if params.beam_width > max_num_seqs:
            raise ArgumentError(
                f"beam_width is {params.beam_width}, max_num_seqs {max_num_seqs}: beams run side by side"
            )
        entries = split_prompts(prompts)
        requests = SamplingParams(temperature=0.0, max_tokens=params.max_tokens)
        asked = self._prepare_all(entries, [requests] * len(entries), priority, cache_salt)
        overlap, self._engine.overlap = self._engine.overlap, False  # a beam's next token is not the engine's to choose
        try:
            return self._search(asked, params, at_once=max_num_seqs // params.beam_width)
        finally:
            self._engine.overlap = overlap

    @use_alone
    def swap_kernels(self, choices: Swaps) -> int:
        """Changes kernels of the loaded model, see AsyncLLM.swap_kernels.

        Args:
            choices: As the option `kernels`. An op that it leaves out keeps its variant; None asks for the default.

        Returns:
            The number of the first step that they run.

        Raises:
            tkernels.SelectionError: A name is unknown, or a variant cannot serve this model; nothing has changed then.
        """
        return self.plan_swap(choices)()

    def _run(self, total: int, use_tqdm: UseTqdm) -> None:
        """Steps until nothing is left, with a bar once that takes long."""
        engine = self._engine
        if callable(use_tqdm):
            self._run_beside(use_tqdm(total=total, desc="generating"), total)
            return
        started = time.perf_counter()
        while engine.has_unfinished and time.perf_counter() - started < _PATIENCE_S:
            engine.step()
        if not engine.has_unfinished:
            return
        console = Console(stderr=True)
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(
            *columns, TextColumn("{task.fields[rate]}"), console=console, disable=not (use_tqdm and console.is_terminal)
        ) as bar:
            task = bar.add_task("generate", total=total, completed=total - engine.num_unfinished, rate="")
            before = engine.stats().num_output_tokens
            resumed = time.perf_counter()
            while engine.has_unfinished:
                if engine.step():
                    rate = (engine.stats().num_output_tokens - before) / (time.perf_counter() - resumed)
                    bar.update(task, completed=total - engine.num_unfinished, rate=f"{rate:.0f} tokens/s")

    def _run_beside(self, bar: Any, total: int) -> None:
        """Steps until nothing is left, and tells a bar of tqdm's kind about it."""
        try:
            done = 0
            while self._engine.has_unfinished:
                self._engine.step()
                bar.update(total - self._engine.num_unfinished - done)
                done = total - self._engine.num_unfinished
        finally:
            bar.close()

    def _prepare_all(
        self,
        entries: list[Any],
        params: list[SamplingParams],
        priority: int | Sequence[int] | None,
        cache_salt: Salt | Sequence[Salt],
    ) -> list[PreparedRequest]:
        arrival = time.perf_counter()
        priorities = broadcast_to_prompts("priority", priority, len(entries), int, default=0)
        salts: list[Salt] = broadcast_to_prompts("cache_salt", cache_salt, len(entries), str, bytes, default=b"")
        return [
            self._prepare(next(self._request_ids), entry, one, arrival, priority=rank, cache_salt=salt)
            for entry, one, rank, salt in zip(entries, params, priorities, salts, strict=True)
        ]

    def _search(self, asked: list[PreparedRequest], params: BeamSearchParams, at_once: int) -> list[RequestOutput]:
        """Searches for each of `asked`, `at_once` of them at a time: all their beams have rows then."""
        waiting = deque(enumerate(asked))
        active: dict[int, BeamSearch] = {}
        outputs: dict[int, RequestOutput] = {}
        try:
            while waiting or active:
                while waiting and len(active) < at_once:
                    place, prepared = waiting.popleft()
                    try:
                        active[place] = self._begin_search(prepared, params)
                    except RefusedError as error:
                        outputs[place] = self._make_refused_output(prepared, str(error), time.perf_counter())
                if active:
                    self._engine.step()
                for place, search in list(active.items()):
                    search.advance()
                    if search.is_over:
                        outputs[place] = self._found(asked[place], search)
                        del active[place]
        except BaseException:
            for search in active.values():
                search.abort()
            raise
        return [outputs[place] for place in range(len(asked))]

    def _begin_search(self, prepared: PreparedRequest, params: BeamSearchParams) -> BeamSearch:
        if prepared.refusal is not None:
            raise RefusedError(prepared.refusal)
        search = BeamSearch(
            self._engine,
            prepared.token_ids,
            params,
            next_id=lambda: next(self._ids),
            eos_token_ids=self.config.eos_token_ids,
        )
        search.begin(arrival_time=prepared.arrival_time, priority=prepared.priority, cache_salt=prepared.cache_salt)
        return search

    def _found(self, prepared: PreparedRequest, search: BeamSearch) -> RequestOutput:
        """The output of a search that is over, with its completions or the reason why it failed."""
        metrics = RequestMetrics(
            prepared.arrival_time, search.first_token_time, time.perf_counter(), search.num_preemptions
        )
        error = search.error
        found = [CompletionOutput(0, [], "", "error")]
        if error is None:
            try:
                found = [
                    CompletionOutput(
                        index, list(one.token_ids), self._decode(one.token_ids), one.finish_reason, None, one.logprob
                    )
                    for index, one in enumerate(search.finished)
                ]
            except RequestFault as fault:
                error = str(fault)
        return RequestOutput(prepared.request_id, prepared.text, prepared.token_ids, found, metrics, error=error)

    def _output(self, prepared: PreparedRequest, requests: list[Request]) -> RequestOutput:
        prompt_logprobs = self._make_prompt_logprobs(requests[0])
        return RequestOutput(
            prepared.request_id,
            prepared.text,
            prepared.token_ids,
            [self._make_completion(index, request) for index, request in enumerate(requests)],
            joint_metrics(requests),
            error=joint_error(requests),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=count_cached_tokens(requests),
        )
