"""What a request is counted as at the door, and what a rate makes of it."""

import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.tsched.serving.test_operations import TALK, TEXT, Start, at_rest, start, wait_for
from tsched.serving import admission
from tsched.serving import exchange as exchange_room
from tsched.serving.admission import Admission, Refused, Ticket
from tsched.serving.engine_client import ModelFacts
from tsched.serving.protocol.completions import CompletionRequest
from tsched.serving.requests import estimate_prompt_tokens
from tsched.serving.text import MAX_CUT_CHARS

__all__ = ["start"]  # the fixture
PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


def path_of(body: dict[str, Any]) -> str:
    return next(path for name, path in PATHS.items() if name in body)


@pytest.mark.parametrize("body", [TEXT | {"prompt": "a b " * 40}, TALK], ids=["text", "chat"])
def test_a_large_body_locks_nobody_out(body: Any, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = start(limits={"max_waiting_tokens": 60})
    may_go_on, has_begun = threading.Event(), threading.Event()

    def make_job(*parts: Any, real: Callable[..., Any] = exchange_room.make_job) -> Any:
        if parts[0].truncate_prompt_tokens is not None:
            has_begun.set()
            may_go_on.wait(20)
        return real(*parts)

    monkeypatch.setattr(exchange_room, "make_job", make_job)
    large = body | {"truncate_prompt_tokens": 5, "user": "x" * 2000}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.post, path_of(body), large)
        try:
            assert has_begun.wait(20)
            assert 0 < server.front.open_door().num_waiting_tokens <= 5
            other = server.post("/v1/completions", TEXT | {"prompt": [5] * 50})
        finally:
            may_go_on.set()
        assert (other.status, first.result().status) == (200, 200), (other.body, first.result().body)
    wait_for(lambda: at_rest(server))


@pytest.mark.parametrize("body", [TEXT, TALK], ids=["text", "chat"])
def test_a_text_that_is_far_too_long_is_refused_untokenized_to_be_truncated_too(body: Any, start: Start) -> None:
    server, client = start()
    assert server.front.codec.max_token_chars * 128 < MAX_CUT_CHARS
    long = "a" * (MAX_CUT_CHARS + 1)
    given = {"prompt": long} if "prompt" in body else {"messages": [{"role": "user", "content": long}]}
    refused = server.post(path_of(body), body | given | {"truncate_prompt_tokens": 5})
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded"), refused.body
    assert not client.submitted


def test_of_a_list_ids_are_counted_and_texts_estimated_by_their_bytes() -> None:
    facts = ModelFacts("random", 1, 128, 300, (0,), None, 4, 256, 4)
    for prompt, num_tokens in (([[5] * 7, [6]], 8), (["abcde", "äöü"], 2 + 2), (["a" * 2000, "a"], 128 + 1)):
        request = CompletionRequest.model_validate({"model": "random", "prompt": prompt})
        assert estimate_prompt_tokens(request, facts) == num_tokens


# Rates.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(admission, "monotonic", lambda: now[0])
    return now


def test_a_rate_says_exactly_when_a_request_fits(clock: list[float]) -> None:
    door = Admission(1 << 20, 1 << 20, tokens_per_minute=600)
    for num_tokens in (100, 100, 400):
        assert isinstance(door.admit("a", 1, num_tokens - 10, 10), Ticket)
    refused = door.admit("a", 1, 240, 10)
    assert isinstance(refused, Refused)
    assert refused.retry_after == 25.0, "ten tokens a second"
    assert isinstance(door.admit("b", 1, 240, 10), Ticket)
    clock[0] += 24.9
    assert isinstance(door.admit("a", 1, 240, 10), Refused)
    clock[0] += 0.1
    assert isinstance(door.admit("a", 1, 240, 10), Ticket)


def test_counted_tokens_take_the_place_of_estimated_ones_and_are_given_back_before_output(clock: list[float]) -> None:
    door = Admission(1 << 20, 1 << 20, requests_per_minute=3, tokens_per_minute=600)

    def enter(num_tokens: int) -> Ticket:
        ticket = door.admit("a", 1, num_tokens, 0)
        assert isinstance(ticket, Ticket)
        return ticket

    first = enter(500)
    assert first.count(100, 20) is None
    second = enter(480)  # fits beside 120
    assert second.count(470, 10) is None
    second.refund()
    second.refund()
    second.give_back()
    third = enter(480)
    third.start()
    third.refund()
    refused = door.admit("a", 1, 1, 0)
    assert isinstance(refused, Refused)
    assert refused.reason == "tokens_per_minute"
    clock[0] += 60
    above = enter(10**6)  # estimated, so it may be below
    over = above.count(601, 0)
    assert over is not None
    assert over.retry_after is None


def test_what_a_rate_keeps_grows_with_no_count() -> None:
    """It kept an entry a token."""
    door = Admission(1 << 20, 1 << 40, tokens_per_minute=1 << 30)
    tracemalloc.start()
    try:
        for _ in range(20):
            ticket = door.admit("a", 1, 20_000, 0)
            assert isinstance(ticket, Ticket)
            ticket.give_back()
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()


def test_a_rate_counts_tokens_and_not_bytes(start: Start) -> None:
    server, _ = start(limits={"tokens_per_minute": 50})
    wide = TEXT | {"user": "x" * 2000, "max_tokens": 3, "prompt": [5]}
    assert server.post("/v1/completions", wide).status == 200
    for asked, param in (({"prompt": [5] * 60}, "prompt"), ({"max_tokens": 60}, "max_tokens")):
        server, client = start(limits={"tokens_per_minute": 50})
        refused = server.post("/v1/completions", TEXT | asked)
        assert (refused.status, refused.error["param"]) == (400, param), refused.body
        assert "60 " in refused.error["message"]
        assert not client.submitted
    talk = {"max_tokens": None, "max_completion_tokens": 60}
    assert server.post("/v1/chat/completions", TALK | talk).error["param"] == "max_completion_tokens"


def test_what_is_tokenized_alone_uses_up_its_rate_too(start: Start) -> None:
    server, _ = start(limits={"tokens_per_minute": 50})
    text = {"prompt": "a " * 80}
    assert server.post("/tokenize", text).status == 200
    assert server.post("/tokenize", text).error["code"] == "tokens_per_minute"


def test_a_request_that_is_refused_after_the_door_uses_up_no_rate(start: Start) -> None:
    server, _ = start(limits={"requests_per_minute": 1, "tokens_per_minute": 200})
    for wrong in ({"prompt": [999]}, {"prompt": [5] * 129}, {"structured_outputs": {"regex": "("}}):
        refused = server.post("/v1/completions", TEXT | wrong)
        assert refused.status == 400, refused.body
    assert server.post("/v1/completions", TEXT).status == 200
    assert server.post("/v1/completions", TEXT).error["code"] == "requests_per_minute"
    wait_for(lambda: at_rest(server))
