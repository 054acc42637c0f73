"""The routes, as a FastAPI app."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tsched.requests.errors import ArgumentTypeError
from tsched.serving import admin
from tsched.serving.admission import Refused
from tsched.serving.auth import Keys
from tsched.serving.body import read_body
from tsched.serving.docs_page import docs_headers, render_docs
from tsched.serving.engine_client import EngineClient
from tsched.serving.exchange import Exchange, asked_seconds, time_is_over, too_much
from tsched.serving.front_end import FrontEnd
from tsched.serving.gate import Gate
from tsched.serving.limits import ServerLimits
from tsched.serving.local_client import LocalClient
from tsched.serving.protocol import chat, completions
from tsched.serving.protocol.errors import ApiError, ErrorBody, document_errors
from tsched.serving.protocol.json_body import parse_request
from tsched.serving.protocol.models import ModelCard, ModelList
from tsched.serving.protocol.sampling import GenerationRequest, WireModel
from tsched.serving.protocol.tokenization import (
    DetokenizedText,
    DetokenizeRequest,
    TokenizeRequest,
    TokenizerInfo,
    Tokens,
)
from tsched.serving.requests import BYTES_PER_TOKEN, check_ids, check_model, tokenize_request
from tsched.serving.text import TextCodec, no_tokenizer

_STREAM = "text/event-stream"
_ANY = document_errors([401, 431, 500])
_BODY_ERRORS = document_errors([400, 404, 408, 413, 415, 429, 503, 504])


def create_app(
    client: EngineClient,
    limits: ServerLimits | None = None,
    *,
    keys: Keys | None = None,
    chat_template: Path | None = None,
) -> FastAPI:
    """An OpenAI server over an engine, which it starts and closes with itself.

    Args:
        client: The engine.
        limits: Every bound and time-out; None is ServerLimits().
        keys: Who may ask; None lets everybody.
        chat_template: A file that takes the place of the model's own.

    Returns:
        The app; `app.state.front_end` is its state.

    Raises:
        ArgumentTypeError: `limits` are something else.
    """
    if not isinstance(limits, ServerLimits | None):
        raise ArgumentTypeError(f"limits must be a ServerLimits, as ServerLimits(max_in_flight=3); got {limits!r:.100}")
    front = FrontEnd(client, limits or ServerLimits(), keys, chat_template)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        front.begin()
        try:
            yield
        finally:
            await front.stop()

    # A redirect would lead to whatever host the request names.
    app = FastAPI(
        title="tkernels",
        version=version("tkernels"),
        lifespan=lifespan,
        responses=_ANY,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's pages fetch scripts from elsewhere
        redoc_url=None,
    )
    app.state.front_end = front
    app.state.records = set()  # of bodies that routes read themselves, for the OpenAPI document
    _add_errors(app)
    _add_generation(app, front)
    _add_models(app, front)
    _add_tokenization(app, front)
    _add_health(app, front)
    _add_admin(app, front)
    _add_docs(app)
    app.add_middleware(Gate, front=front)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app


def create_api_server(
    model: str | Path, *, limits: ServerLimits | None = None, keys: Keys | None = None, **options: Any
) -> FastAPI:
    """The routes of `tk serve` over one model on the threads of this process, as `uvicorn.run` takes them.

        uvicorn.run(create_api_server("tiny", max_num_seqs=32), port=8000)

    uvicorn has the connections then, and its own bounds for them: `header_timeout`, `keep_alive_timeout` and
    `drain_timeout` do nothing, and `write_timeout` ends a request whose reader does not read, but not a connection
    whose answer was written. `tsched.serving.http.serve` runs the app with all of these. `stall_timeout` is of an
    engine in a process of its own, which only `tk serve` has.

    Args:
        model: As of AsyncLLM.
        limits: Every bound and time-out.
        keys: Who may ask; None lets everybody.
        options: As of AsyncLLM.
    """
    return create_app(LocalClient(model, **options), limits, keys=keys)


def _add_errors(app: FastAPI) -> None:
    def say(error: ApiError, headers: Any = None) -> Response:
        return Response(error.body, error.status, {**error.headers, **(headers or {})}, "application/json")

    @app.exception_handler(ApiError)
    async def say_api_error(_: Request, error: ApiError) -> Response:
        return say(error)

    @app.exception_handler(HTTPException)
    async def say_http_error(request: Request, error: HTTPException) -> Response:
        """Starlette's own: there is no such route, or it has another method."""
        path, allowed = request.url.path[:200], (error.headers or {}).get("Allow", "")
        if error.status_code == 405:
            wrong = ApiError(405, f"{path} has no {request.method}, but {allowed}", "method_not_allowed")
        else:
            wrong = ApiError(error.status_code, f"there is no {path}", "not_found")
        return say(wrong, error.headers)


def _post(
    app: FastAPI, path: str, kind: type[WireModel], answer: Any, example: Any, chunk: type[BaseModel] | None = None
) -> Callable[[Any], Any]:
    """Adds a route that reads its own body, with bounds, and is documented as if FastAPI did.

    Args:
        chunk: Of its streams; None where it has none.
    """
    schema = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}, "example": example}
    extra = {"requestBody": {"required": True, "content": {"application/json": schema}}}
    content = {} if chunk is None else {_STREAM: _describe_events(chunk)}
    app.state.records |= {kind, chunk} - {answer, None}
    responses: dict[int | str, dict[str, Any]] = {200: {"model": answer, "content": content}, **_BODY_ERRORS}
    return app.post(path, response_model=None, responses=responses, openapi_extra=extra)


def _describe_events(chunk: type[BaseModel]) -> dict[str, Any]:
    """A stream of chunks, with an error or [DONE] at its end, as FastAPI writes streams of events."""
    chunks = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in (chunk, ErrorBody)]
    content = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": chunks}}
    data = {"anyOf": [{"const": "[DONE]"}, content]}
    return {"itemSchema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}


def _add_generation(app: FastAPI, front: FrontEnd) -> None:
    def answer(kind: type[GenerationRequest], meaning: str) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            return Exchange(front, kind, request.state.tenant)

        handle.__doc__ = meaning
        handle.__name__ = f"create_{kind.__name__.removesuffix('Request').lower()}"
        return handle

    text, talk = completions.CompletionRequest, chat.ChatRequest
    whole = completions.Completion
    _post(app, "/v1/completions", text, whole, completions.EXAMPLE, whole)(answer(text, "Continues prompts."))
    _post(app, "/v1/chat/completions", talk, chat.ChatCompletion, chat.EXAMPLE, chat.ChatChunk)(
        answer(talk, "Answers a chat.")
    )


def _add_models(app: FastAPI, front: FrontEnd) -> None:
    unready = document_errors([503])

    @app.get("/v1/models", responses=unready)
    async def list_models() -> ModelList:
        """The served model."""
        return ModelList(data=[ModelCard.describe(front.facts())])

    @app.get("/v1/models/{model:path}", responses=unready | document_errors([404]))
    async def show_model(model: str) -> ModelCard:
        """The served model, by its name."""
        check_model(model, front.facts())
        return ModelCard.describe(front.facts())


def _add_tokenization(app: FastAPI, front: FrontEnd) -> None:
    def need_codec(param: str) -> TextCodec:
        front.facts()
        if front.codec is None:
            raise no_tokenizer(param)
        return front.codec

    @_post(app, "/tokenize", TokenizeRequest, Tokens, {"prompt": "def main("})
    async def tokenize(request: Request) -> Response:
        """The tokens of a text, as vLLM has it."""

        def work(body: bytes) -> Response:
            asked = parse_request(TokenizeRequest, body)
            facts, codec = front.facts(), need_codec("prompt" if asked.messages is None else "messages")
            check_model(asked.model, facts)
            asked.check_forms()
            ids = tokenize_request(asked, facts, codec, front.chats)
            names = [codec.token_name(one) for one in ids] if asked.return_token_strs else None
            tokens = Tokens(tokens=ids, token_strs=names, count=len(ids), max_model_len=facts.max_model_len)
            return JSONResponse(tokens.model_dump())

        return await _answer_off_loop(front, request, work)

    @_post(app, "/detokenize", DetokenizeRequest, DetokenizedText, {"tokens": [1, 2]})
    async def detokenize(request: Request) -> Response:
        """The text of tokens, as vLLM has it."""

        def work(body: bytes) -> Response:
            asked = parse_request(DetokenizeRequest, body)
            facts, codec = front.facts(), need_codec("tokens")
            check_model(asked.model, facts)
            check_ids(asked.tokens, facts, "tokens")
            return JSONResponse({"prompt": codec.decode(asked.tokens, skip_special_tokens=False)})

        return await _answer_off_loop(front, request, work)

    @app.get("/tokenizer_info", responses=document_errors([400, 503]))
    async def show_tokenizer() -> TokenizerInfo:
        """What is known of the tokenizer, its chat template included."""
        codec = need_codec("model")
        return codec.describe(None if front.template is None else front.template.source)


def _add_health(app: FastAPI, front: FrontEnd) -> None:
    def say_ready() -> Response:
        readiness = front.readiness()
        status = readiness["status"]
        headers = None if status in ("ready", "failed") else {"retry-after": "1"}  # a failed one stays so
        return JSONResponse(dict(readiness), 200 if status == "ready" else 503, headers)

    state: dict[int | str, dict[str, Any]] = {503: {"description": "No request is taken now; `status` says why"}}

    @app.get("/live", response_model=None)
    async def live() -> Response:
        """Whether the front end answers."""
        return JSONResponse({"status": "live"})

    @app.get("/ready", response_model=None, responses=state)
    async def ready() -> Response:
        """Whether requests are taken."""
        return say_ready()

    @app.get("/health", response_model=None, responses=state)
    async def health() -> Response:
        """The same as /ready: a dead or draining engine is not healthy."""
        return say_ready()

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        """The version of the server."""
        return {"version": version("tkernels")}

    @app.get("/load", responses=document_errors([503]))
    async def show_load() -> dict[str, int]:
        """What is in work, as a load balancer asks."""
        front.facts()
        stats, door = front.client.stats(), front.open_door()
        return {
            "in_flight": door.num_in_flight,
            "waiting_tokens": door.num_waiting_tokens,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
        }


def _add_admin(app: FastAPI, front: FrontEnd) -> None:
    @app.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}})
    async def show_metrics() -> Response:
        """Everything that is counted and measured, for Prometheus."""
        engine = front.metrics.read_engine()
        text = await _off_loop(front, lambda: front.metrics.expose(engine))
        return Response(text, media_type="text/plain; version=0.0.4")

    @_post(app, "/admin/kernels", admin.SwapRequest, admin.SwapAnswer, admin.EXAMPLE)
    async def swap_kernels(request: Request) -> Response:
        """Swaps kernels between two steps; needs an admin's key."""
        body = await read_body(request.scope, request.receive, front.limits)
        asked = await front.process(len(body), parse_request, admin.SwapRequest, body)
        return JSONResponse((await admin.swap_kernels(front.client, asked)).model_dump())


def _add_docs(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    async def show_docs() -> Response:
        return Response(render_docs(app.openapi()), media_type="text/html", headers=docs_headers())


async def _answer_off_loop(front: FrontEnd, request: Request, work: Callable[[bytes], Response]) -> Response:
    """Answers what the tokenizer alone answers: let in as a completion is, with the time of a request."""
    seconds = asked_seconds(request.scope, front.limits.request_timeout)
    body = await read_body(request.scope, request.receive, front.limits)
    num_tokens = min(len(body) // BYTES_PER_TOKEN, front.facts().max_model_len)
    ticket = front.open_door().admit(request.state.tenant.name, 1, num_tokens, 0)
    if isinstance(ticket, Refused):
        raise too_much(ticket)
    try:
        async with asyncio.timeout(seconds):
            return cast(Response, await _off_loop(front, lambda: work(body)))
    except ApiError:
        ticket.refund()
        raise
    except TimeoutError:
        raise time_is_over(seconds) from None
    finally:
        ticket.give_back()


async def _off_loop(front: FrontEnd, work: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(front.pool, work)


def _describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the bodies that the routes read themselves."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        records = sorted(app.state.records, key=lambda kind: str(kind.__name__))
        _, bodies = models_json_schema(
            [(kind, "validation") for kind in records], ref_template="#/components/schemas/{model}"
        )
        document["components"]["schemas"].update(bodies["$defs"])
        _drop_fastapis_errors(document)
        app.openapi_schema = document
    return app.openapi_schema


def _drop_fastapis_errors(document: dict[str, Any]) -> None:
    """Takes out the answers of a validation that no request meets: each route checks what it reads, and answers 400."""
    for methods in document["paths"].values():
        for route in methods.values():
            route["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
