"""Schedulers without a model."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tsched.options import EngineOptions
from tsched.resolved_options import ResolvedOptions
from tsched.scheduling.scheduler import Scheduler

SIZES = {one.name for one in fields(ResolvedOptions)} - {"options"}


def build_scheduler(*, eos_token_ids: tuple[int, ...] = (), **given: Any) -> Scheduler:
    """A scheduler of the options and sizes that are `given` by name; other options have their defaults."""
    options = EngineOptions(**{name: value for name, value in given.items() if name not in SIZES})
    sizes = {name: value for name, value in given.items() if name in SIZES}
    return Scheduler(ResolvedOptions(options, **sizes), eos_token_ids)
