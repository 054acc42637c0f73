"""Which requests a server that is not ours can be given so that its time means the same."""

from collections.abc import Sequence

from experiments.peers import PeerUnsupportedError
from experiments.serving.requests import Request


def check_comparable(requests: Sequence[Request]) -> None:
    """PeerUnsupportedError where a token would not depend on the tokens before it alone, or a request comes late."""
    for request in requests:
        params = request.params
        if not (params.is_greedy and params.ignore_eos) or params.has_penalties or params.stop or params.stop_token_ids:
            raise PeerUnsupportedError("only greedy requests that run to their exact length (ignore_eos) are compared")
        if request.after:
            raise PeerUnsupportedError("only requests that come at once are compared")
