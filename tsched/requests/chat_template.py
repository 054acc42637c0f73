"""Chats: a checkpoint's template makes one prompt of messages. Loads jinja2 and, of what is given, no torch.

A prompt has control tokens where the template puts them, and nowhere else. Each string of a message that spells one is
marked before the template renders it, and its text is encoded apart, in two parts. So no message can end its own turn
or begin another's. A prompt without such strings is encoded whole, as transformers does it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tsched.requests.callbacks import attribute_to
from tsched.requests.errors import RefusedError, RequestFault
from tsched.requests.prompts import ROLES, Conversation
from tsched.torch_free import TKernelsError, suggest_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
_KEYS = ("role", "content", "name", "reasoning_content")
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))  # of Unicode
_SET = "chat_template_kwargs"  # what callers set variables with
_TAKEN_NAMES = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"})


class ChatTemplateError(TKernelsError, ValueError):
    """A chat template cannot be read. The message says where it is wrong."""


class ChatTemplate:
    """A compiled template.

    Args:
        source: Its text, in jinja2.
        special_tokens: The variables `bos_token`, `eos_token` and so on.

    Attributes:
        source, special_tokens: As given.
        variables: The names that it reads and a caller may set.

    Raises:
        ChatTemplateError: The text is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        environment = _make_environment()
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ChatTemplateError(f"the chat template is no template of jinja2: {line}{error.message}") from error
        self.source = source
        self.special_tokens = dict(special_tokens)
        read = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.variables = sorted(read - _TAKEN_NAMES - self.special_tokens.keys())
        self.literal_text = "".join(text for _, kind, text in environment.lex(source) if kind in ("data", "string"))

    def render(self, conversation: Conversation, control_tokens: Sequence[str] = ()) -> list[str]:
        """The prompt, in pieces: those at odd places are strings of the messages that spell one of `control_tokens`.

        Raises:
            RefusedError: A message is wrong, or the template refuses the messages.
        """
        messages, variables = _read_messages(conversation.messages), self._read_variables(conversation.variables)
        if conversation.continue_final_message and conversation.add_generation_prompt:
            raise RefusedError("continue_final_message goes on with a message, and add_generation_prompt begins one")
        begin, end, tag = _unused_characters(messages, variables)
        control = re.compile("|".join(map(re.escape, sorted(control_tokens, key=len, reverse=True))) or "(?!)")

        def mark(value: Any) -> Any:
            return control.sub(rf"{begin}\g<0>{end}", value) if isinstance(value, str) else value

        marked = [{key: value if key == "role" else mark(value) for key, value in one.items()} for one in messages]
        if "developer" not in self.source:  # OpenAI's newer word: a template that has not heard of it may drop it
            marked = [one | {"role": "system"} if one["role"] == "developer" else one for one in marked]
        if conversation.continue_final_message:
            marked[-1]["content"] += f"{tag} "  # a template that strips the content takes the space
        try:
            text = self._template.render(
                self.special_tokens | {name: mark(value) for name, value in variables.items()},
                messages=marked,
                tools=None,
                documents=None,
                add_generation_prompt=conversation.add_generation_prompt,
            )
        except Exception as error:  # whatever a checkpoint's template does
            raise RefusedError(f"the chat template refuses the messages: {error}") from error
        if conversation.continue_final_message:
            text = _cut_at(text, tag)
        pieces = re.split(f"{begin}({control.pattern}){end}|[{begin}{end}]", text)
        return ["" if piece is None else piece for piece in pieces]

    def _read_variables(self, variables: Any) -> dict[str, Any]:
        """The variables that a caller sets; RefusedError where the template would not read one."""
        if not isinstance(variables, Mapping):
            raise RefusedError(f"{_SET} must be a mapping, got a {type(variables).__name__}")
        for name, value in variables.items():
            if name in _TAKEN_NAMES or name in self.special_tokens:
                raise RefusedError(f"{_SET} may not hold {name!r}, which is made of the request and the model")
            if name not in self.variables:
                known = f"reads {', '.join(self.variables)}" if self.variables else "reads no variable of a caller"
                raise RefusedError(
                    f"{_SET} has {name!r}, and the chat template {known}{suggest_name(name, self.variables)}"
                )
            if not (value is None or type(value) in (str, int, float, bool)):
                raise RefusedError(f"{_SET} must hold plain values, {name!r} is a {type(value).__name__}")
        return dict(variables)


class ChatEncoder:
    """A template and a tokenizer: makes token ids of conversations.

    Args:
        tokenizer: Of the library tokenizers; it truncates and pads no more.
        template: The checkpoint's; None where it has none.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template

    @cached_property
    def _added_tokens(self) -> dict[int, Any]:
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        return added

    def encode(self, conversation: Conversation, *, add_special_tokens: bool = False) -> tuple[str, list[int]]:
        """The prompt's text and token ids [n], with no special token but the template's own.

        Args:
            conversation: The messages, and how to render them.
            add_special_tokens: Whether to add those that the tokenizer begins and ends a text with.

        Raises:
            RefusedError: There is no template, it or a message is wrong, or the template refuses the messages.
        """
        template = self._find_template(conversation.chat_template)
        pieces = template.render(conversation, self._control_tokens(template))
        try:
            text = "".join(pieces)
            text.encode()
        except UnicodeError as error:  # a lone surrogate
            raise RefusedError(f"the messages cannot be encoded as UTF-8: {error}") from error
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            ids += self._encode_as_text(piece) if place % 2 else self._encode(piece)
        if add_special_tokens:
            begin, end = self._ends
            ids = [*begin, *ids, *end]
        return text, ids

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer begins a text with, and those that it ends it with."""
        mask = self._tokenizer.encode("a")
        own = [place for place, is_special in enumerate(mask.special_tokens_mask) if not is_special]
        return mask.ids[: own[0]], mask.ids[own[-1] + 1 :]

    def _find_template(self, source: str | None) -> ChatTemplate:
        if source is not None:
            try:
                return ChatTemplate(source, {} if self._template is None else self._template.special_tokens)
            except ChatTemplateError as error:
                raise RefusedError(str(error)) from error
        if self._template is None:
            raise RefusedError("the model has no chat template: pass chat_template, or a prompt")
        return self._template

    def _control_tokens(self, template: ChatTemplate) -> list[str]:
        """The special tokens, and the other added ones that the template itself writes; not lines' ends, as Gemma's."""
        added = self._added_tokens.values()
        return [
            one.content
            for one in added
            if one.special or (one.content in template.literal_text and not one.content.isspace())
        ]

    def _encode(self, text: str) -> list[int]:
        try:
            with attribute_to("the tokenizer on the messages"):
                # Other threads run meanwhile, which `encode` does not let them.
                ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids if text else []
        except RequestFault as fault:
            raise RefusedError(str(fault)) from fault
        return ids

    def _encode_as_text(self, token: str) -> list[int]:
        """The ids of a control token's text, in two parts, neither of which is the token."""
        ids = [*self._encode(token[:1]), *self._encode(token[1:])]
        found = next((self._added_tokens[one].content for one in ids if one in self._added_tokens), None)
        if found is not None:
            raise RefusedError(f"a message has {token!r}, whose text cannot be told from the control token {found!r}")
        return ids


def read_chat_template(directory: Path, given: Path | None = None) -> ChatTemplate | None:
    """The chat template of a checkpoint's directory; None where it has none.

    It is chat_template.jinja, or `chat_template` of tokenizer_config.json, there the one named "default" of several.

    Args:
        directory: Of the checkpoint.
        given: A file that takes the place of its template.

    Raises:
        ChatTemplateError: A file is damaged, or the template none.
    """
    config = _read_json(directory / "tokenizer_config.json")
    file = directory / TEMPLATE_FILE if given is None else given
    source = config.get("chat_template")
    try:
        if file.exists() or given is not None:
            source = file.read_text(encoding="utf-8")
        if isinstance(source, list):
            named = {str(one.get("name")): one.get("template") for one in source if isinstance(one, dict)}
            source = named.get("default")
        if source is None:
            return None
        if not isinstance(source, str):
            raise ChatTemplateError(f"chat_template must be a text, got a {type(source).__name__}")
        tokens = {**_read_json(directory / "special_tokens_map.json"), **config}
        return ChatTemplate(source, dict(_special_tokens(tokens)))
    except (ChatTemplateError, UnicodeDecodeError, OSError) as error:
        where = file if file.exists() or given is not None else directory / "tokenizer_config.json"
        raise ChatTemplateError(f"{where}: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of UTF-8 too
        raise ChatTemplateError(f"{file}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ChatTemplateError(f"{file}: must be an object, is a {type(found).__name__}")
    return found


def _special_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The tokens that tokenizer_config.json has under names as `eos_token`."""
    for name, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(content, str):
            yield name, content


def _read_messages(messages: Any) -> list[dict[str, str]]:
    """The messages, each with plain strings alone."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RefusedError(f"messages must be a list, got a {type(messages).__name__}")
    if not messages:
        raise RefusedError("messages must hold one message at least")
    return [_read_message(f"messages[{place}]", one) for place, one in enumerate(messages)]


def _read_message(place: str, message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise RefusedError(f"{place} must be a mapping of role and content, got a {type(message).__name__}")
    for key in message:
        if key not in _KEYS:
            raise RefusedError(f"{place} has a key {key!r}: there is {', '.join(_KEYS)}{suggest_name(key, _KEYS)}")
    role = message.get("role")
    if role not in ROLES:
        raise RefusedError(f"{place}.role must be one of {', '.join(map(repr, ROLES))}, got {role!r}")
    read = {"role": str(role), "content": _read_content(f"{place}.content", message.get("content"))}
    for key in ("name", "reasoning_content"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise RefusedError(f"{place}.{key} must be a text, got {message[key]!r}")
            read[key] = str(message[key])
    return read


def _read_content(place: str, content: Any) -> str:
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RefusedError(f"{place} must be a text or a list of text parts, got a {type(content).__name__}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind != "text":
            raise RefusedError(f'{place}[{number}] must be {{"type": "text", "text": ...}}, got type {kind!r}')
        if not isinstance(part.get("text"), str):
            raise RefusedError(f"{place}[{number}].text must be a text, got {part.get('text')!r}")
        texts.append(str(part["text"]))
    return "\n".join(texts)


def _unused_characters(messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> list[str]:
    """Three characters that are in none of the strings; RefusedError where these have all that Unicode gives away."""
    used = {char for one in (*messages, variables) for text in one.values() if isinstance(text, str) for char in text}
    found = list(islice((char for char in map(chr, chain(*_PRIVATE_USE)) if char not in used), 3))
    if len(found) < 3:
        raise RefusedError("the messages have all of Unicode's private-use characters, and rendering them needs three")
    return found


def _cut_at(text: str, tag: str) -> str:
    """The prompt up to the end of the last message's content, which the tag marks."""
    before, found, after = text.rpartition(tag)
    if not found:
        raise RefusedError("the chat template drops the last message's content, so nothing can go on from it")
    return before if after.startswith(" ") else before.rstrip()


class _GenerationBlocks(jinja2.ext.Extension):
    """Reads `{% generation %}`, by which some templates mark what a model has written, as its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _make_environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: transformers' settings, filters and functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja2's own escapes HTML


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
