"""HTTP requests to the server of a small model: bodies, headers and paths; accepted requests are answered."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megatron.generation import Model
from megatron.generation.batching.batcher import Batcher
from megatron.generation.prompts.chat import ChatTemplate
from megatron.generation.serving.app import Service, build_app
from megatron.generation.serving.auth import AccessControl
from megatron.generation.serving.loop import Replica
from megatron.generation.serving.request_parsing import RequestParser
from megatron.generation.serving.request_queue import EventStream, RequestQueue
from megatron.generation.serving.responses import TokenTexts
from megatron.tokenizer import make_tokenizer
from tests.data.preprocessing.chat_tokenizers import ANSWER, ASK
from tests.fuzz.campaign import Kind, Refused
from tests.fuzz.cases import Case
from tests.fuzz.mutations import spoilt_bytes, spoilt_json, spoilt_value, texts
from tests.fuzz.rows import ROWS
from tests.generation.models import UNTIED, random_model
from tests.generation.serving.server import FOLDER

_NAME, _POSITIONS = "tiny", 64
_COMMON = {"model": _NAME, "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "n": 1, "seed": 3}
_FURTHER: dict[str, Any] = {
    "stop": ["x"], "stream": True, "stream_options": {"include_usage": True}, "top_k": 5, "min_p": 0.1,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 3.0},
    "logprobs": True, "ignore_eos": True, "min_tokens": 1, "stop_token_ids": [3], "echo": True,
    "return_token_ids": True, "top_logprobs": 2, "logprobs_mode": "processed_logprobs",
    "chat_template_kwargs": {"a": 1}, "user": "u", "tool_choice": "auto", "max_completion_tokens": 3,
    "response_format": {"type": "text"}, "best_of": 1, "n": 2, "suffix": "", "tools": [],
}  # fmt: skip
_PROMPTS = ("The harbour", ["a", "b"], [5, 6, 7], [[5, 6], [7]])
_HEADERS = {"host": "127.0.0.1:8000", "content-type": "application/json", "authorization": "Bearer x"}
_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/update_weights", "/v1/models", "/v1/models/tiny", "/health")


class _AnsweringQueue(RequestQueue):
    """A queue that runs a small model's steps in the loop of the HTTP thread, as the serving loop would."""

    def __init__(self) -> None:
        super().__init__(limit=16)
        self.replica = Replica(Batcher(_model(), maximum_rows=4, cache_gb=0.001))

    @contextmanager
    def submit(self, requests: Sequence[Any]) -> Iterator[EventStream]:
        with super().submit(requests) as stream:
            asyncio.get_running_loop().call_soon(self._work)
            yield stream

    def _work(self) -> None:
        outcomes, load = self.replica.step(self.take(0))
        self.deliver(outcomes, load)
        if self.replica.batcher.busy:
            asyncio.get_running_loop().call_soon(self._work)


@cache
def _tokenizer() -> Any:
    return make_tokenizer("HFTokenizer", str(FOLDER / "tokenizer.json"))


@cache
def _model() -> Model:
    vocabulary = _tokenizer().vocab_size
    values = {**UNTIED["neox"], "max_position_embeddings": _POSITIONS, "padded_vocab_size": vocabulary + 1}
    model = random_model(values, tokens=vocabulary)
    return Model(model.args, model.groups, _tokenizer(), model.stage, model.dtype, None)


@cache
def _parser() -> RequestParser:
    chat = ChatTemplate((FOLDER / "chat_template.jinja").read_text(), _tokenizer(), str(FOLDER))
    return RequestParser((_NAME,), _tokenizer(), _POSITIONS, (0,), chat)


@st.composite
def _cases(draw: DrawFn) -> Case:
    path = draw(st.sampled_from([*_PATHS[:2] * 4, *_PATHS]))
    body: dict[str, Any] = dict(_COMMON)
    for name in draw(st.lists(st.sampled_from(sorted(_FURTHER)), max_size=3)):
        body[name] = _FURTHER[name]
    if path == "/v1/completions":
        body["prompt"] = draw(st.sampled_from(_PROMPTS))
        body["logprobs"] = 2 if "logprobs" in body else None
    else:
        body["messages"] = draw(st.sampled_from([[ASK], [ASK, ANSWER, ASK], ROWS[1]["messages"]]))
    if path == "/v1/update_weights":
        body = {"path": "/nowhere", "version": 3, "sha256": {"a.safetensors": "0"}}
        if draw(st.booleans()):
            body = {**body, "url": draw(st.one_of(texts, st.just("http://127.0.0.1:9/x")))} | {"path": None}
    head = {"path": path, "method": "POST" if path in _PATHS[:3] else "GET", "headers": _HEADERS}
    if draw(st.integers(0, 7)) == 0:
        head["path"] = "/" + draw(texts) if draw(st.booleans()) else path
        head["headers"] = draw(spoilt_value(_HEADERS))
        content = json.dumps(body).encode()
    elif draw(st.integers(0, 3)):
        content = draw(spoilt_json(body))
    else:
        content = draw(spoilt_bytes(json.dumps(body).encode()))
    return {"head.json": json.dumps(head).encode(), "body": content}


def _scope(head: Any) -> dict[str, Any] | None:
    """The request line and headers as uvicorn hands them on; None where it would not, as they are no HTTP."""
    if not isinstance(head, dict) or not isinstance(head.get("headers", {}), dict):
        return None
    path, method = head.get("path"), head.get("method", "POST")
    if not isinstance(path, str) or not isinstance(method, str) or not path.startswith("/"):
        return None
    headers = [(str(name).lower().encode("utf-8", "replace"), str(value).encode("utf-8", "replace"))
               for name, value in head.get("headers", {}).items()]  # fmt: skip
    raw, _, query = path.partition("?")
    return {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": unquote(raw),
            "raw_path": raw.encode("utf-8", "replace"), "query_string": query.encode("utf-8", "replace"),
            "root_path": "", "headers": headers, "scheme": "http", "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 1)}  # fmt: skip


async def _answer(scope: dict[str, Any], body: bytes) -> tuple[int, bytes]:
    queue, sent = _AnsweringQueue(), list[dict[str, Any]]()
    service = Service(queue, AccessControl(None, 1 << 16, 5.0), _parser(), TokenTexts(_tokenizer()), 10.0, updates=True)
    middle, disconnected = len(body) // 2, asyncio.Event()
    pieces = iter([(body[:middle], True), (body[middle:], False)])

    async def receive() -> dict[str, Any]:
        for piece, has_more in pieces:
            return {"type": "http.request", "body": piece, "more_body": has_more}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await build_app(service)(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def _run(folder: Path) -> None:
    scope = _scope(json.loads((folder / "head.json").read_bytes()))
    if scope is None:
        raise Refused("no HTTP")
    status, content = asyncio.run(_answer(scope, (folder / "body").read_bytes()))
    assert status < 500 or status in (502, 503, 504), (status, content)
    if status >= 400:
        raise Refused(json.loads(content)["error"]["message"])
    if content.startswith(b"data: "):
        events = [json.loads(line[6:]) for line in content.split(b"\n\n") if line.startswith(b"data: {")]
        if errors := [event["error"]["message"] for event in events if "error" in event]:
            raise Refused(errors[0])
    else:
        json.loads(content)


KIND = Kind("requests", _cases(), _run)
