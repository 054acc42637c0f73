"""Whatever a request's own code does, it is that request's: it ends nobody else's and reaches nothing of theirs."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tsched.test_llm import GREEDY, PROMPTS, completion, crowded_bytes, make_llm
from tsched import LLM, RequestOutput, SamplingParams

FREE = dataclasses.replace(GREEDY, ignore_eos=True)
VOCAB = 300


@pytest.fixture(scope="module", params=[False, True], ids=["", "overlap"])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> LLM:
    return make_llm(checkpoint, overlap=request.param)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Undecidable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Raises:
    """As a processor and as a criterion."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor | None = None) -> torch.Tensor:
        if output.size == 2:
            raise self.error
        return False if logits is None else logits


class Nameless(Raises):
    def __getattribute__(self, name: str) -> object:
        if name == "__qualname__":
            raise RuntimeError("no name")
        return super().__getattribute__(name)


def shrinks_in_place(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return logits.resize_(5)


def reaches_for_the_next_row(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    logits.as_strided((2 * VOCAB,), (1,), logits.storage_offset()).fill_(-torch.inf)
    return logits


def sparse(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return logits.to_sparse()


def on_no_device(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
    return logits.to("meta")


def answers_the_undecidable(prompt: np.ndarray, output: np.ndarray) -> bool:
    return Undecidable()  # type: ignore[return-value]


def check_that_it_fails_alone(llm: LLM, params: SamplingParams, message: str) -> None:
    before, failed, after = llm.generate(PROMPTS[3:6], [FREE, params, FREE])
    assert message in failed.error
    assert failed.outputs[0].finish_reason == "error"
    for prompt, output in ((PROMPTS[3], before), (PROMPTS[5], after)):
        assert output.error is None
        assert completion(output) == completion(llm.generate([prompt], FREE)[0])
    assert llm.stats().num_used_blocks == 0


@pytest.mark.parametrize("kind", ["logits_processors", "stopping_criteria"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SystemExit(3), "raised SystemExit: 3"),
        (GeneratorExit(), "raised GeneratorExit: "),
        (StopIteration(7), "raised StopIteration: 7"),
        (asyncio.CancelledError(), "raised CancelledError: "),
        (Unspeakable(), "raised Unspeakable"),
    ],
)
def test_whatever_is_raised_ends_one_request_alone(llm: LLM, kind: str, error: BaseException, message: str) -> None:
    for callback in (Raises(error), Nameless(error)):
        params = dataclasses.replace(FREE, **{kind: [callback]})
        place = 2 if kind == "logits_processors" else 1
        check_that_it_fails_alone(llm, params, f"{type(callback).__name__} at output token {place} {message}")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (shrinks_in_place, "shrinks_in_place at output token 0 returned torch.float64 of shape [5]"),
        (reaches_for_the_next_row, "reaches_for_the_next_row at output token 0 raised RuntimeError: setStorage"),
        (sparse, "sparse at output token 0 returned torch.float64 of shape [300], not dense"),
        (on_no_device, "on_no_device at output token 0 raised NotImplementedError"),
    ],
)
def test_a_processor_has_no_way_into_the_step(llm: LLM, processor: object, message: str) -> None:
    for temperature in (0.0, 1.0):
        params = dataclasses.replace(FREE, temperature=temperature, logits_processors=[processor])
        check_that_it_fails_alone(llm, params, message)


def test_an_answer_that_cannot_be_shown_ends_one_request_alone(llm: LLM) -> None:
    params = dataclasses.replace(FREE, stopping_criteria=[answers_the_undecidable])
    check_that_it_fails_alone(llm, params, "answers_the_undecidable at output token 0 raised RuntimeError: no words")


def test_the_model_is_not_blamed_for_what_a_request_bars(llm: LLM) -> None:
    def only_the_end(prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([0]), 0.0)

    params = dataclasses.replace(GREEDY, logits_processors=[only_the_end], min_tokens=3)
    check_that_it_fails_alone(llm, params, "min_tokens and logits_processors left no token to choose output token 0")


@pytest.mark.parametrize("kind", ["logits_processors", "stopping_criteria"])
def test_the_users_interrupt_ends_generate(llm: LLM, kind: str) -> None:
    params = dataclasses.replace(FREE, **{kind: [Raises(KeyboardInterrupt())]})
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[3:5], [FREE, params])
    assert llm._engine.num_unfinished == 0
    assert llm.stats().num_used_blocks == 0
    assert llm.generate([PROMPTS[3]], FREE)[0].error is None


def test_an_interrupt_on_another_thread_is_a_callbacks_own(llm: LLM) -> None:
    params = dataclasses.replace(FREE, logits_processors=[Raises(KeyboardInterrupt())])
    thread = threading.Thread(target=check_that_it_fails_alone, args=(llm, params, "raised KeyboardInterrupt: "))
    failed: list[object] = []
    previous, threading.excepthook = threading.excepthook, failed.append
    try:
        thread.start()
        thread.join()
    finally:
        threading.excepthook = previous
    assert not failed


class Keeps:
    """As a processor and as a criterion: keeps what it is given, and what that was."""

    def __init__(self) -> None:
        self.kept: list[tuple[np.ndarray, list[int]]] = []

    def __call__(self, prompt: np.ndarray, output: np.ndarray, logits: torch.Tensor | None = None) -> torch.Tensor:
        self.kept += [(prompt, prompt.tolist()), (output, output.tolist())]
        return False if logits is None else logits


@pytest.mark.parametrize("kind", ["logits_processors", "stopping_criteria"])
@pytest.mark.parametrize("num_blocks", [100, 8])
def test_arrays_that_are_kept_never_show_another_requests_text(checkpoint: Path, kind: str, num_blocks: int) -> None:
    """In a row that changes hands; with few blocks its owner leaves it and comes back to another."""
    crowded = make_llm(
        checkpoint, max_num_seqs=3, overlap=True, block_size=4, kv_cache_bytes=crowded_bytes(checkpoint, num_blocks)
    )
    callbacks = [Keeps() for _ in range(3)]
    params = [dataclasses.replace(FREE, max_tokens=12, **{kind: [one]}) for one in callbacks]
    prompts = [[5, 6, 7], [8, 9, 10, 11], [12]]
    outputs = crowded.generate(prompts, params)
    assert (crowded.stats().num_preemptions > 0) == (num_blocks == 8)
    crowded.generate([[299] * 11] * 6, dataclasses.replace(FREE, max_tokens=12))
    for prompt, output, one in zip(prompts, outputs, callbacks, strict=True):
        tokens = output.outputs[0].token_ids
        for array, then in one.kept:
            assert array.tolist() == then
            assert then in (prompt, tokens[: len(then)])
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0


def test_a_processor_is_called_anew_only_for_a_token_that_was_under_way(checkpoint: Path) -> None:
    """In order, with the same arguments each time; without overlap nothing is under way, so it is called once."""
    crowding = {"max_num_seqs": 3, "block_size": 4, "kv_cache_bytes": crowded_bytes(checkpoint, 8)}
    repeated = {}
    for overlap in (False, True):
        crowded = make_llm(checkpoint, overlap=overlap, **crowding)
        callbacks = [Keeps() for _ in range(3)]
        params = [dataclasses.replace(FREE, max_tokens=16, logits_processors=[one]) for one in callbacks]
        outputs: list[RequestOutput] = crowded.generate([[5, 6, 7], [8, 9, 10, 11], [12]], params)
        assert crowded.stats().num_preemptions > 0
        repeated[overlap] = 0
        for output, one in zip(outputs, callbacks, strict=True):
            seen = [then for _, then in one.kept[1::2]]
            sizes = [len(then) for then in seen]
            assert sizes == sorted(sizes)
            assert set(sizes) == set(range(16))
            assert all(then == output.outputs[0].token_ids[: len(then)] for then in seen)
            repeated[overlap] += sum(times - 1 for times in Counter(sizes).values())
    assert repeated[False] == 0
    assert repeated[True] > 0
