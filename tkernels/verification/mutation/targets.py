"""Which functions are a kernel's source, and how a fault gets into them without any file being changed."""

import importlib.util
import linecache
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tkernels.source_hash import called_functions, is_jit
from tkernels.variant import Variant


@dataclass(frozen=True)
class Target:
    """A file's jit functions, and the Triton variants that run them: the one whose file it is first."""

    file: Path
    functions: frozenset[str]
    variants: tuple[Variant, ...]


def targets(variants: Iterable[Variant]) -> list[Target]:
    """Every device function that these variants run, helpers in other files included, each in one target only."""
    users: dict[tuple[Path, str], list[Variant]] = {}
    for variant in variants:
        for function in _functions(variant):
            file = Path(function.fn.__code__.co_filename)
            users.setdefault((file, function.__name__), []).append(variant)
    grouped: dict[tuple[Path, tuple[str, ...]], tuple[set[str], list[Variant]]] = {}
    for (file, name), known in users.items():
        known.sort(key=lambda variant: variant.file != file)  # stable: the file's own variant, then in their order
        labels = tuple(f"{variant.contract.name}.{variant.name}" for variant in known)
        grouped.setdefault((file, labels), (set(), known))[0].add(name)
    return [Target(file, frozenset(names), tuple(known)) for (file, _), (names, known) in grouped.items()]


def plant(variant: Variant, function: str, original: Path, mutated: Path) -> None:
    """Puts the function of the file `mutated` in the place of the same one of `original`, for the whole process.

    Everyone who imported the function holds the object that changes here, so helpers of other files work as well. There
    is no way back: the process is a mutant's own.

    Raises:
        SyntaxError, or whatever importing the mutated file raises.
        LookupError: The variant runs no such function.
    """
    spec = importlib.util.spec_from_file_location(f"mutant_{mutated.stem}", mutated)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The interpreter rewrites a kernel from its source when it first runs it, by when the file may be gone.
    text = mutated.read_text()
    linecache.cache[str(mutated)] = (len(text), None, text.splitlines(keepends=True), str(mutated))
    for known in _functions(variant):
        if known.__name__ == function and Path(known.fn.__code__.co_filename) == original:
            vars(known).clear()
            vars(known).update(vars(getattr(module, function)))
            if hasattr(known, "device_caches"):  # made by a method of the other object, which it would go on filling
                known.device_caches = defaultdict(known.create_binder)
            return
    raise LookupError(f"{variant.contract.name}.{variant.name} runs no function {function!r} of {original}")


def _functions(variant: Variant) -> list[Any]:
    """The device functions that a Triton variant runs: those that its file defines or imports, and all they call."""
    if variant.kind != "triton" or variant.module is None:
        return []
    return called_functions({name: member for name, member in vars(variant.module).items() if is_jit(member)})
