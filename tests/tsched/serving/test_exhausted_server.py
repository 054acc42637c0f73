"""A device with too little memory for a step: its requests end with the reason over HTTP, and the server serves on."""

import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest
import torch

from tests.tsched.serving.conftest import Answer, RunningServer
from tests.tsched.serving.test_cancels import gated
from tests.tsched.serving.test_metrics import check_sums, total
from tests.tsched.serving.test_operations import wait_for
from tests.tsched.test_exhaustion import ON_GPU
from tsched.execution.sampler import Sampler

JSON = {"content-type": "application/json"}


def test_out_of_memory_ends_the_requests_of_its_step_with_the_reason(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "random", "prompt": [5, 6, 7], "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    whole, before = server.post("/v1/completions", body), total(server, "vllm:request_success_total")

    def exhausted(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError(ON_GPU)

    stats = server.front.client.stats
    with ThreadPoolExecutor(2) as pool, gated(server.front.client._llm._engine) as gate:
        so_far = stats().num_output_tokens
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), JSON)
        gate.allow(2)
        wait_for(lambda: stats().num_output_tokens > so_far)
        begun = connection.getresponse()  # before the fault: else the stream would not have begun, and be refused
        refused = pool.submit(server.post, "/v1/completions", body)
        while stats().num_running < 2:
            wanted = gate.num_begun
            gate.allow(1)
            wait_for(lambda wanted=wanted: gate.num_begun > wanted)  # type: ignore[misc]
        monkeypatch.setattr(Sampler, "sample", exhausted)
        gate.allow(200)
        streamed, plain = Answer(begun), refused.result()
        connection.close()
    last = json.loads(streamed.body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
    for error in (last, plain.error):
        assert error["code"] == "engine_error"
        assert "the device had too little memory for a step of 2 " in error["message"]
        assert "GPU 0" not in error["message"]
    assert (streamed.status, plain.status) == (200, 500)
    assert b"[DONE]" not in streamed.body
    assert server.get("/health").status == 200
    assert server.post("/v1/completions", body).json["choices"] == whole.json["choices"]
    check_sums(server)
    assert total(server, "vllm:request_success_total") == before + 3
