"""The fields that completions and chat have in common. SamplingParams checks their values."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tsched.requests.sampling_params import MAX_STOPS, SamplingParams

MAX_TOP_LOGPROBS = 20
MAX_ALLOWED_IDS = 1000  # each is checked again for every prompt

ItemT = TypeVar("ItemT")

Items = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list whose first wrong entry is said alone: a million wrong ones would take seconds."""

TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
"""How many of the most likely tokens are reported at each place."""

TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
"""A token id as the key of an object, for JSON has no others than texts."""

Unsupported: TypeAlias = None
"""The type of a field that OpenAI has and this server has not: null says the same as leaving it out."""


def _check_bool(value: Any) -> Any:
    """Refuses 0, which equals false; Literal would take it."""
    if not isinstance(value, bool):
        raise ValueError("should be false")
    return value


OnlyFalse: TypeAlias = Annotated[Literal[False], BeforeValidator(_check_bool)]


class WireModel(BaseModel):
    """A record of the wire: nothing is converted, and nothing unknown is dropped."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(WireModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: OnlyFalse | None = None  # nothing is added to a chunk


class TextFormat(WireModel):
    type: Literal["text"]


class JsonObjectFormat(WireModel):
    type: Literal["json_object"]


class JsonSchema(WireModel):
    name: str
    description: str | None = None
    definition: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None  # outputs are always of the schema


class JsonSchemaFormat(WireModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class GenerationRequest(WireModel):
    """What any request for text may say; null is the default everywhere."""

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    truncate_prompt_tokens: int | None = None
    stop: str | Items[str] | None = Field(None, description="a text or a list of texts")
    stop_token_ids: Annotated[Items[int], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[TokenKey, float] | None = None
    allowed_token_ids: Annotated[Items[int], Field(max_length=MAX_ALLOWED_IDS)] | None = None
    bad_words: Items[str | Items[int]] | None = Field(None, description="a list of texts and of lists of token ids")
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Without effect, see docs/serving.md.
    user: str | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields that are SamplingParams' own and were given."""
        given = {name: getattr(self, name) for name in _SAMPLING_NAMES if name in type(self).model_fields}
        if isinstance(self.response_format, JsonObjectFormat):
            given["structured_outputs"] = {"json_object": True}
        elif isinstance(self.response_format, JsonSchemaFormat):
            schema = self.response_format.json_schema.definition
            given["structured_outputs"] = {"json_object": True} if schema is None else {"json": schema}
        return {name: value for name, value in given.items() if value is not None}


_SAMPLING_NAMES = frozenset(one.name for one in fields(SamplingParams)) - {"logprobs", "max_tokens"}


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None


FinishReason = Literal["stop", "length"] | None
