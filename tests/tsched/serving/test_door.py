"""What a request is counted as at the door, and what a rate makes of it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.tsched.serving.test_operations import TALK, TEXT, Start, at_rest, start, wait_for
from tsched.serving import exchange as exchange_room
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
