"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`.

The clients send a request again after 408, 409, 429 and 5xx, so what would fail again has another status.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from tsched.torch_free import TKernelsError

_LONGEST_MESSAGE = 1000  # characters; a refusal is short, however long what it refuses is


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(TKernelsError):
    """A request that is answered with an error.

    Args:
        status: Of the HTTP response.
        message: What was wrong, and what is allowed.
        code: A word for programs.
        param: The request's field.
        kind: OpenAI's `type`.
        retry_after: Seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        retry_after: float | None = None,
    ) -> None:
        short = message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + " …"
        super().__init__(short)
        self.status, self.code, self.param, self.kind, self.retry_after = status, code, param, kind, retry_after

    @property
    def detail(self) -> dict[str, Any]:
        """The body as plain values."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        """The body; what is no Unicode in it is escaped."""
        return json.dumps(self.detail).encode()

    @property
    def headers(self) -> Mapping[str, str]:
        """Those that belong to the status."""
        if self.status == 408:  # the rest of the body is not waited for
            return {"connection": "close"}
        if self.retry_after is None:
            return {}
        # Rounded up: who asks earlier is refused again.
        seconds, millis = math.ceil(self.retry_after), math.ceil(self.retry_after * 1e3)
        return {"retry-after": str(max(1, seconds)), "retry-after-ms": str(millis)}


def invalid_value(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, code, param=param)


def unsupported_parameter(param: str, message: str) -> ApiError:
    return ApiError(400, message, "unsupported_parameter", param=param)


def unavailable(message: str, retry_after: float) -> ApiError:
    """503: no request is taken now."""
    return ApiError(503, message, "unavailable", kind="server_error", retry_after=retry_after)


def engine_failure(message: str) -> ApiError:
    """500: the engine failed while it served the request."""
    return ApiError(500, message, "engine_error", kind="server_error")


def internal_failure() -> ApiError:
    """500: the server itself failed; the log says how, and no answer."""
    return ApiError(500, "the server failed at this request", "internal_error", kind="server_error")


STATUSES: Mapping[int, str] = {
    400: "The request is wrong; `param` names the field",
    401: "The key is missing or unknown",
    404: "There is no such route or model",
    405: "The route has another method",
    408: "The body did not come in time",
    413: "The body is too large",
    415: "The body is no JSON, or is compressed",
    429: "Too much is in work, or the tenant's rate is used up; Retry-After says when to ask again",
    431: "The headers are too large",
    500: "The engine failed",
    503: "The model is being loaded, restarts, or the server stops, and Retry-After says when to ask again; or the "
    "engine has failed for good",
    504: "The request's time is over",
}
"""Status -> what it means."""


def document_errors(statuses: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, as its `responses`."""
    return {status: {"model": ErrorBody, "description": STATUSES[status]} for status in statuses}
