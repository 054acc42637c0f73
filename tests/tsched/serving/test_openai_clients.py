"""OpenAI's own clients, unchanged, against a real server: its numbers are the engine's."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.tsched.serving.conftest import OPTIONS, RunningServer
from tsched import LLM, RequestOutput, SamplingParams

PROMPT = "def scan(line, start=0):"
MESSAGES = [{"role": "user", "content": "return [word"}]
DRAWN = {"temperature": 0.9, "seed": 7, "max_tokens": 12}


@pytest.fixture(scope="module")
def llm(chat_checkpoint: Path) -> LLM:
    return LLM(chat_checkpoint, **OPTIONS)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def generate(llm: LLM, prompt: str, **sampling: float) -> RequestOutput:
    (output,) = llm.generate([prompt], SamplingParams(**sampling))
    return output


def test_a_completion_is_the_engines(client: openai.OpenAI, llm: LLM) -> None:
    (model,) = client.models.list().data
    expected = generate(llm, PROMPT, **DRAWN, n=2)
    answer = client.completions.create(model=model.id, prompt=PROMPT, n=2, **DRAWN)
    assert [choice.text for choice in answer.choices] == [one.text for one in expected.outputs]
    assert [choice.finish_reason for choice in answer.choices] == [one.finish_reason for one in expected.outputs]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in expected.outputs)


def test_a_stream_is_the_same(client: openai.OpenAI, llm: LLM) -> None:
    expected = generate(llm, PROMPT, **DRAWN)
    chunks = list(
        client.completions.create(
            model="random", prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **DRAWN
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected.outputs[0].text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert not chunks[-1].choices


def test_a_chat_answers_what_its_template_asks(client: openai.OpenAI, llm: LLM) -> None:
    expected = generate(llm, "<user>return [word<assistant>", **DRAWN)
    answer = client.chat.completions.create(model="random", messages=MESSAGES, **DRAWN)
    assert answer.choices[0].message.content == expected.outputs[0].text
    parts = [{"role": "user", "content": [{"type": "text", "text": "return [word"}]}]
    chunks = list(client.chat.completions.create(model="random", messages=parts, stream=True, **DRAWN))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.outputs[0].text
    assert chunks[-1].choices[0].finish_reason == expected.outputs[0].finish_reason


def test_an_answer_is_sent_back_as_the_next_turn(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="random", messages=MESSAGES, **DRAWN).choices[0].message
    assert first.content
    for told in (first, first.model_dump()):
        turns = [*MESSAGES, told, {"role": "user", "content": "go on"}]
        answer = client.chat.completions.create(model="random", messages=turns, **DRAWN)
        plain = [*MESSAGES, {"role": "assistant", "content": first.content}, turns[-1]]
        expected = client.chat.completions.create(model="random", messages=plain, **DRAWN)
        assert answer.choices[0].message.content == expected.choices[0].message.content


def test_asynchronous_clients_at_once(server: RunningServer, llm: LLM) -> None:
    async def ask(seed: int, client: openai.AsyncOpenAI) -> str:
        sampling = DRAWN | {"seed": seed}
        stream = await client.completions.create(model="random", prompt=PROMPT, stream=True, **sampling)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(seed, client) for seed in range(8)))

    texts = asyncio.run(ask_all())
    assert texts == [generate(llm, PROMPT, **DRAWN | {"seed": seed}).outputs[0].text for seed in range(8)]
    assert len(set(texts)) > 4


class Verdict(BaseModel):
    kind: Literal["right", "wrong"]
    places: Annotated[list[bool], Field(max_length=3)]


def test_a_parsed_chat_is_of_its_schema(client: openai.OpenAI, llm: LLM) -> None:
    spaces = {str(llm.tokenizer(one)["input_ids"][0]): -100 for one in (" ", "\n", "\t", "\r")}  # JSON may have many
    for seed in range(3):
        answer = client.chat.completions.parse(
            model="random",
            messages=MESSAGES,
            response_format=Verdict,
            temperature=2.0,
            seed=seed,
            max_tokens=80,
            logit_bias=spaces,
        )
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Verdict)


def test_a_form_is_kept_in_streams_too(client: openai.OpenAI) -> None:
    form = {"structured_outputs": {"regex": "[ab]{5}-(yes|no)"}}
    chunks = client.completions.create(
        model="random", prompt=PROMPT, stream=True, extra_body=form, temperature=2.0, seed=1, max_tokens=40
    )
    assert re.fullmatch("[ab]{5}-(yes|no)", "".join(chunk.choices[0].text for chunk in chunks))


def test_errors_have_openais_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="random"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="random", prompt="a", suffix="b")
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "suffix")
