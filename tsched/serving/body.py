"""A request's body, read with bounds: counted while it comes, and for so long."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from tsched.serving.limits import ServerLimits
from tsched.serving.protocol.errors import ApiError, invalid_value
from tsched.torch_free import TKernelsError

CLIENT_GONE = 499
"""The status in the log of a request whose client left before its response."""


class ClientGoneError(TKernelsError):
    """The client closed its connection: nobody is left to answer."""


async def read_body(scope: Scope, receive: Receive, limits: ServerLimits) -> bytes:
    """The body of a JSON request.

    Raises:
        ApiError: 415 where it is no JSON or compressed, 413 where it is too large, 408 where it takes too long.
        ClientGoneError: The client left.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "the body must be JSON: send content-type application/json", "unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise ApiError(415, "a compressed body is not taken: send it as it is", "unsupported_content_encoding")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit():
        raise invalid_value("content-length must be a number", None)
    if len(length) > 18 or int(length) > limits.max_body_bytes:
        raise _too_large(limits)
    try:
        async with asyncio.timeout(limits.body_timeout):
            return await _collect(receive, limits)
    except TimeoutError:
        message = f"the body did not come within {limits.body_timeout:g} s"
        raise ApiError(408, message, "body_timeout", kind="timeout_error") from None


async def _collect(receive: Receive, limits: ServerLimits) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        body += message.get("body", b"")
        if len(body) > limits.max_body_bytes:
            raise _too_large(limits)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(limits: ServerLimits) -> ApiError:
    return ApiError(413, f"a body may have {limits.max_body_bytes} bytes", "body_too_large")
