"""What an experiment's YAML may say of the engine that serves."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainValidator, create_model

from experiments.schema.values import Strict, Swept
from tsched.options import SCHEDULER_OPTIONS

if TYPE_CHECKING:

    class SchedulerOptions(Strict):
        def __getattr__(self, option: str) -> list[Any] | None: ...

else:
    SchedulerOptions = create_model(
        "SchedulerOptions",
        __base__=Strict,
        __doc__="The options of tsched's engine. A key that is absent has its default, a list is an axis.",
        **{
            name: (Swept[Annotated[Any, PlainValidator(option.check_value)]] | None, None)
            for name, option in SCHEDULER_OPTIONS.items()
        },
    )
