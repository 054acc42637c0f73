"""What vLLM's users write is taken under the same names, or refused with the word that does it here."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from tests.tsched.async_serving import LONG, check_empty, collect, joined, make_async, run
from tests.tsched.test_llm import PROMPTS, make_llm
from tsched import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from tsched.options import OPTIONS
from tsched.requests.vllm_names import ENGINE_NAMES, SAMPLING_NAMES

OWN_FIELDS = {one.name for one in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("names", "own"),
    [(ENGINE_NAMES, set(OPTIONS)), (SAMPLING_NAMES, {*OWN_FIELDS, "AsyncLLM", "BeamSearchParams", "LLM"})],
)
def test_each_other_name_is_answered_with_one_that_is_here(names: Mapping[str, str], own: set[str]) -> None:
    assert not names.keys() & own
    elsewhere = {"part of the model's name here", "the hub's own cache here"}
    for name, answer in names.items():
        assert re.match(r"is \S.* here|has no counterpart: \S", answer), name
        if answer.startswith("is ") and not any(one in answer for one in elsewhere):
            assert re.split(r"\W", answer.removeprefix("is "))[0] in own, name
    assert hasattr(LLM, "beam_search")
    assert hasattr(AsyncLLM, "add_request")
    assert "length_penalty" in {one.name for one in fields(BeamSearchParams)}


def test_an_engine_refuses_vllms_other_names_with_its_own() -> None:
    with pytest.raises(TypeError, match="no option 'gpu_memory_utilization': it is kv_cache_fraction here"):
        LLM("nowhere", gpu_memory_utilization=0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'tokenizer': it has no counterpart"):
        LLM("nowhere", tokenizer="other")  # type: ignore[call-arg]


def test_sampling_params_refuse_other_names_with_their_own() -> None:
    with pytest.raises(TypeError, match="no field 'best_of': it has no counterpart"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no field 'temprature': there is n, .*; did you mean 'temperature'?"):
        SamplingParams(temprature=2.0)  # type: ignore[call-arg]
    assert set(inspect.signature(SamplingParams).parameters) == OWN_FIELDS


def test_generate_takes_vllms_keywords(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    (output,) = llm.generate(prompts=PROMPTS[3], sampling_params=LONG, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == LONG.max_tokens


def test_an_online_generate_yields_what_there_is_so_far(checkpoint: Path) -> None:
    params = SamplingParams(n=2, seed=3, temperature=1.2, max_tokens=20, logprobs=1)

    async def main() -> None:
        async with make_async(checkpoint) as served:
            outputs = await collect(served.generate(PROMPTS[5], params, "a"))
            whole = joined(await collect(served.add_request("b", PROMPTS[5], params)))
            for one, other in zip(outputs[-1].outputs, whole, strict=True):
                assert (one.token_ids, one.text, one.finish_reason) == (
                    other.token_ids,
                    other.text,
                    other.finish_reason,
                )
                assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-9)
                assert [list(place) for place in one.logprobs] == [list(place) for place in other.logprobs]
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            for before, after in itertools.pairwise(outputs):
                for one in before.outputs:
                    later = next(other for other in after.outputs if other.index == one.index)
                    assert later.token_ids[: len(one.token_ids)] == one.token_ids
                    assert later.text.startswith(one.text)
            async for output in served.generate(PROMPTS[3], LONG, request_id="c"):
                assert output.request_id == "c"
                break  # which aborts it
            await served.drain()
        check_empty(served)

    run(main)
