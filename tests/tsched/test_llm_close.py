"""An LLM that is closed: the device's memory is free, what ran for it has ended, and it says that it is closed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tsched.test_llm import GREEDY, PROMPTS, make_llm
from tsched import BeamSearchParams, SamplingParams
from tsched.requests.errors import UsageError


def held_tensors(llm: Any) -> list[weakref.ref[torch.Tensor]]:
    """The weights, the caches and the engine's own arrays."""
    runner = llm._engine._runner
    caches = [tensor for layer in runner._kv_cache for tensor in layer]
    weights = [one for one in vars(runner._model).values() if isinstance(one, torch.Tensor)]
    assert caches
    assert weights
    return [weakref.ref(one) for one in (*caches, *weights, runner._state.block_tables, runner._state.last_tokens)]


@pytest.mark.parametrize("graphs", [False, True])
def test_its_memory_is_free_and_its_threads_have_ended(checkpoint: Path, graphs: bool) -> None:
    before = set(threading.enumerate())
    with make_llm(checkpoint, cuda_graphs=graphs) as llm:
        held = held_tensors(llm)
        (output,) = llm.generate(PROMPTS[0], GREEDY)
        llm.start_thread(lambda news: None, lambda failure: None)
    assert [one() for one in held] == [None] * len(held)
    assert set(threading.enumerate()) <= before
    assert output.outputs[0].token_ids, "what it has made stays"
    llm.close()


def test_any_later_use_is_refused(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    llm.close()
    uses: list[Callable[[], object]] = [
        lambda: llm.generate(PROMPTS[0]),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: llm.beam_search(PROMPTS[0], BeamSearchParams(2, 2)),
        lambda: llm.swap_kernels({}),
        llm.warm_up,
        llm.stats,
        llm.reset_peak,
        llm.forget_graphs,
        lambda: llm.start_thread(lambda news: None, lambda failure: None),
        lambda: llm.arm,
    ]
    for use in uses:
        with pytest.raises(UsageError, match="this LLM was closed"):
            use()


def test_it_is_not_closed_while_it_is_in_use(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    said: list[str] = []

    def close(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        try:
            llm.close()
        except UsageError as error:
            said.append(str(error))
        return logits

    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=2, logits_processors=[close]))
    assert output.error is None
    assert len(said) == 2
    assert "this LLM is in use" in said[0]
