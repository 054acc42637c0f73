"""What every request passes first: its id, the size of its headers, its key, and a line in the log at its end."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tsched.serving.auth import Tenant, check_access
from tsched.serving.body import CLIENT_GONE, ClientGoneError
from tsched.serving.front_end import FrontEnd
from tsched.serving.protocol.errors import ApiError, internal_failure

ACCESS = logging.getLogger("tsched.serving.access")
_SOUND_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Gate:
    """Wraps the routes.

    Args:
        app: The routes.
        front: The server.
    """

    def __init__(self, app: ASGIApp, front: FrontEnd) -> None:
        self._app, self._front = app, front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _SOUND_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        state = scope.setdefault("state", {})
        state["send"] = send_with_id
        state["tenant"] = Tenant()
        try:
            _check_headers(scope, self._front.limits.max_header_bytes)
            authorization = [value for name, value in scope["headers"] if name == b"authorization"]
            path = get_route_path(scope)  # the router's own reading: what it strips is no part of what is guarded
            state["tenant"] = check_access(self._front.keys, path, authorization[0] if authorization else None)
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            await send_error(send_with_id, error)
        except ClientGoneError:
            status = CLIENT_GONE
        except Exception:
            logging.getLogger("tsched.serving").exception("a request failed")
            if not status:
                await send_error(send_with_id, internal_failure())
        finally:
            _log(scope, request_id, status, time.monotonic() - began)


async def send_error(send: Send, error: ApiError) -> None:
    """Answers with an error."""
    headers = {"content-type": "application/json", "content-length": str(len(error.body)), **error.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": error.body})


def _check_headers(scope: Scope, most: int) -> None:
    size = len(scope.get("raw_path", b"")) + len(scope["query_string"])
    if size + sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > most:
        raise ApiError(431, f"the headers of a request may have {most} bytes", "headers_too_large")


def _log(scope: Scope, request_id: bytes, status: int, seconds: float) -> None:
    """One line of JSON: who asked for what and what became of it, and no word of a prompt or an output."""
    if not ACCESS.isEnabledFor(logging.INFO):
        return
    state = scope["state"]
    line = {
        "time": round(time.time(), 3),
        "id": request_id.decode(),
        "tenant": state["tenant"].name,
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(seconds, 4),
    }
    if (outcome := state.get("outcome")) is not None:
        line |= {
            "status": outcome.status,
            "error": outcome.error,
            "prompt_tokens": outcome.num_prompt_tokens,
            "completion_tokens": outcome.num_completion_tokens,
            "finish_reasons": outcome.finish_reasons,
        }
    ACCESS.info(json.dumps(line))
