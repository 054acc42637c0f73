"""The names of the ways to choose a config, in a file that needs neither torch nor this package to be read."""

from typing import Literal

TuningMode = Literal["nearest", "frozen", "search"]
"""How the config of a call is chosen: see `tkernels.tuning.Tuning`."""
