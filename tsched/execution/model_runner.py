"""What the steps of an engine do on the device: copies of pages, the forward, the sampling, the tokens' way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tkernels.ranges import NVTX, Ranges
from tkernels.runtime import Runtime
from tmodel.batch import Batch
from tmodel.config import SplitModel
from tmodel.kv_cache import CacheTensors, KVCache
from tsched.execution.batch_builder import ArrangedPlan, BatchBuilder
from tsched.execution.cuda_graphs import DecodeGraphs
from tsched.execution.device_state import DeviceState
from tsched.execution.phases import Phases
from tsched.execution.prefill_graphs import PrefillGraphs
from tsched.execution.prompt_logprobs import PromptScorer, ScoredPrompts, compute_with_prompts
from tsched.execution.readback import HostReader, Outcome, Readback
from tsched.execution.request import Request
from tsched.execution.sampler import Sampler
from tsched.execution.step_kernels import TORCH_KERNELS, StepKernels
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.shared_prefixes import FindGroups
from tsched.scheduling.step_plan import PageMover, StepPlan

Forward = Callable[[Batch, KVCache], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose forward was launched: `logits` [m, V] of its sampled rows, and scores of prompts that want any."""

    plan: StepPlan
    arranged: ArrangedPlan
    logits: torch.Tensor
    prompts: ScoredPrompts | None


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device runs to its end, whose tokens the host has not read yet."""

    plan: StepPlan
    arranged: ArrangedPlan
    readback: Readback
    store_prompts: Callable[[], None] | None


class ModelRunner:
    """Carries out plans, in the order in which they were made: `compute`, then `sample`, then `read` each.

    Before one is sampled, those before it are read and committed. None of these waits for a GPU but `read`.

    Args:
        model: Maps (Batch, caches) to logits [n, V], float32 or wider, one row for each of the batch's logit_indices.
        kv_cache: The caches of each layer, with the scheduler's blocks and block size.
        scheduler: Makes the plans.
        runtime: Of the device where the model runs.
        seed: Of requests without a seed.
        eos_token_ids: The tokens that end a sequence.
        pages: Copies pages for forks and swaps; needed where the scheduler makes any.
        states: Copies states for swaps.
        kernels: The ops that it calls beside the model's.
        inverse_cdf: Whether tokens are drawn by one number a row, and not by one a token.
        find_groups: Finds which decodes begin with the same blocks, which they read together; None is none of them.
        cuda_graphs: Whether steps are recorded and replayed: those of decodes whole, those with up to 512 tokens and
            prefill chunks among them in pieces between their attention, where the model is a SplitModel without states.
            None is yes on a GPU. On a CPU steps are padded as for a graph, and run.
        ranges: Name a step and its phases, the forward with the ids of its requests.

    Attributes:
        runtime: As given.
        phases: The ranges that name what a step does.
        kv_bytes: Of the blocks' caches.
    """

    def __init__(
        self,
        model: Forward,
        kv_cache: KVCache,
        scheduler: Scheduler,
        *,
        runtime: Runtime,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        pages: PageMover | None = None,
        states: PageMover | None = None,
        kernels: StepKernels = TORCH_KERNELS,
        inverse_cdf: bool = False,
        find_groups: FindGroups | None = None,
        cuda_graphs: bool | None = None,
        ranges: Ranges = NVTX,
    ) -> None:
        self.runtime = runtime
        self.phases = Phases(ranges)
        self._model = model
        self._kv_cache = kv_cache
        self._pages = pages
        self._states = states
        self._table = scheduler.table
        self._kernels = kernels
        self._state = DeviceState(scheduler.table, runtime, self._kernels)
        self._builder = BatchBuilder(scheduler.table, self._state, find_groups)
        self._sampler = Sampler(
            scheduler.table, runtime, seed=seed, eos_token_ids=eos_token_ids, kernels=self._kernels,
            inverse_cdf=inverse_cdf,
        )  # fmt: skip
        self._reader = HostReader(runtime)
        self._prompt_scorer = PromptScorer()
        self._graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        if not runtime.is_host if cuda_graphs is None else cuda_graphs:
            recorder = runtime.make_recorder(ranges)
            rows, longest = scheduler.table.num_rows, scheduler.max_model_len
            self._graphs = DecodeGraphs(
                model, kv_cache, self._state, recorder, max_rows=rows, max_model_len=longest,
                num_states=scheduler.states.pool.num_blocks if scheduler.states is not None else 0,
                shared_prefixes=find_groups is not None, ranges=ranges,
            )  # fmt: skip
            split: object = model
            if isinstance(split, SplitModel) and scheduler.states is None:
                most = scheduler.max_num_batched_tokens
                self._prefill_graphs = PrefillGraphs(split, kv_cache, recorder, max_tokens=most, ranges=ranges)
        of_blocks = (
            kv_cache.blocks if isinstance(kv_cache, CacheTensors) else [one for layer in kv_cache for one in layer]
        )
        self.kv_bytes = sum(tensor.nbytes for tensor in of_blocks)

    def enter(self, request: Request) -> None:
        """Notes what a new request wants beside its tokens."""
        if request.prompt_scores is not None:
            self._prompt_scorer.add(request.sequence, request.prompt_scores)
        if request.grammar is not None:
            self._sampler.grammars.add(request.sequence.id, request.grammar)

    def leave(self, request: Request) -> None:
        """Forgets a request that has finished."""
        self._prompt_scorer.forget(request.sequence.id)
        self._sampler.grammars.forget(request.sequence.id)

    def clear(self) -> None:
        """Forgets every request."""
        self._prompt_scorer.clear()
        self._sampler.grammars.clear()

    def forget_graphs(self) -> None:
        """Drops all recorded steps; their next use records them again."""
        for graphs in (self._graphs, self._prefill_graphs):
            if graphs is not None:
                graphs.forget()

    @torch.inference_mode()
    def record_graphs(self, tell: Callable[[int, int], object]) -> None:
        """Records every step that is not recorded yet, see DecodeGraphs.record_all."""
        if self._graphs is None:
            return
        prefill = self._prefill_graphs
        decodes, prefills = self._graphs.num_graphs, 0 if prefill is None else len(prefill.buckets)
        self._graphs.record_all(lambda done, total: tell(done, total + prefills))
        if prefill is not None and len(self._graphs.recorded) == decodes:
            prefill.record_all(lambda done, total: tell(decodes + done, decodes + total))

    def use_model(self, model: Forward, *, kernels: StepKernels, pages: PageMover) -> None:
        """Runs `model` from the next step on, see Engine.use_model."""
        self.runtime.synchronize()  # a graph in flight, and weights that it reads, must outlive it
        self._model, self._pages = model, pages
        self._kernels = self._state.kernels = self._sampler.kernels = kernels
        if self._graphs is not None:
            self._graphs.use_model(model)
        if self._prefill_graphs is not None:
            split: object = model
            assert isinstance(split, SplitModel), "a model is replaced by one of its own kind"
            self._prefill_graphs.use_model(split)

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> ComputedStep | None:
        """Copies the pages of `plan` and launches its forward. None where the plan is empty."""
        phases = self.phases
        with phases.prepare:
            if plan.placed.size:
                self._sampler.forget(plan.placed)
            arranged = self._builder.arrange(plan)
            self._move_pages(plan)
        if arranged is None:
            return None
        with phases.forward.carrying(self._list_ids(plan)) if phases.listening else phases.forward:
            return ComputedStep(plan, arranged, *self._forward(arranged))

    @torch.inference_mode()
    def sample(self, computed: ComputedStep) -> LaunchedStep:
        """Launches the sampling of a step, and the copy of its tokens to the host."""
        plan, arranged = computed.plan, computed.arranged
        with self.phases.sample:
            rows, lengths, epochs = arranged.sampled_rows, arranged.lengths, arranged.sampled_epochs
            nobody_left = self._table.num_departures == plan.num_departures
            sampled = self._sampler.sample(computed.logits, rows, lengths, None if nobody_left else epochs)
            self._state.keep_tokens(rows, lengths, epochs, sampled.token_ids)
            store = None if computed.prompts is None else self._reader.start_prompts(computed.prompts)
            return LaunchedStep(plan, arranged, self._reader.start(sampled), store)

    def read(self, launched: LaunchedStep) -> Outcome:
        """Waits for a step's tokens, and stores the scores of its prompts."""
        with self.phases.wait:
            outcome = launched.readback().failing(launched.arranged.faults, launched.arranged.sampled_rows)
            if launched.store_prompts is not None:
                launched.store_prompts()
        return outcome

    def _forward(self, step: ArrangedPlan) -> tuple[torch.Tensor, ScoredPrompts | None]:
        """Computes the logits [m, V] of the step's sampled rows, and the scores of prompts that want any."""
        if self._graphs is not None and step.all_decode:
            return self._graphs.run(step.rows, step.starts, step.state_slots, step.shared), None
        spans = self._prompt_scorer.find_spans(step)
        if not spans:
            batch = self._builder.build(step)
            if self._prefill_graphs is not None and self._prefill_graphs.takes(batch):
                return self._prefill_graphs.run(batch), None
            return self._model(batch, self._kv_cache), None
        batch = self._builder.build(step, np.concatenate([span.tokens for span in spans]))
        return compute_with_prompts(
            self._model, batch, self._kv_cache, step.sampled_tokens, spans, self.runtime, self._kernels.logprobs
        )

    def _list_ids(self, plan: StepPlan) -> list[int]:
        """The ids of the requests that advance in a step, in the order of its rows."""
        sequences = (self._table.sequences[row] for row in plan.rows.tolist())
        return [sequence.id for sequence in sequences if sequence is not None]

    def _move_pages(self, plan: StepPlan) -> None:
        """Copies pages and states as the plan asks."""
        if not plan.moves_pages:
            return
        if self._pages is None:
            raise RuntimeError("the plan copies pages, and the engine was made without a way to")
        plan.move_pages(self._pages, self._states)
