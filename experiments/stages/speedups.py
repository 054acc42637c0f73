"""The first arm that was timed over each peer, replicate by replicate."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.runs.rows import Row
from experiments.runs.table import spread
from experiments.stages.served_figures import equal_requests

Tokens = Sequence[Sequence[int] | None]


def compare(pairs: Sequence[tuple[Row, Row]], mine: Tokens, theirs: Tokens, common: Mapping[str, Any]) -> Row:
    """pairs: the rows of arm and peer in each replicate in which both were timed. mine, theirs: the requests' tokens in
    one of them. common: the fields that the row shares with every row, arm and settings among them.
    """
    if not pairs:
        reason = "there is no replicate in which both the arm and the peer were timed"
        return Row(stage="speedup", **common, status="failed", reason=reason)
    # A row that is timed has its rate: the row's own validator says so.
    speedups = [float(arm.tokens_per_s or 0) / float(peer.tokens_per_s or 1) for arm, peer in pairs]
    equal = equal_requests([_tuple(one) for one in mine], [_tuple(one) for one in theirs])
    return Row(
        stage="speedup",
        **common,
        status="ok",
        peer_settings=pairs[0][1].peer_settings,
        requests=len(mine),
        speedup=statistics.median(speedups),
        speedup_iqr=spread(speedups),
        speedups=speedups,
        speedup_of="median of replicates" if len(speedups) > 1 else "one replicate",
        tokens_equal=equal == len(mine),
        requests_equal=equal,
    )


def _tuple(tokens: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if tokens is None else tuple(tokens)
