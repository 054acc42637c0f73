"""What the registry's lists say of a variant: what it is, and at what it was asked whether it supports."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.commands.trials import runs_apart
from tkernels.contract import Axes, Contract, Value
from tkernels.device import device_facts
from tkernels.isolation import run_forked
from tkernels.lockfile import tuned_devices
from tkernels.mode import unavailable_reason
from tkernels.variant import Variant
from tkernels.verification.draws import chooser

_DRAWS = 32
_MOST_DRAWS = 1000
_SECONDS = 60.0
"""That an outside variant may take to say what it supports."""


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


def describe_apart(variant: Variant, device: torch.device, drawn: Callable[[int], Axes]) -> dict[str, Any]:
    """The same; of a variant from outside, whose functions are asked, by a child of this process where that may be."""
    if not runs_apart(variant):
        return describe(variant, device, drawn)
    rows: list[dict[str, Any]] = []
    ending = run_forked(lambda tell: tell(describe(variant, device, drawn)), rows.append, _SECONDS)
    reason = f"{variant.file}: cannot be asked what it supports: {ending.death}"
    return rows[0] if rows else describe_broken(variant.file, reason)


def describe_broken(file: Path, reason: str) -> dict[str, Any]:
    """The row of an outside file that is broken: what is not known of it is null."""
    row: dict[str, Any] = {"op": file.parent.name, "variant": file.stem, "kind": "unavailable", "supported": False}
    row |= {"reason": reason, "deterministic": None, "batch_invariant": None, "tuned_on": None}
    return {**row, "wins": "", "file": str(file)}


def count_refused(variant: Variant) -> int:
    """How many of the contract's first draws a variant refuses, whatever the device."""
    facts = device_facts(torch.device("cpu"))
    return sum(variant.refusal(DrawnAxes(variant.contract, seed), facts) is not None for seed in range(_DRAWS))


def _ask_support(variant: Variant, device: torch.device, drawn: Callable[[int], Axes]) -> list[str | None]:
    """Why the variant does not support a draw, or None where it does, for so many draws."""
    facts = device_facts(device)
    if variant.kind == "triton" and (nowhere := unavailable_reason(device)):
        return [nowhere]
    reasons = [variant.unsupported_reason(drawn(seed), device, facts) for seed in range(_DRAWS)]
    while None not in reasons and len(reasons) < _MOST_DRAWS:  # one kind in many may not be drawn yet
        reasons.append(variant.unsupported_reason(drawn(len(reasons)), device, facts))
    return reasons
