"""The engine with a real model, a tiny one: float64, or every row alone with log-probabilities compared bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import tmodel
from tests.tsched.random_model import random_qwen3
from tests.tsched.random_schedules import MAX_MODEL_LEN, Request, Schedule
from tsched.engine import Engine
from tsched.engine import Request as EngineRequest
from tsched.scheduler import Scheduler
from tsched.sequence import Sequence


class EngineServer:
    """`kind` is one of random_qwen3's. With "rowwise" an output is a list of (token, its log-probability and those of
    the two most likely ones); else of tokens.
    """

    kind = "float64"

    def __init__(self, schedule: Schedule) -> None:
        self._options = schedule.options
        # Half of the schedules run ahead by a step, half pad their decodes as for a graph.
        self._engine = self._make_engine(schedule.options, overlap=schedule.lag > 0, cuda_graphs=schedule.seed % 2 == 1)
        self.scheduler = self._engine.scheduler
        self._requests: dict[int, EngineRequest] = {}

    def _make_engine(self, options: dict[str, Any], *, overlap: bool = False, cuda_graphs: bool = False) -> Engine:
        config, model = random_qwen3(self.kind)
        scheduler = Scheduler(**options)
        kv_cache = tmodel.allocate_kv_cache(
            config,
            options["num_blocks"],
            options["block_size"],
            device="cpu",
            dtype=torch.float64 if self.kind == "float64" else torch.float32,
        )
        return Engine(
            model,
            kv_cache,
            scheduler,
            device=torch.device("cpu"),
            seed=0,
            eos_token_ids=options["eos_token_ids"],
            overlap=overlap,
            cuda_graphs=cuda_graphs,
        )

    def _add_to(self, engine: Engine, number: int, request: Request) -> EngineRequest:
        params = replace(request.params, logprobs=2) if self.kind == "rowwise" else request.params
        return engine.add(number, request.prompt, params)

    def add(self, number: int, request: Request) -> Sequence:
        self._requests[number] = self._add_to(self._engine, number, request)
        return self._requests[number].sequence

    def abort(self, number: int) -> None:
        assert self._engine.abort(number) is not None

    def step(self) -> None:
        self._engine.step()

    def output_of(self, sequence: Sequence) -> list[Any]:
        return self._outputs(self._requests[sequence.id], self.scheduler)

    def _outputs(self, request: EngineRequest, scheduler: Scheduler) -> list[Any]:
        tokens = scheduler.output_of(request.sequence)
        if self.kind != "rowwise":
            return tokens
        return list(zip(tokens, [(tuple(p.token_ids), tuple(p.logprobs)) for p in request.logprobs], strict=True))

    def alone(self, request: Request, number: int) -> tuple[list[Any], str]:
        """In an engine of its own whose pool is large, its prompt in one piece."""
        block_size = self._options["block_size"]
        engine = self._make_engine(
            {
                "num_blocks": -(-MAX_MODEL_LEN // block_size) + 1,
                "block_size": block_size,
                "max_num_seqs": 1,
                "max_num_batched_tokens": MAX_MODEL_LEN,
                "max_model_len": MAX_MODEL_LEN,
                "eos_token_ids": self._options["eos_token_ids"],
            }
        )
        lonely = self._add_to(engine, number, request)
        while engine.has_unfinished:
            engine.step()
        reason = lonely.sequence.finish_reason
        assert reason is not None
        return self._outputs(lonely, engine.scheduler), reason


class RowwiseServer(EngineServer):
    kind = "rowwise"
