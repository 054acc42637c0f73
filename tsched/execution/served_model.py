"""A Hugging Face directory made ready to serve: the one place where LLM and AsyncLLM get their engine."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

import tkernels
import tmodel
from tkernels.ranges import NVTX, Ranges
from tkernels.selection import Choices
from tkernels.tuning import TuningMode
from tsched.execution.cache_size import num_host_blocks, num_kv_blocks
from tsched.execution.engine import Engine, Request
from tsched.execution.engine_stats import EngineStats
from tsched.execution.sampler import TokenLogprobs
from tsched.requests.detokenizer import IncrementalDetokenizer
from tsched.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tsched.requests.prompts import Salt, check_salt, check_stop_ids, check_token_ids, parse_prompt
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.refusal import check_priority
from tsched.scheduling.scheduler import RefusedError, Scheduler

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a caller asked for, in the form that the engine takes. `refusal` says why it takes it not."""

    request_id: Any
    text: str | None
    token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: bytes = b""
    refusal: str | None = None


class ServedModel:
    """A model, its engine and its tokenizer; the arguments are those of LLM and AsyncLLM.

    model                   a Hugging Face directory: config.json, safetensors and, for text, a tokenizer
    kernels                 {op: variant} or {op: {variant: {config value: number}}}; other ops get the default
    dtype                   "auto" (the checkpoint's), a name or a torch.dtype: of the activations, weights and KV cache
    device                  None takes CUDA where there is one, else the CPU
    max_model_len           tokens a request, prompt and output together; None is what the model was made for
    max_num_seqs            requests in one step
    max_num_batched_tokens  tokens in one step
    max_chunk_tokens        of one prompt in one step; None is no bound of its own
    decode_share            in [0, 1), of max_num_batched_tokens: prompts may not take it while others decode
    chunked_prefill         False: a prompt is computed whole in one step
    kv_cache_bytes          the cache's size; None takes kv_cache_fraction
    kv_cache_fraction       of the device's memory, for all that is on it: weights, cache, other programs; None takes
                            9/10 of a GPU's, or up to 1 GiB of a CPU's for the cache alone
    swap_bytes              host memory for the caches of preempted requests, with preemption="swap"
    block_size              tokens a cache block, a power of two
    seed                    of the requests that bring none
    order, preemption, prefix_cache   the scheduler's policies by name, see tsched.scheduling.policies
    overlap, cuda_graphs    plan a step while the one before runs; replay recorded decode steps. None: on a GPU alone.
                            The tokens are the same either way
    tuning, ops             handed to tkernels.select: how tuned configs are found, and the registry of variants
    ranges                  where steps, phases, layers and kernels are named while they run, see tkernels.ranges

    `weight_bytes` are those of the weights as they are kept, `prepare_report` says what it cost to bring the quantized
    ones into the layout that their kernel reads.

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
        max_chunk_tokens: int | None = None,
        decode_share: float = 0.0,
        chunked_prefill: bool = True,
        kv_cache_bytes: int | None = None,
        kv_cache_fraction: float | None = None,
        swap_bytes: int = 0,
        block_size: int = 16,
        seed: int = 0,
        order: str = "fcfs",
        preemption: str = "recompute",
        prefix_cache: str = "none",
        overlap: bool | None = None,
        cuda_graphs: bool | None = None,
        tuning: TuningMode | tkernels.Tuning = "nearest",
        ops: tkernels.Registry | None = None,
        ranges: Ranges = NVTX,
    ) -> None:
        directory = self.directory = Path(model)
        seed = _integer("seed", seed, 0)
        max_num_seqs = _integer("max_num_seqs", max_num_seqs, 1)
        max_num_batched_tokens = _integer("max_num_batched_tokens", max_num_batched_tokens, 1)
        max_chunk_tokens = _integer_or_none("max_chunk_tokens", max_chunk_tokens, 1)
        kv_cache_bytes = _integer_or_none("kv_cache_bytes", kv_cache_bytes, 1)
        swap_bytes = _integer("swap_bytes", swap_bytes, 0)
        block_size = _integer("block_size", block_size, 1, "an integer that is a power of two")
        _check_flag("chunked_prefill", chunked_prefill, "True or False")
        for name, flag in (("overlap", overlap), ("cuda_graphs", cuda_graphs)):
            _check_flag(name, flag is not None and flag, "None, True or False")
        self.config = tmodel.load_config(directory)
        self.device = _device(device)
        self.dtype = _dtype(dtype, self.config.dtype)
        self.max_model_len = _max_model_len(max_model_len, self.config.max_position_embeddings)
        num_blocks = num_kv_blocks(
            directory,
            self.config,
            kv_cache_bytes=kv_cache_bytes,
            kv_cache_fraction=_fraction("kv_cache_fraction", kv_cache_fraction),
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
            max_chunk_tokens=max_chunk_tokens,
            decode_share=_fraction("decode_share", decode_share) or 0.0,
            chunked_prefill=chunked_prefill,
            num_host_blocks=num_host_blocks(
                self.config, swap_bytes, preemption=preemption, block_size=block_size, dtype=self.dtype
            ),
            eos_token_ids=self.config.eos_token_ids,
            order=order,
            preemption=preemption,
            prefix_cache=prefix_cache,
        )
        limits = tmodel.Limits(
            max_num_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
        )
        axes = tmodel.kernel_axes(self.config, limits)
        self.kernels = tkernels.select(
            kernels or {}, device=self.device, dtype=self.dtype, axes=axes, tuning=tuning, ops=ops, ranges=ranges
        )
        # tkernels decides at import how Triton runs, so transformers, which imports Triton too, comes after it.
        self.tokenizer = load_tokenizer(directory)
        self._detokenize = ranges.named("detokenize", "phase", launches=False)
        self._engine = self._make_engine(scheduler, seed=seed, overlap=overlap, cuda_graphs=cuda_graphs)
        self._ids = count()  # of sequences
        self._request_ids = count()

    def _make_engine(
        self, scheduler: Scheduler, *, seed: int, overlap: bool | None, cuda_graphs: bool | None
    ) -> Engine:
        """Load the weights and allocate the caches."""
        pool, host = scheduler.pool, scheduler.host_pool
        network = tmodel.load_model(self.directory, self.config, self.kernels, device=self.device, dtype=self.dtype)
        self.weight_bytes, self.prepare_report = network.weight_bytes, network.prepare_report
        kv_cache = tmodel.allocate_kv_cache(
            self.config, pool.num_blocks, pool.block_size, device=self.device, dtype=self.dtype
        )
        return Engine(
            network,
            kv_cache,
            scheduler,
            device=self.device,
            seed=seed,
            eos_token_ids=self.config.eos_token_ids,
            step_inputs=self.kernels.step_inputs,
            pages=tmodel.CachePages(kv_cache.blocks, self.kernels.copy_pages, 0 if host is None else host.num_blocks),
            overlap=overlap,
            cuda_graphs=cuda_graphs,
            ranges=self.kernels.ranges,
        )

    @property
    def arm(self) -> dict[str, str]:
        """op -> the variant that serves it."""
        return self.kernels.arm

    def stats(self) -> EngineStats:
        """Steps, tokens, preemptions, prefix cache hits and the pool's use since the LLM was made."""
        return self._engine.stats()

    def forget_graphs(self) -> None:
        """Record decode steps anew when they are next wanted, see Engine.forget_graphs."""
        self._engine.forget_graphs()

    def reset_peak(self) -> None:
        """The pool's peak in `stats` is of what comes from now on."""
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
    ) -> Prepared:
        """Read and check a prompt; what is wrong with it is told in `refusal`, not raised."""
        text: str | None = None
        token_ids: list[int] = []
        refusal = None
        try:
            prompt = parse_prompt(entry)
            text = prompt if isinstance(prompt, str) else None
            token_ids = self._encode(prompt) if isinstance(prompt, str) else prompt
            check_token_ids(token_ids, self.config.vocab_size)
            check_stop_ids(params, self.config.vocab_size, self.config.eos_token_ids)
        except RefusedError as error:
            refusal = str(error)
        salt = check_salt(cache_salt)
        return Prepared(request_id, text, token_ids, params, arrival, check_priority(priority), salt, refusal)

    def _start(self, prepared: Prepared) -> list[Request]:
        """Queue what was prepared: a request for each of its n samples. RefusedError where it could never finish."""
        if prepared.refusal is not None:
            raise RefusedError(prepared.refusal)
        params = prepared.params
        needs_text = bool(params.stop_strings) and self.tokenizer is not None
        return self._engine.add_group(
            [next(self._ids) for _ in range(params.n)],
            prepared.token_ids,
            [params.of_sample(index) for index in range(params.n)],
            detokenizers=[
                IncrementalDetokenizer(self._decode, params.stop_strings) if needs_text else None
                for _ in range(params.n)
            ],
            arrival_time=prepared.arrival_time,
            priority=prepared.priority,
            cache_salt=prepared.cache_salt,
        )

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
        with self._detokenize:
            text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _refused(self, prepared: Prepared, reason: str, now: float) -> RequestOutput:
        """The output of a request that was never served."""
        outputs = [CompletionOutput(i, [], "", "error") for i in range(prepared.params.n)]
        metrics = RequestMetrics(prepared.arrival_time, None, now)
        return RequestOutput(prepared.request_id, prepared.text, prepared.token_ids, outputs, metrics, error=reason)

    def _completion(self, index: int, request: Request) -> CompletionOutput:
        """The whole of a request that has finished."""
        sequence = request.sequence
        token_ids = sequence.output_token_ids
        wants_logprobs = sequence.params.logprobs is not None
        return CompletionOutput(
            index=index,
            token_ids=token_ids,
            text=self._decode(token_ids) if request.detokenizer is None else request.detokenizer.text,
            finish_reason=sequence.finish_reason or "abort",
            logprobs=[self._logprobs(place) for place in request.logprobs] if wants_logprobs else None,
            cumulative_logprob=sum(place.logprobs[0] for place in request.logprobs) if wants_logprobs else None,
        )

    def _logprobs(self, place: TokenLogprobs) -> dict[int, Logprob]:
        """By token id; the chosen token is the first, also where it is among the most likely."""
        found: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(place.token_ids, place.logprobs, place.ranks, strict=True):
            if token_id not in found:
                decoded = self._decode([token_id]) if self.tokenizer is not None else None
                found[token_id] = Logprob(logprob, rank, decoded)
        return found


def joint_metrics(requests: Sequence[Request]) -> RequestMetrics:
    """Of the samples [n >= 1] of one request: from the first's first token to the last's last."""
    begun = [request.first_token_time for request in requests if request.first_token_time is not None]
    ended = [request.finish_time for request in requests if request.finish_time is not None]
    return RequestMetrics(
        requests[0].arrival_time,
        min(begun) if begun else None,
        max(ended) if len(ended) == len(requests) else None,
        sum(request.sequence.num_preemptions for request in requests),
    )


def joint_error(requests: Sequence[Request]) -> str | None:
    """Why samples failed; with several, each with its index."""
    errors = [(index, request.error) for index, request in enumerate(requests) if request.error is not None]
    if len(requests) == 1:
        return errors[0][1] if errors else None
    return "; ".join(f"completion {index}: {error}" for index, error in errors) or None


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


def load_tokenizer(directory: Path) -> Any:
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


def _integer(name: str, value: Any, low: int, allowed: str | None = None) -> int:
    """`value` as an int, where it is an integer of at least `low`; `allowed` says so in words."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low:
        raise ValueError(f"{name} must be {allowed or f'an integer of at least {low}'}, got {value!r}")
    return number


def _integer_or_none(name: str, value: Any, low: int) -> int | None:
    return None if value is None else _integer(name, value, low, f"None or an integer of at least {low}")


def _check_flag(name: str, value: Any, allowed: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def _fraction(name: str, value: Any) -> float | None:
    """`value` as a float, where it is a number or None; its range is checked where it is used."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
    return float(value)
