"""Offline serving of a Hugging Face directory: `LLM(model, kernels={...}).generate(prompts, params)`."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import tkernels
import tmodel
from tkernels.selection import Choices
from tkernels.tuning import TuningMode
from tsched.cache_size import num_kv_blocks
from tsched.detokenizer import IncrementalDetokenizer
from tsched.engine import Engine, EngineStats, Request
from tsched.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tsched.prompts import Prompt, check_stop_ids, check_token_ids, parse_prompt, split_prompts
from tsched.sampler import TokenLogprobs
from tsched.sampling_params import SamplingParams
from tsched.scheduler import RefusedError, Scheduler

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_PATIENCE_S = 2.0  # work shorter than this needs no progress bar


class LLM:
    """A model and all that serves it. Not for use by two threads at once.

    model                   a Hugging Face directory: config.json, safetensors and, for text, a tokenizer
    kernels                 {op: variant} or {op: {variant: {config value: number}}}; other ops get the default
    dtype                   "auto" (the checkpoint's), a name or a torch.dtype: of the activations, weights and KV cache
    device                  None takes CUDA where there is one, else the CPU
    max_model_len           tokens a request, prompt and output together; None is what the model was made for
    max_num_seqs            requests in one step
    max_num_batched_tokens  tokens in one step
    kv_cache_bytes          None takes 9/10 of what a GPU has left, or up to 1 GiB of a CPU's memory
    block_size              tokens a cache block, a power of two
    seed                    of the requests that bring none
    order, preemption, prefix_cache   the scheduler's policies by name, see tsched.policies
    tuning, ops             handed to tkernels.select: how tuned configs are found, and the registry of variants

    Raises, before any weight is loaded: tmodel.ConfigError for a directory that cannot be served,
    tkernels.SelectionError for a kernel that is unknown or unsupported here, ValueError for any other argument.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        kernels: Choices | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        kv_cache_bytes: int | None = None,
        block_size: int = 16,
        seed: int = 0,
        order: str = "fcfs",
        preemption: str = "recompute",
        prefix_cache: str = "none",
        tuning: TuningMode | tkernels.Tuning = "nearest",
        ops: tkernels.Registry | None = None,
    ) -> None:
        directory = self.directory = Path(model)
        seed = _integer("seed", seed, 0, "an integer of at least 0")
        max_num_seqs = _integer("max_num_seqs", max_num_seqs, 1, "an integer of at least 1")
        max_num_batched_tokens = _integer(
            "max_num_batched_tokens", max_num_batched_tokens, 1, "an integer of at least 1"
        )
        block_size = _integer("block_size", block_size, 1, "an integer that is a power of two")
        if kv_cache_bytes is not None:
            kv_cache_bytes = _integer("kv_cache_bytes", kv_cache_bytes, 1, "None or an integer of at least 1")
        self.config = tmodel.load_config(directory)
        self.device = _device(device)
        self.dtype = _dtype(dtype, self.config.dtype)
        self.max_model_len = _max_model_len(max_model_len, self.config.max_position_embeddings)
        num_blocks = num_kv_blocks(
            directory,
            self.config,
            kv_cache_bytes=kv_cache_bytes,
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
            max_tokens=max_num_seqs * self.max_model_len,
        )
        scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.max_model_len,
            eos_token_ids=self.config.eos_token_ids,
            order=order,
            preemption=preemption,
            prefix_cache=prefix_cache,
        )
        axes = self.config.kernel_axes(
            max_num_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
        )
        self.kernels = tkernels.select(
            kernels or {}, device=self.device, dtype=self.dtype, axes=axes, tuning=tuning, ops=ops
        )
        # tkernels decides at import how Triton runs, so transformers, which imports Triton too, comes after it.
        self.tokenizer = _load_tokenizer(directory)
        network = tmodel.load_model(directory, self.config, self.kernels, device=self.device, dtype=self.dtype)
        kv_cache = tmodel.allocate_kv_cache(self.config, num_blocks, block_size, device=self.device, dtype=self.dtype)
        self._engine = Engine(
            network, kv_cache, scheduler, device=self.device, seed=seed, eos_token_ids=self.config.eos_token_ids
        )
        self._ids = count()

    @property
    def arm(self) -> dict[str, str]:
        """op -> the variant that serves it."""
        return self.kernels.arm

    def stats(self) -> EngineStats:
        """Steps, tokens, preemptions and the pool's use since the LLM was made."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Serve `prompts` (a text, a list of token ids, or a list of such) to their ends; outputs come in the
        prompts' order.

        params: one for all, or one each; None is SamplingParams(). progress: show a bar where the work is long and
        stderr a terminal. A request that cannot be served has finish_reason "error" and says why in `error`; the
        others finish.
        """
        entries = split_prompts(prompts)
        arrival = time.perf_counter()
        wanted = _params_for(len(entries), params)
        requests = [self._admit(entry, one, arrival) for entry, one in zip(entries, wanted, strict=True)]
        try:
            self._run(sum(isinstance(r, _Admitted) for r in requests), progress)
        except BaseException:
            for admitted in requests:
                if isinstance(admitted, _Admitted):
                    self._engine.abort(admitted.request.sequence.id)
            raise
        return [r if isinstance(r, RequestOutput) else self._output(r) for r in requests]

    def _admit(self, entry: Any, params: SamplingParams, arrival: float) -> _Admitted | RequestOutput:
        """The request in the engine's hands, or the output that tells why it is not."""
        request_id = next(self._ids)
        text: str | None = None
        token_ids: list[int] = []
        try:
            prompt = parse_prompt(entry)
            text = prompt if isinstance(prompt, str) else None
            token_ids = self._encode(prompt) if isinstance(prompt, str) else prompt
            check_token_ids(token_ids, self.config.vocab_size)
            check_stop_ids(params, self.config.vocab_size)
            needs_text = bool(params.stop_strings) and self.tokenizer is not None
            detokenizer = IncrementalDetokenizer(self._decode, params.stop_strings) if needs_text else None
            request = self._engine.add(request_id, token_ids, params, detokenizer=detokenizer, arrival_time=arrival)
        except RefusedError as error:
            failed = CompletionOutput(index=0, token_ids=[], text="", finish_reason="error")
            metrics = RequestMetrics(arrival, None, time.perf_counter())
            return RequestOutput(request_id, text, token_ids, [failed], metrics, error=str(error))
        return _Admitted(request, text, token_ids)

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

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RefusedError(
                f"the prompt is text, and {self.directory} has no tokenizer ({', '.join(_TOKENIZER_FILES)}): "
                "pass token ids"
            )
        try:
            text.encode()
        except UnicodeError as error:  # a lone surrogate
            raise RefusedError(f"the prompt cannot be encoded as UTF-8: {error}") from error
        return list(self.tokenizer(text)["input_ids"])

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _output(self, admitted: _Admitted) -> RequestOutput:
        request = admitted.request
        sequence = request.sequence
        token_ids = sequence.output_token_ids
        wants_logprobs = sequence.params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            token_ids=token_ids,
            text=self._decode(token_ids) if request.detokenizer is None else request.detokenizer.text,
            finish_reason=sequence.finish_reason or "abort",
            logprobs=[self._logprobs(place) for place in request.logprobs] if wants_logprobs else None,
            cumulative_logprob=sum(place.logprobs[0] for place in request.logprobs) if wants_logprobs else None,
        )
        metrics = RequestMetrics(
            request.arrival_time, request.first_token_time, request.finish_time, sequence.num_preemptions
        )
        return RequestOutput(sequence.id, admitted.text, admitted.token_ids, [completion], metrics, error=request.error)

    def _logprobs(self, place: TokenLogprobs) -> dict[int, Logprob]:
        """By token id; the chosen token is the first, also where it is among the most likely."""
        found: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(place.token_ids, place.logprobs, place.ranks, strict=True):
            if token_id not in found:
                decoded = self._decode([token_id]) if self.tokenizer is not None else None
                found[token_id] = Logprob(logprob, rank, decoded)
        return found


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A request that the engine took, and its prompt."""

    request: Request
    text: str | None
    token_ids: list[int]


def _params_for(num_prompts: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Sequence):
        raise TypeError(f"params must be SamplingParams or a list of them, got {type(params).__name__}")
    for one in params:
        if not isinstance(one, SamplingParams):
            raise TypeError(f"params must hold SamplingParams, got {type(one).__name__}")
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} SamplingParams for {num_prompts} prompts: give one for all, or one each")
    return list(params)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is none that torch knows: {error}") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}, and torch finds no CUDA here; there is 'cpu'")
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
    return chosen


def _dtype(dtype: torch.dtype | str, of_checkpoint: torch.dtype) -> torch.dtype:
    if dtype == "auto":
        return of_checkpoint
    chosen = _DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if chosen is None or chosen not in _DTYPES.values():
        raise ValueError(f"dtype must be 'auto' or one of {', '.join(_DTYPES)}, got {dtype!r}")
    return chosen


def _max_model_len(wanted: int | None, max_position_embeddings: int) -> int:
    if wanted is None:
        return max_position_embeddings
    allowed = f"None or an integer from 1 to {max_position_embeddings}, the model's max_position_embeddings"
    number = _integer("max_model_len", wanted, 1, allowed)
    if number > max_position_embeddings:
        raise ValueError(f"max_model_len must be {allowed}, got {number}")
    return number


def _load_tokenizer(directory: Path) -> Any:
    """The directory's tokenizer, or None where it has none."""
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    # Late: importing transformers takes seconds, and a directory without a tokenizer does not need it.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions too
        reason = f"{type(error).__name__}: {error}"
        raise tmodel.ConfigError(f"{directory}: its tokenizer cannot be loaded: {reason}") from error


def _integer(name: str, value: Any, low: int, allowed: str) -> int:
    """`value` as an int, where it is an integer of at least `low`; `allowed` says so in words."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low:
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return number
