"""Drawn requests at every route; `python -m tests.tsched.serving.fuzz_routes` draws more."""

from pathlib import Path

import pytest
from schemathesis.core.failures import FailureGroup

from tests.tsched.serving.conftest import RunningServer
from tests.tsched.serving.fuzz_routes import KEYS, fuzz
from tests.tsched.serving.scripted_client import ScriptedClient
from tsched.serving import responses
from tsched.serving.app import create_app
from tsched.serving.responses import frame


@pytest.mark.parametrize("num_examples", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_no_drawn_request_gets_a_5xx_or_what_the_document_denies(num_examples: int, chat_checkpoint: Path) -> None:
    server = RunningServer(create_app(ScriptedClient(chat_checkpoint), keys=KEYS)).wait_until_ready()
    found = fuzz(server.base, num_examples)
    server.stop()
    assert found.keys() >= {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models/{model}"}
    for route in ("POST /v1/completions", "POST /v1/chat/completions", "POST /tokenize", "POST /admin/kernels"):
        assert found[route][200]


def test_a_stream_that_the_document_denies_is_noticed(chat_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "frame", lambda content: frame(content | {"object": "text"}))
    server = RunningServer(create_app(ScriptedClient(chat_checkpoint), keys=KEYS)).wait_until_ready()
    with pytest.raises(FailureGroup, match="event"):
        fuzz(server.base, 60)
    server.stop()
