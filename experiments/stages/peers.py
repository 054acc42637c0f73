"""A peer serves the token ids of a workload in timed rounds."""

from dataclasses import replace

from experiments.peers.serving import PeerTask, PeerUnsupportedError, make_peer
from experiments.runs.rows import Row
from experiments.serving.requests import Request
from experiments.serving.rounds import interleaved
from experiments.stages.context import Context, one_line, peer_fields
from experiments.stages.engine import counted
from experiments.stages.served_figures import figures, raw_rounds
from experiments.stages.yardstick import Yardstick
from tsched.requests.tokenizer import load_tokenizer


def run(context: Context) -> None:
    """Records one row, and keeps the rounds' raw moments and the last one's tokens."""
    plan, task, report = context.plan, context.task, context.report
    assert plan.model is not None
    common = context.common(**peer_fields(plan, context.served, task.peer))
    report.say("finding its best settings" if task.peer_settings is None else "loading")
    try:
        where = (plan.model.directory(), _by_ids(context), plan.device, plan.dtype)
        server = make_peer(PeerTask(task.peer, *where, task.peer_settings, plan.architecture_folders))
        repeats = plan.experiment.repeats
        yardstick = Yardstick() if plan.device.type == "cpu" else None
        rounds = interleaved([server], repeats, counted(report.say, 1 + repeats, yardstick))[0]
        if isinstance(rounds, Exception):
            raise rounds
    except PeerUnsupportedError as error:
        context.record(Row(stage="peers", **common, status="unsupported", reason=str(error)))
    except Exception as error:
        context.record(Row(stage="peers", **common, status="failed", reason=one_line(error)))
    else:
        report.keep({"rounds": raw_rounds(rounds), "tokens": rounds[-1].tokens})
        taken = yardstick.median_us if yardstick is not None else None
        settings = dict(server.settings)
        row = Row(stage="peers", **common, status="ok", yardstick_us=taken, peer_settings=settings, **figures(rounds))
        context.record(row)


def _by_ids(context: Context) -> list[Request]:
    """The workload's requests with their prompts as token ids, which every peer is given."""
    requests = context.requests()
    if not any(isinstance(request.prompt, str) for request in requests):
        return requests
    assert context.plan.model is not None
    tokenizer = load_tokenizer(context.plan.model.directory())
    if tokenizer is None:
        raise PeerUnsupportedError("the workload is of texts, and the model has no tokenizer")
    return [replace(request, prompt=list(tokenizer(request.prompt)["input_ids"])) for request in requests]
