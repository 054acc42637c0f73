"""Requests served on the host and on a simulated CUDA device: the same scheduler, engine and tokens, another path.

The model is HashModel, as one launch: a stale input, a page that was copied late, a block table that was not sent or a
token that was read too early changes every later token of that request.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

import tmodel
from tests.tkernels.simulated_cuda import DEVICE, SimulatedCuda
from tests.tkernels.simulated_streams import Pace
from tests.tsched.hash_model import HashModel
from tests.tsched.schedulers import build_scheduler
from tests.tsched.simulated_device import EOS, VOCAB, check_accounts
from tkernels.ops.copy_pages.contract import baseline as copy_pages
from tkernels.runtime import CudaRuntime, HostRuntime, Runtime
from tmodel.batch import Batch, PrefixGroups
from tmodel.kv_cache import CacheTensors, KVCache
from tsched.execution import cuda_graphs as cuda_graphs_module
from tsched.execution import prefill_graphs as prefill_graphs_module
from tsched.execution.engine import Engine
from tsched.execution.model_runner import ModelRunner
from tsched.execution.request import Request
from tsched.execution.step_kernels import TORCH_KERNELS
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.shared_prefixes import FindGroups, find_shared_prefixes

MAX_MODEL_LEN = 60
OPTIONS: dict[str, Any] = {
    "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 20, "max_model_len": MAX_MODEL_LEN,
    "eos_token_ids": (EOS,),
}  # fmt: skip


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """All that a step's kernels read of it."""
    records = [batch, *([] if batch.prefix_groups is None else [batch.prefix_groups])]
    values = [getattr(record, one.name) for record in records for one in fields(record)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def with_tensors(batch: Batch, given: Iterable[torch.Tensor]) -> Batch:
    """The batch with other tensors, in the order of `tensors_of`."""
    left = iter(given)

    def of(record: Batch | PrefixGroups) -> dict[str, torch.Tensor]:
        return {f.name: next(left) for f in fields(record) if isinstance(getattr(record, f.name), torch.Tensor)}

    there, groups = replace(batch, **of(batch)), batch.prefix_groups
    return there if groups is None else replace(there, prefix_groups=replace(groups, **of(groups)))


class LaunchedModel(HashModel):
    """HashModel in one launch, which must have run once outside a capture, as a kernel that is compiled then."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._compiled: set[tuple[int, ...]] = set()
        self.num_decode_calls = 0
        self.is_retired = False

    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        shape = batch.num_decodes, batch.token_ids.shape[0], batch.max_context_len
        if self._cuda.is_current_stream_capturing() and shape not in self._compiled:
            raise RuntimeError(f"a kernel for {shape} is compiled in a capture")
        self._compiled.add(shape)
        self.num_decode_calls += batch.cu_seqlens_q.shape[0] == 1
        logits = torch.empty(batch.logit_indices.shape[0], VOCAB, dtype=self.dtype, device=DEVICE)

        def run(logits: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *given: torch.Tensor) -> None:
            there = with_tensors(batch, given)
            logits.copy_(super(LaunchedModel, self).__call__(there, [(keys, values)]))
            assert not self.is_retired, "a model runs that was replaced"
            assert (there.token_ids >= 0).all(), "a token that is none"
            self.batches.clear()

        self._cuda.launch(run, logits, *kv_cache[0], *tensors_of(batch))
        return logits


class SplitHashModel(HashModel):
    """HashModel as layers are: what depends on single tokens, attention, and a head."""

    num_prefill_calls = 0

    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        return self.compute_logits(self.compute_hidden(batch, kv_cache))

    def compute_hidden(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        self.num_prefill_calls += batch.num_prefills > 0
        self._launch(self.write, batch, kv_cache)
        q = batch.token_ids.double()[:, None, None]  # [T, 1, 1]

        def attend(step: Batch, q: torch.Tensor) -> torch.Tensor:
            attended = q.new_zeros((q.shape[0], 1, VOCAB))
            whole = replace(step, logit_indices=torch.arange(step.token_ids.shape[0], device=q.device))
            self._launch(self._read, whole, kv_cache, q, attended)
            return attended

        attended = attend(batch, q) if batch.attend_between is None else batch.attend_between(q, VOCAB, attend)
        return attended[:, 0].index_select(0, batch.logit_indices)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.to(self.dtype)

    def _read(self, batch: Batch, kv_cache: KVCache, q: torch.Tensor, attended: torch.Tensor) -> None:
        count = batch.token_ids.shape[0]
        assert (q[:count, 0, 0] == batch.token_ids).all(), "queries of another step"
        assert (q[count:] == 0).all(), "padding is no token 0"
        attended[:count, 0] = self.read(batch, kv_cache).double()

    def _launch(self, kernel: Callable[..., None], batch: Batch, kv_cache: KVCache, *tensors: torch.Tensor) -> None:
        kernel(batch, kv_cache, *tensors)


class LaunchedSplitModel(SplitHashModel):
    """The same on the simulated device. A kernel must have run once outside a capture; what attends is in none."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._compiled: set[int] = set()
        self.num_decode_calls = 0
        self.is_retired = False

    def compute_hidden(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        self.num_decode_calls += batch.num_prefills == 0
        size = batch.token_ids.shape[0]
        if self._cuda.is_current_stream_capturing() and size not in self._compiled:
            raise RuntimeError(f"a kernel for {size} tokens is compiled in a capture")
        self._compiled.add(size)
        return super().compute_hidden(batch, kv_cache)

    def _launch(self, kernel: Callable[..., None], batch: Batch, kv_cache: KVCache, *tensors: torch.Tensor) -> None:
        num_own = len(tensors)

        def run(keys: torch.Tensor, values: torch.Tensor, *given: torch.Tensor) -> None:
            own, its = given[:num_own], given[num_own:]
            kernel(with_tensors(batch, its), [(keys, values)], *own)
            assert not self.is_retired, "a model runs that was replaced"

        self._cuda.launch(run, *kv_cache[0], *tensors, *tensors_of(batch))


def make_engine(
    runtime: Runtime, model: HashModel, *, overlap: bool | None, cuda_graphs: bool | None, seed: int = 0,
    find_groups: FindGroups | None = None, **options: Any,
) -> Engine:  # fmt: skip
    options = OPTIONS | options
    shape = 2, options["num_blocks"], options["block_size"], 1, 1
    blocks = torch.full(shape, -1.0, dtype=torch.float64, device=runtime.device)
    kv_cache = CacheTensors([(blocks[0], blocks[1])], [blocks])
    scheduler = build_scheduler(**options)
    # So that graphs have several bounds, and steps that are larger than all buckets.
    with (
        mock.patch.object(cuda_graphs_module, "_SMALLEST_BOUND", 16),
        mock.patch.object(prefill_graphs_module, "token_buckets", return_value=[4, 8, 16]),
    ):
        runner = ModelRunner(
            model, kv_cache, scheduler, runtime=runtime, seed=seed, eos_token_ids=options["eos_token_ids"],
            pages=tmodel.CachePages(kv_cache.blocks, copy_pages, runtime, int(options.get("num_host_blocks", 0))),
            find_groups=find_groups, cuda_graphs=cuda_graphs,
        )  # fmt: skip
    return Engine(scheduler, runner, overlap=overlap)


@dataclass(frozen=True)
class World:
    """What arrives and leaves when, drawn by `seed`, in an engine with these options."""

    seed: int
    overlap: bool = True
    cuda_graphs: bool = True
    num_blocks: int = 18
    num_requests: int = 9
    swaps: bool = False
    swap_model_at: int = -1  # a step
    in_pieces: bool = False  # the model attends between pieces
    shares: bool = False  # prompts begin alike, and decodes read what they share together

    @property
    def options(self) -> dict[str, Any]:
        swap = {"preemption": "swap", "num_host_blocks": 14, "prefix_cache": "hash"} if self.swaps else {}
        shares = {"prefix_cache": "radix", "find_groups": find_shared_prefixes} if self.shares else {}
        return {"num_blocks": self.num_blocks, **swap, **shares}


def draw_params(rng: np.random.Generator) -> SamplingParams:
    common: dict[str, Any] = {"max_tokens": int(rng.integers(1, 25)), "ignore_eos": bool(rng.integers(2))}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"seed": int(rng.integers(99)), "top_k": 5, "temperature": 2.0},
        {"seed": 1, "top_p": 0.9, "temperature": 3.0, "n": 2},
        {"seed": 2, "min_p": 0.05, "temperature": 2.5, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0, "presence_penalty": 1.5, "logprobs": 0, "n": 2},
        {"temperature": 0, "stop_token_ids": [3, 7], "min_tokens": common["max_tokens"] // 2},
        {"temperature": 0, "allowed_token_ids": range(1, 12), "bad_words": [[4, 5], [6]]},
        {"temperature": 0, "logit_bias": {3: 2.0, 9: -5.0}},
    ]
    return SamplingParams(**common, **kinds[int(rng.integers(len(kinds)))])


def serve(world: World, runtime: Runtime, make_model: Callable[[], HashModel]) -> list[tuple[Any, ...]]:
    """The outputs of a world's requests, in the order of their numbers."""
    rng = np.random.default_rng(world.seed)
    arrivals = [
        (int(rng.integers(20)), rng.integers(0, VOCAB, rng.integers(1, 15)).tolist(), draw_params(rng))
        for _ in range(world.num_requests)
    ]
    if world.shares:
        # Of a few beginnings, one the beginning of another, so that some requests share more than others.
        begun = rng.integers(0, VOCAB, 12).tolist()
        arrivals = [(when, begun[: int(rng.choice([0, 4, 8, 12]))] + prompt, one) for when, prompt, one in arrivals]
    aborts = {int(rng.integers(40)): int(rng.integers(world.num_requests)) for _ in range(4)}
    engine = make_engine(
        runtime, make_model(), overlap=world.overlap, cuda_graphs=world.cuda_graphs, seed=world.seed, **world.options
    )
    entered: dict[int, Request] = {}
    for step in range(2000):
        for number, (arrives, prompt, params) in enumerate(arrivals):
            if arrives == step:
                ids = [number + 100 * sample for sample in range(params.n)]
                own = [params.derive_sample_params(sample) for sample in range(params.n)]
                group = engine.add_group(ids, prompt, own, detokenizers=[None] * params.n)
                entered.update({one.sequence.id: one for one in group})
        if step in aborts:
            engine.abort(aborts[step])
        if step == world.swap_model_at:
            old, pages = engine._runner._model, engine._runner._pages
            assert isinstance(old, HashModel)
            assert pages is not None
            engine.use_model(make_model(), kernels=TORCH_KERNELS, pages=pages)
            if isinstance(old, LaunchedModel | LaunchedSplitModel):
                old.is_retired = True
        engine.step()
        if step > 40 and not engine.has_unfinished:
            break
    assert not engine.has_unfinished
    check_accounts(engine.scheduler)
    assert engine.scheduler.pool.num_referenced == 0
    return [
        (
            number, one.sequence.output_token_ids, one.sequence.finish_reason, one.logprobs,
            None if one.prompt_scores is None else one.prompt_scores.found,
        )
        for number, one in sorted(entered.items())
    ]  # fmt: skip


@functools.cache
def serve_on_host(world: World) -> list[tuple[Any, ...]]:
    """The same on the host, where nothing is recorded."""
    return serve(replace(world, cuda_graphs=False), HostRuntime(), SplitHashModel if world.in_pieces else HashModel)


def serve_on_device(world: World, pace: Pace) -> list[tuple[Any, ...]]:
    """The same on a simulated device, where the host waits for steps to be read alone, and for recordings of graphs."""
    models: list[LaunchedModel | LaunchedSplitModel] = []
    with SimulatedCuda(pace) as cuda:

        def make_model() -> LaunchedModel | LaunchedSplitModel:
            models.append(LaunchedSplitModel(cuda) if world.in_pieces else LaunchedModel(cuda))
            return models[-1]

        answers = serve(world, CudaRuntime(DEVICE, cuda), make_model)
    assert not cuda.faults, cuda.faults
    waits = Counter(cuda.waits)
    assert waits.keys() <= {"an event", "the device"}, waits
    if world.cuda_graphs:
        num_calls, num_graphs = sum(model.num_decode_calls for model in models), waits["the device"] - len(models) + 1
        assert 0 < num_calls <= 3 * num_graphs, "steps were launched that a graph has"
    return answers


def check_world(world: World, pace: Pace) -> None:
    """Compares the two."""
    for here, there in zip(serve_on_host(world), serve_on_device(world, pace), strict=True):
        assert here == there
