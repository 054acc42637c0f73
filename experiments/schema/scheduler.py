"""What an experiment's YAML may say of the engine that serves: tsched.options says what there is."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, StrictBool, create_model

from experiments.document import nearest
from experiments.schema.values import Strict, Swept
from tsched.options import SCHEDULER_OPTIONS, Option


def _value_type(option: Option) -> Any:
    """The type of one value of an option."""

    def check_word(word: str) -> str:
        if word not in option.choices:
            # Quoted: one of them is called 'none'.
            known = ", ".join(map(repr, option.choices))
            raise ValueError(f"unknown {option.name} {word!r}: there is {known}{nearest(word, option.choices)}")
        return word

    if option.choices:
        return Annotated[str, AfterValidator(check_word)]
    if option.kind is bool:
        return StrictBool
    return Annotated[option.kind, Field(strict=True, **option.bounds)]


_swept: Any = Swept
_fields: dict[str, Any] = {
    name: (_swept[_value_type(option)] | None, None) for name, option in SCHEDULER_OPTIONS.items()
}
_Options: Any = create_model("_Options", __base__=Strict, **_fields)


class SchedulerOptions(_Options):
    """What tsched.LLM takes besides the model; a key that is absent has LLM's default, a list is an axis."""
