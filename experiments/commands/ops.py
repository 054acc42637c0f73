"""`tk ops`: what there is, what runs here, and when each variant should win."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from experiments.commands.choices import open_registry
from experiments.commands.output import print_json
from experiments.commands.requests import OpsRequest
from experiments.reporting.table_style import make_table
from tkernels.contract import Axes, Contract, Value
from tkernels.device import device_facts, first_device
from tkernels.mode import unavailable_reason
from tkernels.tuning import tuned_devices
from tkernels.variant import Variant
from tkernels.verification.check import chooser

_DRAWS = 32
_MOST_DRAWS = 1000


def run(request: OpsRequest) -> int:
    """Prints the registry; always 0."""
    device, ops = first_device(), open_registry(request.variants_from)
    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on inputs as small as the draws', threads only wait for each other
    try:
        for op in ops.values():
            drawn = cache(partial(DrawnAxes, op.contract))
            rows += [describe(variant, device, drawn) for variant in op.variants.values()]
    finally:
        torch.set_num_threads(threads)
    rows += [_describe_broken(file, reason) for file, reason in ops.broken.items()]
    order = [*ops, *ops.unavailable]
    rows.sort(key=lambda row: order.index(row["op"]))
    if request.as_json:
        print_json(rows)
    else:
        _print(Console(), rows, device)
    return 0


class DrawnAxes(Mapping[str, Value]):
    """The axes of a contract's drawn call, as a variant's `supports` gets them.

    Those that only a call tells, an argument's alignment say, join when one is asked for: they need inputs, which take
    milliseconds.
    """

    def __init__(self, contract: Contract, seed: int) -> None:
        self._contract, self._seed, self._is_bound = contract, seed, False
        self._axes = contract.draw_axes(chooser(seed))

    def __getitem__(self, name: str) -> Value:
        if name not in self._axes and not self._is_bound:
            # Draws are small: real inputs take less than the first product on "meta", which imports torch's compiler.
            case = self._contract.case(self._axes, self._seed, "cpu")
            self._axes |= self._contract.bind_axes(self._contract.bind_arguments((), case.inputs))[0]
            self._is_bound = True
        return self._axes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)


def describe(variant: Variant, device: torch.device, drawn: Callable[[int], Axes]) -> dict[str, Any]:
    """One row of `tk ops --json`; `drawn` gives the axes of the contract's draw of a seed.

    supported: on this device, somewhere in the contract's draws. reason: why not, or where it is not.
    tuned_on: the devices in whose lockfiles it is; none means that its configs are defaults, by reasoning. Null for a
        variant without configs.
    """
    reasons = _ask_support(variant, device, drawn)
    # "not M = 2" and "not M = 17" are one reason.
    refused = {re.sub(r"\d+", "0", reason): reason for reason in reversed(reasons) if reason is not None}
    return {
        "op": variant.contract.name,
        "variant": variant.name,
        "kind": variant.kind,
        "supported": None in reasons,
        "reason": "; ".join(sorted(refused.values())) or None,
        "deterministic": variant.deterministic,
        "batch_invariant": variant.batch_invariant,
        "tuned_on": tuned_devices(variant) if variant.kind == "triton" else None,
        "wins": variant.wins,
        "file": str(variant.file),
    }


def _ask_support(variant: Variant, device: torch.device, drawn: Callable[[int], Axes]) -> list[str | None]:
    """Why the variant does not support a draw, or None where it does, for so many draws."""
    facts = device_facts(device)
    if variant.kind == "triton" and (nowhere := unavailable_reason(device)):
        return [nowhere]
    reasons = [variant.unsupported_reason(drawn(seed), device, facts) for seed in range(_DRAWS)]
    while None not in reasons and len(reasons) < _MOST_DRAWS:  # one kind in many may not be drawn yet
        reasons.append(variant.unsupported_reason(drawn(len(reasons)), device, facts))
    return reasons


def _describe_broken(file: Path, reason: str) -> dict[str, Any]:
    """The row of an outside file that is broken: what is not known of it is null."""
    row: dict[str, Any] = {"op": file.parent.name, "variant": file.stem, "kind": "unavailable", "supported": False}
    row |= {"reason": reason, "deterministic": None, "batch_invariant": None, "tuned_on": None}
    return {**row, "wins": "", "file": str(file)}


_COLUMNS = ("variant", "kind", "here", "det.", "inv.", "when it should win")
_YES_OR_NO = {None: "-", True: "yes", False: "no"}
_CAPTION = (
    "here: whether it runs on this machine. det.: the same bits on every run. inv.: the bits of a row do not depend on "
    "the batch around it. --json adds files and reasons."
)


def _cells(row: Mapping[str, Any]) -> Sequence[str | Text]:
    """The op, as a heading, and a cell for each column."""
    here = Text("no", "yellow")
    if row["supported"]:
        here = Text("partly" if row["reason"] else "yes", "green")
    flags = (_YES_OR_NO[row[key]] for key in ("deterministic", "batch_invariant"))
    return row["op"], row["variant"], row["kind"], here, *flags, row["wins"]


def _print(console: Console, rows: Sequence[Mapping[str, Any]], device: torch.device) -> None:
    where = device_facts(device).name if device.type == "cuda" else "CPU, Triton interpreted"
    kinds = Counter(row["kind"] for row in rows)
    num_ops = len({row["op"] for row in rows if row["kind"] != "unavailable"})
    title = f"{num_ops} ops, {len(rows) - kinds['unavailable']} variants ({where})"
    table = make_table(title, _COLUMNS, map(_cells, rows), headed=True, caption=_CAPTION)
    for column in table.columns[:-1]:
        column.no_wrap = True
    console.print(table)
    if untuned := sum(row["tuned_on"] == [] for row in rows):
        among = f"{untuned} of {kinds['triton']} Triton variants"
        console.print(Text(f"{among} are tuned on no device: their configs are defaults, by reasoning."))
    for row in rows:
        if row["reason"]:
            console.print(Text(f"{row['op']}.{row['variant']}: {row['reason']}"))
