"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tsched.serving.protocol.sampling import FinishReason, GenerationRequest, Items, TopLogprobs, Unsupported, Usage

MAX_PROMPTS = 128

Prompts = (
    Annotated[str, Field(min_length=1)]
    | Annotated[Items[int], Field(min_length=1)]
    | Annotated[Items[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    | Annotated[Items[Annotated[Items[int], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
)
"""A text, token ids, or a list of either, of one kind."""


class CompletionRequest(GenerationRequest):
    prompt: Prompts = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")
    max_tokens: int | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Unsupported = None


class CompletionLogprobs(BaseModel):
    """One entry for each token; `top_logprobs` maps tokens to log-probabilities, the token of the place among them."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


EXAMPLE: dict[str, Any] = {"model": "tiny", "prompt": "def main(", "max_tokens": 8}
