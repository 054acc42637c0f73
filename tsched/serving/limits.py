"""Every bound and time-out of the server, in one record: type, default, range, unit and meaning.

`tk serve` has a flag for each, an experiment's section `serving` a key, and docs/serving.md a row. A new one is one
more field here, and where it acts. None is a value where it is the default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from tsched.options import COUNT_END, Option, describe_options


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What the server takes, and how long it waits.

    Raises:
        OptionError: A value has another type or is outside its range. The message names the limit, what is allowed and
            what was given.
    """

    max_header_bytes: Annotated[
        int,
        Option(
            "most bytes of a request's headers, above which it is refused with 431", unit="bytes", ge=256, lt=COUNT_END
        ),
    ] = 32 << 10
    max_body_bytes: Annotated[
        int,
        Option("most bytes of a request's body, above which it is refused with 413", unit="bytes", ge=1, lt=COUNT_END),
    ] = 4 << 20
    header_timeout: Annotated[
        float,
        Option("seconds for a request's headers to come, after which the connection is closed", unit="seconds", gt=0),
    ] = 10.0
    body_timeout: Annotated[
        float, Option("seconds for a request's body to come, 408 after them", unit="seconds", gt=0)
    ] = 30.0
    keep_alive_timeout: Annotated[float, Option("seconds that a connection may stay idle", unit="seconds", gt=0)] = 60.0
    write_timeout: Annotated[
        float,
        Option(
            "seconds that a reader may leave a full connection unread before its request is aborted",
            unit="seconds",
            gt=0,
        ),
    ] = 30.0
    max_unread_bytes: Annotated[
        int,
        Option(
            "most bytes of output that wait for a reader who leaves a full connection unread, who is aborted above",
            unit="bytes",
            ge=1,
            lt=COUNT_END,
        ),
    ] = 256 << 10
    queue_timeout: Annotated[
        float, Option("seconds to a request's first token, 504 after them", unit="seconds", gt=0)
    ] = 60.0
    request_timeout: Annotated[
        float,
        Option(
            "seconds of a request in all, 504 after them; the header x-request-timeout asks for less",
            unit="seconds",
            gt=0,
        ),
    ] = 600.0
    ping_interval: Annotated[
        float, Option("seconds of silence in a stream before a comment says that it goes on", unit="seconds", gt=0)
    ] = 15.0
    drain_timeout: Annotated[
        float, Option("seconds that running requests have to end after the first SIGTERM", unit="seconds", gt=0)
    ] = 30.0
    stall_timeout: Annotated[
        float,
        Option(
            "seconds that a worker with unfinished requests or kernels to swap may take no step before it is killed",
            unit="seconds",
            gt=0,
        ),
    ] = 120.0
    max_in_flight: Annotated[
        int | None,
        Option("most completions in work or waiting, 429 above", none="four times max_num_seqs", ge=1, lt=COUNT_END),
    ] = None
    max_waiting_tokens: Annotated[
        int | None,
        Option(
            "most prompt tokens that wait for their first output token, 429 above",
            none="twice what the KV cache holds",
            unit="tokens",
            ge=1,
            lt=COUNT_END,
        ),
    ] = None
    requests_per_minute: Annotated[
        int | None, Option("most requests of each tenant in a minute, 429 above", none="no bound", ge=1, lt=COUNT_END)
    ] = None
    tokens_per_minute: Annotated[
        int | None,
        Option(
            "most tokens of each tenant in a minute, prompts and asked outputs, 429 above",
            none="no bound",
            unit="tokens",
            ge=1,
            lt=COUNT_END,
        ),
    ] = None
    tokenizer_threads: Annotated[int, Option("threads that turn text into tokens", ge=1, le=256)] = 2

    def __post_init__(self) -> None:
        for one in LIMITS.values():
            object.__setattr__(self, one.name, one.check_value(getattr(self, one.name)))


LIMITS: Mapping[str, Option] = describe_options(ServerLimits)
"""Every limit by name, in the record's order."""
