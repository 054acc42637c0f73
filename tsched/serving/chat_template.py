"""A model's chat template, rendered in jinja2's sandbox. Never one that a request brings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError as JinjaError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tsched.torch_free import TKernelsError


class TemplateError(TKernelsError, ValueError):
    """A template cannot be read, or does not take these messages."""


class ChatTemplate:
    """Makes one prompt of messages.

    Args:
        source: The template, in jinja2, as transformers' tokenizers have them.
        tokens: Names that it may use, as in {"bos_token": "<s>"}.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        self.source = source
        try:
            self._template = environment.from_string(source)
        except JinjaError as error:
            raise TemplateError(f"the chat template is no template: {error}") from error
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that asks for the assistant's next message.

        Raises:
            TemplateError: The template refuses the messages.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._tokens)
        except TemplateError:
            raise
        except Exception as error:  # a template is a program, and any of its errors are the messages'
            raise TemplateError(f"the chat template cannot render the messages: {error}") from error


def read_template(directory: Path, config: Mapping[str, Any], file: Path | None = None) -> ChatTemplate | None:
    """The template of `file`, else of a model's directory; None where it has none.

    Args:
        directory: Of the model.
        config: What its tokenizer_config.json says.
        file: One that is given by hand.
    """
    own = directory / "chat_template.jinja"
    source: Any = config.get("chat_template")
    if file is not None or own.is_file():
        source = (file or own).read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")})


def _token_text(token: Any) -> str:
    """A special token as tokenizer_config.json writes it: a text, or a mapping with its content."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def _refuse(message: str) -> None:
    raise TemplateError(f"the chat template refuses the messages: {message}")
