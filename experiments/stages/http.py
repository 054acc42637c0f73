"""An OpenAI server that runs elsewhere serves a workload in timed rounds."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, cast

from experiments.schema import HttpWorkload
from experiments.stages.context import Context, describe_error
from experiments.stages.served_figures import count_served, raw_rounds, summarize_times, time_rounds

if TYPE_CHECKING:
    from experiments.stages.http_server import HttpServed


def run(context: Context) -> None:
    """Records one row, and keeps the rounds' raw moments."""
    workload = context.served.workload
    assert isinstance(workload, HttpWorkload)
    from experiments.stages.http_server import (
        HttpServer,  # of an extra, which a document of this kind is refused without
    )

    context.say(f"asking {workload.url}")
    try:
        with HttpServer(workload) as server:
            served, yardstick_us = time_rounds(context, server)
    except Exception as error:
        context.record("failed", reason=describe_error(error))
        return
    rounds = [cast("HttpServed", one) for one in served]
    context.keep({"rounds": raw_rounds(rounds)})
    if all(tokens is None for tokens in rounds[-1].tokens):
        context.record("failed", reason=f"every request failed: {rounds[-1].error}")
        return
    rates = [one.goodput for one in rounds if one.goodput is not None]
    good = [one.num_good for one in rounds if one.num_good is not None]
    context.record(
        yardstick_us=yardstick_us,
        served_model=server.served_model,
        goodput=statistics.median(rates) if rates else None,
        slo_met=sum(good) / sum(len(one.tokens) for one in rounds) if good else None,
        **count_served(rounds[-1]),
        **summarize_times(rounds),
    )
