"""What an output says of its end, its text, its cache and its times; and that streams say the same as lists."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from tests.tsched.async_serving import collect, joined, make_async, run
from tests.tsched.test_llm import PROMPTS, make_llm
from tsched import LLM, BeamSearchParams, CompletionOutput, SamplingParams

FREE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
EOS = 0


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return make_llm(checkpoint)


def serve(llm: LLM, prompt: list[int], **changes: Any) -> CompletionOutput:
    return llm.generate([prompt], dataclasses.replace(FREE, **changes))[0].outputs[0]


def text_of(llm: LLM, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    return str(llm.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


def test_what_is_returned_whole_is_finished(llm: LLM) -> None:
    (whole,) = llm.generate([PROMPTS[3]], FREE)
    (searched,) = llm.beam_search([PROMPTS[3]], BeamSearchParams(beam_width=2, max_tokens=2))
    assert whole.finished is searched.finished is True


def test_a_stop_token_says_so_and_has_no_text(llm: LLM) -> None:
    free = serve(llm, PROMPTS[3])
    assert (free.finish_reason, free.stop_reason) == ("length", None)
    stop = free.token_ids[7]
    tokens = free.token_ids[: free.token_ids.index(stop) + 1]
    found = serve(llm, PROMPTS[3], stop_token_ids=[stop])
    assert (found.token_ids, found.finish_reason, found.stop_reason) == (tokens, "stop", stop)
    assert found.text == text_of(llm, tokens[:-1])
    shown = serve(llm, PROMPTS[3], stop_token_ids=[stop], include_stop_str_in_output=True)
    assert (shown.token_ids, shown.text) == (tokens, text_of(llm, tokens))
    late = serve(llm, PROMPTS[3], stop_token_ids=[stop], max_tokens=len(tokens))
    assert (late.finish_reason, late.stop_reason) == ("stop", stop)


def test_a_stop_string_is_the_reason_and_stays_where_it_is_asked_for(llm: LLM) -> None:
    text = serve(llm, PROMPTS[3]).text
    stop = text[8:12]
    end = text.index(stop)
    for stops in ([stop], ["\u2603", stop, stop + "no"]):
        found = serve(llm, PROMPTS[3], stop=stops)
        assert (found.text, found.finish_reason, found.stop_reason) == (text[:end], "stop", stop)
        shown = serve(llm, PROMPTS[3], stop=stops, include_stop_str_in_output=True)
        assert (shown.text, shown.stop_reason) == (text[: end + len(stop)], stop)
        assert shown.token_ids == found.token_ids


def test_the_end_of_sequence_is_no_stop_reason_and_has_text_where_it_is_asked_for(llm: LLM) -> None:
    prompt, end = PROMPTS[3], {"logit_bias": {EOS: 100.0}, "min_tokens": 5}
    tokens = serve(llm, prompt, ignore_eos=False, **end).token_ids
    assert (len(tokens), tokens[-1]) == (6, EOS)
    before = text_of(llm, tokens[:-1])
    for changes, text in (
        ({}, before),
        ({"include_stop_str_in_output": True}, before),  # a special token has none
        ({"skip_special_tokens": False}, before),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, before + "<end>"),
    ):
        found = serve(llm, prompt, ignore_eos=False, stop_token_ids=[EOS], **end, **changes)
        assert (found.token_ids, found.finish_reason, found.stop_reason) == (tokens, "stop", None)
        assert found.text == text
    by_id = serve(llm, prompt, stop_token_ids=[EOS], **end)
    assert by_id.stop_reason == EOS, "where it is ignored as the end of a sequence it is a stop token like others"
    going_on = serve(llm, prompt, skip_special_tokens=False, logit_bias={EOS: 100.0})
    assert going_on.text == "<end>" * len(going_on.token_ids)


def test_bytes_of_tokens_tell_half_characters_apart(checkpoint: Path, checkpoint_without_tokenizer: Path) -> None:
    llm = make_llm(checkpoint)
    found = serve(llm, PROMPTS[4], logprobs=200)
    chosen = [place[token].token_bytes for token, place in zip(found.token_ids, found.logprobs or [], strict=True)]
    assert b"".join(chosen).replace(b"<end>", b"").decode("utf-8", "replace") == found.text
    for place in found.logprobs or []:
        halves = [entry for entry in place.values() if entry.decoded_token == "\ufffd"]
        assert len(halves) > 20
        assert len({entry.token_bytes for entry in halves}) == len(halves)
    bare = serve(make_llm(checkpoint_without_tokenizer), PROMPTS[4], logprobs=1)
    assert {entry.token_bytes for place in bare.logprobs or [] for entry in place.values()} == {None}


def test_cached_tokens_are_counted_once_for_all_samples(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, prefix_cache="hash", block_size=4)
    prompt = PROMPTS[4]
    several = dataclasses.replace(FREE, n=3, temperature=1.0, seed=1)
    cold, warm, other = (llm.generate([one], several)[0] for one in (prompt, prompt, PROMPTS[3]))
    assert [one.num_cached_tokens for one in (cold, warm, other)] == [0, (len(prompt) - 1) // 4 * 4, 0]
    (salted,) = llm.generate([prompt], FREE, cache_salt="another")
    assert salted.num_cached_tokens == 0
    (refused,) = llm.generate([[]], FREE)
    assert refused.num_cached_tokens is None


def test_beams_hit_only_what_was_cached_under_their_salt(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, prefix_cache="radix", block_size=4)
    params = BeamSearchParams(beam_width=2, max_tokens=3)

    def hits(salt: str | None) -> int:
        before = llm.stats().prefix_cache.hit_tokens
        llm.beam_search([PROMPTS[4]], params, cache_salt=salt)
        return llm.stats().prefix_cache.hit_tokens - before

    assert [hits("one") > 0, hits("two") > 0, hits(None) > 0, hits("one") > 0] == [False, False, False, True]


def test_times_of_queue_prefill_and_decode_add_up(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, max_num_seqs=1)
    first, second = llm.generate(PROMPTS[3:5], FREE)
    for one in (first.metrics, second.metrics):
        assert one.queue_time + one.prefill_time == pytest.approx(one.time_to_first_token)
        assert one.queue_time + one.prefill_time + one.decode_time == pytest.approx(one.latency)
        assert min(one.queue_time, one.prefill_time, one.decode_time) > 0
    assert second.metrics.queue_time >= first.metrics.latency, "there is one row"


def draw_params(rng: random.Random, texts: list[str], tokens: list[int]) -> SamplingParams:
    """Parameters of which each may end the output, or change its text, in its own way."""
    place = rng.randrange(4, 12)
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 1.0]),
        seed=rng.randrange(99),
        n=rng.choice([1, 1, 2]),
        max_tokens=rng.randrange(1, 30),
        min_tokens=rng.choice([0, 1]),
        ignore_eos=rng.random() < 0.5,
        stop=rng.choice([(), [rng.choice(texts)[place : place + rng.randrange(1, 4)] or "x", "zz"]]),
        stop_token_ids=rng.choice([(), rng.sample(tokens, 2)]),
        include_stop_str_in_output=rng.random() < 0.5,
        skip_special_tokens=rng.random() < 0.7,
        logprobs=rng.choice([None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, 1]),
    )


def test_streams_give_what_lists_do(checkpoint: Path, llm: LLM) -> None:
    """Drawn requests: text, tokens, reasons and log-probabilities, in parts and whole."""
    rng = random.Random(5)
    free = [output.outputs[0] for output in llm.generate(PROMPTS, FREE)]
    texts, tokens = [one.text for one in free], sorted({token for one in free for token in one.token_ids})
    asked = [(rng.choice(PROMPTS), draw_params(rng, texts, tokens)) for _ in range(60)]
    wholes = [llm.generate([prompt], params)[0] for prompt, params in asked]
    reasons = {type(one.stop_reason) for whole in wholes for one in whole.outputs}
    assert reasons == {str, int, type(None)}

    async def main() -> None:
        async with make_async(checkpoint) as served:
            streams = [served.add_request(str(i), prompt, params) for i, (prompt, params) in enumerate(asked)]
            everything = await asyncio.gather(*(collect(one, rng.choice([0.0, 0.01])) for one in streams))
            for parts, whole in zip(everything, wholes, strict=True):
                for one, other in zip(joined(parts), whole.outputs, strict=True):
                    assert (one.token_ids, one.text) == (other.token_ids, other.text)
                    assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
                    if other.logprobs is None:
                        assert one.logprobs is None
                        continue
                    assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-9)
                    for place, expected in zip(one.logprobs, other.logprobs, strict=True):
                        assert [(t, e.decoded_token, e.token_bytes) for t, e in place.items()] == [
                            (t, e.decoded_token, e.token_bytes) for t, e in expected.items()
                        ]
                told = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
                assert len(told) == (whole.prompt_logprobs is not None)
                assert parts[-1].error == whole.error
                assert parts[-1].num_cached_tokens is not None

    run(main)
