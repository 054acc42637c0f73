"""One root of errors: what tsched refuses is a TKernelsError, and the built-in error that it is as well."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tsched
from tests.tsched.async_serving import LONG, make_async
from tests.tsched.test_llm import PROMPTS, make_llm
from tkernels.errors import TKernelsError
from tsched import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams

ROOT = Path(tsched.__file__).parent
PLAIN = ("ValueError", "TypeError", "RuntimeError", "KeyError", "Exception")

# The rooms of the machinery, whose broken accounts nobody is to catch.
MACHINERY = ("scheduling", "execution", "serving")
# Hooks of Python's json and of pydantic, which take a ValueError as an answer.
HOOKS = "serving/protocol/"


def raised_plainly(file: Path) -> Iterator[str]:
    """The built-in errors that a file raises by their own names, with their lines."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call | ast.Name):
            name = ast.unparse(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
            if name in PLAIN:
                yield f"{name}, line {node.lineno}"


def test_no_error_of_a_caller_is_raised_without_the_root() -> None:
    found = {
        str(file.relative_to(ROOT)): errors
        for file in sorted(ROOT.rglob("*.py"))
        if (errors := list(raised_plainly(file)))
    }
    assert not [name for name in found if not name.startswith(MACHINERY)]
    wrong = {
        name: [one for one in errors if not one.startswith("RuntimeError")]
        for name, errors in found.items()
        if not name.startswith(HOOKS)
    }
    assert not {name: errors for name, errors in wrong.items() if errors}


BAD_PARAMETERS: list[tuple[type[Exception], Callable[[], object]]] = [
    (ValueError, lambda: SamplingParams(temperature=-1.0)),
    (ValueError, lambda: SamplingParams(n=True)),
    (ValueError, lambda: SamplingParams(max_tokens=1.5)),  # type: ignore[arg-type]
    (ValueError, lambda: SamplingParams(stop=[""])),
    (ValueError, lambda: SamplingParams(logit_bias={-1: 2.0})),
    (ValueError, lambda: SamplingParams(bad_words=[[]])),
    (ValueError, lambda: SamplingParams(logits_processors=[3])),  # type: ignore[list-item]
    (ValueError, lambda: SamplingParams(structured_outputs={"regx": "a"})),  # type: ignore[arg-type]
    (TypeError, lambda: SamplingParams(temprature=1.0)),  # type: ignore[call-arg]
    (ValueError, lambda: StructuredOutputsParams()),
    (ValueError, lambda: StructuredOutputsParams(choice=[])),
    (TypeError, lambda: StructuredOutputsParams(structural_tag="a")),  # type: ignore[call-arg]
    (ValueError, lambda: BeamSearchParams(0, 4)),
    (ValueError, lambda: BeamSearchParams(2, 4, ignore_eos=1)),  # type: ignore[arg-type]
    (ValueError, lambda: LLM("nowhere", max_num_seqs=0)),
    (ValueError, lambda: LLM("nowhere")),
    (TypeError, lambda: LLM("nowhere", max_nun_seqs=2)),  # type: ignore[call-arg]
]


@pytest.mark.parametrize("place", range(len(BAD_PARAMETERS)))
def test_bad_parameters_raise_both(place: int) -> None:
    kind, call = BAD_PARAMETERS[place]
    with pytest.raises(kind) as raised:
        call()
    assert isinstance(raised.value, TKernelsError)


def test_bad_calls_raise_both(checkpoint: Path) -> None:
    llm: Any = make_llm(checkpoint, max_num_seqs=2)
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (TypeError, lambda: llm.generate(3)),
        (TypeError, lambda: llm.generate(PROMPTS[0], {"temperature": 0})),
        (ValueError, lambda: llm.generate(PROMPTS[:2], [SamplingParams()])),
        (ValueError, lambda: llm.generate(PROMPTS[0], priority=2**40)),
        (TypeError, lambda: llm.generate(PROMPTS[0], priority="high")),
        (TypeError, lambda: llm.generate(PROMPTS[0], cache_salt=3)),
        (TypeError, lambda: llm.generate(PROMPTS[0], lora_request=3)),
        (ValueError, lambda: llm.beam_search(PROMPTS[0], BeamSearchParams(3, 2))),
        (TypeError, lambda: llm.beam_search(PROMPTS[0], SamplingParams())),
        (ValueError, lambda: llm.swap_kernels({"paged_decode": "nothing"})),
    ]
    for kind, call in calls:
        with pytest.raises(kind) as raised:
            call()
        assert isinstance(raised.value, TKernelsError), raised.value


def test_a_name_that_the_package_has_not_is_answered_with_those_that_it_has() -> None:
    with pytest.raises(AttributeError, match=r"^module 'tsched' has no attribute 'LLMS'; it has LLM, AsyncLLM, "):
        tsched.LLMS  # noqa: B018
    assert {"LLM", "AsyncLLM", "SamplingParams"} <= {*dir(tsched)}


def test_bad_calls_online_raise_both(checkpoint: Path) -> None:
    async def main() -> None:
        served: Any = make_async(checkpoint)
        async with served:
            stream = served.add_request("a", PROMPTS[0], LONG)
            calls: list[tuple[type[Exception], Callable[[], object]]] = [
                (ValueError, lambda: served.add_request("a", PROMPTS[0])),
                (TypeError, lambda: served.add_request(3, PROMPTS[0])),
                (TypeError, lambda: served.add_request("b", PROMPTS[0], {})),
                (TypeError, lambda: served.add_request("b", PROMPTS[0], trace_headers={"a": "b"})),
                (ValueError, lambda: served.add_request("b", PROMPTS[0], priority=2**40)),
            ]
            for kind, call in calls:
                with pytest.raises(kind) as raised:
                    call()
                assert isinstance(raised.value, TKernelsError), raised.value
            await stream.aclose()
        with pytest.raises(RuntimeError) as closed:
            served.add_request("c", PROMPTS[0])
        assert isinstance(closed.value, TKernelsError)

    asyncio.run(main())
