"""The ops and their variants: every file that `folders` lists, imported and checked."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from tkernels.contract import Contract
from tkernels.folders import BUILT_IN, op_folders
from tkernels.launch import call_variant
from tkernels.names import Names, unknown_name
from tkernels.variant import Op, Variant, VariantError

T = TypeVar("T")


class Registry(Names[Op]):
    """The ops by name. Immutable: joining an outside folder returns a new one."""

    def __init__(self, ops: Mapping[str, Op]) -> None:
        super().__init__("op", ops)

    def with_variants_from(self, folder: Path | str) -> "Registry":
        """This registry and the variants (and ops) of an outside folder of the same shape.

        Raises:
            VariantError: no such folder, an op folder that is neither known nor has a contract, a duplicate, a broken
            file.
        """
        folder = Path(folder).resolve()
        if not folder.is_dir():
            raise VariantError(f"variants_from: {folder} is not a folder")
        return Registry(_join(dict(self), folder, package=None))


def _import(file: Path, package: str | None) -> ModuleType:
    if package is not None:
        return importlib.import_module(f"{package}.{file.parent.name}.{file.stem}")
    return import_outside(file, VariantError)


def import_outside(file: Path, failure: type[Exception]) -> ModuleType:
    """The module in `file`, which belongs to no package; `failure` names the file where it cannot be imported.

    Its path makes the module's name unique, so that two folders may hold the same file names.
    """
    name = f"tkernels_outside_{sha256(str(file).encode()).hexdigest()[:12]}_{file.parent.name}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise failure(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks a kernel's module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a file that exits is broken; it must not end us
        del sys.modules[name]
        raise failure(f"{file}: cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _declared(module: ModuleType, name: str, kind: type[T], file: Path) -> T:
    declared = getattr(module, name, None)
    if not isinstance(declared, kind):
        raise VariantError(f"{file}: must define {name}, a tkernels.{kind.__name__}")
    return declared


def _new_op(file: Path, package: str | None) -> Op:
    contract = _declared(_import(file, package), "CONTRACT", Contract, file)
    if contract.name != file.parent.name:
        raise VariantError(f"{file}: the contract is named {contract.name!r}, its folder {file.parent.name!r}")
    baseline = Variant(
        wins="on a CPU, and as the measure of natural error: torch's own best way",
        deterministic=True,
        batch_invariant=False,
        function=contract.baseline,
    )
    torch_variant = baseline.joined(contract, "torch", file, None, call_variant)
    return Op(contract, Names("variant", {"torch": torch_variant}))


def _join(ops: dict[str, Op], root: Path, package: str | None) -> dict[str, Op]:
    for folder in op_folders(root):
        name = folder.op
        if folder.contract is not None:
            if name in ops:
                raise VariantError(f"{folder.contract}: op {name!r} is already defined")
            ops[name] = _new_op(folder.contract, package)
        if name not in ops:
            raise VariantError(f"{folder.path}: {unknown_name('op', name, ops)}")
        op = ops[name]
        variants = dict(op.variants)
        for file in folder.variants:
            module = _import(file, package)
            variant = _declared(module, "VARIANT", Variant, file)
            if file.stem in variants:
                raise VariantError(f"{file}: {name} already has a variant {file.stem!r}, in {variants[file.stem].file}")
            variants[file.stem] = variant.joined(op.contract, file.stem, file, module, call_variant)
        ops[name] = replace(op, variants=Names(f"{name} variant", variants))
    for op in ops.values():
        if op.contract.default not in op.variants:
            raise VariantError(f"{op.name}: its default variant {op.contract.default!r} does not exist")
    return {name: replace(op, variants=_with_parts(op, ops)) for name, op in ops.items()}


def _with_parts(op: Op, ops: Mapping[str, Op]) -> Names[Variant]:
    """An op's variants, each fusion that has just joined with the ops that it is made of."""
    variants = {name: v.with_parts(ops) if v.parts and not v.part_ops else v for name, v in op.variants.items()}
    return Names(f"{op.name} variant", variants)


@cache
def builtin_ops() -> Registry:
    """The ops of this package; `tkernels.OPS`."""
    return Registry(_join({}, BUILT_IN, package="tkernels.ops"))
