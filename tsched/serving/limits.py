"""Every bound and time-out of the server, in one record."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What the server takes, and how long it waits. None is no bound, except where it says otherwise.

    Attributes:
        max_header_bytes: Of a request's headers; more are refused with 431.
        max_body_bytes: Of a request's body; more are refused with 413.
        header_timeout: Seconds for a request's headers to come; the connection is closed after them.
        body_timeout: Seconds for its body to come; 408 after them.
        keep_alive_timeout: Seconds that a connection may stay idle.
        write_timeout: Seconds that a reader may leave a full connection unread; its request is aborted after them.
        queue_timeout: Seconds to the first token; 504 after them.
        request_timeout: Seconds in all; 504 after them, or an error frame in a stream. A request may ask for less.
        drain_timeout: Seconds that running requests have to end after the first SIGTERM.
        max_in_flight: Completions in work or waiting; 429 above. None is four times max_num_seqs.
        max_waiting_tokens: Prompt tokens that wait for their first output token, bytes / 4 until they are counted; 429
            above. None is twice what the KV cache holds.
        requests_per_minute: Of each key; 429 above.
        tokens_per_minute: Of each key, prompts and asked outputs; 429 above.
        tokenizer_threads: Threads that turn text into tokens.
    """

    max_header_bytes: int = 32 << 10
    max_body_bytes: int = 4 << 20
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    keep_alive_timeout: float = 60.0
    write_timeout: float = 30.0
    queue_timeout: float = 60.0
    request_timeout: float = 600.0
    drain_timeout: float = 30.0
    max_in_flight: int | None = None
    max_waiting_tokens: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokenizer_threads: int = 2

    def __post_init__(self) -> None:
        for one in fields(self):
            value, is_count = getattr(self, one.name), "int" in str(one.type)
            if value is None and "None" in str(one.type):
                continue
            if isinstance(value, bool) or not isinstance(value, int if is_count else (int, float)):
                raise ValueError(f"{one.name} must be {'an integer' if is_count else 'a number'}, got {value!r}")
            if not 0 < value < math.inf:
                raise ValueError(f"{one.name} must be above 0 and finite, got {value!r}")
