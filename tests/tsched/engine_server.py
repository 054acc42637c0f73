"""The engine with a real model, a tiny one: float64, or every row alone with log-probabilities compared bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import tkernels
import tmodel
from tests.tsched.random_model import ARCHITECTURES, QWEN3, random_model
from tests.tsched.random_schedules import MAX_MODEL_LEN, Request, Schedule
from tests.tsched.schedulers import build_scheduler
from tests.tsched.window_server import draw_window
from tkernels.runtime import HostRuntime
from tsched.execution.engine import Engine
from tsched.execution.model_runner import ModelRunner
from tsched.execution.request import Request as EngineRequest
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Sequence
from tsched.scheduling.shared_prefixes import find_shared_prefixes

COPY_PAGES = tkernels.OPS["copy_pages"].variants["torch"]


class EngineServer:
    """`kind` is one of random_model's. With "rowwise" an output is a list of (token, its log-probability and those of
    the two most likely ones); else of tokens.

    The schedule's lag is the engine's overlap; half of all schedules pad their decode steps as CUDA graphs need it.
    """

    kind = "float64"

    def __init__(self, schedule: Schedule, architecture: str = QWEN3) -> None:
        self._schedule = schedule
        self._architecture = architecture
        self._engine = self._make_engine(schedule.options, is_late=schedule.lag == 1, pads=schedule.seed % 4 < 2)
        self.scheduler = self._engine.scheduler
        self._requests: dict[int, EngineRequest] = {}

    def _make_engine(self, options: dict[str, Any], *, is_late: bool, pads: bool) -> Engine:
        config, model = random_model(self.kind, self._architecture)
        dtype = torch.float32 if self.kind == "rowwise" else torch.float64
        shape = options["num_blocks"], options["block_size"]
        kv_cache = tmodel.allocate_kv_cache(config, *shape, device="cpu", dtype=dtype)
        scheduler = build_scheduler(**options)
        runner = ModelRunner(
            model,
            kv_cache,
            scheduler,
            runtime=HostRuntime(),
            seed=0,
            eos_token_ids=options["eos_token_ids"],
            pages=tmodel.CachePages(kv_cache.blocks, COPY_PAGES, HostRuntime(), options.get("num_host_blocks", 0)),
            cuda_graphs=pads,
            find_groups=find_shared_prefixes if self.kind == "shared" else None,
        )
        return Engine(scheduler, runner, overlap=is_late)

    def _params(self, params: SamplingParams) -> SamplingParams:
        return replace(params, logprobs=2) if self.kind == "rowwise" else params

    def _add_to(self, engine: Engine, numbers: list[int], request: Request) -> list[EngineRequest]:
        return engine.add_group(
            numbers,
            request.prompt,
            [self._params(member.params) for member in request.members],
            detokenizers=[None] * len(numbers),
            priority=request.priority,
            cache_salt=request.salt,
        )

    def add(self, numbers: list[int], request: Request) -> list[Sequence]:
        requests = self._add_to(self._engine, numbers, request)
        self._requests.update(zip(numbers, requests, strict=True))
        return [one.sequence for one in requests]

    def fork(self, parent: int, number: int, params: SamplingParams, num_tokens: int) -> Sequence:
        self._requests[number] = self._engine.fork(parent, number, self._params(params), num_tokens=num_tokens)
        return self._requests[number].sequence

    def abort(self, number: int) -> None:
        assert self._engine.abort(number) is not None

    def step(self) -> None:
        self._engine.step()

    @property
    def is_idle(self) -> bool:
        return not self._engine.has_unfinished and self._engine.stats().num_used_blocks == 0

    def output_of(self, sequence: Sequence) -> list[Any]:
        return self._outputs(self._requests[sequence.id], self.scheduler)

    def _outputs(self, request: EngineRequest, scheduler: Scheduler) -> list[Any]:
        tokens = scheduler.output_of(request.sequence)
        if self.kind != "rowwise":
            return tokens
        own = [(tuple(place.token_ids), tuple(place.logprobs)) for place in request.logprobs]
        assert [ids[0] for ids, _ in own] == tokens[len(tokens) - len(own) :]
        return own

    def alone(self, request: Request, number: int) -> tuple[list[Any], str]:
        """In an engine of its own whose pool is large, its prompt in one piece, each step waited for."""
        block_size = self._schedule.options["block_size"]
        options = {
            "num_blocks": -(-MAX_MODEL_LEN // block_size) + 1,
            "block_size": block_size,
            "max_num_seqs": 1,
            "max_num_batched_tokens": MAX_MODEL_LEN,
            "max_model_len": MAX_MODEL_LEN,
            "eos_token_ids": self._schedule.options["eos_token_ids"],
        }
        engine = self._make_engine(options, is_late=False, pads=False)
        (lonely,) = self._add_to(engine, [number], replace(request, siblings=()))
        if request.given:  # what it took over is not its own doing
            lonely.sequence.tokens = np.array([*request.prompt, *request.given])
        while engine.has_unfinished:
            engine.step()
        reason = lonely.sequence.finish_reason
        assert reason is not None
        return self._outputs(lonely, engine.scheduler), reason


class RowwiseServer(EngineServer):
    kind = "rowwise"


class SharingServer(EngineServer):
    """Decodes that begin with the same blocks read these together.

    Attributes:
        num_shared: Steps of all such servers in which some did.
    """

    kind = "shared"
    num_shared = 0

    def step(self) -> None:
        super().step()
        SharingServer.num_shared += self._engine._runner._builder._shared is not None


class WindowedServer(EngineServer):
    """A model whose layers all have a window, in a pool that is short of blocks for it; alone, a request keeps all."""

    def __init__(self, schedule: Schedule, architecture: str = "MistralForCausalLM") -> None:
        options = draw_window(schedule, ARCHITECTURES[architecture]["sliding_window"])
        super().__init__(replace(schedule, options=options), architecture)
