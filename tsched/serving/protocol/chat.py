"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from tsched.serving.protocol.sampling import (
    FinishReason,
    GenerationRequest,
    Items,
    OnlyFalse,
    TopLogprobs,
    Unsupported,
    Usage,
    WireModel,
)

MAX_MESSAGES = 4096


Nothing: TypeAlias = Annotated[list[None], Field(max_length=0)] | None


class TextPart(WireModel):
    type: Literal["text"]
    text: str


class Message(WireModel):
    role: Literal["developer", "system", "user", "assistant"]
    content: str | Annotated[Items[TextPart], Field(min_length=1)]
    name: str | None = None
    # OpenAI's client sends an answer back as it read it: with fields that are null, and with what it parsed of content.
    annotations: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None
    parsed: Any = None
    refusal: Nothing = None
    tool_calls: Nothing = None

    @property
    def texts(self) -> list[str]:
        """What a chat template may render of it."""
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return [*texts, self.name or ""]


Messages = Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class ConversationRequest(WireModel):
    """What a chat template is rendered with."""

    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None


class ChatRequest(GenerationRequest, ConversationRequest):
    messages: Messages
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    # Without effect, see docs/serving.md.
    metadata: dict[str, str] | None = None
    modalities: Annotated[Items[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: OnlyFalse | None = None
    tool_choice: Literal["none"] | None = None
    # OpenAI's alone.
    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    prompt_cache_key: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Unsupported = None
    reasoning_effort: Unsupported = None
    tools: Unsupported = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class PlaceLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[PlaceLogprobs]


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class MessageDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str


class ChatChunkChoice(BaseModel):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class ChatChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


EXAMPLE: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "def main("}], "max_tokens": 8}
