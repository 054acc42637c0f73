"""From the wire to the engine: one `Job` for each HTTP request, with an engine request for each of its prompts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from tsched.requests.chat_template import ChatEncoder
from tsched.requests.errors import ArgumentTypeError, RefusedError
from tsched.requests.prompts import Conversation, check_named_ids
from tsched.requests.sampling_params import SamplingParams
from tsched.serving.auth import MAX_PART, Tenant
from tsched.serving.engine_client import EngineRequest, ModelFacts, read_sampling
from tsched.serving.protocol.chat import ChatRequest, ConversationRequest
from tsched.serving.protocol.completions import CompletionRequest
from tsched.serving.protocol.errors import ApiError, invalid_value
from tsched.serving.protocol.sampling import GenerationRequest, WireModel
from tsched.serving.protocol.tokenization import TokenizeRequest
from tsched.serving.text import TextCodec, check_length, no_tokenizer

_SAMPLING_NAMES = frozenset(one.name for one in fields(SamplingParams))
BYTES_PER_TOKEN = 4  # what a token of a text is estimated at until it is counted
_RENDERED = {"role", "content", "name"}  # of a message; of its other fields none says anything


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens, and the text that an answer has of it: "" where none is asked for."""

    token_ids: list[int]
    echo: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine, and how it is answered.

    Attributes:
        id: Of the answer. Engine requests have it with the prompt's place, so nobody else can guess their names.
        api: Which one.
        created: Seconds since 1970.
        model: As clients call it.
        prompts: One engine request each.
        requests: Those.
        n: Completions of each prompt.
        stream: Whether the answer is a stream.
        include_usage: Whether a stream ends with the usage.
        continuous_usage: Whether every chunk has it.
        echo: Whether the answer begins with the prompt.
        top_logprobs: Most likely tokens to report at each place; None reports no log-probabilities.
        skip_special_tokens: Whether special tokens have no text, in the prompt as in the output.
    """

    id: str
    api: Literal["completion", "chat"]
    created: int
    model: str
    prompts: Sequence[Prompt]
    requests: Sequence[EngineRequest]
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    top_logprobs: int | None
    skip_special_tokens: bool


def _list_prompts(request: CompletionRequest) -> list[Any]:
    given = request.prompt
    return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


def count_prompts(request: GenerationRequest) -> int:
    """Prompts that a request has."""
    return len(_list_prompts(request)) if isinstance(request, CompletionRequest) else 1


def count_completions(request: GenerationRequest) -> int:
    """Completions that a request asks for, over all its prompts."""
    return count_prompts(request) * max(1, request.n or 1)


def estimate_prompt_tokens(request: GenerationRequest, facts: ModelFacts) -> int:
    """Prompt tokens that a request brings to the engine: ids counted, text by its bytes, both as `_truncate` leaves
    them."""
    if isinstance(request, ConversationRequest):
        sizes = [_estimate_tokens(_list_texts(request))]
    else:
        entries = _list_prompts(request) if isinstance(request, CompletionRequest) else []
        sizes = [_estimate_tokens([one]) if isinstance(one, str) else len(one) for one in entries]
    most = facts.max_model_len
    if request.truncate_prompt_tokens is not None:
        most = min(most, request.truncate_prompt_tokens)
    return sum(min(size, most) for size in sizes)


def _estimate_tokens(texts: Sequence[str]) -> int:
    num_bytes = sum(len(one) if one.isascii() else len(one.encode("utf-8", "surrogatepass")) for one in texts)
    return -(-num_bytes // BYTES_PER_TOKEN)


def _list_texts(request: ConversationRequest) -> list[str]:
    """All that a chat template may render of a conversation."""
    variables = (request.chat_template_kwargs or {}).values()
    texts = [text for one in request.messages or () for text in one.texts]
    return texts + [one for one in variables if isinstance(one, str)]


def count_asked_outputs(request: GenerationRequest, facts: ModelFacts) -> int:
    """Output tokens that a request may make at most."""
    given = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    given = request.max_tokens if given is None and isinstance(request, ChatRequest | CompletionRequest) else given
    if given is None:
        given = 16 if isinstance(request, CompletionRequest) else facts.max_model_len
    return count_completions(request) * min(max(given, 0), facts.max_model_len)


def check_model(asked: str | None, facts: ModelFacts) -> None:
    """Refuses another model than the served one by ApiError 404."""
    if asked is not None and asked != facts.name:
        message = f"there is no model {asked[:100]!r}; {facts.name!r} is served"
        raise ApiError(404, message, "model_not_found", param="model")


def check_request(request: GenerationRequest, facts: ModelFacts, *, may_hurry: bool) -> dict[str, Any]:
    """Checks all that needs no tokens.

    Args:
        request: As it was parsed.
        facts: Of the model.
        may_hurry: Whether it may ask for a priority before its tenant's, as where there is one tenant alone.

    Returns:
        Keywords of SamplingParams, without max_tokens.

    Raises:
        ApiError: Another model is asked for, or a field has a value that it cannot have.
    """
    check_model(request.model, facts)
    _check_pairs(request)
    least = -MAX_PART if may_hurry else 0
    if not least <= (request.priority or 0) <= MAX_PART:
        why = "" if may_hurry else ": it is added to the key's, which no request makes more urgent"
        raise invalid_value(f"priority must be from {least} to {MAX_PART}{why}", "priority")
    sampling = request.sampling()
    top_logprobs = _top_logprobs(request)
    if top_logprobs is not None:
        sampling["logprobs"] = top_logprobs
    given = _given_max_tokens(request)
    is_scored = isinstance(request, CompletionRequest) and request.echo and top_logprobs is not None
    if is_scored or (isinstance(request, CompletionRequest) and given is not None and given <= 0):
        sampling["prompt_logprobs"] = top_logprobs or 0
    try:
        # The shortest prompt leaves the most: what this one leaves is known when it is tokenized.
        most = _default_max_tokens(request, max(1, facts.max_model_len - 1)) if given is None else given
        params = read_sampling(sampling | {"max_tokens": most})
        check_named_ids(params, facts.vocab_size, facts.eos_token_ids)
    except RefusedError as error:
        raise refuse(request, error) from None
    return sampling


def refuse(request: WireModel, error: RefusedError, code: str = "invalid_value") -> ApiError:
    """The error of a request that the engine's own checks refuse: their messages begin with the field's name."""
    name, message = getattr(error, "param", None), str(error)
    if name not in _SAMPLING_NAMES:
        name = message.split(" ")[0].split(".")[0].removesuffix(":")
    if name == "structured_outputs" and getattr(request, name) is None:
        name = "response_format"
        message = message.replace("structured_outputs.json", "response_format.json_schema.schema", 1).replace(
            "structured_outputs", name, 1
        )
    if name not in type(request).model_fields:
        name = "messages" if isinstance(request, ConversationRequest) else "prompt"
    if name == "max_tokens" and getattr(request, "max_completion_tokens", None) is not None:
        message, name = message.replace(name, "max_completion_tokens", 1), "max_completion_tokens"
    return invalid_value(message, name, code)


def find_param(request: GenerationRequest, name: Literal["prompt", "max_tokens"]) -> str:
    """A request's own name of its prompt, or of its most output tokens."""
    if name == "prompt":
        return "messages" if isinstance(request, ConversationRequest) else name
    return name if getattr(request, "max_completion_tokens", None) is None else "max_completion_tokens"


def _check_pairs(request: GenerationRequest) -> None:
    """Refuses fields that contradict each other, by ApiError."""
    if request.stream_options is not None and not request.stream:
        raise invalid_value("stream_options needs stream: true", "stream_options")
    if request.structured_outputs is not None and request.response_format is not None:
        raise invalid_value("response_format and structured_outputs say one thing: give one", "response_format")
    if isinstance(request, CompletionRequest) and request.best_of not in (None, request.n or 1):
        message = f"best_of is {_short(request.best_of)} and n {_short(request.n or 1)}: all are returned, so give n"
        raise invalid_value(message, "best_of")
    if isinstance(request, ChatRequest):
        if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
            message = "max_tokens and max_completion_tokens are two names of one thing: give one"
            raise invalid_value(message, "max_completion_tokens")
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid_value("top_logprobs needs logprobs: true", "top_logprobs")


def _short(number: int | None) -> str:
    return str(number) if number is None or abs(number) < 10**20 else "a number of dozens of digits"


def make_job(
    request: GenerationRequest,
    sampling: dict[str, Any],
    facts: ModelFacts,
    codec: TextCodec | None,
    chats: ChatEncoder | None,
    tenant: Tenant,
) -> Job:
    """Tokenizes a request that `check_request` has passed. It takes time, so it runs off the event loop.

    Raises:
        ApiError: A prompt is too long, has ids outside the vocabulary, or cannot be made.
    """
    is_chat = isinstance(request, ChatRequest)
    if isinstance(request, ChatRequest):
        will_be_cut = request.truncate_prompt_tokens is not None
        prompts = [encode_chat(request, facts, codec, chats, will_be_cut=will_be_cut)]
    elif isinstance(request, CompletionRequest):
        prompts = _read_prompts(request, facts, codec)
    else:
        raise ArgumentTypeError(f"no API has a {type(request).__name__}")
    prompts = [_truncate(prompt, request.truncate_prompt_tokens) for prompt in prompts]
    skips, echoes = request.skip_special_tokens is not False, isinstance(request, CompletionRequest) and request.echo
    if echoes and codec is not None:
        # The tokens' text, not the request's: a text and its ids echo alike, and offsets point into it.
        prompts = [Prompt(one.token_ids, codec.decode(one.token_ids, skip_special_tokens=skips)) for one in prompts]
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
    requests = [
        EngineRequest(
            f"{name}-{place}",
            prompt.token_ids,
            sampling | {"max_tokens": _find_max_tokens(request, len(prompt.token_ids), facts)},
            (request.priority or 0) + tenant.priority,
            tenant.salt(request.cache_salt),
        )
        for place, prompt in enumerate(prompts)
    ]
    options = request.stream_options
    return Job(
        id=name,
        api="chat" if is_chat else "completion",
        created=int(time.time()),
        model=facts.name,
        prompts=prompts,
        requests=requests,
        n=request.n or 1,
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        echo=bool(echoes),
        top_logprobs=_top_logprobs(request),
        skip_special_tokens=skips,
    )


def _top_logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if isinstance(request, ChatRequest) and request.logprobs:
        return request.top_logprobs or 0
    return None


def _given_max_tokens(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatRequest):
        return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return request.max_tokens if isinstance(request, CompletionRequest) else None


def _find_max_tokens(request: GenerationRequest, num_prompt_tokens: int, facts: ModelFacts) -> int:
    """Output tokens of a prompt: those asked for, else 16 of a completion, else what the model's length leaves.

    Raises:
        ApiError: The model's length does not leave them, or fewer than min_tokens.
    """
    given, left = _given_max_tokens(request), facts.max_model_len - num_prompt_tokens
    least = max(1, request.min_tokens or 0) if given is None else given
    if left < least:
        asked = "" if given is None and least == 1 else f" and {least} of output"
        message = f"the model takes {facts.max_model_len} tokens; the request has {num_prompt_tokens} of prompt{asked}"
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise invalid_value(message, param, "context_length_exceeded")
    return _default_max_tokens(request, left) if given is None else given


def _default_max_tokens(request: GenerationRequest, left: int) -> int:
    return left if isinstance(request, ChatRequest) else min(16, left)


def _read_prompts(request: CompletionRequest, facts: ModelFacts, codec: TextCodec | None) -> list[Prompt]:
    entries, will_be_cut = _list_prompts(request), request.truncate_prompt_tokens is not None
    for entry in entries:  # all before any is tokenized
        if isinstance(entry, str):
            if codec is None:
                raise no_tokenizer("prompt")
            check_length(len(entry), codec, facts.max_model_len, "prompt", will_be_cut=will_be_cut)
        else:
            check_ids(entry, facts, may_be_long=will_be_cut)
    return [_make_prompt(entry, codec) for entry in entries]


def _make_prompt(entry: str | list[int], codec: TextCodec | None) -> Prompt:
    if not isinstance(entry, str):
        return Prompt(entry)
    token_ids = [] if codec is None else codec.encode(entry)
    if not token_ids:
        raise invalid_value("the prompt has no tokens", "prompt")
    return Prompt(token_ids)


def _truncate(prompt: Prompt, most: int | None) -> Prompt:
    """The last `most` tokens of a prompt; None keeps all."""
    if most is None or len(prompt.token_ids) <= most:
        return prompt
    return Prompt(prompt.token_ids[-most:])


def check_ids(token_ids: list[int], facts: ModelFacts, param: str = "prompt", *, may_be_long: bool = False) -> None:
    """Refuses ids outside the vocabulary, and more than the model takes unless they may be long, by ApiError."""
    if len(token_ids) > facts.max_model_len and not may_be_long:
        message = f"the model takes {facts.max_model_len} tokens; {param} has {len(token_ids)}"
        raise invalid_value(message, param, "context_length_exceeded")
    wrong = next((one for one in token_ids if not 0 <= one < facts.vocab_size), None)
    if wrong is not None:
        message = f"token id {_short(wrong)} is out of vocabulary; ids go from 0 to {facts.vocab_size - 1}"
        raise invalid_value(message, param)


def tokenize_request(
    request: TokenizeRequest, facts: ModelFacts, codec: TextCodec, chats: ChatEncoder | None
) -> list[int]:
    """The token ids of a prompt or of messages, of a request that has one of them; ApiError where it is wrong."""
    if request.prompt is None:
        special = bool(request.add_special_tokens)  # vLLM's default: a template writes its own
        return encode_chat(request, facts, codec, chats, add_special_tokens=special).token_ids
    check_length(len(request.prompt), codec, facts.max_model_len, "prompt")
    return codec.encode(request.prompt, add_special_tokens=request.add_special_tokens is not False)


def encode_chat(
    request: ConversationRequest,
    facts: ModelFacts,
    codec: TextCodec | None,
    chats: ChatEncoder | None,
    *,
    will_be_cut: bool = False,
    add_special_tokens: bool = False,
) -> Prompt:
    """The prompt that the model's chat template makes of messages.

    Args:
        request: With messages.
        facts: Of the model.
        codec: Its tokenizer; None where it has none.
        chats: Its tokenizer with its template; None where it has none.
        will_be_cut: Whether only the last of its tokens are kept.
        add_special_tokens: Whether it begins and ends as the tokenizer's texts, whatever the template writes.

    Raises:
        ApiError: A message or variable is wrong, there is no template, or the messages are too long.
    """
    messages = request.messages or []
    if codec is None:
        raise no_tokenizer("messages")
    if chats is None:
        message = "the model has no chat template: start the server with --chat-template FILE, or use /v1/completions"
        raise invalid_value(message, "messages")
    variables = request.chat_template_kwargs or {}
    num_chars = sum(map(len, _list_texts(request)))
    check_length(num_chars, codec, facts.max_model_len, "messages", will_be_cut=will_be_cut)
    conversation = Conversation(
        [one.model_dump(include=_RENDERED, exclude_none=True) for one in messages],
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        variables=variables,
    )
    try:
        _, token_ids = chats.encode(conversation, add_special_tokens=add_special_tokens)
    except RefusedError as error:
        raise refuse(request, error) from None
    if not token_ids:
        raise invalid_value("the rendered messages have no tokens", "messages")
    return Prompt(token_ids)
