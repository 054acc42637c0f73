"""What vLLM's users write is taken under the same names, or refused with the word that does it here."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from tests.tsched.async_serving import LONG, check_empty, collect, joined, make_async, run
from tests.tsched.test_llm import PROMPTS, make_llm
from tsched import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from tsched import llm as llm_room
from tsched.options import OPTIONS
from tsched.requests.errors import ArgumentTypeError
from tsched.requests.vllm_names import (
    BEAM_NAMES,
    CALL_NAMES,
    ENGINE_NAMES,
    FORM_NAMES,
    METHOD_NAMES,
    PROMPT_NAMES,
    SAMPLING_NAMES,
    OtherName,
)

VLLM: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("vllm_names.yaml").read_text())
OWN_FIELDS = {one.name for one in fields(SamplingParams)}


def own_names(door: type) -> set[str]:
    return {name for name in dir(door) if not name.startswith("_")}


def own_arguments(method: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(method).parameters)


TABLES: dict[str, tuple[Mapping[str, OtherName], set[str]]] = {
    "arguments of an engine": (ENGINE_NAMES, {*OPTIONS, "model"}),
    "SamplingParams": (SAMPLING_NAMES, OWN_FIELDS),
    "BeamSearchParams": (BEAM_NAMES, {one.name for one in fields(BeamSearchParams)}),
    "StructuredOutputsParams": (FORM_NAMES, {one.name for one in fields(StructuredOutputsParams)}),
    "LLM": (METHOD_NAMES, own_names(LLM)),
    "AsyncLLM": (METHOD_NAMES, own_names(AsyncLLM)),
    "keys of a prompt": (PROMPT_NAMES, {"prompt", "prompt_token_ids"}),
    "LLM.generate": (CALL_NAMES, own_arguments(LLM.generate)),
    "LLM.chat": (CALL_NAMES, own_arguments(LLM.chat)),
    "LLM.beam_search": (CALL_NAMES, own_arguments(LLM.beam_search)),
    "AsyncLLM.generate": (CALL_NAMES, own_arguments(AsyncLLM.generate)),
    "AsyncLLM.add_request": (CALL_NAMES, own_arguments(AsyncLLM.add_request)),
    "AsyncLLM.abort": (CALL_NAMES, own_arguments(AsyncLLM.abort)),
}
"""Where a name of vLLM stands -> what is said of those that are not ours, and ours."""


@pytest.mark.parametrize("where", TABLES)
def test_each_name_of_vllm_is_ours_or_is_answered(where: str) -> None:
    others, own = TABLES[where]
    theirs = {*VLLM[where], *VLLM["earlier"].get(where, ())}
    assert theirs & own
    assert not theirs - own - others.keys(), "names of vLLM that nobody here has heard of"


def test_no_name_is_answered_that_vllm_never_had() -> None:
    for others in {id(table): table for table, _ in TABLES.values()}.values():
        places = [where for where, (table, _) in TABLES.items() if table is others]
        theirs = {name for where in places for name in (*VLLM[where], *VLLM["earlier"].get(where, ()))}
        assert not others.keys() - theirs


def test_each_answer_has_words() -> None:
    for others in {id(table): table for table, _ in TABLES.values()}.values():
        for name, other in others.items():
            assert "None" not in other.answer, name
            assert None not in other.unused, f"{name}: None asks for nothing anyhow"


def test_each_other_name_is_answered_with_one_that_is_here() -> None:
    here = {"SamplingParams": SamplingParams, "BeamSearchParams": BeamSearchParams, "LLM": LLM, "AsyncLLM": AsyncLLM}
    elsewhere = (
        "part of the model's name",
        "the hub's own",
        "the property",
        "an argument of ",
        "prompts=",
        "tk profile",
    )
    plain = {*OPTIONS, *OWN_FIELDS, *own_names(LLM), *(one.name for one in fields(StructuredOutputsParams))}
    for others in (ENGINE_NAMES, SAMPLING_NAMES, BEAM_NAMES, FORM_NAMES, CALL_NAMES, METHOD_NAMES, PROMPT_NAMES):
        for name, other in others.items():
            assert re.fullmatch(r"is \S.* here.*|has no counterpart: \S.*", other.answer), name
            if not other.answer.startswith("is ") or other.answer.removeprefix("is ").startswith(elsewhere):
                continue
            first, _, attribute = re.match(r"(\w+)(\.(?=\w))?(\w*)", other.answer.removeprefix("is ")).groups()
            assert hasattr(here[first], attribute) if attribute else first in plain | here.keys(), name


def test_an_engine_refuses_vllms_other_names_with_its_own() -> None:
    with pytest.raises(ArgumentTypeError, match="no option 'gpu_memory_utilization': it is kv_cache_fraction here"):
        LLM("nowhere", gpu_memory_utilization=0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'tokenizer': it has no counterpart"):
        LLM("nowhere", tokenizer="other")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'task': it has no counterpart: text alone is generated"):
        LLM("nowhere", task="embed")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'tensor_parallel_size': it has no counterpart: an engine serves"):
        LLM("nowhere", tensor_parallel_size=2)  # type: ignore[call-arg]


def test_what_asks_for_nothing_is_taken(checkpoint: Path) -> None:
    """What programs for vLLM pass although they use it not."""
    unused: dict[str, Any] = {
        "task": "generate", "served_model_name": None, "tensor_parallel_size": 1, "trust_remote_code": False,
        "tokenizer": None, "tokenizer_mode": "auto", "enforce_eager": False, "enable_lora": False,
        "cpu_offload_gb": 0.0, "quantization": None, "gpu_memory_utilization": None, "scheduling_policy": "fcfs",
        "limit_mm_per_prompt": {},
    }  # fmt: skip
    llm = make_llm(checkpoint, **unused)
    params = SamplingParams(max_tokens=4, best_of=None, guided_decoding=None, detokenize=True, logits_processors=None)  # type: ignore[call-arg, arg-type]
    others: Any = {"lora_request": None, "tokenization_kwargs": {}, "mm_processor_kwargs": None, "trace_headers": {}}
    form = StructuredOutputsParams(regex="a", disable_additional_properties=False)  # type: ignore[call-arg]
    assert form == StructuredOutputsParams(regex="a")
    (output,) = llm.generate(PROMPTS[3], params, priority=None, **others)
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(ArgumentTypeError, match=r"generate\(\) has no argument 'lora_request': .* no adapters"):
        llm.generate(PROMPTS[3], params, lora_request=object())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'sampling_parms'"):
        llm.generate(PROMPTS[3], sampling_parms=params)  # type: ignore[call-arg]
    message = [{"role": "user", "content": "hello"}]
    others = {"tools": None, "lora_request": None, "chat_template_content_format": "auto"}
    (chat,) = llm.chat(message, params, True, priority=0, chat_template="{{ messages[0].content }}", **others)
    assert chat.error is None
    with pytest.raises(ArgumentTypeError, match=r"chat\(\) has no argument 'tools': it has no counterpart: tools are"):
        llm.chat(message, params, tools=[{"type": "function"}])  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match="BeamSearchParams has no field 'temperature'"):
        BeamSearchParams(2, 4, temperature=0.7)  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match="it has no counterpart: a beam ends at its length or at an end-of-"):
        BeamSearchParams(2, 4, include_stop_str_in_output=True)  # type: ignore[call-arg]
    (found,) = llm.beam_search([PROMPTS[3]], BeamSearchParams(2, 3, temperature=0.0), use_tqdm=False)  # type: ignore[call-arg]
    assert len(found.outputs) == 2


def test_an_llm_has_vllms_getters_and_says_what_its_other_methods_are(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    assert llm.get_tokenizer() is llm.tokenizer
    assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'encode': it has no counterpart: text"):
        llm.encode("a")
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'genrate'$"):
        llm.genrate("a")
    assert not hasattr(llm, "sleep")


def test_sampling_params_refuse_other_names_with_their_own() -> None:
    with pytest.raises(TypeError, match="no field 'best_of': it has no counterpart"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
    with pytest.raises(ArgumentTypeError, match="no field 'guided_decoding': it is structured_outputs here"):
        SamplingParams(guided_decoding={"regex": "a"})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no field 'temprature': there is n, .*; did you mean 'temperature'?"):
        SamplingParams(temprature=2.0)  # type: ignore[call-arg]
    assert set(inspect.signature(SamplingParams).parameters) == OWN_FIELDS


def test_prompts_are_mappings_as_vllm_has_them(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    params = SamplingParams(temperature=0, max_tokens=4)
    ids = llm.tokenizer("the cat")["input_ids"]
    both = {"prompt": "the cat", "prompt_token_ids": ids, "multi_modal_data": None}
    outputs = llm.generate([{"prompt": "the cat"}, {"prompt_token_ids": ids}, both], params)
    assert [output.prompt for output in outputs] == ["the cat", None, "the cat"]
    assert [output.prompt_token_ids for output in outputs] == [ids] * 3
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    wrong: list[tuple[Any, str]] = [
        (
            {"prompt": "a", "multi_modal_data": {"image": 1}},
            "no 'multi_modal_data': it has no counterpart: models read",
        ),
        ({"prompt": "a", "cache_salt": "x"}, "no 'cache_salt': it is an argument of generate here"),
        ({"promt": "a"}, 'has "prompt", "prompt_token_ids" or both; got [\'promt\']'),
        ({"prompt": None}, "got ['prompt']"),
        ({"prompt": [1]}, '"prompt" of a prompt cannot be a list'),
        ({"prompt_token_ids": "a"}, '"prompt_token_ids" of a prompt cannot be a str'),
        ({"prompt_token_ids": {"prompt": "a"}}, '"prompt_token_ids" of a prompt cannot be a dict'),
    ]
    for (_, why), output in zip(wrong, llm.generate([one for one, _ in wrong], params), strict=True):
        assert why in output.error
    with pytest.raises(ArgumentTypeError, match="messages must be a list of messages, .* got dict"):
        llm.chat({"role": "user", "content": "a"})


def test_a_bar_is_made_as_tqdm_makes_one(checkpoint: Path) -> None:
    class Bar:
        made: ClassVar[list[Bar]] = []

        def __init__(self, *, total: int, desc: str) -> None:
            self.total, self.desc, self.done, self.is_closed = total, desc, 0, False
            self.made.append(self)

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            self.is_closed = True

    llm = make_llm(checkpoint)
    llm.generate(PROMPTS[:3], SamplingParams(max_tokens=3, n=2), use_tqdm=Bar)
    (bar,) = Bar.made
    assert (bar.total, bar.done, bar.is_closed, bar.desc) == (6, 6, True, "generating")


def test_a_terminal_shows_how_far_a_long_generate_is(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(llm_room, "_PATIENCE_S", 0.0)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    llm, params = make_llm(checkpoint), SamplingParams(max_tokens=3, n=2)
    llm.generate(PROMPTS[:3], params, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(PROMPTS[:3], params)
    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", capsys.readouterr().err).splitlines()[-1]
    assert re.search(r"generating .*6/6 .*\d+ tokens/s", shown)


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
