"""Sampling parameters as YAMLs and commands say them: SamplingParams says which there are and what they mean."""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Annotated, Any, get_origin

import typer

from tsched.requests.sampling_params import SamplingParams

# Keys of their own in a workload (n, max_tokens, output_len, input_len), of the stages themselves (logprobs), or code.
_SAID_ELSEWHERE = frozenset(
    {"n", "max_tokens", "truncate_prompt_tokens"}
    | {"logprobs", "prompt_logprobs", "logits_processors", "stopping_criteria"}
)
SAMPLING_KEYS = tuple(one.name for one in fields(SamplingParams) if one.name not in _SAID_ELSEWHERE)

_KINDS: Mapping[str, Any] = {
    "int": int,
    "int | None": int | None,
    "float": float,
    "bool": bool,
    "str | Iterable[str] | None": list[str],
    "Iterable[int] | None": list[int],
    "Iterable[BadWord] | None": list[str],
}
"""A parameter's type as SamplingParams has it -> that of its flag. One of another type is a YAML's key alone."""

FLAG_KEYS = tuple(one.name for one in fields(SamplingParams) if one.name in SAMPLING_KEYS and one.type in _KINDS)


@dataclass(frozen=True)
class SamplingFlags:
    """Marks the field of a command's record that holds sampling parameters: the command has a flag for each of `names`.

    Attributes:
        names: The parameters.
        usual: Parameter -> the command's default, where it is not that of SamplingParams.
    """

    names: Sequence[str]
    usual: Mapping[str, Any]

    def parameters(self) -> list[inspect.Parameter]:
        """The parameters of a function from which typer makes the flags."""
        meanings, known = read_meanings(), {one.name: one for one in fields(SamplingParams)}
        return [_make_flag(known[name], meanings.get(name, ""), self.usual) for name in self.names]

    def take(self, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """Takes the parameters' values out of a call's `arguments`."""
        return {name: arguments.pop(name) for name in self.names}


def _make_flag(one: Field[Any], meaning: str, usual: Mapping[str, Any]) -> inspect.Parameter:
    kind, default = _KINDS[str(one.type)], usual.get(one.name, one.default)
    if get_origin(kind) is list:
        meaning, default = f"{meaning} Repeatable.", None if default is None else list(default)
    info = typer.Option("--" + one.name.replace("_", "-"), help=meaning, rich_help_panel="Sampling")
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def read_meanings() -> dict[str, str]:
    """Sampling parameter -> what the docstring of SamplingParams says of it."""
    section = (inspect.getdoc(SamplingParams) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
