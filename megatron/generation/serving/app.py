"""Defines the HTTP endpoints of the server, as a Starlette (ASGI) application."""

import asyncio
import logging
import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from megatron.generation.serving.auth import AccessControl
from megatron.generation.serving.errors import APIError
from megatron.generation.serving.request_parsing import ParsedRequest, RequestParser
from megatron.generation.serving.request_queue import EventStream, RequestQueue
from megatron.generation.serving.responses import (
    SSE_DONE,
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ResponseBuilder,
    TokenTexts,
    sse_event,
)
from megatron.generation.weight_updates import WeightUpdate

_SLOW_CLIENT_S = 30.0  # a client that reads slowly has this long, after the time limit of its request
_FETCH_S = 60.0  # longest wait for the next bytes of new weights
_LOG = logging.getLogger("megatron")


@dataclass(frozen=True)
class Service:
    """The objects and settings that the HTTP endpoints share.

    seconds: time limit of a request. updates: whether clients may replace the model's weights.
    """

    queue: RequestQueue
    access: AccessControl
    parser: RequestParser
    texts: TokenTexts
    seconds: float
    updates: bool = False


def build_app(service: Service) -> Starlette:
    """Returns the ASGI application that answers `/v1/completions`, `/v1/chat/completions`, `/v1/models`,
    `/v1/update_weights` and `/health`."""
    parser, created = service.parser, int(time.time())

    def described(name: str) -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": created, "owned_by": "neox"}
        model |= {"parent": parser.names[0]} if name != parser.names[0] else {}
        model |= {"dtype": parser.dtype, "max_model_len": parser.positions}
        return {**model, **_version(service.queue.weight_version)}

    async def list_models(request: Request) -> Response:
        service.access.check(request)
        return JSONResponse({"object": "list", "data": [described(name) for name in parser.names]})

    async def get_model(request: Request) -> Response:
        service.access.check(request)
        if (name := request.path_params["name"]) not in parser.names:
            raise APIError(404, parser.no_model(name), code="model_not_found")
        return JSONResponse(described(name))

    async def health(request: Request) -> Response:
        """Returns the state of the server. Clients need no token for it, so that monitoring can call it."""
        load, closing = service.queue.load, service.queue.closing
        content = {"status": "shutting down" if closing else "ok", **vars(load)}
        content |= _version(service.queue.weight_version)
        return JSONResponse(content, 503 if closing else 200)

    async def update_weights(request: Request) -> Response:
        service.access.check(request)
        if not service.updates:
            raise APIError(403, "this server refuses new weights; start it with serve_weight_updates: true to allow it")
        if len(parser.names) > 1:
            raise APIError(409, "weights cannot be replaced on a server with named adapters (adapter: NAME=PATH)")
        body = parse_update(await service.access.read_body(request))
        async with fetched(body) as update:
            with service.queue.submit([update]) as stream:
                async for _ in stream.events(service.seconds):
                    pass
        return JSONResponse({"object": "weights", **_version(update.version)})

    return Starlette(
        routes=[
            Route(
                "/v1/completions",
                GenerationEndpoint(service, parser.completion, CompletionResponseBuilder),
                methods=["POST"],
            ),
            Route(
                "/v1/chat/completions",
                GenerationEndpoint(service, parser.chat_completion, ChatResponseBuilder),
                methods=["POST"],
            ),
            Route("/v1/update_weights", update_weights, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", get_model),
            Route("/health", health),
        ],
        exception_handlers={APIError: _on_api_error, HTTPException: _on_http_exception, Exception: _on_exception},
    )


class GenerationEndpoint:
    """An HTTP endpoint that returns generated text in one response, or streams the text as server-sent
    events.

    It is an ASGI application rather than a function, so that it can cancel the generation whenever the
    response ends, also when the client disconnects.
    """

    def __init__(
        self,
        service: Service,
        parse: Callable[[bytes], ParsedRequest],
        make_builder: Callable[[ParsedRequest, TokenTexts], ResponseBuilder],
    ) -> None:
        self.service, self.parse, self.make_builder = service, parse, make_builder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, service = Request(scope, receive), self.service
        service.access.check(request)
        try:
            content = await service.access.read_body(request)
        except ClientDisconnect:
            return
        parsed = await asyncio.to_thread(self.parse, content)
        builder = self.make_builder(parsed, service.texts)
        with service.queue.submit(parsed.requests) as stream:
            if not parsed.body.stream:
                response = await _unless(_wait_for_disconnect(request), self._response(builder, stream))
                if response is not None:
                    await JSONResponse(response)(scope, receive, send)
                return
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            streamed = StreamingResponse(self._chunks(builder, stream), media_type="text/event-stream", headers=headers)
            try:
                async with asyncio.timeout(service.seconds + _SLOW_CLIENT_S):
                    await streamed(scope, receive, send)
            except TimeoutError:
                _LOG.warning(f"{builder.id}: cut off, because the client read its answer too slowly")

    async def _response(self, builder: ResponseBuilder, stream: EventStream) -> dict[str, Any]:
        async for index, event in stream.events(self.service.seconds):
            builder.add(index, event)
        return builder.response() | _version(stream.weight_version)

    async def _chunks(self, builder: ResponseBuilder, stream: EventStream) -> AsyncIterator[bytes]:
        try:
            async for index, event in stream.events(self.service.seconds):
                builder.add(index, event)
                if (chunk := builder.chunk(index)) is not None:
                    yield sse_event(chunk)
        except APIError as problem:  # the HTTP status has already been sent
            yield sse_event(problem.body())
            return
        if (usage_chunk := builder.usage_chunk()) is not None:
            yield sse_event(usage_chunk)
        yield SSE_DONE


def _version(number: int | None) -> dict[str, int]:
    """Returns the response field {"weight_version": number}. Returns {} if `number` is None: the server still
    has the weights that it started with."""
    return {} if number is None else {"weight_version": number}


async def _wait_for_disconnect(request: Request) -> None:
    """Waits until the client of a request disconnects. The request's body must have been read before."""
    try:
        while (await request.receive())["type"] != "http.disconnect":
            pass
    except ClientDisconnect:
        pass


async def _unless(stop: Any, work: Any) -> Any:
    """Awaits `work` and returns its result. If the awaitable `stop` ends first, cancels `work` and returns
    None."""
    tasks = [asyncio.ensure_future(stop), asyncio.ensure_future(work)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await tasks[1] if tasks[1].done() else None
    finally:
        for task in tasks:
            task.cancel()


# -- new weights ---------------------------------------------------------------------------------------------


class UpdateRequest(BaseModel):
    """The body of a request to `/v1/update_weights`.

    path: a HuggingFace folder that all machines of the server can see.
    url: instead of `path`, the URL below which the files named in `sha256` are; for a server on one machine.
    version: the number of the new weights, which later answers report.
    sha256: {file name: SHA-256 of the file}.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str | None = None
    url: Annotated[str, Field(pattern="^https?://")] | None = None
    version: int = Field(ge=0)
    sha256: dict[str, str] = {}

    @model_validator(mode="after")
    def _check(self) -> "UpdateRequest":
        if (self.path is None) == (self.url is None):
            raise ValueError("send exactly one of path and url")
        if self.url is not None and not self.sha256:
            raise ValueError("with url, pass sha256: a map from each file name at that URL to its SHA-256")
        wrong = next((name for name in self.sha256 if not re.fullmatch(r"\w[\w.-]*", name)), None)
        if wrong is not None:
            raise ValueError(f"sha256: {wrong!r} is not a file name; a key must be a plain file name, not a path")
        return self


def parse_update(content: bytes) -> UpdateRequest:
    """Parses the body of a request to `/v1/update_weights`. Raises APIError, which names the invalid
    field."""
    try:
        return UpdateRequest.model_validate_json(content)
    except ValidationError as problem:
        error = problem.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, error["loc"])) or "body"
        raise APIError(400, f"{place}: {error['msg'].removeprefix('Value error, ')}", param=place) from None


@asynccontextmanager
async def fetched(request: UpdateRequest) -> AsyncIterator[WeightUpdate]:
    """Yields the weights that a request names, as files in a folder. Raises APIError if a file cannot be
    fetched.

    Files from a URL are downloaded to this machine, and deleted at the end of the `with` block.
    """
    if request.path is not None:
        yield WeightUpdate(request.path, request.version, request.sha256)
        return
    assert request.url is not None
    folder = Path(tempfile.mkdtemp(prefix="neox_weights_"))
    try:
        await asyncio.to_thread(_fetch, request.url, request.sha256, folder)
        yield WeightUpdate(str(folder), request.version, request.sha256)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fetch(url: str, files: Mapping[str, str], folder: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy: the URL is inside the cluster
    for name in files:
        try:
            with opener.open(f"{url.rstrip('/')}/{name}", timeout=_FETCH_S) as answer:
                with (folder / name).open("wb") as file:
                    shutil.copyfileobj(answer, file, 1 << 20)
        except OSError as problem:
            raise APIError(502, f"url: {name} cannot be fetched ({problem})", param="url") from None


# -- errors --------------------------------------------------------------------------------------------------


async def _on_api_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, APIError)
    # The connection is closed, because the rest of the body is not read.
    close = {"connection": "close"} if problem.status in (401, 403, 408, 413, 415) else {}
    return JSONResponse(problem.body(), problem.status, {**problem.headers(), **close})


async def _on_http_exception(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    error = APIError(problem.status_code, f"{request.method} {request.url.path}: {problem.detail}")
    return JSONResponse(error.body(), error.status, {**(problem.headers or {}), **error.headers()})


async def _on_exception(request: Request, problem: Exception) -> Response:
    error = APIError(500, "the server failed while it handled this request; see the server's log")
    return JSONResponse(error.body(), error.status, error.headers())
