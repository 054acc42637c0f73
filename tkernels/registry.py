"""The ops and their variants: every file that `folders` lists, imported and checked."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from tkernels.contract import Contract
from tkernels.folders import BUILT_IN, OpFolder, fault_of_name, op_folders, why_unreadable
from tkernels.launch import call_variant
from tkernels.names import Names, unknown_name
from tkernels.silence import silenced
from tkernels.variant import Op, Variant, VariantError

T = TypeVar("T")


class Registry(Names[Op]):
    """The ops by name. Immutable: joining an outside folder returns a new one.

    folders: the outside folders that joined. broken: the files of them that were left out, each with its reason.
    """

    def __init__(
        self,
        ops: Mapping[str, Op],
        unavailable: Mapping[str, str] | None = None,
        folders: tuple[Path, ...] = (),
        broken: Mapping[Path, str] | None = None,
    ) -> None:
        super().__init__("op", ops, unavailable)
        self.folders = folders
        self.broken = MappingProxyType(dict(broken or {}))

    def with_variants_from(self, folder: Path | str, broken: Mapping[Path, str] | None = None) -> "Registry":
        """This registry and the variants (and ops) of an outside folder of the same shape.

        Args:
            broken: Files that are not imported, each with its reason, as `tkernels.outside.broken_files` finds them:
                what they hold is unavailable.

        Raises:
            VariantError: No such folder, an op folder that is neither known nor has a contract, a duplicate, a broken
            file.
        """
        folder = Path(folder).resolve()
        if not folder.is_dir():
            raise VariantError(f"variants_from: {folder} is not a folder")
        own = [file.name for file in sorted(folder.glob("*.py"))]
        if folder.name in self and own and not op_folders(folder):
            raise VariantError(f"variants_from: {folder} is named as an op and holds {', '.join(own)}; name its parent")
        left_out = {**self.broken, **(broken or {})}
        ops, unavailable = _join(dict(self), folder, None, left_out)
        return Registry(ops, {**self.unavailable, **unavailable}, (*self.folders, folder), left_out)

    def outside(self) -> dict[str, Any]:
        """What is not built in, as JSON can hold it: another process has the same registry by `registry_of`."""
        broken = {str(file): reason for file, reason in self.broken.items()}
        return {"folders": [str(folder) for folder in self.folders], "broken": broken}


def _import(file: Path, package: str | None) -> ModuleType:
    if package is not None:
        return importlib.import_module(f"{package}.{file.parent.name}.{file.stem}")
    return import_outside(file, VariantError)


def import_outside(file: Path, failure: type[Exception]) -> ModuleType:
    """The module in `file`, which belongs to no package; `failure` names the file where it cannot be imported.

    Its path makes the module's name unique, so that two folders may hold the same file names.
    """
    if (unreadable := why_unreadable(file)) is not None:
        raise failure(f"{file}: {unreadable}")
    name = f"tkernels_outside_{sha256(str(file).encode()).hexdigest()[:12]}_{file.parent.name}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise failure(f"{file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton looks a kernel's module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a file that exits is broken; it must not end us
        sys.modules.pop(name, None)  # it may have done so itself
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
        said = str(error)
        if isinstance(error, SyntaxError) and error.filename == str(file):
            lines, said = [error.lineno], error.msg  # the rest of its text is the place
        where = f"{file}:{lines[-1]}" if lines else str(file)
        raise failure(f"{where}: cannot be imported: {type(error).__name__}: {said}") from error
    return module


def _declared(module: ModuleType, name: str, kind: type[T], file: Path) -> T:
    declared = getattr(module, name, None)
    if not isinstance(declared, kind):
        others = [other for other, value in vars(module).items() if isinstance(value, kind)]
        found = f"; it has {', '.join(others)}" if others else ""
        found = f"; its {name} is {declared!r}" if declared is not None else found
        raise VariantError(f"{file}: must define {name}, a tkernels.{kind.__name__}{found}")
    return declared


def _new_op(file: Path, package: str | None) -> Op:
    if (fault := fault_of_name(file.parent.name)) is not None:
        raise VariantError(f"{file}: the name of an op's folder: {fault}")
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


def _join(
    ops: dict[str, Op], root: Path, package: str | None, broken: Mapping[Path, str]
) -> tuple[dict[str, Op], dict[str, str]]:
    """The ops with those of `root`, and the ops of it that are unavailable."""
    unavailable: dict[str, str] = {}
    for folder in op_folders(root):
        files = (folder.contract,) if folder.contract is not None else () if folder.op in ops else folder.variants
        if files and all(file in broken for file in files):
            unavailable[folder.op] = broken[files[0]]
        else:
            ops[folder.op] = _with_variants(_op_of(folder, ops, package), folder.variants, package, broken)
    for op in ops.values():
        if op.contract.default not in {**op.variants, **op.variants.unavailable}:
            raise VariantError(f"{op.name}: its default variant {op.contract.default!r} does not exist")
    return {name: replace(op, variants=_with_parts(op, ops)) for name, op in ops.items()}, unavailable


def _op_of(folder: OpFolder, ops: Mapping[str, Op], package: str | None) -> Op:
    """The op that a folder defines, or adds variants to."""
    if folder.contract is None:
        if folder.op not in ops:
            raise VariantError(f"{folder.path}: {unknown_name('op', folder.op, ops)}")
        return ops[folder.op]
    if folder.op in ops:
        raise VariantError(f"{folder.contract}: op {folder.op!r} is already defined")
    return _new_op(folder.contract, package)


def _with_variants(op: Op, files: Sequence[Path], package: str | None, broken: Mapping[Path, str]) -> Op:
    """The op with the variants of these files, less those that are broken."""
    variants, unavailable = dict(op.variants), dict(op.variants.unavailable)
    for file in files:
        if file in broken:
            unavailable[file.stem] = broken[file]
            continue
        if file.stem in op.variants:
            raise VariantError(f"{file}: {op.fault_of_name(file.stem)}")
        module = _import(file, package)
        variant = _declared(module, "VARIANT", Variant, file)
        variants[file.stem] = variant.joined(op.contract, file.stem, file, module, call_variant)
    return replace(op, variants=Names(f"{op.name} variant", variants, unavailable))


def _with_parts(op: Op, ops: Mapping[str, Op]) -> Names[Variant]:
    """An op's variants, each fusion that has just joined with the ops that it is made of."""
    variants = {name: v.with_parts(ops) if v.parts and not v.part_ops else v for name, v in op.variants.items()}
    return Names(f"{op.name} variant", variants, op.variants.unavailable)


def registry_of(outside: Mapping[str, Any]) -> Registry:
    """The registry that a `Registry.outside` tells of."""
    broken = {Path(file): reason for file, reason in outside["broken"].items()}
    ops = builtin_ops()
    with silenced():  # what these files print was heard where they were tried
        for folder in outside["folders"]:
            ops = ops.with_variants_from(folder, broken)
    return ops


@cache
def builtin_ops() -> Registry:
    """The ops of this package; `tkernels.OPS`."""
    ops, _ = _join({}, BUILT_IN, "tkernels.ops", {})
    return Registry(ops)
