"""POST /tokenize and /detokenize, GET /tokenizer_info: vLLM's, which lm-eval asks."""

from __future__ import annotations

from pydantic import BaseModel

from tsched.serving.protocol.sampling import Items, WireModel


class TokenizeRequest(WireModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(WireModel):
    model: str | None = None
    tokens: Items[int]


class DetokenizedText(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
