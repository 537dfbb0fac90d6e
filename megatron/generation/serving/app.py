"""The paths of the server, as an ASGI application."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from megatron.generation.serving.auth import AccessControl, wait_for_disconnect
from megatron.generation.serving.errors import APIError
from megatron.generation.serving.request_parsing import RequestParser
from megatron.generation.serving.request_queue import EventStream, RequestQueue
from megatron.generation.serving.responses import (
    END,
    ChatResponseBuilder,
    CompletionResponseBuilder,
    ParsedRequest,
    ResponseBuilder,
    TokenTexts,
    sse_event,
)

_SLACK_S = 30.0  # for a client that reads slowly, after the time of its request is up
_LOG = logging.getLogger("megatron")


@dataclass(frozen=True)
class Service:
    """All that answers need. seconds: for a request."""

    queue: RequestQueue
    access: AccessControl
    parser: RequestParser
    texts: TokenTexts
    seconds: float


def build_app(service: Service) -> Starlette:
    """`/v1/completions`, `/v1/chat/completions`, `/v1/models`, `/health`."""
    parser, begun = service.parser, int(time.time())
    model = {"id": parser.name, "object": "model", "created": begun, "owned_by": "neox"}

    async def models(request: Request) -> Response:
        service.access.check(request)
        return JSONResponse({"object": "list", "data": [{**model, "max_model_len": parser.positions}]})

    async def one_model(request: Request) -> Response:
        service.access.check(request)
        if (name := request.path_params["name"]) != parser.name:
            raise APIError(404, f"there is no model {name!r} here, but {parser.name!r}", code="model_not_found")
        return JSONResponse({**model, "max_model_len": parser.positions})

    async def health(request: Request) -> Response:
        """Open to all: for those who watch over it."""
        load, closing = service.queue.load, service.queue.closing
        content = {"status": "shutting down" if closing else "ok", **vars(load)}
        return JSONResponse(content, 503 if closing else 200)

    return Starlette(
        routes=[
            Route(
                "/v1/completions",
                GenerationEndpoint(service, parser.completion, CompletionResponseBuilder),
                methods=["POST"],
            ),
            Route(
                "/v1/chat/completions",
                GenerationEndpoint(service, parser.conversation, ChatResponseBuilder),
                methods=["POST"],
            ),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
        ],
        exception_handlers={APIError: _refused, HTTPException: _unknown, Exception: _failed},
    )


class GenerationEndpoint:
    """An endpoint that writes text. An ASGI application and no function, so that jobs end with the answer, whichever
    way that ends."""

    def __init__(
        self,
        service: Service,
        read: Callable[[bytes], ParsedRequest],
        reply: Callable[[ParsedRequest, str, TokenTexts], ResponseBuilder],
    ) -> None:
        self.service, self.read, self.reply = service, read, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, service = Request(scope, receive), self.service
        service.access.check(request)
        try:
            content = await service.access.read(request)
        except ClientDisconnect:
            return
        asked = await asyncio.to_thread(self.read, content)
        reply = self.reply(asked, service.parser.name, service.texts)
        with service.queue.open(asked.requests) as call:
            if not asked.body.stream:
                whole = await _unless(wait_for_disconnect(request), self._whole(reply, call))
                if whole is not None:
                    await JSONResponse(whole)(scope, receive, send)
                return
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            answer = StreamingResponse(self._pieces(reply, call), media_type="text/event-stream", headers=headers)
            try:
                async with asyncio.timeout(service.seconds + _SLACK_S):
                    await answer(scope, receive, send)
            except TimeoutError:
                _LOG.warning(f"{reply.id}: the client did not read its answer")

    async def _whole(self, reply: ResponseBuilder, call: EventStream) -> dict[str, Any]:
        async for index, event in call.events(self.service.seconds):
            reply.add(index, event)
        return reply.whole()

    async def _pieces(self, reply: ResponseBuilder, call: EventStream) -> AsyncIterator[bytes]:
        try:
            async for index, event in call.events(self.service.seconds):
                reply.add(index, event)
                if (piece := reply.piece(index)) is not None:
                    yield sse_event(piece)
        except APIError as problem:  # the status has gone out
            yield sse_event(problem.body())
            return
        if (last := reply.last()) is not None:
            yield sse_event(last)
        yield END


async def _unless(stop: Any, work: Any) -> Any:
    """What `work` gives; None if `stop` ends first."""
    tasks = [asyncio.ensure_future(stop), asyncio.ensure_future(work)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await tasks[1] if tasks[1].done() else None
    finally:
        for task in tasks:
            task.cancel()


async def _refused(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, APIError)
    # What is left of a body is not read.
    close = {"connection": "close"} if problem.status in (401, 403, 408, 413, 415) else {}
    return JSONResponse(problem.body(), problem.status, {**problem.headers(), **close})


async def _unknown(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    told = APIError(problem.status_code, f"{request.method} {request.url.path}: {problem.detail}")
    return JSONResponse(told.body(), told.status, {**(problem.headers or {}), **told.headers()})


async def _failed(request: Request, problem: Exception) -> Response:
    told = APIError(500, "the server failed at this request; its log says how")
    return JSONResponse(told.body(), told.status, told.headers())
