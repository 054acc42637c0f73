"""What steps need of the processor alone, in pieces that many processes can make at once, before the device is used."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import triton

from experiments.gpu_report.estimates import COMPILE_S
from experiments.peers import BUILDS
from tkernels.contract import Axes
from tkernels.tuning import launchable
from tkernels.variant import Variant


@dataclass(frozen=True)
class Piece:
    """One of them, as it goes from process to process as JSON.

    what: a variant compiled at a point with a config; compiled at its compile signature of that number; or called once
        at a point, which has a peer build its kernels.
    seconds: of one core, by estimate.
    """

    what: Literal["config", "signature", "peer"]
    seconds: float
    op: str
    variant: str
    source: str
    axes: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, int] = field(default_factory=dict)
    number: int = 0

    @cached_property
    def key(self) -> str:
        """The same for the same work under the same Triton."""
        about = {**vars(self), "seconds": None, "triton": triton.__version__}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def title(self) -> str:
        return f"{self.op}.{self.variant}, {self.what}"


def config_pieces(variant: Variant, axes: Axes, arch: str) -> tuple[Piece, ...]:
    """Every candidate of a variant's tuning that the architecture can meet, at a point, the default first."""
    about = _about(variant)
    return tuple(
        Piece("config", COMPILE_S, *about, axes=dict(axes), config=config.as_dict())
        for config in launchable(variant, arch)
    )


def signature_pieces(variant: Variant, count: int) -> tuple[Piece, ...]:
    """The first compile signatures that its drawn cases have."""
    about = _about(variant)
    return tuple(Piece("signature", COMPILE_S, *about, number=number) for number in range(count))


def peer_pieces(variant: Variant, axes: Axes) -> tuple[Piece, ...]:
    """What a peer builds when it is called first; nothing where it is built already."""
    if variant.name not in BUILDS:
        return ()
    return (Piece("peer", BUILDS[variant.name], *_about(variant), axes=dict(axes)),)


def _about(variant: Variant) -> tuple[str, str, str]:
    return variant.contract.name, variant.name, variant.source if variant.kernels else ""


def wall_seconds(pieces: Sequence[Piece], processes: int) -> float:
    """What making the pieces takes so many processes: the longest piece, or their shares of the whole."""
    return max(sum(piece.seconds for piece in pieces) / processes, *(piece.seconds for piece in pieces))
