"""Texts over HTTP, of `LLM.generate` and of transformers: are they the same, streamed and whole?

python -m tests.tsched.serving.same_answers FOLDER [--model tiny] [--prompts 500] [--streams 2000] [--at-once 64]

Greedy: each prompt over HTTP, `--at-once` at a time, by LLM.generate, and by transformers' generate, one by one.
Drawn: requests with drawn parameters, each as a stream and whole: text, reason, log-probabilities and usage of the
chunks together are the whole body's, and text and reason are LLM.generate's. FOLDER keeps the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tsched.serving.tk_serve import Served, serving
from tsched import LLM, SamplingParams

T = TypeVar("T")
Body = dict[str, Any]

MAX_TOKENS = 24
LARGEST_DIFFERENCE = 1e-4
"""Of a log-probability, in nats, between two forms of a request: they run in other batches, whose GEMMs round apart."""


def draw_prompts(count: int) -> list[str]:
    """Beginnings of pieces of Python's own sources."""
    drawn = random.Random(0)
    source = Path(os.__file__).with_name("inspect.py").read_text(encoding="utf-8")
    starts = [drawn.randrange(len(source) - 400) for _ in range(count)]
    return [source[start : start + drawn.randint(4, 300)] for start in starts]


def draw_body(drawn: random.Random, prompts: Sequence[str]) -> Body:
    """A request for one or several completions, of one or several prompts."""
    body: Body = {
        "model": "served",
        "prompt": drawn.choice(prompts) if drawn.random() < 0.7 else drawn.sample(prompts, drawn.randint(2, 4)),
        "max_tokens": drawn.randint(1, MAX_TOKENS),
        "temperature": drawn.choice([0.0, 0.5, 1.0, 2.0]),
        "seed": drawn.randint(0, 2**31),
        "n": drawn.choice([1, 1, 1, 2, 4]),
        "top_p": drawn.choice([1.0, 1.0, 0.9, 0.5]),
        "presence_penalty": drawn.choice([0.0, 0.0, 1.0]),
        "frequency_penalty": drawn.choice([0.0, 0.0, 0.5]),
    }
    if drawn.random() < 0.4:
        body["stop"] = drawn.sample(["e", "self", ")", "\n", " re", "::"], drawn.randint(1, 3))
    if drawn.random() < 0.4:
        body["logprobs"] = drawn.randint(0, 5)
    return body


async def for_each(count: int, at_once: int, ask: Callable[[int], Awaitable[T]]) -> list[T]:
    """`ask` of 0 to count - 1, so many at once."""
    places = asyncio.Semaphore(at_once)

    async def one(index: int) -> T:
        async with places:
            return await ask(index)

    return await asyncio.gather(*map(one, range(count)))


async def post(client: httpx2.AsyncClient, body: Body) -> Any:
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def follow(client: httpx2.AsyncClient, body: Body) -> Any:
    """A stream as the body that it would have been."""
    choices: dict[int, Any] = {}
    usage = None
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=asked) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    for event in map(json.loads, lines[:-1]):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            found = choices.setdefault(choice["index"], {**choice, "text": "", "logprobs": None})
            found["text"] += choice["text"]
            found["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                parts = found["logprobs"] = found["logprobs"] or {name: [] for name in choice["logprobs"]}
                for name, values in choice["logprobs"].items():
                    parts[name] += values
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def find_difference(whole: Any, streamed: Any) -> str | None:
    """What tells a stream from a whole body."""
    if whole["usage"] != streamed["usage"]:
        return f"usage: {whole['usage']} and {streamed['usage']}"
    for one, other in zip(whole["choices"], streamed["choices"], strict=True):
        for name in ("text", "finish_reason"):
            if one[name] != other[name]:
                return f"{name}: {one[name]!r} and {other[name]!r}"
        if (one["logprobs"] is None) != (other["logprobs"] is None):
            return "only one has log-probabilities"
        if one["logprobs"] is not None and (said := _find_logprob_difference(one["logprobs"], other["logprobs"])):
            return said
    return None


def _find_logprob_difference(one: Any, other: Any) -> str | None:
    for name in ("tokens", "text_offset"):
        if one[name] != other[name]:
            return f"{name}: {one[name]} and {other[name]}"
    pairs = zip(one["token_logprobs"], other["token_logprobs"], strict=True)
    far = [(a, b) for a, b in pairs if abs(a - b) > LARGEST_DIFFERENCE]
    return f"log-probabilities {far[0]}" if far else None


def prompts_of(body: Body) -> list[str]:
    return [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]


def to_sampling(body: Body) -> SamplingParams:
    return SamplingParams(**{name: value for name, value in body.items() if name not in ("model", "prompt")})


def continue_greedily(directory: Path, prompts: Sequence[str]) -> list[str]:
    """transformers' own greedy text, one prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        row = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            made = model.generate(**row, max_new_tokens=MAX_TOKENS, do_sample=False)[0, row["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(made, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return texts


async def compare(served: Served, num_prompts: int, num_streams: int, at_once: int) -> int:
    """How many answers differ, each printed up to the first ten."""
    prompts = draw_prompts(max(num_prompts, 50))
    drawn = random.Random(1)
    bodies = [draw_body(drawn, prompts) for _ in range(num_streams)]
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=served.base, timeout=300.0, limits=limits) as client:

        async def ask_greedily(index: int) -> str:
            body = {"model": "served", "prompt": prompts[index], "temperature": 0, "max_tokens": MAX_TOKENS}
            return str((await post(client, body))["choices"][0]["text"])

        greedy = await for_each(num_prompts, at_once, ask_greedily)
        whole = await for_each(num_streams, at_once, lambda index: post(client, bodies[index]))
        streamed = await for_each(num_streams, at_once, lambda index: follow(client, bodies[index]))
    llm = LLM(served.directory)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    offline = [one.outputs[0].text for one in llm.generate(prompts[:num_prompts], params)]
    theirs = continue_greedily(served.directory, prompts[:num_prompts])
    pairs = [(prompt, to_sampling(body)) for body in bodies for prompt in prompts_of(body)]
    every = iter(llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs]))
    ours = [[one for _ in prompts_of(body) for one in next(every).outputs] for body in bodies]
    faults = [
        f"prompt {index}: {one!r} over HTTP, {other!r} by {name}"
        for name, texts in (("LLM.generate", offline), ("transformers", theirs))
        for index, (one, other) in enumerate(zip(greedy, texts, strict=True))
        if one != other
    ]
    print(
        f"{num_prompts} greedy prompts over HTTP, {at_once} at once, LLM.generate, transformers: {len(faults)} differ"
    )
    different = [
        (body, said) for body, *two in zip(bodies, whole, streamed, strict=True) if (said := find_difference(*two))
    ]
    apart = [
        (body, f"{[c['text'] for c in one['choices']]} over HTTP, {[c.text for c in outputs]} by LLM.generate")
        for body, one, outputs in zip(bodies, whole, ours, strict=True)
        if [(c["text"], c["finish_reason"]) for c in one["choices"]] != [(c.text, c.finish_reason) for c in outputs]
    ]
    print(f"{num_streams} drawn streams: {len(different)} differ from their whole form, {len(apart)} from LLM.generate")
    faults += [f"{body}: {said}" for body, said in different + apart]
    for fault in faults[:10]:
        print(fault)
    return len(faults)


def main() -> int:
    """1 where an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with serving(asked.model, asked.folder) as served:
        return 1 if asyncio.run(compare(served, asked.prompts, asked.streams, asked.at_once)) else 0


if __name__ == "__main__":
    sys.exit(main())
