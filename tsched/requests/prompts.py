"""Checks of what callers pass with a prompt, and one form for all kinds of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from tsched.requests.errors import ArgumentError, ArgumentTypeError, RefusedError
from tsched.requests.first_token import check_first_token
from tsched.requests.grammar import Grammar
from tsched.requests.sampling_params import SamplingParams
from tsched.requests.vllm_names import PROMPT_NAMES

MAX_PRIORITY = 2**31  # the scheduler's keys are int64

ROLES = ("system", "developer", "user", "assistant")
"""Of the messages of a chat."""


@dataclass(frozen=True)
class Conversation:
    """Messages that a chat template makes a prompt of, see tsched.requests.chat_template.

    Attributes:
        messages: Mappings with a `role` of ROLES and a `content`, a text or a list of {"type": "text", "text": ...},
            whose lines follow each other; `name` and `reasoning_content` where the template asks for them.
        add_generation_prompt: Whether the prompt ends with what begins an assistant's message.
        continue_final_message: Whether the prompt ends with the last message's content, which the output goes on from.
        chat_template: The text of a template to use in the place of the checkpoint's.
        variables: More of the variables that the template reads, as `enable_thinking` of some.
    """

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


Prompt = str | Sequence[int] | Mapping[str, Any] | Conversation
"""Text, token ids, vLLM's {"prompt": text} and {"prompt_token_ids": ids}, or messages. Of a mapping with both, the ids
are the prompt."""

Salt = str | bytes | None
"""Separates one tenant's cached prefixes from another's; None is the empty salt."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request as the engine takes it.

    Attributes:
        request_id: The caller's.
        text: The prompt where it is text; None where it is token ids.
        token_ids: The prompt's [n].
        params: How tokens are chosen.
        arrival_time: Seconds on time.perf_counter's clock.
        priority: Lower goes first.
        cache_salt: Requests with equal salts share cached prefixes.
        refusal: Why the engine cannot take the request; None where it can.
        grammar: Of structured_outputs, or why it is refused, once that is known; None where there are none.
    """

    request_id: Any
    text: str | None
    token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: bytes = b""
    refusal: str | None = None
    grammar: Future[Grammar | str] | None = None


ValueT = TypeVar("ValueT")

_PLAIN = frozenset({int})  # a list of nothing else needs no check of each entry


def split_prompts(prompts: Any) -> list[Any]:
    """Splits prompts into one entry per request. A single text, mapping, conversation or list of token
    ids is one request.

    Raises:
        ArgumentTypeError: It is neither that nor a list of prompts.
    """
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, (str, Mapping, Conversation)):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ArgumentTypeError(
            f"prompts must be a text, a list of token ids or a list of those, got {type(prompts).__name__}"
        )
    entries = list(prompts)
    if _PLAIN.issuperset(map(type, entries)):
        return [entries] if entries else []
    return [entries] if all(_is_integer(entry) for entry in entries) else entries


def parse_prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """Returns the prompt's text and its token ids as a list of int; one of them is None where it is not given.

    Raises:
        RefusedError: It is no prompt. The message says what is wrong.
    """
    if isinstance(prompt, str):
        return prompt, None
    return _parse_mapping(prompt) if isinstance(prompt, Mapping) else (None, _parse_ids(prompt))


def _parse_ids(prompt: Any) -> list[int]:
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, (list, tuple, range)):
        if _PLAIN.issuperset(map(type, prompt)):
            return list(prompt)
        wrong = next((entry for entry in prompt if not _is_integer(entry)), None)
        if wrong is not None:
            raise RefusedError(f"token ids must be integers, got {wrong!r}")
        return [int(entry) for entry in prompt]
    raise RefusedError(f"a prompt must be a text or a list of token ids, got {type(prompt).__name__}")


def _parse_mapping(prompt: Mapping[Any, Any]) -> tuple[str | None, list[int] | None]:
    for key, value in prompt.items():
        if key in PROMPT_NAMES and PROMPT_NAMES[key].asks_for(value):
            raise RefusedError(f"a prompt mapping has no {key!r}: it {PROMPT_NAMES[key].answer}")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    others = prompt.keys() - {"prompt", "prompt_token_ids"} - PROMPT_NAMES.keys()
    if others or (text is None and ids is None):
        keys = sorted(map(str, prompt))
        raise RefusedError(f'a prompt mapping has "prompt", "prompt_token_ids" or both; got {keys}')
    if text is not None and not isinstance(text, str):
        raise RefusedError(f'"prompt" of a prompt cannot be a {type(text).__name__}')
    if isinstance(ids, (str, Mapping)):
        raise RefusedError(f'"prompt_token_ids" of a prompt cannot be a {type(ids).__name__}')
    return text, None if ids is None else _parse_ids(ids)


def check_token_ids(token_ids: list[int], vocab_size: int) -> None:
    """Checks the ids of a prompt.

    Raises:
        RefusedError: One is not in [0, vocab_size).
    """
    if not token_ids:
        return
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise RefusedError(
            f"token id {wrong} at place {token_ids.index(wrong)} of the prompt is out of vocabulary; "
            f"ids go from 0 to {vocab_size - 1}"
        )


def check_named_ids(params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Checks the tokens that parameters name against the model's vocabulary.

    Raises:
        RefusedError: One is outside the vocabulary, or together they leave none to begin with.
    """
    named: dict[str, Iterable[int]] = {
        "stop_token_ids": params.stop_ids,
        "logit_bias": params.biases,
        "allowed_token_ids": params.allowed_ids or (),
        "bad_words": (token for word in params.forbidden if not isinstance(word, str) for token in word),
    }
    for name, ids in named.items():
        highest = max(ids, default=0)
        if highest >= vocab_size:
            raise RefusedError(f"{name} holds {highest}; ids go from 0 to {vocab_size - 1}")
    check_first_token(params, vocab_size, eos_token_ids)


def check_salt(salt: Salt) -> bytes:
    """Returns the salt as bytes.

    Raises:
        ArgumentTypeError: It is no str, bytes or None.
    """
    if salt is None or isinstance(salt, bytes):
        return salt or b""
    if not isinstance(salt, str):
        raise ArgumentTypeError(f"cache_salt must be a str, bytes or None, got {type(salt).__name__}")
    return salt.encode("utf-8", "surrogatepass")


def check_priority(priority: int) -> int:
    """Returns the priority as an int.

    Raises:
        ArgumentTypeError: It is no integer.
        ArgumentError: Its magnitude is above MAX_PRIORITY.
    """
    if not isinstance(priority, (int, np.integer)) or isinstance(priority, bool):
        raise ArgumentTypeError(f"priority must be an integer, got {priority!r}")
    if abs(priority) > MAX_PRIORITY:
        raise ArgumentError(f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority}")
    return int(priority)


def broadcast_to_prompts(
    name: str, value: ValueT | Sequence[ValueT] | None, num_prompts: int, *types: type, default: ValueT
) -> list[ValueT]:
    """Returns one value for each prompt.

    Args:
        name: Of the option, for messages.
        value: One for all prompts, or a list of one each. None, alone or in a list, is `default`.
        num_prompts: The length of the result.
        types: That a value may have.
        default: Stands for None.

    Raises:
        ArgumentTypeError: A value has another type.
        ArgumentError: The list has another length.
    """
    names = " or ".join(kind.__name__ for kind in types)
    if value is None or _has_type(value, types):
        return [default if value is None else value] * num_prompts  # type: ignore[list-item]
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ArgumentTypeError(f"{name} must be {names} or a list of them, got {type(value).__name__}")
    for one in value:
        if one is not None and not _has_type(one, types):
            raise ArgumentTypeError(f"{name} must hold {names}, got {type(one).__name__}")
    if len(value) != num_prompts:
        raise ArgumentError(f"{len(value)} {name} for {num_prompts} prompts: give one for all, or one each")
    return [default if one is None else one for one in value]


def _has_type(value: Any, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _is_integer(entry: Any) -> bool:
    return isinstance(entry, (int, np.integer)) and not isinstance(entry, bool)
