"""What passes between front end and engine: plain values, and the engine's own outputs behind them."""

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tsched import LLM, SamplingParams
from tsched.serving.engine_client import (
    Delta,
    EngineFailedError,
    EngineRequest,
    EngineUnavailableError,
    RequestRefusedError,
    read_sampling,
)
from tsched.serving.local_client import LocalClient

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "kv_cache_bytes": 1 << 19}


def test_deltas_and_stats_are_the_engines_own_and_json_holds_them(checkpoint: Path) -> None:
    sampling = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "n": 2, "logprobs": 1}
    request = EngineRequest("a", [5, 6, 7, 8], sampling, cache_salt="tenant")
    (expected,) = LLM(checkpoint, **SMALL).generate([request.prompt_token_ids], SamplingParams(**sampling))

    async def serve() -> list[Delta]:
        client = LocalClient(checkpoint, **SMALL)
        assert client.state == "loading"
        with pytest.raises(EngineUnavailableError):
            client.submit(request)
        with pytest.raises(EngineUnavailableError, match="the model is being loaded"):
            client.stats()
        await client.start()
        assert client.state == "ready"
        assert (client.facts.name, client.facts.vocab_size) == (checkpoint.name, 300)
        (stream,) = client.submit(request)
        deltas = [delta async for delta in stream]
        assert client.stats().num_output_tokens >= 12
        with pytest.raises(RequestRefusedError, match="out of vocabulary"):
            await anext(*client.submit(EngineRequest("b", [300], {})))
        json.dumps([asdict(client.stats()), asdict(client.facts), asdict(request)])
        (long,) = client.submit(EngineRequest("c", [5], {"max_tokens": 100, "ignore_eos": True}))
        client.abort("c")
        assert [delta async for delta in long][-1].samples[0].finish_reason == "abort"
        await client.close()
        assert client.state == "draining"
        with pytest.raises(EngineUnavailableError, match="stopping"):
            client.submit(request)
        return deltas

    deltas = asyncio.run(serve())
    assert [delta.is_last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert json.loads(json.dumps(deltas)) is not None
    for index, whole in enumerate(expected.outputs):
        parts = [sample for delta in deltas for sample in delta.samples if sample.sample == index]
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert "".join(part.text for part in parts) == whole.text
        assert parts[-1].finish_reason == whole.finish_reason
        scores = [scores for part in parts for scores in part.logprobs or []]
        assert [scores.token_ids[0] for scores in scores] == whole.token_ids


def test_an_engine_that_ends_in_between_is_said_as_what_it_is(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look whether it runs and the request; and a swap that fails there is the swap's."""

    async def serve() -> None:
        client = LocalClient(checkpoint, **SMALL)
        await client.start()
        llm = client._running()
        monkeypatch.setattr(client, "_running", lambda: llm)

        def fail(choices: object) -> object:
            raise RuntimeError("no memory for the weights")

        with monkeypatch.context() as patch:
            patch.setattr(llm, "plan_swap", lambda choices: lambda: fail(choices))
            with pytest.raises(RequestRefusedError, match="RuntimeError: no memory for the weights"):
                await client.swap_kernels({})
        (stream,) = client.submit(EngineRequest("a", [5], {"max_tokens": 9, "ignore_eos": True}))
        monkeypatch.setattr(llm._engine, "step", lambda: fail(None))
        with pytest.raises(EngineFailedError, match="no memory"):
            [delta async for delta in stream]
        with pytest.raises(EngineFailedError, match="the engine failed: RuntimeError: no memory"):
            client.submit(EngineRequest("b", [5], {}))
        await client.close()
        with pytest.raises(EngineUnavailableError, match="stopping"):
            client.submit(EngineRequest("c", [5], {}))

    asyncio.run(serve())


@pytest.mark.parametrize(
    ("sampling", "param", "message"),
    [
        ({"temperatur": 1}, "temperatur", "temperature"),
        ({"top_p": 2.0}, "top_p", "at most 1"),
        ({"n": 0}, "n", "n must"),
        ({"n": 2, "temperature": -1.0, "top_k": 3}, "temperature", "temperature must"),
        ({"min_tokens": 2, "structured_outputs": {"regex": "a"}, "n": 1}, "min_tokens", "does not go with"),
    ],
)
def test_wrong_sampling_is_refused_by_the_fields_name(sampling: dict[str, float], param: str, message: str) -> None:
    with pytest.raises(RequestRefusedError, match=message) as refused:
        read_sampling(sampling)
    assert refused.value.param == param


def test_the_front_end_loads_neither_torch_nor_transformers_nor_triton() -> None:
    """Every module of the server, but the worker's, in a process of its own."""
    code = """
import importlib, pkgutil, sys, tsched.serving
for module in pkgutil.walk_packages(tsched.serving.__path__, "tsched.serving."):
    if not module.name.endswith(".worker"):
        importlib.import_module(module.name)
print(sorted({"torch", "transformers", "triton", "tkernels", "tmodel"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
