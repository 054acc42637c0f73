"""Outside variant files are imported in a process of their own first: one that hangs, exits or is broken harms itself
alone, and the others of its folder join the ops.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tkernels.contract import ContractError
from tkernels.declaration import Fault, find_faults
from tkernels.folders import op_folders
from tkernels.footprint import code_shared, find_changes, settings_shared
from tkernels.isolation import Ending, Prepare, Server, ServerError, Tell, Work, free_memory
from tkernels.mode import MODE
from tkernels.recorded_faults import recorded_faults
from tkernels.registry import builtin_ops
from tkernels.side_by_side import run_side_by_side
from tkernels.trial_launch import find_launch_faults
from tkernels.variant import VariantError

FailureTypes = type[Exception] | tuple[type[Exception], ...]

Enter = Callable[[str], None]
"""Takes what a file's code is about to be run for, as what could be said of it where that never ends."""

_SHOWN = 4
"""Of what a file changes."""

IMPORT_SECONDS = 60.0
"""For one task, which may import a large library; those that hang wait together."""


@dataclass
class _Told:
    """What is known of the files of one task. doing: what could be said of them where the process ended now."""

    name: str
    doing: str = "cannot be imported"
    faults: list[str] = field(default_factory=list)
    ending: Ending | None = None

    def fault(self, otherwise: str) -> str | None:
        """Why they cannot be imported, None where they can; `otherwise` where they did not come to their turn."""
        if self.faults:
            return self.faults[0]
        death = self.ending.death if self.ending is not None else otherwise
        if death is not None:
            return f"{self.name}: {self.doing}: {death}"
        goes_on = self.ending is not None and self.ending.left
        return f"{self.name}: cannot be imported: {_GOES_ON}" if goes_on else None


_GOES_ON = "it starts processes that go on after the import or a trial call"


@contextmanager
def importing(prepare: str) -> Iterator[Callable[[Mapping[str, Any]], dict[str, str]]]:
    """Gives a function that has files imported, those of each task in a process of their own.

    Args:
        prepare: As for `Server.load`; it returns what `side_by_side` makes.

    Yields:
        Maps tasks, by what their files are called, to why these cannot be imported; the others are not in its answer.
    """

    def import_faults(tasks: Mapping[str, Any]) -> dict[str, str]:
        told = [_Told(name) for name in tasks]

        def hear(message: tuple[int, str, Any]) -> None:
            number, kind, value = message
            if kind == "entered":
                told[number].doing = value
            elif kind == "fault":
                told[number].faults.append(value)
            else:
                told[number].ending = Ending(**value)

        try:
            otherwise = server.run({"tasks": [*tasks.values()], "seconds": IMPORT_SECONDS}, hear).death
        except ServerError as error:
            otherwise = str(error)
        faults = {one.name: one.fault(f"the process that tries files {otherwise}") for one in told}
        return {name: fault for name, fault in faults.items() if fault is not None}

    with Server({"TRITON_INTERPRET": "1" if MODE == "interpret" else "0"}) as server:
        server.load(prepare)
        yield import_faults


def side_by_side(prepare: Prepare) -> Prepare:
    """In a server: does the tasks of `importing`, each of which `prepare` makes the work of."""

    def prepare_all(asked: Mapping[str, Any]) -> Work:
        works = [prepare(task) for task in asked["tasks"]]

        def work(tell: Tell) -> None:
            def hear(number: int, message: tuple[str, str]) -> None:
                tell([number, *message])

            endings = run_side_by_side(works, hear, asked["seconds"], free_memory() / 2)
            for number, ending in enumerate(endings):
                tell([number, "ended", asdict(ending)])

        return work

    return prepare_all


def work_of_import(
    name: str, imports: Callable[[Enter], Any], failure: FailureTypes, shared: Mapping[str, Any]
) -> Work:
    """A task's work: it imports files, and tells of a failure, of threads that would outlive the import and of what it
    changes for all.

    Args:
        name: What the files are called.
        imports: Imports them; what more it does with them it enters first.
        failure: What this raises where they are broken, with a message that names the file.
        shared: What `code_shared` gives before the import.
    """

    def work(tell: Tell) -> None:
        own, fault, settings = os.getpid(), "", settings_shared()

        def stop_copy() -> None:
            if os.getpid() != own:  # made by a file's os.fork: it waits for its end, so that it is counted
                signal.pause()

        def enter(doing: str) -> None:
            stop_copy()
            tell(("entered", doing))

        try:
            imports(enter)
        except failure as error:
            fault = str(error)
        stop_copy()
        if fault:
            tell(("fault", fault))
        elif changed := find_changes(shared, settings):
            more = f" and {len(changed) - _SHOWN:,} more" if changed[_SHOWN:] else ""
            tell(("fault", f"{name}: it changes what all variants share: {', '.join(changed[:_SHOWN])}{more}"))
        if waiting := [
            one.name for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon
        ]:
            waits = f"it starts threads that a process waits for: {', '.join(waiting)}"
            tell(("fault", f"{name}: cannot be imported: {waits}"))

    return work


def broken_files(folders: Sequence[Path]) -> dict[Path, str]:
    """The files of outside folders that cannot join the ops, each with its reason.

    Args:
        folders: As for `Registry.with_variants_from`, which then leaves these files out.
    """
    files = {file: folder for folder in folders if folder.is_dir() for file in variant_files(folder)}
    broken: dict[Path, str] = {}
    if not files:
        return broken
    contracts = [file for file in files if file.name == "contract.py"]
    with importing("tkernels.outside:prepare_imports") as import_faults:
        for group in (contracts, [file for file in files if file not in contracts]):
            of_contracts = {file: broken.get(file.with_name("contract.py")) for file in group}
            broken |= {file: fault for file, fault in of_contracts.items() if fault is not None}
            tasks = {str(file): [str(files[file]), str(file)] for file in group if file not in broken}
            broken |= {Path(file): fault for file, fault in import_faults(tasks).items()}
    return {file: broken[file] for file in files if file in broken}


def variant_files(folder: Path) -> list[Path]:
    """The contracts and variants of an outside folder, each contract before its variants."""
    found = op_folders(folder.resolve())
    return [file for one in found for file in (one.contract, *one.variants) if file is not None]


def prepare_imports(about: None) -> Prepare:
    """In a server: each task is a folder and one file of it, which joins the ops without the other variants."""
    shared = code_shared()

    def prepare(task: Sequence[str]) -> Work:
        folder, file = map(Path, task)
        needed = (file, file.with_name("contract.py"))
        others = dict.fromkeys((one for one in variant_files(folder) if one not in needed), "not asked for")

        return work_of_import(
            str(file), lambda enter: _join(folder, file, others, enter), (VariantError, ContractError), shared
        )

    return side_by_side(prepare)


_TRIAL = "a trial call of its supports, prepare, workspace and launch does not come to its end"


def _join(folder: Path, file: Path, others: Mapping[Path, str], enter: Enter) -> None:
    """Joins a file's variant to the ops, without `others`.

    Raises:
        VariantError: It breaks rules of its declaration, or of how it launches its kernels: all of them, by line.
    """
    with recorded_faults(file) as faults:
        try:
            ops = builtin_ops().with_variants_from(folder, others)
        except (VariantError, ContractError) as error:
            variant = error.declared if isinstance(error, VariantError) else None
            if variant is None:
                raise VariantError("\n".join([*_say(faults, file), str(error)])) from None
        else:
            variant = ops[file.parent.name].variants[file.stem] if file.name != "contract.py" else None
    if variant is not None:
        enter(_TRIAL)
        faults += [*find_faults(variant), *find_launch_faults(variant)]
    if faults:
        raise VariantError("\n".join(_say(faults, file)))


def _say(faults: Sequence[Fault], file: Path) -> list[str]:
    return [fault.at(file) for fault in sorted(dict.fromkeys(faults), key=lambda fault: fault.line or 0)]
