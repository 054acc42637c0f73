"""Drawn requests at every route; `python -m tests.tsched.serving.fuzz_routes` draws more."""

from pathlib import Path

import pytest

from tests.tsched.serving.conftest import RunningServer
from tests.tsched.serving.fuzz_routes import fuzz
from tests.tsched.serving.scripted_client import ScriptedClient
from tsched.serving.app import create_app


@pytest.mark.parametrize("num_examples", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_no_drawn_request_gets_a_5xx_or_what_the_document_denies(num_examples: int, chat_checkpoint: Path) -> None:
    server = RunningServer(create_app(ScriptedClient(chat_checkpoint))).wait_until_ready()
    found = fuzz(server.base, num_examples)
    server.stop()
    assert found.keys() >= {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models/{model}"}
    assert all(found[f"POST {path}"][200] for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"))
