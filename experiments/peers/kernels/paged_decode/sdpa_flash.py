"""torch's SDPA, its flash backend, on keys and values that were gathered before."""

from torch.nn.attention import SDPBackend

from experiments.peers.dense_attention import dense_decode

VARIANT = dense_decode(SDPBackend.FLASH_ATTENTION)
