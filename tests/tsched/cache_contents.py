"""Which block each prefix cache keeps for which content, read out of its own structures and checked on the way."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.tsched.page_contents import Values, first_value, values_after
from tsched.scheduling.block_pool import NO_BLOCK
from tsched.scheduling.policies.hash_prefix_cache import DIGEST_SIZE, HashPrefixCache
from tsched.scheduling.policies.radix_prefix_cache import RadixPrefixCache
from tsched.scheduling.policies.windowed_prefix_caches import WindowedHashCache, WindowedRadixCache


def cut_digests(prefix: Any) -> list[bytes]:
    """One after the other."""
    return [prefix[start : start + DIGEST_SIZE] for start in range(0, len(prefix), DIGEST_SIZE)]


def blocks_by_digest(cache: HashPrefixCache) -> dict[bytes, int]:
    """Every block that is kept, once, in a run of those who follow each other."""
    runs = list(cache._run_at.items())
    assert list(cache._run_of.items()) == [(int(run.blocks[0]), run) for _, run in runs]
    found = {}
    for first, run in runs:
        pending = cache._chain(run.digests[-DIGEST_SIZE:], run.pending)  # it stays so: nobody has looked it up
        digests = cut_digests(run.digests + pending)[: run.blocks.size]
        assert digests[0] == first
        assert not found.keys() & set(digests)
        assert (cache._first_of[run.blocks] == run.blocks[0]).all()
        found.update(zip(digests, run.blocks.tolist(), strict=True))
    return found


def blocks_of_digests(cache: WindowedHashCache) -> dict[bytes, int]:
    """Digest -> block, for every block that is kept."""
    found = {digest: block for block, digest in cache._digest_of.items()}
    assert found == cache._block_of
    return found


def contents_of_trees(cache: RadixPrefixCache, block_size: int) -> dict[int, bytes]:
    contents: dict[int, bytes] = {}
    for salt, root in cache._roots.items():
        pending = [(child, first_value(salt)) for child in root.children.values()]
        while pending:
            node, before = pending.pop()
            tokens = np.frombuffer(node.tokens, dtype=np.int64, count=node.blocks.size * block_size)
            values: Values = values_after(before, tokens)
            for block, content in zip(node.blocks.tolist(), values.reshape(-1, block_size), strict=True):
                assert block not in contents
                contents[block] = content.tobytes()
            if node.children:
                pending += [(child, int(values[-1])) for child in node.children.values()]
    return contents


def contents_of_block_trees(cache: WindowedRadixCache) -> dict[int, bytes]:
    contents: dict[int, bytes] = {}
    pending = [(node, first_value(salt)) for salt, root in cache._roots.items() for node in root.children.values()]
    while pending:
        node, before = pending.pop()
        values = values_after(before, np.frombuffer(node.tokens, dtype=np.int64))
        assert node.children or node.block != NO_BLOCK, "a node that leads nowhere"
        if node.block != NO_BLOCK:
            assert node.block not in contents
            contents[node.block] = values.tobytes()
        pending += [(child, int(values[-1])) for child in node.children.values()]
    return contents
