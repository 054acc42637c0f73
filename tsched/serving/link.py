"""The link between the front end and a worker: messages over a socket pair, each with its length ahead of it.

They are msgpack's, which holds what JSON does and takes a third of its time, of numbers a twentieth.

Loads no torch, so that the front end stays small. A message is a dict with its `kind`. The front end sends `load`,
`submit`, `abort` and `swap`; a worker answers with `ready` or `load_failed`, then with `news`, `swapped`,
`swap_refused` and `failed`. All news of one step of the engine are one message.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from typing import Any

import msgpack

from tsched.serving.engine_client import Delta, RequestTimes, SampleDelta, TokenScores
from tsched.torch_free import TKernelsError

MAX_FRAME_BYTES = 2**26
"""Of one message: prompts of a million tokens fit, and what a broken peer makes us allocate is bounded."""

_LENGTH = struct.Struct("!I")
_SURROGATES = "surrogatepass"  # texts may hold lone ones

Message = dict[str, Any]


class LinkError(TKernelsError, RuntimeError):
    """A message that is too long, or bytes that are none."""


def encode_message(message: Message) -> bytes:
    """The frame of a message.

    Raises:
        LinkError: It is longer than MAX_FRAME_BYTES, or holds an integer of more than 64 bits or too deep a nesting.
        TypeError: It holds what JSON does not.
    """
    try:
        body: bytes = msgpack.packb(message, unicode_errors=_SURROGATES)
    except (OverflowError, ValueError) as error:
        raise LinkError(f"a {message.get('kind')!r} message cannot be sent: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise LinkError(f"a {message.get('kind')!r} message has {len(body)} bytes; at most {MAX_FRAME_BYTES} are sent")
    return _LENGTH.pack(len(body)) + body


class LinkWriter:
    """The sending end of a link, for any thread: frames leave in the order of the calls, and no call waits.

    What the socket does not take at once is kept, and the event loop sends it later. So a frame of the engine's thread
    wakes no other thread of the process.

    Args:
        link: Does not block; this has a descriptor of its own for it.
        loop: Sends what is left.
    """

    def __init__(self, link: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._socket = link.dup()
        self._socket.setblocking(False)
        self._loop = loop
        self._lock = threading.Lock()
        self._left = bytearray()  # under the lock: bytes that the socket did not take

    def write(self, frame: bytes) -> None:
        """Sends a frame; nothing happens where the peer has closed the link."""
        with self._lock:
            if self._left:  # the loop is at it
                self._left += frame
                return
            num_sent = self._try_send(frame)
            if num_sent < len(frame):
                self._left += frame[num_sent:]
                self._loop.call_soon_threadsafe(self._loop.add_writer, self._socket.fileno(), self._send_left)

    async def flush(self) -> None:
        """Waits until the socket has taken all that was written."""
        while self._left:
            await asyncio.sleep(0.002)

    def _send_left(self) -> None:
        with self._lock:
            del self._left[: self._try_send(self._left)]
            if not self._left:
                self._loop.remove_writer(self._socket.fileno())

    def _try_send(self, data: bytes | bytearray) -> int:
        """Sends what the socket takes now and returns how much; all of it is lost where nobody reads any more."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # who reads the link hears of its end
            return len(data)


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None where the peer has closed the link between two.

    Raises:
        LinkError: The bytes are no message, or stop in the middle of one.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise LinkError(f"a message of {length} bytes is announced; at most {MAX_FRAME_BYTES} are read")
        body = await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if not error.partial and error.expected == _LENGTH.size:
            return None
        raise LinkError("the link ends in the middle of a message") from error
    except ConnectionError:  # it died with something of ours unread
        return None
    try:
        message = msgpack.unpackb(body, unicode_errors=_SURROGATES, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise LinkError(f"a message is not msgpack's: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise LinkError("a message is no object with a kind")
    return message


def delta_of(written: list[Any]) -> Delta:
    """The Delta that a message has as lists."""
    samples, is_last, error, num_cached, prompt_logprobs, times, *others = written
    return Delta(
        [SampleDelta(s, ids, text, scores_of(scores), *ends) for s, ids, text, scores, *ends in samples],
        is_last,
        error,
        num_cached,
        None if prompt_logprobs is None else [None if one is None else TokenScores(*one) for one in prompt_logprobs],
        None if times is None else RequestTimes(*times),
        *others,
    )


def scores_of(written: list[Any] | None) -> list[TokenScores] | None:
    """The log-probabilities that a message has as lists."""
    return None if written is None else [TokenScores(*one) for one in written]


def join_deltas(one: Delta, other: Delta) -> Delta:
    """What two deltas of a request say, the `other` after `one`."""
    samples = {sample.sample: sample for sample in one.samples}
    for new in other.samples:
        old = samples.get(new.sample)
        samples[new.sample] = new if old is None else _join_samples(old, new)
    return Delta(
        list(samples.values()),
        other.is_last,
        other.error if one.error is None else one.error,
        other.num_cached_tokens if one.num_cached_tokens is None else one.num_cached_tokens,
        other.prompt_logprobs if one.prompt_logprobs is None else one.prompt_logprobs,
        other.times,
        other.at_fault if one.error is None else one.at_fault,
        one.starts_over,
    )


def _join_samples(old: SampleDelta, new: SampleDelta) -> SampleDelta:
    scores = None if old.logprobs is None and new.logprobs is None else [*(old.logprobs or ()), *(new.logprobs or ())]
    return new._replace(token_ids=old.token_ids + new.token_ids, text=old.text + new.text, logprobs=scores)
