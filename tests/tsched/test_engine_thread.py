"""The news of a step come in one list, of every request, without a task for each."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import decoders

from tests.tsched.test_llm import GREEDY, PROMPTS, completion, make_llm
from tsched import LLM, SamplingParams
from tsched.execution.engine_thread import EngineThread, NobodyListensError
from tsched.execution.news import News
from tsched.serving.engine_records import make_delta, make_scores


class Listener:
    """Takes the news of a thread, and its end."""

    def __init__(self) -> None:
        self.steps: list[list[News]] = []
        self.ends: list[BaseException | None] = []
        self.ended = threading.Event()

    def on_end(self, failure: BaseException | None) -> None:
        self.ends.append(failure)
        self.ended.set()

    def start(self, llm: LLM) -> EngineThread:
        return llm.start_thread(self.steps.append, self.on_end)

    def of(self, name: str) -> list[News]:
        return [one for step in self.steps for one in step if one.ticket.prepared.request_id == name]


@pytest.fixture
def llm(checkpoint: Path) -> LLM:
    return make_llm(checkpoint)


def test_one_list_a_step_holds_what_generate_gives(llm: LLM) -> None:
    params = [
        GREEDY,
        SamplingParams(n=2, seed=1, temperature=1.5, max_tokens=9, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=12, stop=["zz"], ignore_eos=True),
        SamplingParams(stop_token_ids=[300]),
    ]
    expected = llm.generate(PROMPTS[3:7], params)
    listener = Listener()
    thread = listener.start(llm)
    for number, (prompt, one) in enumerate(zip(PROMPTS[3:7], params, strict=True)):
        thread.submit(llm.make_ticket(str(number), prompt, one))
    thread.drain()
    thread.join()
    for number, whole in enumerate(expected):
        news = listener.of(str(number))
        assert [one.is_last for one in news] == [False] * (len(news) - 1) + [True]
        assert news[-1].error == whole.error
        told = [one.prompt_logprobs for one in news if one.prompt_logprobs is not None]
        assert len(told) == (whole.prompt_logprobs is not None)
        assert not told or list(map(list, told[0][1:])) == list(map(list, whole.prompt_logprobs[1:]))
        for completed in whole.outputs:
            parts = [one.completion for one in news if one.completion.index == completed.index]
            assert [token for part in parts for token in part.token_ids] == completed.token_ids
            assert "".join(part.text for part in parts) == completed.text
            assert parts[-1].finish_reason == completed.finish_reason
            if completed.logprobs is not None:
                assert [list(place) for part in parts for place in part.logprobs] == list(map(list, completed.logprobs))
                assert parts[-1].cumulative_logprob == pytest.approx(completed.cumulative_logprob, abs=1e-9)
    for step in listener.steps:
        assert set(Counter((one.ticket, one.completion.index) for one in step).values()) == {1}
    assert max(map(len, listener.steps)) >= 4, "several requests in one list"
    assert listener.ends == [None]


def test_requests_that_come_together_begin_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the form of one is compiled first; so their batches, and what is drawn, are generate's."""
    listener, counts = Listener(), list[int]()
    step = llm._engine.step
    monkeypatch.setattr(llm._engine, "step", lambda: (counts.append(len(llm._engine._requests)), step())[1])
    form = {"regex": "[ab]{30}"}
    thread = listener.start(llm)
    params = [SamplingParams(n=2, seed=1, max_tokens=4), SamplingParams(max_tokens=4, structured_outputs=form)]
    thread.submit(*(llm.make_ticket(str(i), PROMPTS[3 + i], one) for i, one in enumerate(params)))
    thread.drain()
    thread.join()
    assert counts[0] == 3
    assert [one.is_last for name in "01" for one in listener.of(name)].count(True) == 2


def test_who_labels_log_probabilities_itself_gets_the_same_and_no_label_is_made(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=2, seed=1, temperature=1.5, max_tokens=9, logprobs=2, prompt_logprobs=1)
    (whole,) = llm.generate([PROMPTS[3]], params)
    monkeypatch.setattr(llm._texts, "_make_label", None)
    llm._texts._labels.clear()
    listener = Listener()
    thread = llm.start_thread(listener.steps.append, listener.on_end, label_logprobs=False)
    thread.submit(llm.make_ticket("a", PROMPTS[3], params))
    thread.drain()
    thread.join()
    assert listener.ends == [None]
    news = listener.of("a")
    assert {one.logprobs for one in news} | {one.prompt_logprobs for one in news} == {None}
    (told,) = (one.prompt_scores for one in news if one.prompt_scores is not None)
    expected = [place for place in whole.prompt_logprobs or [] if place is not None]
    assert [dict.fromkeys(one.token_ids) for one in told] == [dict.fromkeys(place) for place in expected]
    for completed in whole.outputs:
        scores = [place for one in news if one.index == completed.index for place in one.scores or ()]
        assert len(scores) == len(completed.logprobs or ())
        for one, place in zip(scores, completed.logprobs or (), strict=True):
            assert make_scores(one).token_ids == list(place)
            assert make_scores(one).logprobs == pytest.approx([entry.logprob for entry in place.values()], abs=1e-9)


def test_news_with_log_probabilities_are_records_of_the_link(llm: LLM) -> None:
    listener = Listener()
    thread = llm.start_thread(listener.steps.append, listener.on_end, label_logprobs=False)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    thread.submit(llm.make_ticket("a", PROMPTS[3], params))
    thread.drain()
    thread.join()
    deltas = [make_delta(one) for one in listener.of("a")]
    assert [scores for delta in deltas for one in delta.samples for scores in one.logprobs or ()] == [
        make_scores(place) for one in listener.of("a") for place in one.scores or ()
    ]
    told = next(delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None)
    assert [None if place is None else place.token_ids[0] for place in told] == [None, *PROMPTS[3][1:]]


def test_a_thread_that_has_ended_is_called_no_more(llm: LLM) -> None:
    thread = Listener().start(llm)
    assert thread.call(lambda: 3).result(20) == 3
    thread.drain()
    thread.join()
    with pytest.raises(RuntimeError, match="^the engine's thread has ended$"):
        thread.call(lambda: 3)


def test_every_request_is_told_of_the_threads_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener()
    step, steps = llm._engine.step, iter(range(3))

    def failing() -> list[Any]:
        if next(steps, None) is None:
            raise MemoryError("the device is full")
        return step()

    monkeypatch.setattr(llm._engine, "step", failing)
    thread = listener.start(llm)
    tickets = [llm.make_ticket(str(i), PROMPTS[3 + i], SamplingParams(n=1 + i, max_tokens=30)) for i in range(3)]
    for ticket in tickets:
        thread.submit(ticket)
    assert listener.ended.wait(30)
    assert [type(end) for end in listener.ends] == [MemoryError]
    for number, ticket in enumerate(tickets):
        news = listener.of(str(number))
        assert [one.is_last for one in news].count(True) == news[-1].is_last == 1
        assert news[-1].error == "the engine failed: MemoryError: the device is full"
        assert ticket.failure is listener.ends[0]
        ends = [one.completion.index for one in news if one.completion.finish_reason is not None]
        assert sorted(ends) == list(range(1 + number))
    with pytest.raises(RuntimeError, match="has ended"):
        thread.submit(tickets[0])


@pytest.mark.parametrize("kind", [RuntimeError, NobodyListensError])
def test_what_taking_the_news_raises_is_the_threads_failure_unless_nobody_listens(
    llm: LLM, kind: type[Exception]
) -> None:
    listener, error = Listener(), kind("the news cannot be made")

    def take(news: list[News]) -> None:
        listener.steps.append(news)
        if len(listener.steps) == 2:
            raise error

    thread = llm.start_thread(take, listener.on_end)
    ticket = llm.make_ticket("0", PROMPTS[3], SamplingParams(max_tokens=30, ignore_eos=True))
    thread.submit(ticket)
    assert listener.ended.wait(30)
    failure = None if kind is NobodyListensError else error
    assert listener.ends == [thread.failure] == [ticket.failure] == [failure]
    assert listener.of("0")[-1].error == (failure and "the engine failed: RuntimeError: the news cannot be made")


class Breaks:
    """A decoder of the tokenizers library that fails at one token's text, whatever is around it."""

    def __init__(self, bad: str) -> None:
        self.bad = bad

    def decode_chain(self, tokens: list[str]) -> list[str]:
        if self.bad in tokens:
            raise ValueError("unknown piece")
        return tokens


def test_a_fault_in_the_librarys_own_stream_ends_one_request(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = llm.generate(PROMPTS[3:6], free)
    tokens = [output.outputs[0].token_ids for output in expected]
    bad = next(token for token in tokens[1][3:] if token not in tokens[0] + tokens[2])
    backend = llm.tokenizer.backend_tokenizer
    backend.decoder = decoders.Decoder.custom(Breaks(backend.id_to_token(bad)))
    llm.tokenizer = llm.tokenizer  # what it knows of tokens it knew of the decoder before
    listener = Listener()
    thread = listener.start(llm)
    for number in range(3):
        thread.submit(llm.make_ticket(str(number), PROMPTS[3 + number], free))
    thread.drain()
    thread.join()
    assert listener.ends == [None]
    for number in (0, 2):
        got = [token for one in listener.of(str(number)) for token in one.completion.token_ids]
        assert (got, listener.of(str(number))[-1].completion.finish_reason) == completion(expected[number])
    failed = listener.of("1")[-1]
    assert failed.completion.finish_reason == "error"
    assert "unknown piece" in str(failed.error)
    assert llm.stats().num_used_blocks == 0
