"""Other engines that serve the same workload, by name. Kernels of other projects live in `<op>/<variant>.py` here."""

from collections.abc import Mapping

PEERS: Mapping[str, str] = {
    "transformers_one_at_a_time": "experiments.peers.transformers_generate",
    "transformers_batched": "experiments.peers.transformers_generate",
}
"""name -> the module whose `make_peer(name, directory, requests, device, dtype)` gives a server with `settings`."""


class PeerUnsupportedError(ValueError):
    """A peer cannot serve this workload in a way that compares."""
