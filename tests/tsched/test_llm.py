"""The whole way from a directory to text, against transformers and against each request alone."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tkernels
import tmodel
from tests.tsched.test_beam_search import by_brute_force
from tsched import LLM, BeamSearchParams, RequestOutput, SamplingParams
from tsched.serving.engine_records import describe_model

PROMPTS = [[(7 * i + 3 * j) % 299 + 1 for j in range(1 + 9 * i % 40)] for i in range(10)]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def make_llm(directory: Path, **changes: Any) -> LLM:
    arguments: dict = {"dtype": "float64", "device": "cpu", "max_num_seqs": 8, "kernels": torch_kernels(directory)}
    return LLM(directory, **arguments | changes)


def torch_kernels(directory: Path) -> dict[str, str]:
    limits = tmodel.Limits(max_num_tokens=1, max_num_seqs=1, max_model_len=1, block_size=1, num_blocks=1)
    return dict.fromkeys(tmodel.kernel_axes(tmodel.load_config(directory), limits), "torch")


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return make_llm(checkpoint)


def completion(output: RequestOutput) -> tuple[list[int], str]:
    return output.outputs[0].token_ids, output.outputs[0].finish_reason


def crowded_bytes(directory: Path, num_blocks: int) -> int:
    return num_blocks * tmodel.kv_bytes_per_block(tmodel.load_config(directory), 4, torch.float64)


def test_greedy_tokens_are_those_of_transformers(checkpoint: Path, llm: LLM) -> None:
    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(checkpoint).double().eval()
    outputs = llm.generate(PROMPTS, GREEDY)
    ends = set()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=20,
            pad_token_id=0,
            attention_mask=torch.ones(1, len(prompt)),
        )[0, len(prompt) :].tolist()
        assert output.prompt_token_ids == prompt
        assert (output.prompt, output.error, output.finished) == (None, None, True)
        assert completion(output) == (expected, "stop" if expected[-1] == 0 else "length")
        ends.add(expected[-1] == 0)
        assert len(set(expected)) > 2


def test_company_pressure_and_splitting_change_nothing(checkpoint: Path, llm: LLM) -> None:
    params = [
        dataclasses.replace(GREEDY, max_tokens=10 + 3 * i)
        if i % 2
        else SamplingParams(temperature=1.0, top_p=0.95, seed=i, max_tokens=30, logprobs=2)
        for i in range(10)
    ]
    crowded = make_llm(
        checkpoint,
        block_size=4,
        max_num_batched_tokens=11,
        kv_cache_bytes=crowded_bytes(checkpoint, 24),
        max_num_seqs=5,
    )
    together = crowded.generate(PROMPTS, params, use_tqdm=False)
    stats = crowded.stats()
    assert stats.num_blocks == 24
    assert stats.num_preemptions > 0
    assert stats.num_used_blocks == 0
    for prompt, one, output in zip(PROMPTS, params, together, strict=True):
        (alone,) = llm.generate([prompt], one)
        assert completion(output) == completion(alone)
        if one.logprobs is not None:
            assert output.outputs[0].cumulative_logprob == pytest.approx(alone.outputs[0].cumulative_logprob, abs=1e-9)


def test_text_goes_in_and_out(checkpoint: Path, llm: LLM) -> None:
    text = "def scan(line): # ünïcode 🐍"
    (output,) = llm.generate(text, GREEDY)
    assert output.prompt == text
    assert llm.tokenizer.decode(output.prompt_token_ids) == text
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)
    same = llm.generate([{"prompt": text}, {"prompt_token_ids": output.prompt_token_ids}], GREEDY)
    assert [completion(o) for o in same] == [completion(output)] * 2
    metrics = output.metrics
    assert 0 < metrics.time_to_first_token <= metrics.latency


def test_a_stop_string_that_spans_tokens_cuts_the_text(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=30, ignore_eos=True)
    (free,) = llm.generate([PROMPTS[3]], params)
    text = free.outputs[0].text
    pieces = [llm.tokenizer.decode([token]) for token in free.outputs[0].token_ids]
    edge = len("".join(pieces[:5]))
    stop = text[edge - 1 : edge + 1]
    (output,) = llm.generate([PROMPTS[3]], dataclasses.replace(params, stop=stop))
    assert output.outputs[0].text == text[: text.index(stop)]
    assert output.outputs[0].finish_reason == "stop"
    tokens = output.outputs[0].token_ids
    assert tokens == free.outputs[0].token_ids[: len(tokens)]
    assert stop in llm.tokenizer.decode(tokens)


def test_logprobs_are_by_token(llm: LLM) -> None:
    (output,) = llm.generate([PROMPTS[2]], dataclasses.replace(GREEDY, logprobs=3, max_tokens=4))
    found = output.outputs[0]
    assert len(found.logprobs) == len(found.token_ids)
    for token, place in zip(found.token_ids, found.logprobs, strict=True):
        assert next(iter(place)) == token
        assert len(place) == 3
        assert [entry.rank for entry in place.values()] == [1, 2, 3]
        assert place[token].decoded_token == llm.tokenizer.decode([token])
        assert place[token].logprob == max(entry.logprob for entry in place.values()) <= 0
    total = sum(place[token].logprob for token, place in zip(found.token_ids, found.logprobs, strict=True))
    assert found.cumulative_logprob == pytest.approx(total)
    (sampled,) = llm.generate([PROMPTS[2]], SamplingParams(seed=1, logprobs=0, max_tokens=4, temperature=3.0))
    assert [list(place) for place in sampled.outputs[0].logprobs] == [[t] for t in sampled.outputs[0].token_ids]
    (without,) = llm.generate([PROMPTS[2]], GREEDY)
    assert without.outputs[0].logprobs is without.outputs[0].cumulative_logprob is None


def test_tokens_are_biased_allowed_and_barred(checkpoint: Path, llm: LLM) -> None:
    """Alone and in a crowd, with preemption: each request's output is its own, and keeps to its rules."""
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    usual = llm.generate([PROMPTS[2]], free)[0].outputs[0].token_ids
    texts = [llm.tokenizer.decode([token]) for token in usual]
    word = next(text for text in texts if text.isascii() and text.strip() == text and text.isprintable())
    rules: list[dict[str, Any]] = [
        {"logit_bias": {77: 100.0, 78: 100.0}},
        {"allowed_token_ids": [5, 6, 7, 8]},
        {"bad_words": [word, [5]], "temperature": 0.0},
        {"logit_bias": {9: -100.0}, "allowed_token_ids": [9, 10], "bad_words": [[10, 10]]},
    ]
    params = [
        SamplingParams(**{"seed": i, "max_tokens": 30, "ignore_eos": True, **rules[i % 4]}) for i in range(len(PROMPTS))
    ]
    crowded = make_llm(
        checkpoint, block_size=4, kv_cache_bytes=crowded_bytes(checkpoint, 24), max_num_seqs=5, overlap=True
    )
    together = crowded.generate(PROMPTS, params)
    assert crowded.stats().num_preemptions > 0
    for i, (prompt, one, output) in enumerate(zip(PROMPTS, params, together, strict=True)):
        assert completion(output) == completion(llm.generate([prompt], one)[0])
        ids = output.outputs[0].token_ids
        if i % 4 == 0:
            assert set(ids) <= {77, 78}
        elif i % 4 == 1:
            assert set(ids) <= {5, 6, 7, 8}
        elif i % 4 == 2:
            assert 5 not in ids
            spelled = llm.tokenizer(word, add_special_tokens=False)["input_ids"]
            assert not any(ids[k : k + len(spelled)] == spelled for k in range(30))
        else:
            assert ids == [10, 9] * 15
    bad = usual[4:6]
    (kept,) = llm.generate([PROMPTS[2]], dataclasses.replace(free, bad_words=[bad, word]))
    found = kept.outputs[0].token_ids
    assert found != usual
    assert bad not in [found[k : k + 2] for k in range(20)]


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words"])
def test_a_token_outside_the_vocabulary_is_refused_by_the_name_of_its_field(llm: LLM, name: str) -> None:
    ids: Any = {"logit_bias": {300: 1.0}, "bad_words": [[3, 300]]}.get(name, [300])
    (output,) = llm.generate([[1]], SamplingParams(**{name: ids}))
    assert output.error == f"{name} holds 300; ids go from 0 to 299"


def test_bad_words_are_spelled_as_vllm_spells_them(llm: LLM) -> None:
    prepared = llm._prepare(0, [1], SamplingParams(bad_words=["def", "  return", [7]]), 0.0)

    def encode(text: str) -> tuple[int, ...]:
        return tuple(llm.tokenizer(text)["input_ids"])

    expected = []
    for word in ("def", "return"):
        expected.append(encode(word))
        spaced = encode(" " + word)
        if len(spaced) == len(encode(word)) and spaced[0] != encode(word)[0]:
            expected.append(spaced)
    assert prepared.params.bad_words == (*expected, (7,))


def test_bad_requests_fail_alone(checkpoint: Path) -> None:
    llm = make_llm(checkpoint, block_size=4, kv_cache_bytes=crowded_bytes(checkpoint, 16), max_model_len=100)
    cases: list[tuple[Any, SamplingParams, str]] = [
        ([], GREEDY, "empty"),
        ("", GREEDY, "empty"),
        ([1] * 100, GREEDY, "has 100 tokens, max_model_len is 100"),
        ([5, 300], GREEDY, "token id 300 at place 1 of the prompt is out of vocabulary; ids go from 0 to 299"),
        ([5, -1], GREEDY, "token id -1 at place 1"),
        ([5, 1.5], GREEDY, "integers, got 1.5"),
        ([[1]], GREEDY, "integers"),
        (None, GREEDY, "a text or a list of token ids, got NoneType"),
        ({"promt": "x"}, GREEDY, '"prompt_token_ids" or both; got'),
        ({"prompt_token_ids": "x"}, GREEDY, "cannot be a str"),
        ("\ud800", GREEDY, "UTF-8"),
        ([1] * 50, GREEDY, "need 18 blocks of 4 tokens, the pool has 16"),
        ([1], dataclasses.replace(GREEDY, stop_token_ids=[300]), "stop_token_ids holds 300"),
    ]
    prompts = [entry for prompt, _, _ in cases for entry in (prompt, PROMPTS[2])]
    outputs = llm.generate(prompts, [p for _, params, _ in cases for p in (params, GREEDY)], use_tqdm=False)
    good = {json.dumps(completion(output)) for output in outputs[1::2]}
    assert len(good) == 1
    assert len(outputs[1].outputs[0].token_ids) > 1
    for (_, _, message), output in zip(cases, outputs[::2], strict=True):
        assert message in output.error
        assert completion(output) == ([], "error")
        assert output.outputs[0].text == ""
        assert output.metrics.first_token_time is None


def test_a_directory_without_a_tokenizer_serves_token_ids(checkpoint_without_tokenizer: Path, llm: LLM) -> None:
    bare = make_llm(checkpoint_without_tokenizer)
    assert describe_model(bare, "bare").tokenizer_directory is None
    ids, text, stop = bare.generate(
        [PROMPTS[1], "text", PROMPTS[1]], [GREEDY, GREEDY, dataclasses.replace(GREEDY, stop="x")]
    )
    assert completion(ids) == completion(llm.generate([PROMPTS[1]], GREEDY)[0])
    assert ids.outputs[0].text == ""
    assert "has no tokenizer" in text.error
    assert "pass token ids" in text.error
    assert "no tokenizer" in stop.error


def test_a_seeded_run_is_repeatable(checkpoint: Path) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    runs = [make_llm(checkpoint, seed=seed).generate([PROMPTS[4]] * 3, params) for seed in (1, 1, 2)]
    tokens = [[completion(output)[0] for output in run] for run in runs]
    assert tokens[0] == tokens[1] != tokens[2]
    assert tokens[0][0] != tokens[0][1], "requests have streams of their own"


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        (5, None, TypeError, "got int"),
        (b"text", None, TypeError, "got bytes"),
        ([[1]], {"temperature": 0}, TypeError, "SamplingParams"),
        ([[1]], [0.5], TypeError, "SamplingParams, got float"),
        ([[1], [2]], [GREEDY, None, GREEDY], ValueError, "3 sampling_params for 2 prompts"),
        ([[1], [2]], [GREEDY], ValueError, "1 sampling_params for 2 prompts"),
    ],
)
def test_wrong_arguments_raise(llm: LLM, prompts: Any, params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompts, params)


def test_completions_draw_from_streams_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, temperature=1.5, max_tokens=12, ignore_eos=True, logprobs=0)
    both = llm.generate([PROMPTS[4], PROMPTS[5]], params)
    for prompt, output in zip([PROMPTS[4], PROMPTS[5]], both, strict=True):
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
        for index, completion in enumerate(output.outputs):
            (alone,) = llm.generate([prompt], params.derive_sample_params(index))
            assert completion.token_ids == alone.outputs[0].token_ids
            assert completion.cumulative_logprob == pytest.approx(alone.outputs[0].cumulative_logprob, abs=1e-9)
    assert params.derive_sample_params(0).seed == 7
    assert len({params.derive_sample_params(index).seed for index in range(4)}) == 4
    before = llm.stats()
    llm.generate([PROMPTS[4]], params)
    after = llm.stats()
    # The others compute the last token of the prompt that the first one has computed, each for its own logits.
    assert after.num_prefill_tokens - before.num_prefill_tokens == len(PROMPTS[4])
    assert after.num_decode_tokens - before.num_decode_tokens == 4 * 11 + 3
    (unseeded,) = llm.generate([PROMPTS[4]], dataclasses.replace(params, seed=None))
    assert len({tuple(completion.token_ids) for completion in unseeded.outputs}) == 4
    (refused,) = llm.generate([[5, 300]], params)
    assert [(c.index, c.finish_reason) for c in refused.outputs] == [(i, "error") for i in range(4)]
    assert llm.stats().num_used_blocks == 0


def test_a_salt_is_a_text_or_bytes_and_changes_no_token(llm: LLM) -> None:
    plain, *salted = llm.generate([PROMPTS[4]] * 3, GREEDY, cache_salt=[None, "tenant", b"tenant"])
    assert all(completion(output) == completion(plain) for output in salted)
    with pytest.raises(TypeError, match="cache_salt must be str or bytes or a list of them, got int"):
        llm.generate([PROMPTS[4]], GREEDY, cache_salt=5)
    with pytest.raises(ValueError, match="1 cache_salt for 2 prompts"):
        llm.generate(PROMPTS[:2], GREEDY, cache_salt=["tenant"])


def test_prompts_come_in_many_forms(llm: LLM) -> None:
    (expected,) = llm.generate([[5, 6, 7]], GREEDY)
    for prompts in (
        [5, 6, 7],
        np.array([5, 6, 7]),
        [np.array([5, 6, 7])],
        [(5, 6, 7)],
        [range(5, 8)],
        np.array([[5, 6, 7]]),
    ):
        assert [completion(output) for output in llm.generate(prompts, GREEDY)] == [completion(expected)]
    assert llm.generate([], GREEDY) == []
    (default,) = llm.generate([[5, 6, 7]])
    assert len(default.outputs[0].token_ids) <= 16


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kernels": {"paged_decode": "splitkv"}}, tkernels.SelectionError, "split_kv"),
        ({"kernels": {"paged_decod": "torch"}}, tkernels.SelectionError, "paged_decode"),
        ({"dtype": "float8"}, ValueError, "dtype must be 'auto', one of float32,"),
        ({"dtype": torch.int32}, ValueError, "dtype must be"),
        ({"device": "tpu"}, ValueError, "device"),
        ({"device": "meta"}, ValueError, "'cpu' or 'cuda'"),
        ({"max_model_len": 129}, ValueError, "from 1 to 128"),
        ({"max_model_len": 0}, ValueError, "max_model_len must be None or an integer of at least 1"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs"),
        ({"max_num_batched_tokens": 0}, ValueError, "max_num_batched_tokens"),
        ({"block_size": 12}, ValueError, "power of two"),
        ({"kv_cache_bytes": 100}, ValueError, "kv_cache_bytes is 100"),
        ({"kv_cache_fraction": 0.0}, ValueError, "above 0 and at most 1"),
        ({"kv_cache_fraction": "half"}, ValueError, "kv_cache_fraction must be None or a number above 0"),
        ({"kv_cache_fraction": 0.5, "kv_cache_bytes": 10**6}, ValueError, "give one"),
        ({"kv_cache_fraction": 1e-12}, ValueError, "the memory left for the KV cache is 0"),
        ({"max_chunk_tokens": 0}, ValueError, "max_chunk_tokens must be None or"),
        ({"decode_share": 1.0}, ValueError, "decode_share must be a number of at least 0 and below 1"),
        ({"decode_share": True}, ValueError, "decode_share must be a number"),
        ({"chunked_prefill": None}, ValueError, "chunked_prefill must be True or False"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 127}, ValueError, "at least max_model_len, 128, got 127"),
        ({"swap_bytes": -1}, ValueError, "swap_bytes must be an integer of at least 0"),
        ({"preemption": "swap"}, ValueError, "needs swap_bytes for a block at least"),
        ({"preemption": "swaps"}, ValueError, "did you mean 'swap'"),
        ({"overlap": 1}, ValueError, "overlap must be None, True or False"),
        ({"cuda_graphs": "no"}, ValueError, "cuda_graphs must be None, True or False"),
        ({"seed": -1}, ValueError, "seed"),
        ({"order": "lifo"}, ValueError, "fcfs"),
        ({"prefix_cache": "lru"}, ValueError, "'hash', 'none', 'radix'"),
    ],
)
def test_bad_settings_fail_before_any_weight_is_read(
    checkpoint: Path, tmp_path: Path, arguments: dict, error: type[Exception], message: str
) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(error, match=message):
        LLM(tmp_path, **{"device": "cpu", **arguments})


@pytest.mark.parametrize("value", ["a", True, 8.0, -1, [8]])
@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("max_model_len", "None or an integer of at least 1 and below 2**31"),
        ("max_num_seqs", "an integer of at least 1 and below 2**31"),
        ("max_num_batched_tokens", "an integer of at least 1 and below 2**31"),
        ("kv_cache_bytes", "None or an integer of at least 1 and below 2**63"),
        ("block_size", "None or an integer of at least 1 and below 2**31 that is a power of two"),
        ("seed", "an integer of at least 0 and below 2**64"),
    ],
)
def test_what_is_no_integer_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, name: str, allowed: str, value: Any
) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name} must be {allowed}, got {value!r}')}$"):
        LLM(tmp_path, device="cpu", **{name: value})


def test_numpy_integers_are_integers(checkpoint_without_tokenizer: Path) -> None:
    number = np.int32(64)
    served = make_llm(checkpoint_without_tokenizer, max_model_len=number, max_num_seqs=number, block_size=number)
    assert type(served.max_model_len) is int


@pytest.mark.parametrize("damaged", ["{", "{}", "[]", "\x00", '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_is_named_before_any_weight_is_read(checkpoint: Path, tmp_path: Path, damaged: str) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((checkpoint / name).read_text())
    (tmp_path / "tokenizer.json").write_text(damaged)
    with pytest.raises(
        tmodel.ConfigError, match=rf"^{re.escape(str(tmp_path))}: its tokenizer cannot be loaded: \w+: "
    ):
        make_llm(tmp_path)


def test_an_interrupted_run_leaves_an_llm_that_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (expected,) = llm.generate([PROMPTS[0]], GREEDY)
    engine = llm._engine
    steps = iter(range(3))

    def interrupted() -> list:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return type(engine).step(engine)

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert llm.stats().num_used_blocks == 0
    assert not engine.has_unfinished
    assert [completion(o) for o in llm.generate([PROMPTS[0]], GREEDY)] == [completion(expected)]


@pytest.mark.parametrize("prefix_cache", ["none", "hash", "radix"])
@pytest.mark.parametrize("options", [{}, {"preemption": "swap", "swap_bytes": 10**6}, {"order": "priority"}])
def test_every_policy_gives_the_tokens_that_a_request_gets_alone(
    checkpoint: Path, llm: LLM, prefix_cache: str, options: dict
) -> None:
    shared = PROMPTS[3][:14]
    prompts = [shared + PROMPTS[i] for i in range(8)] + PROMPTS[:2]
    params = [
        SamplingParams(n=1 + i % 3, seed=i, max_tokens=16, ignore_eos=True, temperature=1.3)
        for i in range(len(prompts))
    ]
    crowded = make_llm(
        checkpoint,
        block_size=4,
        max_num_batched_tokens=24,
        max_chunk_tokens=9,
        decode_share=0.3,
        kv_cache_bytes=crowded_bytes(checkpoint, 30),
        prefix_cache=prefix_cache,
        **options,
    )
    priority = [i % 3 for i in range(len(prompts))]
    together = crowded.generate(prompts, params, priority=priority, cache_salt=["a", "b"] * 5)
    for prompt, one, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate([prompt], one)
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in alone.outputs]
    stats = crowded.stats()
    assert stats.num_preemptions > 0
    assert stats.num_used_blocks == 0
    assert sum(output.metrics.num_preemptions for output in together) == stats.num_preemptions


def test_priorities_decide_who_goes_first(checkpoint: Path) -> None:
    one_row = make_llm(checkpoint, max_num_seqs=1, order="priority")
    outputs = one_row.generate(PROMPTS[:4], GREEDY, priority=[2, 0, 1, 0])
    order = sorted(range(4), key=lambda i: outputs[i].metrics.first_token_time)
    assert order == [1, 3, 2, 0]
    for priority, error in ((0.5, TypeError), ([0, 1], ValueError), (2**40, ValueError)):
        with pytest.raises(error, match="priority"):
            one_row.generate(PROMPTS[:4], GREEDY, priority=priority)


def test_beams_are_those_of_transformers_by_brute_force(checkpoint: Path, llm: LLM) -> None:
    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(checkpoint).double().eval()

    @torch.inference_mode()
    def logprobs_after(tokens: list[int]) -> torch.Tensor:
        return reference(torch.tensor([tokens])).logits[0, -1].log_softmax(dim=-1)

    params = BeamSearchParams(beam_width=4, max_tokens=7, length_penalty=0.7)
    crowded = make_llm(
        checkpoint, block_size=4, kv_cache_bytes=crowded_bytes(checkpoint, 24), max_num_seqs=9, overlap=True
    )
    swapping = make_llm(
        checkpoint,
        block_size=4,
        kv_cache_bytes=crowded_bytes(checkpoint, 24),
        max_num_seqs=9,
        prefix_cache="radix",
        preemption="swap",
        swap_bytes=10**5,
    )
    for served in (llm, crowded, swapping):
        outputs = served.beam_search(PROMPTS[2:6], params)
        assert served.stats().num_used_blocks == 0
        for prompt, output in zip(PROMPTS[2:6], outputs, strict=True):
            expected = by_brute_force(logprobs_after, prompt, params, {0})
            assert [tuple(c.token_ids) for c in output.outputs] == [h.token_ids for h in expected]
            assert [c.finish_reason for c in output.outputs] == [h.finish_reason for h in expected]
            assert [c.cumulative_logprob for c in output.outputs] == pytest.approx([h.logprob for h in expected])
            assert output.outputs[0].text == served.tokenizer.decode(
                output.outputs[0].token_ids, skip_special_tokens=True
            )
            assert output.metrics.time_to_first_token <= output.metrics.latency
    assert crowded._engine.overlap


def test_beam_search_refuses_what_it_cannot_do(checkpoint: Path, llm: LLM) -> None:
    good, bad = llm.beam_search([PROMPTS[2], [300]], BeamSearchParams(beam_width=2, max_tokens=3))
    assert len(good.outputs) == 2
    assert "out of vocabulary" in bad.error
    with pytest.raises(ValueError, match="beam_width is 9, max_num_seqs 8"):
        llm.beam_search([PROMPTS[2]], BeamSearchParams(beam_width=9, max_tokens=3))
    with pytest.raises(TypeError, match="BeamSearchParams, got SamplingParams"):
        llm.beam_search([PROMPTS[2]], GREEDY)
    assert llm.beam_search([], BeamSearchParams(beam_width=2, max_tokens=3)) == []


def test_a_prompt_keeps_its_last_tokens(llm: LLM) -> None:
    cut = dataclasses.replace(GREEDY, truncate_prompt_tokens=3)
    text, ids = PROMPTS[3], [5, 9, 2, 7]
    (whole,) = llm.generate(text, GREEDY)
    outputs = llm.generate([text, ids, ids[-3:], ids[-2:]], cut)
    assert [output.prompt_token_ids for output in outputs] == [
        whole.prompt_token_ids[-3:],
        [9, 2, 7],
        [9, 2, 7],
        [2, 7],
    ]
    (same,) = llm.generate([ids[-3:]], GREEDY)
    assert outputs[1].outputs == outputs[2].outputs == same.outputs
    too_long = [1] * 500
    assert llm.generate([too_long], GREEDY)[0].error is not None
    assert llm.generate([too_long], cut)[0].error is None
