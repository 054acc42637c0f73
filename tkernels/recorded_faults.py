"""Where an outside file is only tried, its import goes on after what a `Config` or `Variant` refuses when it is made.

So all that the file breaks is said at once.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tkernels.config import Config
from tkernels.declaration import Fault, line_of_caller, lines_of_fields
from tkernels.names import suggest_name
from tkernels.variant import Variant

_SAID_BY_NOBODY: Mapping[str, Any] = {"wins": "not said", "deterministic": False, "batch_invariant": False}
"""What a declaration that lacks a field goes on with."""


@contextmanager
def recorded_faults(file: Path) -> Iterator[list[Fault]]:
    """Meanwhile every Config and Variant that `file` makes can be made; gives the list of what it breaks in them."""
    found: list[Fault] = []
    make_config: Any = Config.__init__
    make_variant: Any = Variant.__init__

    def config(self: Config, *positional: Any, **values: Any) -> None:
        try:
            make_config(self, *positional, **values)
        except (TypeError, ValueError) as error:
            if (line := line_of_caller(file)) is None:
                raise
            found.append(Fault(line, _words_of(error)))
            held: dict[str, Any] = {
                name: value if isinstance(value, int | float) else 1 for name, value in values.items()
            }
            self._hold(held)

    def variant(self: Variant, *positional: Any, **given: Any) -> None:
        known = {name: one for name, one in inspect.signature(make_variant).parameters.items() if name != "self"}
        lines = {"": line_of_caller(file), **(lines_of_fields(file) if given.keys() - known.keys() else {})}
        for name in [name for name in given if name not in known]:
            text = f"a Variant has no field {name!r}{suggest_name(name, known.keys() - given.keys())}"
            found.append(Fault(lines.get(name, lines[""]), text))
            del given[name]
        if missing := [one for one, rule in known.items() if rule.default is rule.empty and one not in given]:
            found.append(Fault(lines[""], f"a Variant has to say {', '.join(missing)}"))
        if positional:
            found.append(Fault(lines[""], f"a Variant's fields are given by name; {len(positional)} have none"))
        make_variant(self, **{name: _SAID_BY_NOBODY.get(name) for name in missing}, **given)

    Config.__init__, Variant.__init__ = config, variant  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Config.__init__, Variant.__init__ = make_config, make_variant  # type: ignore[method-assign]


def _words_of(error: Exception) -> str:
    """A ValueError is the config's own; Python says the rest."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
