"""Tuning runs every config many times: each must be right alone, and the call's own tensors must survive the search.

A launch that works in place, run three times on the caller's tensors, leaves there what three calls would; a config
whose writes stay in the output masks the next one's mistake. A config that is too large for the device is to be
recorded with its reason and passed over.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from triton.runtime.errors import OutOfResources

from tkernels.config import Config
from tkernels.contract import Axes, Case, unpack
from tkernels.device import INTERPRETER, DeviceFacts
from tkernels.inputs import clone_inputs
from tkernels.launch import Kernel
from tkernels.lockfile import lockfile, read_lockfile
from tkernels.tuning import Tuning, candidates
from tkernels.variant import Variant
from tkernels.verification.addresses import default_door
from tkernels.verification.calls import call, first_difference, wanted_outputs
from tkernels.verification.check import check_case
from tkernels.verification.sanitizers.base import Sanitizer, without_launches

RUNS = 3
"""Launches of each config while it is measured; a launch that undoes itself would pass with two."""

SEARCHES = 3
"""How many of a variant's configs are searched for too: what a search leaves behind does not depend on the config."""

_DEVICE = replace(INTERPRETER, name="a device to tune for")  # the interpreter itself always takes the defaults


@dataclass(frozen=True)
class _TuningForDevice(Tuning):
    def resolve(
        self,
        variant: Variant,
        axes: Axes,
        device: DeviceFacts,
        launch: Callable[[Config], Callable[[], None]] | None = None,
    ) -> Config:
        return super().resolve(variant, axes, _DEVICE, launch)


def _run(variant: Variant, case: Case, config: Config | None) -> str | None:
    assert config is not None
    alone = check_case(variant, case, config)
    if alone.status != "ok":
        return f"alone, the config is {alone.status}: {alone.reason or 'beyond the error rule'}"
    configs = candidates(variant, INTERPRETER.arch)
    if config not in configs[:SEARCHES]:
        return None
    others = [other for other in configs if other != config]
    with TemporaryDirectory() as folder:
        # Its lockfile lies beside its file, so the copy's lies here.
        searched = replace(variant, file=Path(folder) / variant.file.name, configs=(*others[:1], config))
        return _search(searched, case, too_large=bool(others))


def _search(variant: Variant, case: Case, too_large: bool) -> str | None:
    """Calls the public entry with a searching tuning whose first config does not fit, where there are two."""
    launches_seen = 0

    def measure(launch: Callable[[], None]) -> float:
        nonlocal launches_seen
        launches_seen += 1
        if launches_seen == 1 and too_large:
            raise OutOfResources(1 << 20, 1 << 16, "shared memory")
        for _ in range(RUNS):
            launch()
        return 1.0

    got = _call_searching(variant, case, _TuningForDevice("search", variant.file.parent, measure))
    (entry,) = read_lockfile(lockfile(variant, _DEVICE, variant.file.parent)).values()
    skipped = [why for _, us, why in entry.timings if us is None]
    if too_large and not any("shared memory" in why for why in skipped):
        return f"a config that is too large for the device was not recorded with its reason: {entry.timings}"
    expected = call(variant, clone_inputs(case.inputs), entry.config)
    # What the op leaves untouched is NaN in `expected`, and whatever was there in what the entry allocated.
    got = {name: torch.where(expected[name].float().isnan(), expected[name], tensor) for name, tensor in got.items()}
    if variant.deterministic and (why := first_difference(expected, got)):
        return f"a call that tuned itself first returns other bits, so its tensors were tuned on: {why}"
    return None


def _call_searching(variant: Variant, case: Case, tuning: Tuning) -> dict[str, torch.Tensor]:
    """Each result of a call by name, through the public entry."""
    mine = case.contract.bind_arguments((), clone_inputs(case.inputs))
    results = unpack(Kernel(variant, tuning, {}, default_door())(**mine))
    named = dict(zip(wanted_outputs(case.contract, mine), results, strict=True))
    return named | {name: mine[name] for name in case.contract.writes}


SANITIZER = Sanitizer(
    "tuning",
    "a config that is wrong alone; tensors that a search leaves changed; a config too large that ends it",
    _run,
    unfit=without_launches,
    draws=1,
    each_config=True,
)
