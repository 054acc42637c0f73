"""Makes a model ready to serve: LLM and AsyncLLM both get their engine here."""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import tkernels
import tmodel
from tkernels.ranges import NVTX
from tkernels.runtime import choose_runtime
from tsched.execution.engine import Engine
from tsched.execution.engine_stats import EngineStats
from tsched.execution.engine_thread import EngineThread
from tsched.execution.model_runner import ModelRunner
from tsched.execution.news import News, Ticket
from tsched.execution.placement import check_random_weights, check_token_table, find_device, find_dtype, fit_options
from tsched.execution.request import Request, extend_text, label_places, label_prompt
from tsched.execution.step_kernels import StepKernels
from tsched.options import OPTIONS, EngineOptions, read_options
from tsched.requests.bad_words import spell_bad_words
from tsched.requests.callbacks import attribute_to
from tsched.requests.chat_template import ChatEncoder, ChatTemplateError, read_chat_template
from tsched.requests.errors import RefusedError, RequestFault, UsageError
from tsched.requests.first_token import check_first_token
from tsched.requests.grammar import GrammarCompiler
from tsched.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tsched.requests.prompts import (
    Conversation,
    PreparedRequest,
    Prompt,
    Salt,
    check_named_ids,
    check_priority,
    check_salt,
    check_token_ids,
    parse_prompt,
)
from tsched.requests.sampling_params import SamplingParams
from tsched.requests.token_texts import TokenTexts
from tsched.requests.tokenizer import TOKENIZER_FILES, load_tokenizer
from tsched.requests.vllm_names import METHOD_NAMES
from tsched.resolved_options import ResolvedOptions
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.shared_prefixes import find_shared_prefixes

Swaps = Mapping[str, str | Mapping[str, Mapping[str, int] | None] | None]
"""op -> a variant as in the option `kernels`, or None for the op's default."""

_FREED = ("_engine", "_network", "_pages", "_grammars", "_thread", "kernels")  # what a closed one has no more

SelfT = TypeVar("SelfT")
ParametersT = ParamSpec("ParametersT")


def takes_options(
    record: Callable[ParametersT, EngineOptions],
) -> Callable[
    [Callable[[SelfT, str | Path, EngineOptions], None]], Callable[Concatenate[SelfT, str | Path, ParametersT], None]
]:
    """Makes `__init__(self, model, options)` take the options as keywords.

    Type checkers see the record's own parameters; `help` and `inspect.signature` see them too, and a docstring that
    lists them.
    """

    def decorate(
        make: Callable[[SelfT, str | Path, EngineOptions], None],
    ) -> Callable[Concatenate[SelfT, str | Path, ParametersT], None]:
        @functools.wraps(make)
        def __init__(self: SelfT, model: str | Path, **options: Any) -> None:
            make(self, model, read_options(options))

        own = list(inspect.signature(make).parameters.values())[:2]
        keywords = [
            inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.annotation)
            for one in OPTIONS.values()
        ]
        signature = inspect.Signature([*own, *keywords], return_annotation=None)
        lines = [
            f"    {one.name}: {one.meaning}; {one.usual} by default. It is {one.allowed}" for one in OPTIONS.values()
        ]
        vars(__init__).update(__signature__=signature)
        __init__.__doc__ = "\n".join((f"{inspect.getdoc(make)}\n\nOptions:", *lines))
        return __init__  # type: ignore[return-value]  # what it takes is known at run time alone

    return decorate


class ServedModel:
    """A model, its engine and its tokenizer: what LLM and AsyncLLM have in common.

    Attributes:
        weight_bytes: Of the weights in memory.
        prepare_report: The cost of bringing quantized weights into the layout of their kernel.
    """

    _thread: EngineThread | None = None  # that serves, where one does
    _is_closed = False

    @takes_options(EngineOptions)
    def __init__(self, model: str | Path, options: EngineOptions) -> None:
        """Makes `model` ready to serve.

        Args:
            model: A Hugging Face directory: config.json, safetensors and, for text, a tokenizer. Else a trained preset,
                "tiny", which is made where it is first used, or a model of the Hugging Face hub, "owner/name". Random
                weights of a published shape are asked for as such, "random:Qwen3-0.6B".
            options: Keywords, each of which has a default; see below.

        Raises:
            tmodel.ConfigError: There is no such model, or it cannot be served.
            tkernels.SelectionError: A kernel is unknown or unsupported here.
            ArgumentTypeError: There is no such option.
            ArgumentError: Any other argument is wrong. All of these are raised before any weight is loaded.
        """
        plan = tmodel.find_model(model, tmodel.architectures_with(options.architectures_from))
        self.config = plan.config
        self.device = find_device(options.device)
        self._runtime = choose_runtime(self.device)
        self.dtype = find_dtype(options.dtype, self.config.dtype)
        if plan.weights is None:  # bad options are refused before weights are made or fetched
            check_random_weights(plan, self.device, self.dtype)
            self._choose(options, None)
        directory = self.directory = plan.directory()
        fitted, self.kernels = self._choose(options, directory)
        self._choices, self._ops, self._axes = dict(options.kernels or {}), options.ops, fitted.kernel_axes(self.config)
        self.max_model_len = fitted.max_model_len
        scheduler = Scheduler(fitted, self.config.eos_token_ids)
        # tkernels decides at import how Triton runs, so transformers, which imports Triton too, comes after it.
        self._texts = TokenTexts(load_tokenizer(directory))
        self._grammars = GrammarCompiler(self.tokenizer, self.config.vocab_size, self.config.eos_token_ids)
        self._engine = self._make_engine(scheduler, options)
        self._ids = count()  # of sequences
        self._in_use = threading.Lock()  # by a call that steps the engine
        self._request_ids = count()

    def _choose(self, options: EngineOptions, weights: Path | None) -> tuple[ResolvedOptions, tkernels.KernelSet]:
        """Resolves the options for this model and selects its kernels."""
        fitted = fit_options(options, self.config, weights, device=self.device, dtype=self.dtype)
        check_token_table(fitted)
        kernels = tkernels.select(
            options.kernels or {},
            device=self.device,
            dtype=self.dtype,
            axes=fitted.kernel_axes(self.config),
            tuning=options.tuning,
            ops=options.ops,
            ranges=NVTX if options.ranges is None else options.ranges,
        )
        return fitted, kernels

    def _make_engine(self, scheduler: Scheduler, options: EngineOptions) -> Engine:
        """Loads the weights and allocates the caches."""
        pool, host, states = scheduler.pool, scheduler.host_pool, scheduler.states
        host_states = None if states is None else states.host_pool
        network = tmodel.load_model(self.directory, self.config, self.kernels, device=self.device, dtype=self.dtype)
        self._network, self.weight_bytes, self.prepare_report = network, network.weight_bytes, network.prepare_report
        kv_cache = tmodel.allocate_kv_cache(
            self.config, pool.num_blocks, pool.block_size, 0 if states is None else states.pool.num_blocks,
            device=self.device, dtype=self.dtype,
        )  # fmt: skip
        self._pages = tmodel.CachePages(
            kv_cache.blocks,
            self.kernels.copy_pages if kv_cache.blocks else None,
            self._runtime,
            0 if host is None else host.num_blocks,
        )
        runner = ModelRunner(
            network,
            kv_cache,
            scheduler,
            runtime=self._runtime,
            seed=options.seed,
            eos_token_ids=self.config.eos_token_ids,
            kernels=StepKernels.of(self.kernels),
            inverse_cdf=options.sampling == "inverse_cdf",
            find_groups=find_shared_prefixes if options.shared_prefixes else None,
            pages=self._pages,
            states=tmodel.CachePages(
                kv_cache.states, None, self._runtime, 0 if host_states is None else host_states.num_blocks
            ),
            cuda_graphs=options.cuda_graphs,
            ranges=self.kernels.ranges,
        )
        return Engine(scheduler, runner, overlap=options.overlap)

    @property
    def tokenizer(self) -> Any:
        """The directory's, a transformers one; None where it has none."""
        return self._texts.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._texts.use(tokenizer)

    def get_tokenizer(self) -> Any:
        """`tokenizer`."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without sampling parameters gets."""
        return SamplingParams()

    def __getattr__(self, name: str) -> Any:  # of what is not there
        if self._is_closed and name in _FREED:
            raise UsageError(f"this {type(self).__name__} was closed")
        why = f": it {METHOD_NAMES[name].answer}" if name in METHOD_NAMES else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{why}", name=name, obj=self)

    @property
    def arm(self) -> dict[str, str]:
        """op -> the variant that serves it."""
        return self.kernels.arm

    @property
    def kernel_choices(self) -> Swaps:
        """What was asked for by the option `kernels` and by swaps since."""
        return self._choices

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in one step."""
        return self._engine.scheduler.table.num_rows

    def plan_swap(self, choices: Swaps) -> Callable[[], int]:
        """Selects other kernels and builds the model over them.

        Args:
            choices: As the option `kernels`. An op that it leaves out keeps its variant; None asks for the default.

        Returns:
            What makes them run, and returns the first step that they run: to be called between two steps.

        Raises:
            tkernels.SelectionError: A name is unknown, or a variant cannot serve this model; nothing has changed then.
        """
        asked = {op: choice for op, choice in {**self._choices, **choices}.items() if choice is not None}
        old = self.kernels
        kernels = tkernels.select(
            asked, device=self.device, dtype=self.dtype, axes=self._axes, tuning=old.tuning, ops=self._ops,
            ranges=old.ranges,
        )  # fmt: skip
        network = tmodel.with_kernels(self._network, kernels)
        pages = self._pages.with_kernel(kernels.copy_pages) if "copy_pages" in kernels else self._pages

        def swap() -> int:
            self._choices, self.kernels, self._pages = asked, kernels, pages
            self._network, self.weight_bytes = network, network.weight_bytes
            return self._engine.use_model(network, kernels=StepKernels.of(kernels), pages=pages)

        return swap

    def stats(self) -> EngineStats:
        """Returns counts of steps, tokens, preemptions and prefix cache hits since its making, and the pool's use.

        Where a thread serves they are those that it left after its last step, and any other thread may ask.
        """
        return self._engine.stats() if self._thread is None else self._thread.stats

    def forget_graphs(self) -> None:
        """Drops all recorded steps, see Engine.forget_graphs."""
        self._engine.forget_graphs()

    def reset_peak(self) -> None:
        """Starts the pool's peak in `stats` anew."""
        self._engine.reset_peak()

    def _prepare(
        self,
        request_id: Any,
        entry: Any,
        params: SamplingParams,
        arrival: float,
        *,
        priority: int = 0,
        cache_salt: Salt = None,
    ) -> PreparedRequest:
        """Reads and checks a prompt. A fault of the prompt goes into `refusal` and is not raised.

        Raises:
            ArgumentTypeError: The priority or the salt has another type.
            ArgumentError: The priority is too large.
        """
        text: str | None = None
        token_ids: list[int] = []
        refusal = None
        try:
            text, token_ids = self._read_prompt(entry)
            token_ids = token_ids[-(params.truncate_prompt_tokens or 0) :]
            check_token_ids(token_ids, self.config.vocab_size)
            params = self._spell_bad_words(params)
            check_named_ids(params, self.config.vocab_size, self.config.eos_token_ids)
            form = params.structured_outputs
            grammar = None if form is None else self._grammars.start(form)
        except RefusedError as error:
            refusal, grammar = str(error), None
        salt, rank = check_salt(cache_salt), check_priority(priority)
        return PreparedRequest(request_id, text, token_ids, params, arrival, rank, salt, refusal, grammar)

    def _start(self, prepared: PreparedRequest) -> list[Request]:
        """Queues a request for each of the n samples of `prepared`.

        Raises:
            RefusedError: The request could never run to its end.
        """
        if prepared.refusal is not None:
            raise RefusedError(prepared.refusal)
        params, grammar = prepared.params, None if prepared.grammar is None else prepared.grammar.result()
        if isinstance(grammar, str):
            raise RefusedError(grammar)
        if grammar is not None:
            check_first_token(params, self.config.vocab_size, self.config.eos_token_ids, grammar)
        return self._engine.add_group(
            [next(self._ids) for _ in range(params.n)],
            prepared.token_ids,
            [params.derive_sample_params(index) for index in range(params.n)],
            detokenizers=[self._texts.make_detokenizer(params) for _ in range(params.n)],
            grammar=grammar,
            arrival_time=prepared.arrival_time,
            priority=prepared.priority,
            cache_salt=prepared.cache_salt,
        )

    def _spell_bad_words(self, params: SamplingParams) -> SamplingParams:
        """`params` with all bad_words in tokens, where there is a tokenizer."""
        if self.tokenizer is None or not any(isinstance(word, str) for word in params.forbidden):
            return params

        def encode(text: str) -> list[int]:
            with attribute_to("the tokenizer on bad_words"):
                return [operator.index(one) for one in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

        try:
            return replace(params, bad_words=spell_bad_words(params.forbidden, encode))
        except RequestFault as fault:
            raise RefusedError(str(fault)) from fault

    def _free(self) -> None:
        """Ends the thread that serves, if one does, and gives up all that is on the device."""
        if self._thread is not None:
            self._thread.close()
            self._thread.join()
        self._is_closed = True
        for name in _FREED:
            vars(self).pop(name, None)
        gc.collect()  # recorded steps refer to each other in circles
        self._runtime.release_memory()

    def warm_up(self, tell: Callable[[int, int], object] = lambda done, total: None) -> None:
        """Records the graphs of steps and serves a short request before any other: kernels are compiled and their tuned
        configs read now.

        Its steps and tokens count in `stats`.

        Args:
            tell: Called with how many graphs are recorded and how many will be.
        """
        self._engine.record_graphs(tell)
        prompt = [token % self.config.vocab_size for token in range(1, min(8, self.max_model_len))]
        params = SamplingParams(temperature=0, max_tokens=min(3, self.max_model_len - len(prompt)), ignore_eos=True)
        self._engine.add(next(self._ids), prompt, params, cache_salt=b"warm-up")
        while self._engine.has_unfinished:
            self._engine.step()

    def start_thread(
        self,
        on_news: Callable[[list[News]], object],
        on_end: Callable[[BaseException | None], object],
        *,
        label_logprobs: bool = True,
    ) -> EngineThread:
        """Begins to serve on a thread of its own, for a caller who takes the news of all requests together.

            thread = model.start_thread(on_news, on_end)
            ticket = model.make_ticket("a", [5, 6, 7], SamplingParams(max_tokens=8))
            thread.submit(ticket)

        Args:
            on_news: Called on the thread after each step with what it brought, see EngineThread.
            on_end: Called on the thread once, at its end, with the engine's exception or None.
            label_logprobs: Whether log-probabilities come with the texts of their tokens.

        Returns:
            The thread, which alone uses the engine from now on.
        """
        name = f"engine of {self.directory.name}"
        texts = self._texts if label_logprobs else None
        self._thread = EngineThread(self._engine, self._start, texts, on_news=on_news, on_end=on_end, name=name)
        return self._thread

    def make_ticket(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: Salt = None,
    ) -> Ticket:
        """Checks a request for `EngineThread.submit`. A fault of the prompt refuses it there.

        Raises:
            ArgumentTypeError: The priority or the salt has another type.
            ArgumentError: The priority is too large.
        """
        arrival = time.perf_counter()
        return Ticket(self._prepare(request_id, prompt, params, arrival, priority=priority, cache_salt=cache_salt))

    def _read_prompt(self, entry: Any) -> tuple[str | None, list[int]]:
        """The prompt's text, None where it is token ids alone, and its token ids."""
        if isinstance(entry, Conversation):
            return self._chat_encoder.encode(entry)
        text, token_ids = parse_prompt(entry)
        return text, self._encode(text or "") if token_ids is None else token_ids

    @functools.cached_property
    def _chat_encoder(self) -> ChatEncoder:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RefusedError(f"{self.directory} has no tokenizer of the library tokenizers, which chats need")
        try:
            return ChatEncoder(backend, read_chat_template(self.directory))
        except ChatTemplateError as error:
            raise RefusedError(str(error)) from error

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RefusedError(
                f"the prompt is text, and {self.directory} has no tokenizer ({', '.join(TOKENIZER_FILES)}): "
                "pass token ids"
            )
        try:
            text.encode()
        except UnicodeError as error:  # a lone surrogate
            raise RefusedError(f"the prompt cannot be encoded as UTF-8: {error}") from error
        try:
            with attribute_to("the tokenizer on the prompt"):
                return [operator.index(token_id) for token_id in self.tokenizer(text)["input_ids"]]
        except RequestFault as fault:
            raise RefusedError(str(fault)) from fault

    def _decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids; RequestFault where the tokenizer makes none of them."""
        with self._engine.phases.detokenize:
            return self._texts.decode(token_ids)

    def _make_refused_output(self, prepared: PreparedRequest, reason: str, now: float) -> RequestOutput:
        """Makes the output of a request that was refused for `reason`; `now` is on time.perf_counter's clock."""
        outputs = [CompletionOutput(i, [], "", "error") for i in range(prepared.params.n)]
        metrics = RequestMetrics(prepared.arrival_time, None, now)
        return RequestOutput(prepared.request_id, prepared.text, prepared.token_ids, outputs, metrics, error=reason)

    def _make_completion(self, index: int, request: Request) -> CompletionOutput:
        """Makes the whole completion of a finished request; its `error` is set where its tokens have no text."""
        sequence = request.sequence
        token_ids = sequence.output_token_ids
        wants_logprobs = sequence.params.logprobs is not None
        text = ""
        logprobs: list[dict[int, Logprob]] = []
        try:
            with self._engine.phases.detokenize:
                text = self._make_text(request, token_ids)
                logprobs = label_places(request.logprobs, self._texts)
        except RequestFault as fault:
            request.fail(str(fault))
        return CompletionOutput(
            index=index,
            token_ids=token_ids,
            text=text,
            finish_reason=sequence.finish_reason or "abort",
            logprobs=logprobs if wants_logprobs else None,
            cumulative_logprob=sum(place.logprobs[0] for place in request.logprobs) if wants_logprobs else None,
            stop_reason=request.stop_reason,
        )

    def _make_text(self, request: Request, token_ids: list[int]) -> str:
        """The whole text of a finished request; RequestFault where the tokenizer makes none."""
        if request.detokenizer is not None and request.stops_at_text:
            return request.detokenizer.text
        return extend_text(request, token_ids, is_over=True)

    def _make_prompt_logprobs(self, first: Request) -> list[dict[int, Logprob] | None] | None:
        """Makes the log-probabilities of a prompt, of whose requests `first` is one; its `error` is set where it
        fails.
        """
        try:
            return label_prompt(first, self._texts)
        except RequestFault as fault:
            first.fail(str(fault))
            return None
