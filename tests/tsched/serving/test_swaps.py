"""Kernels swapped under load between two arms: each stream has the tokens of one up to a swap's step, and then the
other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tsched.random_model import save_random_model
from tests.tsched.serving.test_worker import collect, joined
from tests.tsched.test_kernel_swap import NEGATED
from tests.tsched.test_llm import PROMPTS
from tkernels import OPS
from tsched import LLM, SamplingParams
from tsched.serving.engine_client import EngineClient
from tsched.serving.local_client import LocalClient
from tsched.serving.supervisor import SupervisedClient

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float64", "max_num_seqs": 8}
OP, ARMS = "gate_up_swiglu", ("negated", "torch")
NUM_CLIENTS = 6
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 90, "ignore_eos": True}

Stream = tuple[list[int], list[int]]
"""(prompt, output)."""


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys and values do not depend on its MLP, so an arm's next token follows from the tokens alone."""
    directory = tmp_path_factory.mktemp("one")
    save_random_model(directory, num_hidden_layers=1)
    return directory


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants")
    (folder / OP).mkdir()
    (folder / OP / "negated.py").write_text(NEGATED.format(op=OP))
    return folder


async def load_and_swap(client: EngineClient, num_swaps: int) -> tuple[list[Stream], list[tuple[int, str]]]:
    """(every stream of clients that ask one after another, each swap's first step and arm)."""
    streams: list[Stream] = []
    done = asyncio.Event()

    async def ask(index: int) -> None:
        count = 0
        while not done.is_set():
            ((tokens, _, reason),) = joined(await collect(client, f"{index}-{count}", PROMPTS[index], GREEDY)).values()
            assert (len(tokens), reason) == (GREEDY["max_tokens"], "length")
            streams.append((PROMPTS[index], tokens))
            count += 1

    clients = [asyncio.create_task(ask(index)) for index in range(NUM_CLIENTS)]
    swaps = []
    for number in range(num_swaps):
        swap = await client.swap_kernels({OP: ARMS[number % 2]})
        assert swap.arm[OP] == ARMS[number % 2]
        swaps.append((swap.first_step, ARMS[number % 2]))
        await asyncio.sleep(0.01)
    done.set()
    await asyncio.gather(*clients)
    return streams, swaps


def tell_arms(directory: Path, variants: Path, streams: Sequence[Stream]) -> list[list[set[str]]]:
    """For each token of each stream the arms that would have made it after what is before it."""
    told: list[list[set[str]]] = [[set() for _ in tokens] for _, tokens in streams]
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)
    for arm in ARMS:
        llm = LLM(directory, ops=OPS.with_variants_from(variants), kernels={OP: arm}, **OPTIONS)
        outputs = llm.generate([prompt + tokens for prompt, tokens in streams], params, use_tqdm=False)
        for (prompt, tokens), output, arms in zip(streams, outputs, told, strict=True):
            for place, token in enumerate(tokens):
                found = output.prompt_logprobs[len(prompt) + place]
                if max(found, key=lambda one: found[one].logprob) == token:
                    arms[place].add(arm)
    return told


def find_first_steps(arms: Sequence[set[str]], swaps: Sequence[tuple[int, str]], num_steps: int) -> list[int]:
    """The steps at which a stream's first token may have been made, one step after another, by the arms of each."""
    at_step, arm, following = [], ARMS[1], iter([*swaps, (num_steps + len(arms), "")])
    swap = next(following)
    for step in range(num_steps + len(arms)):
        while swap[0] <= step:
            arm, swap = swap[1], next(following)
        at_step.append(arm)
    return [
        first for first in range(num_steps) if all(at_step[first + place] in told for place, told in enumerate(arms))
    ]


def check_swaps(make_client: Callable[[], EngineClient], directory: Path, variants: Path, num_swaps: int) -> None:
    async def main() -> tuple[list[Stream], list[tuple[int, str]], int]:
        client = make_client()
        await client.start()
        streams, swaps = await load_and_swap(client, num_swaps)
        num_steps = client.stats().num_steps
        await client.close()
        return streams, swaps, num_steps

    streams, swaps, num_steps = asyncio.run(main())
    assert len(streams) >= NUM_CLIENTS
    steps = [step for step, _ in swaps]
    assert steps == sorted(steps)
    num_mixed = 0
    for arms in tell_arms(directory, variants, streams):
        assert all(arms), "a token is of no arm"
        num_mixed += any("torch" not in told for told in arms) and any("negated" not in told for told in arms)
        firsts = find_first_steps(arms, swaps, num_steps)
        assert firsts, "the arms change elsewhere than at the swaps' steps"
    assert num_mixed >= NUM_CLIENTS, "few streams met a swap"


def test_10_swaps_under_load_change_the_arm_at_their_steps(one_layer: Path, variants: Path) -> None:
    options = OPTIONS | {"ops": OPS.with_variants_from(variants)}
    check_swaps(lambda: LocalClient(one_layer, **options), one_layer, variants, num_swaps=10)


@pytest.mark.slow
def test_100_swaps_in_a_real_worker_drop_no_request(one_layer: Path, variants: Path) -> None:
    check_swaps(
        lambda: SupervisedClient(one_layer, variants_from=[variants], **OPTIONS), one_layer, variants, num_swaps=100
    )
