"""POST /tokenize and /detokenize, GET /tokenizer_info: vLLM's, which lm-eval asks."""

from __future__ import annotations

from pydantic import BaseModel

from tsched.serving.protocol.chat import ConversationRequest
from tsched.serving.protocol.errors import invalid_value
from tsched.serving.protocol.sampling import Items, Unsupported, WireModel


class TokenizeRequest(ConversationRequest):
    """A prompt, or messages, whose fields are those of a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # vLLM's alone.
    chat_template: Unsupported = None
    media_io_kwargs: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    tools: Unsupported = None

    def check_forms(self) -> None:
        """Refuses both forms, none, and a chat's field with a prompt, by ApiError."""
        if self.prompt is None and self.messages is None:
            raise invalid_value("prompt is required, or messages", "prompt", "missing_required_parameter")
        if self.prompt is not None:
            for name in ConversationRequest.model_fields:
                if getattr(self, name) is not None:
                    raise invalid_value(f"{name} does not go with a prompt: give one of prompt and messages", name)


class Tokens(BaseModel):
    tokens: list[int]
    token_strs: list[str] | None
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
