"""A peer serves the token ids of a workload in timed rounds."""

from dataclasses import replace

from experiments.peers.serving import PeerTask, PeerUnsupportedError, make_peer
from experiments.serving.requests import Request
from experiments.stages.context import Context, describe_error
from experiments.stages.served_figures import count_served, raw_rounds, summarize_times, time_rounds
from tsched.requests.tokenizer import load_tokenizer


def run(context: Context) -> None:
    """Records one row, and keeps the rounds' raw moments and the last one's tokens."""
    plan, task = context.plan, context.task
    context.say("finding its best settings" if task.peer_settings is None else "loading")
    try:
        where = (context.directory, _tokenize_prompts(context), plan.device, plan.dtype)
        server = make_peer(PeerTask(task.peer, *where, task.peer_settings, plan.architecture_folders))
        rounds, yardstick_us = time_rounds(context, server)
    except PeerUnsupportedError as error:
        context.record("unsupported", reason=str(error))
    except Exception as error:
        context.record("failed", reason=describe_error(error))
    else:
        context.keep({"rounds": raw_rounds(rounds), "tokens": rounds[-1].tokens})
        figures = count_served(rounds[-1]) | summarize_times(rounds)
        context.record(yardstick_us=yardstick_us, peer_settings=dict(server.settings), **figures)


def _tokenize_prompts(context: Context) -> list[Request]:
    """The workload's requests with their prompts as token ids, which every peer is given."""
    requests = context.requests()
    if not any(isinstance(request.prompt, str) for request in requests):
        return requests
    tokenizer = load_tokenizer(context.directory)
    if tokenizer is None:
        raise PeerUnsupportedError("the workload is of texts, and the model has no tokenizer")
    return [replace(request, prompt=list(tokenizer(request.prompt)["input_ids"])) for request in requests]
