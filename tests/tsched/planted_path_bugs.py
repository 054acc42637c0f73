"""Faults of the CUDA path, each one small change to a function of which a CPU reaches the other branch alone.

    python -m tests.tsched.planted_path_bugs     # which check catches which, and how

Each branch has checks, which serve it on a simulated device; a fault counts as caught where one of them raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from tests.tkernels.simulated_streams import at_random, copies_first, late, work_first
from tests.tsched import path_checks
from tests.tsched.device_worlds import World, check_world, serve_on_host
from tests.tsched.planted_bugs import PlantedBug, planted
from tkernels.ops.copy_pages import contract as copy_pages
from tkernels.ops.kv_scatter import contract as kv_scatter
from tkernels.ops.sample import _torch
from tkernels.runtime import CudaRecorder, CudaRuntime
from tkernels.workspace import ZeroedBuffers
from tmodel.kv_cache import CachePages
from tsched.execution import cache_size, device_state, token_masks
from tsched.execution.batch_builder import BatchBuilder
from tsched.execution.cuda_graphs import DecodeGraphs
from tsched.execution.device_state import DeviceState
from tsched.execution.engine import Engine
from tsched.execution.model_runner import ModelRunner
from tsched.execution.penalties import PenaltyCounts
from tsched.execution.prefill_graphs import PrefillGraphs
from tsched.execution.sampler import Sampler

Owner = type | ModuleType


@dataclass(frozen=True)
class Branch:
    """What differs on CUDA in a place: checks that serve it, and faults (function, right, wrong) of theirs by name."""

    name: str
    checks: tuple[Callable[[], None], ...]
    faults: dict[str, tuple[Owner, str, str, str]]

    @property
    def bugs(self) -> list[PlantedBug]:
        return [PlantedBug(name, *fault) for name, fault in self.faults.items()]


SERVED = (
    partial(check_world, World(1, swaps=True, swap_model_at=20), late),
    partial(check_world, World(3, swaps=True), work_first),
    partial(check_world, World(4, cuda_graphs=False), copies_first),
    partial(check_world, World(5), at_random(1)),
)
GRAPHS = (path_checks.check_graphs, *SERVED)
IN_PIECES = (
    partial(check_world, World(5, swaps=True, swap_model_at=8, in_pieces=True), late),
    partial(check_world, World(6, in_pieces=True), work_first),
)
PIECES = (path_checks.check_pieces, *IN_PIECES)
SHARING = (
    partial(check_world, World(8, shares=True), late),
    partial(check_world, World(9, shares=True, swaps=True, cuda_graphs=False), work_first),
    partial(check_world, World(10, shares=True, swaps=True, in_pieces=True), at_random(3)),
)

BRANCHES = (
    Branch("arrays that are sent", (path_checks.check_sending,), {
        "a pinned buffer is written again while its copy is under way": (CudaRuntime, "send",
            "return tensor.pin_memory()",
            "return vars(self).setdefault(str(tensor.shape), torch.zeros(tensor.shape, dtype=tensor.dtype, "
            "pin_memory=True)).copy_(tensor)"),
        "the host waits for what it sends": (CudaRuntime, "send", "non_blocking=True", "non_blocking=False"),
        "memory that is not pinned is sent": (CudaRuntime, "send", "tensor.pin_memory()", "tensor"),
    }),
    Branch("tensors that are read", (path_checks.check_reading,), {
        "copies do not wait for the work before them": (CudaRuntime, "start_reading",
            "stream.wait_stream(self._cuda.current_stream(self.device))", "pass"),
        "the event comes before the copies": (CudaRuntime, "start_reading",
            "copies = [self._copy_pinned(tensor) for tensor in tensors]\n        done = self._cuda.Event()\n        "
            "done.record(stream)",
            "done = self._cuda.Event()\n        done.record(stream)\n        "
            "copies = [self._copy_pinned(tensor) for tensor in tensors]"),
        "the event is on the stream of the work": (CudaRuntime, "start_reading",
            "done.record(stream)", "done.record(self._cuda.streams[0])"),
        "nobody waits for the event": (CudaRuntime, "start_reading", "done.synchronize()", "pass"),
        "copies run on the stream of the work": (CudaRuntime, "start_reading",
            "with self._cuda.stream(stream):", "with self._cuda.stream(self._cuda.current_stream(self.device)):"),
        "memory is reused before it is read": (CudaRuntime, "_copy_pinned",
            "tensor.record_stream(self._reading)", "pass"),
        "all results are read into one buffer": (CudaRuntime, "_copy_pinned",
            "copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)",
            "copy = vars(self).setdefault(str(tensor.shape), torch.empty(tensor.shape, dtype=tensor.dtype, "
            "pin_memory=True))"),
        "results go to memory that is not pinned": (CudaRuntime, "_copy_pinned", ", pin_memory=True", ""),
        "the copy waits": (CudaRuntime, "_copy_pinned", "non_blocking=True", "non_blocking=False"),
    }),
    Branch("recorded graphs", (path_checks.check_recording,), {
        "a warm-up does not wait for its inputs": (CudaRecorder, "_warm_up",
            "self._stream.wait_stream(current)", "pass"),
        "work after a warm-up that failed does not wait for it": (CudaRecorder, "_warm_up",
            "current.wait_stream(self._stream)", "pass"),
        "nothing runs before the capture": (CudaRecorder, "_warm_up", "range(self._NUM_WARM_UPS)", "range(0)"),
        "a replay launches everything again": (CudaRecorder, "record", "graph.replay()", "run()"),
        "a replay replays nothing": (CudaRecorder, "record", "graph.replay()", "pass"),
    }),
    Branch("decode steps through graphs", GRAPHS, {
        "a graph is captured at another size than its bucket's": (DecodeGraphs, "_record",
            "self._step(*key)", "self._step(max(1, key[0] // 2), *key[1:])"),
        "a graph replays with the inputs of its recording": (DecodeGraphs, "_fill",
            "self._inputs[:, : padded.shape[1]].copy_(",
            "padded.shape[1] in [one for one, *_ in self._replays] or self._inputs[:, : padded.shape[1]].copy_("),
        "padding is what the last step left there": (DecodeGraphs, "run",
            "self._fill(padded)", "self._fill(padded[:, : rows.size])"),
        "padding writes to pages": (DecodeGraphs, "_padding", "padded[1] = -1", "pass"),
        "the bound is a token short": (DecodeGraphs, "run", "int(starts.max()) + 1", "int(starts.max())"),
        "a graph of another bound is replayed": (DecodeGraphs, "run",
            "bound = self.bounds[bisect_left(self.bounds, int(starts.max()) + 1)]", "bound = self.bounds[0]"),
        "graphs of a model that was replaced are replayed": (DecodeGraphs, "use_model", "self.forget()", "pass"),
        "a model is replaced while a graph of it runs": (ModelRunner, "use_model",
            "self.runtime.synchronize()", "pass"),
    }),
    Branch("steps with prompts through graphs", PIECES, {
        "what attends is left out of a replay": (CudaRecorder, "record_pieces", "call(step)", "pass"),
        "what attends runs at the recording alone": (CudaRecorder, "record_pieces", "calls.append(call)", "call(step)"),
        "the last piece is left out": (CudaRecorder, "record_pieces", "graphs[-1].replay()", "pass"),
        "a piece launches while it is captured alone": (CudaRecorder, "record_pieces", "graph.replay()\n", "pass\n"),
        "a replay attends as its recording did": (PrefillGraphs, "_run",
            "attend(step, queries)", "attend(batch, queries)"),
        "what was attended is left where it was made": (PrefillGraphs, "_run",
            "attended.copy_(attend(step, queries))", "attend(step, queries)"),
        "queries are never handed over": (PrefillGraphs, "_run", "queries.copy_(q)", "pass"),
        "a step has the tokens of its recording": (PrefillGraphs, "run", "self._inputs[:, :count] = torch",
            "(self._inputs if bucket not in self._replays else self._inputs.clone())[:, :count] = torch"),
        "what pads is what a step left there": (PrefillGraphs, "run", "self._pad(count, bucket)", "pass"),
        "what pads is stored": (PrefillGraphs, "_pad", "fill_(-1)", "fill_(0)"),
        "the first tokens' logits are taken": (PrefillGraphs, "run", "hidden.index_select(0, batch.logit_indices)",
            "hidden[: batch.logit_indices.shape[0]]"),
        "pieces of a model that was replaced are replayed": (PrefillGraphs, "use_model", "self.forget()", "pass"),
    }),
    Branch("decodes that read what they share together", SHARING, {
        "a group shares a block more": (device_state, "pack_groups",
            "shared.num_blocks * block_size", "(shared.num_blocks + 1) * block_size"),
        "a group takes in the row behind it": (device_state, "pack_groups",
            "packed[0, : shared.starts.size] = shared.starts",
            "packed[0, : shared.starts.size] = shared.starts; packed[0, shared.starts.size - 1] += 1"),
        "groups without rows begin at the first": (device_state, "pack_groups",
            "shared.starts[-1], dtype", "0, dtype"),
        "groups of the first step stay": (DeviceState, "send_groups",
            "self._groups is None or self._groups[0] is not shared", "self._groups is None"),
        "a graph replays with the groups of its recording": (DecodeGraphs, "run",
            "if shared is not None:\n        packed",
            "if shared is not None and (bucket, bound, True) not in self._replays:\n        packed"),
        "a graph for rows that share nothing is replayed": (DecodeGraphs, "run",
            "key = (bucket, bound, shared is not None)", "key = (bucket, bound, shared is None)"),
        "groups stay as they were when a row leaves": (BatchBuilder, "_order_rows",
            "if self._find_groups is not None:", "if self._find_groups is not None and before.size <= num:"),
        "rows that came or changed blocks keep the groups": (BatchBuilder, "_order_rows",
            "if self._find_groups is not None:", "if self._find_groups is not None and self._shared is None:"),
        "rows are not put in the groups' order": (BatchBuilder, "_order_rows",
            "order = decoding[shared.order]", "pass"),
    }),
    Branch("the device's arrays", (path_checks.check_kept_tokens, *SERVED), {
        "sampled tokens are kept for other rows": (DeviceState, "keep_tokens",
            "self.runtime.send(rows)", "self.runtime.send(np.sort(rows))"),
        "a failed row's token is kept": (DeviceState, "keep_tokens", "tokens.clamp_min(0)", "tokens"),
        "one block of a new table is sent": (DeviceState, "update_tables",
            "index_copy_(0, sent[0], sent[1].int())", "index_copy_(0, sent[0, :1], sent[1, :1].int())"),
        "a row that came keeps the table of the one that left": (DeviceState, "update_tables",
            "(self._epoch_at[:num] == table.epoch[rows])", "True"),
        "a preempted row's token counts as kept": (DeviceState, "forget", "self._token_epoch[placed] = -1", "pass"),
        "tokens of the host are sent to other rows": (DeviceState, "_write_tokens",
            "np.stack((rows, tokens))", "np.stack((rows[::-1], tokens))"),
        "prompts begin among the decodes": (DeviceState, "make_mixed_batch",
            "counts[num_decodes:] - num_decodes if", "counts[num_decodes:] if"),
    }),
    Branch("inputs that the device makes", SERVED, {
        "the next row's token is read": (BatchBuilder, "build", "-1 - rows[:num_decodes]", "-rows[:num_decodes]"),
        "tokens are read that the host does not know yet": (BatchBuilder, "build",
            "-1 - rows[:num_decodes]", "self._tokens.take(rows[:num_decodes] * self._tokens_stride + positions["
            ":num_decodes])"),
        "prompts come before the decodes": (BatchBuilder, "build",
            "np.concatenate((-1 - rows[:num_decodes], prefill_tokens))",
            "np.concatenate((prefill_tokens, -1 - rows[:num_decodes]))"),
    }),
    Branch("the sampler", (path_checks.check_sampling,), {
        "a row without a finite logit gets a token": (Sampler, "sample",
            ".masked_fill_(tokens.index_select(0, index) < 0, NOT_FINITE)", ""),
        "what is left is asked for on the host": (Sampler, "sample",
            "index = self._runtime.send(changed)",
            "index = self._runtime.send(changed)\n        bool((tokens < 0).any())"),
        "the last of equal tokens is taken": (_torch, "_find_highest",
            "highest, token = scores.max(dim=1)",
            "highest, token = scores.flip(1).max(dim=1)\n        token = scores.shape[1] - 1 - token"),
        "small shares are dropped": (_torch, "_draw",
            "kept = weights >= least", "kept = weights >= least + (not is_host) * 2**58"),
        "all are sorted in descending order": (_torch, "_sort",
            "values.sort(dim=1)", "values.sort(dim=1, descending=True)"),
        "noise is another token's": (_torch, "_perturb",
            "[_odd(*words[:2]), _odd(*words[2:])]", "[_odd(*words[2:]), _odd(*words[:2])]"),
        "filters are ignored": (_torch, "_draw",
            "if not is_host or bool(((top_k > 0) | (top_p < 1.0)).any()):",
            "if is_host and bool(((top_k > 0) | (top_p < 1.0)).any()):"),
        "min_p is ignored": (_torch, "_draw", "(min_p * 2.0**TOP_WEIGHT)", "(min_p * is_host * 2.0**TOP_WEIGHT)"),
        "the host asks whether any row draws": (_torch, "baseline",
            "if not is_host or bool((temperature > 0).any()):", "if bool((temperature > 0).any()):"),
        "a seed is another row's": (Sampler, "_choose", "self._seeds.find_seeds(drawn)",
            "self._seeds.find_seeds(drawn)[:: 1 if self._runtime.is_host else -1]"),
        "a row is penalized as another": (PenaltyCounts, "update", "self._runtime.send(slots)",
            "self._runtime.send(slots if self._runtime.is_host else slots[::-1])"),
    }),
    Branch("masks of tokens", (path_checks.check_masks,), {
        "what is allowed is barred": (token_masks, "bar_others", ".logical_not_()", ""),
        "a changed copy is dropped": (token_masks, "bar_others", "scores.masked_fill_(", "scores.masked_fill("),
        "other rows are barred": (token_masks, "bar_others",
            "index = runtime.send(entries)", "index = runtime.send(np.arange(entries.size))"),
        "bits are read from the other end": (token_masks, "unpack_masks", ">> places)", ">> (31 - places))"),
    }),
    Branch("pages on their way", (path_checks.check_pages,), {
        "the host's pages are not pinned": (CudaRuntime, "allocate_host", ", pin_memory=math.prod(shape) > 0", ""),
        "swapping out waits": (CachePages, "swap_out", "non_blocking=True", "non_blocking=False"),
        "swapping in waits": (CachePages, "swap_in", "non_blocking=True", "non_blocking=False"),
        "pages are read from the host before they are there": (CachePages, "swap_in",
            "host[first : first + count], non", "host[first : first + count].clone(), non"),
        "the device is asked how many pages are copied": (copy_pages, "baseline", "if src.is_cuda:", "if False:"),
        "skipped pairs write to a page": (copy_pages, "copy_without_sync",
            "pair = torch.where(kept, torch.arange(kept.numel(), device=kept.device), kept.int().argmax())",
            "pair = torch.arange(kept.numel(), device=kept.device)"),
        "the last kept pair is repeated as a target alone": (copy_pages, "copy_without_sync",
            "pages.index_select(1, source)", "pages.index_select(1, source.flip(0))"),
    }),
    Branch("keys and values that are stored", (path_checks.check_stored_rows,), {
        "the device is asked how many rows are stored": (kv_scatter, "baseline", "if slots.is_cuda:", "if False:"),
        "rows without a slot are stored in the first": (kv_scatter, "scatter_without_sync",
            "source = torch.where(kept, torch.arange(slots.numel(), device=slots.device), kept.int().argmax())",
            "source = torch.arange(slots.numel(), device=slots.device)"),
        "without a row to store the first slot changes": (kv_scatter, "scatter_without_sync",
            "torch.where(any_kept, values, cache[pages, offsets])", "values"),
        "a page has a token more": (kv_scatter, "scatter_without_sync",
            "targets // k_cache.shape[1], targets % k_cache.shape[1]",
            "targets // (k_cache.shape[1] + 1), targets % k_cache.shape[1]"),
    }),
    Branch("workspaces that are kept at zero", (path_checks.check_zeroed_workspaces,), {
        "two streams share one": (ZeroedBuffers, "take",
            "(*place, self._cuda.current_stream(device).cuda_stream)", "(*place, 0)"),
        "a capture takes the stream's": (ZeroedBuffers, "take", "if capturing:", "if False:"),
        "a capture makes its own": (ZeroedBuffers, "take",
            'if capturing and (*place, "capture") not in self._kept:', "if False:"),
        "no eager launch makes one for captures": (ZeroedBuffers, "take",
            'self._keep((*place, "capture"), buffer, device)', "pass"),
    }),
    Branch("what a device is by default", (path_checks.check_defaults,), {
        "the host waits for each token": (Engine, "__init__",
            "not runner.runtime.is_host", "runner.runtime.is_host"),
        "decode steps are not recorded": (ModelRunner, "__init__",
            "if not runtime.is_host if", "if runtime.is_host if"),
        "nothing is given back": (CudaRuntime, "release_memory", "self._cuda.empty_cache()", "pass"),
        "what is free counts as taken": (CudaRuntime, "measure_memory",
            "return total, total - free", "return total, free"),
        "a GPU's cache is as large as a CPU's": (cache_size, "compute_cache_bytes",
            "if choose_runtime(device).is_host:", "if True:"),
        "memory in use is forgotten": (cache_size, "compute_cache_bytes", "- taken -", "-"),
    }),
)  # fmt: skip


def find_failure(branch: Branch, bug: PlantedBug) -> BaseException | None:
    """How the first of a branch's checks that fails under `bug` does; None where none does."""
    for check in branch.checks:
        if isinstance(check, partial):  # the host's answers are kept, so they must be those without the fault
            serve_on_host(check.args[0])
    with planted(bug):
        for check in branch.checks:
            try:
                check()
            except (AssertionError, RuntimeError, LookupError, ValueError, TypeError) as error:
                return error
    return None


def main() -> None:
    for branch in BRANCHES:
        for bug in branch.bugs:
            error = find_failure(branch, bug)
            verdict = "survives" if error is None else f"{type(error).__name__}: {str(error).splitlines()[:1]}"
            print(f"{branch.name:30} {bug.name:62} {verdict[:100]}", flush=True)


if __name__ == "__main__":
    main()
