"""Steps with prompts in pieces: what is kept, what is let go, and what stays eager."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.tkernels.simulated_cuda import DEVICE, SimulatedCuda
from tests.tsched.device_worlds import LaunchedSplitModel, SplitHashModel, make_engine
from tkernels.runtime import CudaRuntime, EagerRecorder, HostRuntime
from tmodel.batch import Batch
from tmodel.kv_cache import KVCache
from tsched.execution.engine import Engine
from tsched.execution.prefill_graphs import PrefillGraphs, token_buckets
from tsched.requests.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def pieces_of(engine: Engine) -> PrefillGraphs:
    pieces = engine._runner._prefill_graphs
    assert pieces is not None
    return pieces


def serve_twice(engine: Engine) -> list[list[int]]:
    """The tokens of two prompts of each of three lengths, one after the other."""
    outputs = []
    for number, length in enumerate((3, 3, 6, 6, 12, 12)):
        request = engine.add(number, [number + 1, *range(length - 1)], GREEDY)
        while engine.has_unfinished:
            engine.step()
        outputs.append(request.sequence.output_token_ids)
    return outputs


def host_engine(model: SplitHashModel, cuda_graphs: bool = True) -> Engine:
    return make_engine(HostRuntime(), model, overlap=False, cuda_graphs=cuda_graphs, num_blocks=60)


EXPECTED = serve_twice(host_engine(SplitHashModel(), cuda_graphs=False))


def test_buckets_are_multiples_of_a_tiles_rows_up_to_the_most_tokens() -> None:
    assert token_buckets(12) == [12]
    assert token_buckets(64) == [16, 32, 64]
    assert token_buckets(200) == [16, 32, 64, 128, 192, 200]
    assert len(token_buckets(512)) == 10


def test_a_length_is_recorded_when_it_comes_again() -> None:
    engine = host_engine(SplitHashModel())
    engine.add(0, [1, 2, 3], GREEDY)
    while engine.has_unfinished:
        engine.step()
    assert pieces_of(engine).recorded == []
    assert serve_twice(engine) == EXPECTED
    assert pieces_of(engine).recorded == [4, 8, 16]


@pytest.mark.parametrize("forget", [PrefillGraphs.forget, lambda pieces: pieces.use_model(pieces._model)])
def test_what_is_forgotten_is_gone_at_once_and_can_be_recorded_anew(forget: Callable[[PrefillGraphs], None]) -> None:
    """Without the garbage collector: a server freezes what is there after its start."""
    gc.collect()
    gc.disable()
    try:
        with SimulatedCuda() as cuda:
            engine = make_engine(
                CudaRuntime(DEVICE, cuda), LaunchedSplitModel(cuda), overlap=False, cuda_graphs=True, num_blocks=60
            )
            engine.record_graphs(lambda done, total: None)
            (pool,) = cuda._pools
            decodes = len(engine._runner._graphs.recorded)  # type: ignore[union-attr]
            assert pool.num_graphs == decodes + 2 * 3  # of one layer: a piece ahead of what attends and one behind it
            cuda.synchronize()
            forget(pieces_of(engine))
            assert pool.num_graphs == decodes
            engine._runner.forget_graphs()
            gc.collect()  # a simulated graph of decodes and its memory know each other
            assert pool.num_graphs == 0
            pieces_of(engine).record_all(lambda done, total: None)  # into a pool that has no graphs any more
            assert pool.num_graphs == 2 * 3
            assert serve_twice(engine) == EXPECTED
    finally:
        gc.enable()


class AttendsAtOnce(SplitHashModel):
    """A model that does not ask how to attend."""

    def compute_hidden(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        self.write(batch, kv_cache)
        return self.read(batch, kv_cache).double()


def test_a_model_that_attends_in_another_way_is_served_eagerly_and_that_is_said_once() -> None:
    engine = host_engine(AttendsAtOnce())
    with pytest.warns(
        UserWarning, match="AttendsAtOnce with prompts are recorded in no CUDA graphs: 0 of its 1 layers"
    ):
        assert serve_twice(engine) == EXPECTED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.record_graphs(lambda done, total: None)
    assert pieces_of(engine).recorded == []


class SmallRecorder(EagerRecorder):
    """Has memory for one set of pieces."""

    num_asked = 0

    def record_pieces(self, run: Any, step: Any) -> Any:
        self.num_asked += 1
        if self.num_asked > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")
        return super().record_pieces(run, step)


def test_a_length_whose_pieces_memory_does_not_hold_stays_eager_and_no_prompt_is_lost() -> None:
    engine = host_engine(SplitHashModel())
    pieces_of(engine)._recorder = recorder = SmallRecorder()
    assert serve_twice(engine) == EXPECTED
    assert (pieces_of(engine).recorded, recorder.num_asked) == ([4], 3)
    assert serve_twice(engine) == EXPECTED
    assert recorder.num_asked == 3
