"""`tk ops`: what there is, what runs here, and when each variant should win."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from experiments.commands.choices import find_op, open_registry
from experiments.commands.op_page import describe_op, print_page
from experiments.commands.op_rows import DrawnAxes, describe_apart, describe_broken
from experiments.commands.output import print_json
from experiments.commands.requests import OpsRequest
from experiments.reporting.table_style import make_table
from tkernels.device import device_facts, first_device


def run(request: OpsRequest) -> int:
    """Prints the registry, or the page of one op; always 0.

    Raises:
        ExperimentError: No such op.
    """
    device, ops = first_device(), open_registry(request.variants_from)
    if request.op is not None:
        op = find_op(ops, request.op)
        with one_thread():
            page = describe_op(op, device, request.variants_from)
        page["variants"] += [describe_broken(*one) for one in ops.broken.items() if one[0].parent.name == op.name]
        if request.as_json:
            print_json(page)
        else:
            print_page(Console(), page)
        return 0
    rows = []
    with one_thread():
        for op in ops.values():
            drawn = cache(partial(DrawnAxes, op.contract))
            rows += [describe_apart(variant, device, drawn) for variant in op.variants.values()]
    rows += [describe_broken(file, reason) for file, reason in ops.broken.items()]
    order = [*ops, *ops.unavailable]
    rows.sort(key=lambda row: order.index(row["op"]))
    if request.as_json:
        print_json(rows)
    else:
        _print(Console(), rows, device)
    return 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch alone on a core: on inputs as small as the draws', threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
