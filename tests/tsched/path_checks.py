"""Checks of single branches of the CUDA path, each on a simulated device under paces that differ."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch

from tests.tkernels.simulated_cuda import DEVICE, SimulatedCuda
from tests.tkernels.simulated_streams import Pace, at_random, copies_first, early, late, work_first
from tests.tsched.device_worlds import LaunchedModel, LaunchedSplitModel, SplitHashModel, make_engine
from tests.tsched.hash_model import HashModel
from tests.tsched.schedulers import build_scheduler
from tkernels.ops.copy_pages.contract import baseline as copy_pages
from tkernels.ops.copy_pages.contract import copy_without_sync
from tkernels.ops.kv_scatter.contract import baseline as kv_scatter
from tkernels.runtime import CudaRuntime, HostRuntime, Runtime
from tkernels.workspace import Buffer, ZeroedBuffers
from tmodel.kv_cache import CachePages
from tsched.execution import cache_size
from tsched.execution.batch_builder import BatchBuilder
from tsched.execution.device_state import DeviceState
from tsched.execution.readback import HostReader, Outcome
from tsched.execution.sampler import Sampler
from tsched.execution.token_masks import bar_others, pack_mask
from tsched.options import EngineOptions
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.block_pool import BlockPool
from tsched.scheduling.sequence import Sequence, SequenceTable

PACES: tuple[Pace, ...] = (late, early, work_first, copies_first, at_random(0))


def check_sending() -> None:
    """What was sent is what the array was, whenever the copy runs; the host waits for none."""
    for pace in PACES:
        with SimulatedCuda(pace) as cuda, torch.inference_mode():
            runtime = CudaRuntime(DEVICE, cuda)
            arrays = [np.arange(6) + 10 * i for i in range(4)]
            sums = [runtime.send(array) + 1 for array in arrays]
            assert not cuda.waits, cuda.waits
            for array, there in zip(arrays, sums, strict=True):
                assert there.tolist() == (array + 1).tolist()


def check_reading() -> None:
    """What is read is what was there after the launches before the call, though it is dropped and memory is reused."""
    for pace in PACES:
        with SimulatedCuda(pace) as cuda, torch.inference_mode():
            runtime = CudaRuntime(DEVICE, cuda)
            ones = runtime.send(np.ones(5))
            reads = []
            for i in range(4):
                value, second = ones * i, ones + i
                reads.append(runtime.start_reading([value, second[1:3]]))
                del value, second
                ones = ones * 1
            assert not cuda.waits, cuda.waits
            for i, wait in enumerate(reads):
                value, second = wait()
                assert (value.tolist(), second.tolist()) == ([float(i)] * 5, [1.0 + i] * 2)
            assert set(cuda.waits) == {"an event"}
            # Launches do not wait for the copies of what was launched before them.
            blocker = runtime.start_reading([ones])
            if pace is work_first:
                assert not cuda.streams[0].queue
                assert cuda.streams[1].queue
            blocker()


def check_recording() -> None:
    """A recording reads what was launched before it, replays on changed inputs, and is ordered before what follows,
    also where it fails.
    """
    for pace in PACES:
        with SimulatedCuda(pace) as cuda, torch.inference_mode():
            runtime = CudaRuntime(DEVICE, cuda)
            inputs, seen = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
            recorder, calls = runtime.make_recorder(), []

            def run(fails: bool = False) -> torch.Tensor:
                calls.append(cuda.is_current_stream_capturing())  # noqa: B023
                seen.copy_(torch.maximum(seen, inputs))  # noqa: B023
                assert not fails, "memory ran out"
                return inputs * 2  # noqa: B023

            inputs.copy_(runtime.send(np.full(3, 7.0, dtype=np.float32)))
            replay = recorder.record(run)
            assert calls == [False, False, True]
            assert seen.tolist() == [7.0] * 3, "a warm-up read what was not there yet"
            for value in (1.0, 2.0):
                inputs.copy_(runtime.send(np.full(3, value, dtype=np.float32)))
                assert replay().tolist() == [2 * value] * 3
            assert len(calls) == 3
            inputs.fill_(9.0)
            with pytest.raises(AssertionError, match="memory ran out"):
                recorder.record(lambda: run(fails=True))
            inputs.fill_(3.0)
            assert seen.tolist() == [9.0] * 3, "a warm-up ran after what was launched after it"
            recorder.record(run)


def check_kept_tokens() -> None:
    """A row's next decode reads what was sampled, what replaced it on the host, or 0 where there is none."""
    for pace in PACES:
        scheduler = build_scheduler(
            num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=30
        )
        for i in range(4):
            scheduler.add(i, [i + 1], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        with SimulatedCuda(pace) as cuda, torch.inference_mode():
            runtime = CudaRuntime(DEVICE, cuda)
            state = DeviceState(scheduler.table, runtime)
            builder = BatchBuilder(scheduler.table, state)
            plan = scheduler.schedule()
            step = builder.arrange(plan)
            assert step is not None
            sampled = np.array([5, -1, 7, -2])
            order = np.arange(4) if step.order is None else step.order
            state.keep_tokens(step.sampled_rows, step.lengths, step.sampled_epochs, runtime.send(sampled[order]))
            scheduler.commit(plan, np.maximum(sampled, 0))
            replaced = {0: 23, 3: 24}
            for number, token in replaced.items():
                scheduler.replace_last(number, token)
            step = builder.arrange(scheduler.schedule())
            assert step is not None
            batch = builder.build(step)
            assert not cuda.waits, cuda.waits
            sequences = [scheduler.table.sequences[row] for row in step.rows.tolist()]
            wanted = [replaced.get(one.id, max(0, int(sampled[one.id]))) for one in sequences if one is not None]
            assert batch.token_ids.tolist() == wanted


WAYS = ((False, False), (False, True), (True, True))  # on the device, with graphs: of a host without any and with


def check_graphs() -> None:
    """Decode steps of any number of rows and any context in turn, against the host's."""
    for pace in (late, work_first):
        outputs, recorded = [], []
        for on_device, cuda_graphs in WAYS:
            with SimulatedCuda(pace) as cuda:
                runtime: Runtime = CudaRuntime(DEVICE, cuda) if on_device else HostRuntime()
                model = LaunchedModel(cuda) if on_device else HashModel()
                engine = make_engine(runtime, model, overlap=True, cuda_graphs=cuda_graphs, num_blocks=60)
                if pace is late:  # at the start, all of them
                    engine.record_graphs(lambda done, total: None)
                params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 3, 9, 6, 14)]
                requests = [engine.add(i, [i + 1, 2], one) for i, one in enumerate(params)]
                while engine.has_unfinished:
                    engine.step()
                outputs.append([one.sequence.output_token_ids for one in requests])
                graphs = engine._runner._graphs
                assert (graphs is not None) == cuda_graphs
                if graphs is not None:
                    recorded.append(graphs.recorded)
                if on_device:
                    assert cast(LaunchedModel, model).num_decode_calls == 3 * len(recorded[-1])
        assert outputs[0] == outputs[1] == outputs[2]
        assert recorded[0] == recorded[1] != []


def check_pieces() -> None:
    """Steps with prompts of any number of tokens, beside decodes, against the host's."""
    for pace in (late, work_first):
        outputs, recorded = [], []
        for on_device, cuda_graphs in WAYS:
            with SimulatedCuda(pace) as cuda:
                runtime: Runtime = CudaRuntime(DEVICE, cuda) if on_device else HostRuntime()
                model = LaunchedSplitModel(cuda) if on_device else SplitHashModel()
                engine = make_engine(runtime, model, overlap=True, cuda_graphs=cuda_graphs, num_blocks=60)
                if pace is late:
                    engine.record_graphs(lambda done, total: None)
                params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
                requests = []
                for number, length in enumerate((2, 2, 5, 4, 10, 7)):
                    requests.append(engine.add(number, [number + 1, *range(length - 1)], params))
                    engine.step()
                    engine.step()
                while engine.has_unfinished:
                    engine.step()
                outputs.append([one.sequence.output_token_ids for one in requests])
                pieces = engine._runner._prefill_graphs
                assert (pieces is not None) == cuda_graphs
                if pieces is not None:
                    recorded.append(pieces.recorded)
                if on_device:
                    # Recorded at the start, or once as it is and then recorded.
                    assert model.num_prefill_calls == (3 if pace is late else 4) * len(recorded[-1])
        assert outputs[0] == outputs[1] == outputs[2]
        assert recorded[0] == recorded[1]
        assert len(recorded[0]) == 3


def _sample(runtime: Runtime, logits: np.ndarray, params: list[SamplingParams], inverse_cdf: bool = False) -> Outcome:
    table, pool = SequenceTable(len(params), 200, 16), BlockPool(len(params), 16)
    for i, one in enumerate(params):
        sequence = Sequence(i, [1, i % 40, 2], one, 200)
        sequence.prompt_len = 2
        table.place(sequence, pool.allocate(1))
    sampler = Sampler(table, runtime, seed=0, eos_token_ids=(3,), inverse_cdf=inverse_cdf)
    sampled = sampler.sample(runtime.send(logits), np.arange(len(params)), np.full(len(params), 3))
    waits = list(runtime._cuda.waits) if isinstance(runtime, CudaRuntime) else []
    assert not waits, f"sampling waits for {waits}"
    return HostReader(runtime).start(sampled)()


def _draw_rows() -> tuple[np.ndarray, list[SamplingParams]]:
    rng = np.random.default_rng(3)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0, "logprobs": 3}, {}, {"top_k": 3}, {"top_k": 39}, {"top_p": 0.6},
        {"top_p": 0.9, "top_k": 12, "temperature": 2.0}, {"min_p": 0.3, "temperature": 3.0}, {"min_p": 0.9},
        {"temperature": 4.0}, {"repetition_penalty": 1.6, "logprobs": 1}, {"frequency_penalty": 0.7, "top_p": 0.5},
        {"allowed_token_ids": range(5, 25)}, {"logit_bias": {7: 3.0, 8: -2.0}}, {"min_tokens": 4, "temperature": 0},
        {"bad_words": [[11], [2, 12]], "temperature": 0}, {"allowed_token_ids": [3], "min_tokens": 9},
    ]  # fmt: skip
    params = [SamplingParams(**(kind | {"seed": seed})) for kind in kinds for seed in range(4)]
    logits = 2 * rng.normal(size=(len(params), 40))
    logits[::3] = np.round(logits[::3])  # ties
    logits[0], logits[8, 5], logits[9] = np.inf, np.nan, -np.inf
    logits[48, 30], logits[49] = np.nan, -np.inf  # token 30 is barred in its row, and any in the next
    return logits.astype(np.float32), params


def check_sampling() -> None:
    """Rows with any parameters, ties, and logits that are no numbers, against the host's; none waits."""
    logits, params = _draw_rows()
    for some, inverse_cdf in ((slice(None), False), (slice(0, 4), False), (slice(12, 40), False), (slice(None), True)):
        here = _sample(HostRuntime(), logits[some], params[some], inverse_cdf)
        with SimulatedCuda(late) as cuda, torch.inference_mode():
            there = _sample(CudaRuntime(DEVICE, cuda), logits[some], params[some], inverse_cdf)
        assert there.token_ids.tolist() == here.token_ids.tolist()
        assert (there.logprobs, there.faults) == (here.logprobs, here.faults)


def check_masks() -> None:
    """What a mask bars, in some rows or all, against the host's."""
    rng = np.random.default_rng(1)
    for entries in ([0, 1, 2], [0, 2], [1]):
        masks = np.stack([pack_mask(np.flatnonzero(rng.random(45) < 0.5), 45) for _ in entries])
        scores = rng.normal(size=(3, 45))
        here = torch.from_numpy(scores.copy())
        bar_others(here, np.array(entries), torch.from_numpy(masks), HostRuntime())
        with SimulatedCuda(late) as cuda, torch.inference_mode():
            runtime = CudaRuntime(DEVICE, cuda)
            there = runtime.send(scores)
            bar_others(there, np.array(entries), runtime.send(masks), runtime)
            assert not cuda.waits, cuda.waits
            assert torch.equal(there.cpu(), here)


def _pairs(rng: np.random.Generator, sources: int, targets: int) -> np.ndarray:
    count = int(rng.integers(1, min(sources, targets)))
    chosen = rng.permutation(sources)[:count], rng.permutation(targets)[:count]
    return np.stack(chosen).astype(np.int32)


def check_pages() -> None:
    """Pages that go out, in and elsewhere in turn, against numpy; nothing waits before the end."""
    for seed, pace in enumerate(PACES):
        rng = np.random.default_rng(seed)
        pages, host = np.arange(2 * 7 * 3.0).reshape(2, 7, 3, 1, 1), np.zeros((6, 2, 3, 1, 1))
        with SimulatedCuda(pace) as cuda, torch.inference_mode():
            runtime = CudaRuntime(DEVICE, cuda)
            caches = runtime.send(pages.copy())
            mover = CachePages([caches], copy_pages, runtime, 6, staged_bytes=2 * 6 * 8)
            for _ in range(6):
                out, back, own = _pairs(rng, 7, 6), _pairs(rng, 6, 7), rng.permutation(7).astype(np.int32)
                mover.swap_out(out)
                host[out[1]] = pages[:, out[0]].swapaxes(0, 1)
                mover.swap_in(back)
                pages[:, back[1]] = host[back[0]].swapaxes(0, 1)
                mover.copy(own[:6].reshape(2, 3))
                pages[:, own[3:6]] = pages[:, own[:3]]
                caches += 1.0
                pages += 1.0
            assert not cuda.waits, cuda.waits
            assert (caches.cpu().numpy() == pages).all()
            _check_padded_copies(runtime, caches, pages)


def _check_padded_copies(runtime: Runtime, caches: torch.Tensor, pages: np.ndarray) -> None:
    for src, dst in (([-1, 2, 4], [3, 0, 1]), ([2, 3], [-1, -1]), ([1, -1], [5, -1])):
        copy_without_sync(caches, runtime.send(np.array(src)), runtime.send(np.array(dst)))
        for source, target in zip(src, dst, strict=True):
            if min(source, target) >= 0:
                pages[:, target] = pages[:, source]
        assert (caches.cpu().numpy() == pages).all()


def check_stored_rows() -> None:
    """Rows go to their slots, also in a graph that is replayed with others; those without a slot go nowhere."""
    rng = np.random.default_rng(0)
    for pace in PACES:
        expected = rng.normal(size=(2, 4, 3, 2, 5))  # keys, values: [P, S, Hkv, D]
        with SimulatedCuda(pace) as cuda, torch.inference_mode():
            runtime = CudaRuntime(DEVICE, cuda)
            caches, rows = runtime.send(expected.copy()), torch.zeros(2, 6, 2, 5, dtype=torch.float64, device=DEVICE)
            slots = torch.full((6,), -1, device=DEVICE)

            def run(
                caches: torch.Tensor = caches, rows: torch.Tensor = rows, slots: torch.Tensor = slots
            ) -> torch.Tensor:
                kv_scatter(rows[0], rows[1], caches[0], caches[1], slots)
                return rows

            replay = runtime.make_recorder().record(run)
            for given in ([3, -1, 0, -1, 11, 5], [-1] * 6, [-1, -1, 2, 7, -1, -1], [1, 2, 3, 4, 6, 8]):
                new = rng.normal(size=(2, 6, 2, 5))
                rows.copy_(runtime.send(new))
                slots.copy_(runtime.send(np.array(given)))
                replay()
                for row, slot in enumerate(given):
                    if slot >= 0:
                        expected[:, slot // 3, slot % 3] = new[:, row]
            assert set(cuda.waits) == {"the device"}, cuda.waits
            assert (caches.cpu().numpy() == expected).all()


def check_zeroed_workspaces() -> None:
    """Launches of one stream share a buffer, those of two do not; captures share one that an eager launch made."""
    asked = Buffer((4,), torch.int32, zeroed=True)
    with SimulatedCuda(late) as cuda, torch.inference_mode():
        buffers, other = ZeroedBuffers(cuda), cuda.Stream()
        for refused in (Buffer((5,), torch.int32, zeroed=True), asked):
            with pytest.raises(RuntimeError, match="launch once before the capture"), _capturing(cuda):
                buffers.take("counts", refused, DEVICE)
        first = buffers.take("counts", asked, DEVICE)
        with cuda.stream(other):
            second = buffers.take("counts", asked, DEVICE)
        captured = []
        for _ in range(2):
            with _capturing(cuda):
                captured.append(buffers.take("counts", asked, DEVICE))
        assert captured[0] is captured[1]
        assert len({one.data_ptr() for one in (first, second, captured[0])}) == 3
        assert buffers.take("counts", asked, DEVICE) is first
        with cuda.stream(other):
            assert buffers.take("counts", asked, DEVICE) is second
        assert buffers.not_zero() == []


def _capturing(cuda: SimulatedCuda) -> AbstractContextManager[None]:
    return cuda.graph(
        cuda.CUDAGraph(), pool=cuda.graph_pool_handle(), stream=cuda.streams[-1], capture_error_mode="thread_local"
    )


def check_defaults() -> None:
    """On a GPU steps overlap and are recorded, memory that is kept is given back, all that is free is there to use."""
    with SimulatedCuda() as cuda:
        runtime = CudaRuntime(DEVICE, cuda)
        engine = make_engine(runtime, LaunchedModel(cuda), overlap=None, cuda_graphs=None, num_blocks=9)
        assert engine.overlap
        assert engine._runner._graphs is not None
        runtime.release_memory()
        assert cuda.num_emptied == 1
        cuda.free_bytes = cuda.total_bytes - 100
        assert runtime.measure_memory() == (cuda.total_bytes, 100)
        config = cast(Any, SimpleNamespace())
        with mock.patch.object(cache_size, "choose_runtime", return_value=runtime):
            found = cache_size.compute_cache_bytes(EngineOptions(), config, None, device=DEVICE, dtype=torch.float32)
        assert found == int(cuda.total_bytes * cache_size.GPU_FRACTION) - 100
    host = make_engine(HostRuntime(), HashModel(), overlap=None, cuda_graphs=None, num_blocks=9)
    assert not host.overlap
    assert host._runner._graphs is None
