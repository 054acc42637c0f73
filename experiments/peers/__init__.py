"""Other engines that serve the same workload, by name. Kernels of other projects: `kernels/<op>/<variant>.py` here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names are read where torch is not loaded yet
    from tkernels import Registry
    from tkernels.variant import Variant

PEERS: Mapping[str, str] = {
    "transformers_one_at_a_time": "experiments.peers.transformers_generate",
    "transformers_batched": "experiments.peers.transformers_generate",
    "without_kv_cache": "experiments.peers.without_kv_cache",
}
"""name -> the module whose `make_peer` makes the peer of a `PeerTask`, see `experiments.peers.serving`."""

KERNELS = Path(__file__).resolve().parent / "kernels"
"""A folder of other projects' variants, <op>/<variant>.py."""

BUILDS: Mapping[str, float] = {"flashinfer": 60.0, "torch_compile": 15.0, "vllm": 30.0, "triton_kernels": 10.0}
"""Of those variants, the ones whose kernels a compiler builds when they are called first, and the seconds that it takes
by reasoning: what builds them before they are timed has them built.
"""


def with_peers(ops: Registry) -> Registry:
    """The registry and other projects' kernels, as variants: unavailable, with the reason, where one is not
    installed.
    """
    return ops.with_variants_from(KERNELS)


def is_peer(variant: Variant) -> bool:
    """Whether another project wrote this variant's kernel."""
    return KERNELS in variant.file.parents


def slack_of(variant: Variant) -> float:
    """What the error rule's allowance is multiplied by: other projects round where they like, as torch may."""
    from tkernels.verification.check import BASELINE_SLACK

    return BASELINE_SLACK if is_peer(variant) else 1.0
