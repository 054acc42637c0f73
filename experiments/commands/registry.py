"""The registry that a command works on, and names looked up in it."""

from collections.abc import Sequence
from pathlib import Path

import tkernels
from experiments.document import ExperimentError
from tkernels import ContractError, Registry, UnknownNameError, VariantError
from tkernels.outside import broken_files
from tkernels.variant import Variant


def open_registry(folders: Sequence[Path]) -> Registry:
    """The built-in ops and the variants of each folder, less those whose files are broken, which are unavailable.

    Raises ExperimentError for a folder that is none, or that defines again what there is.
    """
    ops, broken = tkernels.OPS, broken_files(folders)
    for folder in folders:
        try:
            ops = ops.with_variants_from(folder, broken)
        except (VariantError, ContractError) as error:
            raise ExperimentError([f"--variants-from: {error}"]) from None
    return ops


def matching(ops: Registry, op: str | None, variant: str | None) -> list[Variant]:
    """The variants of one op or of all, all of them or those of one name.

    Raises ExperimentError for an unknown name, and where any of them is unavailable.
    """
    unavailable = [
        f"--variants-from: {reason}"
        for file, reason in ops.broken.items()
        if op in (None, file.parent.name) and variant in (None, file.stem)
    ]
    if unavailable:
        raise ExperimentError(list(dict.fromkeys(unavailable)))
    try:
        chosen = [ops[op]] if op is not None else list(ops.values())
        if variant is None:
            return [one for each in chosen for one in each.variants.values()]
        if op is not None:
            return [chosen[0].variants[variant]]
    except UnknownNameError as error:
        raise ExperimentError([str(error)]) from None
    found = [each.variants[variant] for each in chosen if variant in each.variants]
    if not found:
        known = sorted({name for each in chosen for name in each.variants})
        raise ExperimentError([f"no op has a variant {variant!r}; there is {', '.join(known)}"])
    return found
