"""The server on two ranks, its end, and who may talk to it."""

import asyncio
import concurrent.futures
import http.client
import json
import select
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.responses import JSONResponse

from megatron.generation.batching.requests import Request
from megatron.generation.serving.http_server import HTTPServerThread, open_server_socket
from megatron.generation.serving.request_queue import RequestQueue, StepCommands
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.generation.serving.server import NAME, SHAPE, Server, make_model, serving

TEXTS = ["A", "The quick brown fox", "x" * 200, ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving")
    make_model(path, positions=40_000)
    return path


def written(server: Server) -> list[str]:
    """Sampled texts and greedy ones, asked for at the same time."""

    def ask(i: int) -> list[str]:
        body = {"model": NAME, "prompt": TEXTS[i % 4], "max_tokens": 24, "seed": i, "temperature": i % 2, "n": 2}
        status, reply, _ = server.post("/v1/completions", body)
        assert status == 200, reply
        return [choice["text"] for choice in reply["choices"]]

    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        return [text for texts in threads.map(ask, range(12)) for text in texts]


def test_every_layout_writes_the_same(folder: Path) -> None:
    texts, blocks = [], []
    for world_size, tensor in ((1, 1), (2, 2), (2, 1)):
        with serving(folder, world_size, model_parallel_size=tensor) as server:
            blocks.append(server.get("/health")["total_blocks"])
            texts.append(written(server))
            load = server.idle()
            assert load["free_blocks"] == load["total_blocks"] == blocks[-1]
        assert all(out == "" for _, out, _ in server.results[1:]), "only rank 0 speaks"
    assert len(set(texts[0])) > 12 and texts == [texts[0]] * 3
    assert blocks[2] == 2 * blocks[0], "both replicas work"


@pytest.mark.ends_processes
def test_a_signal_lets_running_requests_end(folder: Path) -> None:
    """With two replicas; what takes longer than serve_shutdown_timeout_s is told so; the exit code is 0."""
    long = {"model": NAME, "prompt": "A", "max_tokens": 39_000, "temperature": 0, "ignore_eos": True}
    with (
        serving(folder, 2, serve_shutdown_timeout_s=4, serve_max_rows=1) as server,  # so that each has one
        concurrent.futures.ThreadPoolExecutor(2) as threads,
    ):
        short = threads.submit(server.post, "/v1/completions", {**long, "max_tokens": 60})
        endless = threads.submit(server.post, "/v1/completions", long)
        while server.get("/health")["running"] < 2:
            time.sleep(0.01)
        server.signal(signal.SIGTERM)
        while (health := server.post("/health", None))[0] == 200:
            time.sleep(0.01)
        assert (health[0], health[1]["status"]) == (503, "shutting down")
        status, reply, headers = server.post("/v1/completions", long)
        assert (status, reply["error"]["message"]) == (503, "the server is shutting down") and headers["retry-after"]
        status, reply, _ = short.result()
        assert status == 200 and reply["choices"][0]["finish_reason"] == "length"
        status, reply, _ = endless.result()
        assert (status, reply["error"]["message"]) == (503, "the server has shut down")
    assert server.results[0][1].endswith("the server has shut down\n")


def test_a_token_is_asked_for(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("open-sesame\n")
    changes: dict[str, Any] = {"serve_token_file": str(tmp_path / "token"), "serve_model_name": "ours"}
    with (
        serving(folder, **changes, serve_request_timeout_s=2, serve_body_timeout_s=3) as server,
        ExitStack() as opened,
    ):
        body = {"model": "ours", "prompt": "a", "max_tokens": 1}
        head = ["Host: a", "Content-Type: application/json", "Content-Length: 500", "Authorization: Bearer open-sesame"]
        place = ("127.0.0.1", int(server.address.rpartition(":")[2]))
        slow = [opened.enter_context(socket.create_connection(place, timeout=300)) for _ in range(20)]
        for connection in slow:
            connection.sendall("\r\n".join(["POST /v1/completions HTTP/1.1", *head, "", '{"model"']).encode())
        assert server.get("/health")["status"] == "ok" and not select.select(slow, [], [], 0)[0], "none waits for them"
        for header_value in ("", "Bearer open", "Bearer open-sesam\u00e9", "open-sesame", "Basic open-sesame"):
            status, reply, _ = server.post("/v1/completions", body, authorization=header_value)
            assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
        assert server.post("/v1/models", None)[0] == 401
        with server.client() as client:
            authorised = client.with_options(api_key="open-sesame")
            assert authorised.completions.create(**body, extra_headers={"host": "any.name"}).choices[0].finish_reason
            with pytest.raises(openai.AuthenticationError, match="token is missing"):
                client.models.list()
            long: dict[str, Any] = {**body, "max_tokens": 39_000, "temperature": 0, "extra_body": {"ignore_eos": True}}
            # Its time is up: the answer is cut off with an error, not with an end.
            with pytest.raises(openai.InternalServerError, match="not done after 2 s"):
                authorised.completions.create(**long)
            with pytest.raises(openai.APIError, match="not done after 2 s"):
                list(authorised.completions.create(**long, stream=True))
        assert server.idle()["running"] == 0
        for connection in slow:
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status == 408 and "did not arrive within 3 s" in json.loads(answer.read())["error"]["message"]
            assert connection.recv(1) == b"", "closed"


def bound_socket(**values: object) -> Any:
    bound = open_server_socket(NeoXArgs.from_dict({**SHAPE, "serve_port": 0, **values}))
    bound.socket.close()
    return bound


def test_other_machines_need_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEOX_SERVE_TOKEN", raising=False)
    assert bound_socket().token is None and bound_socket(serve_host="localhost").token is None
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="serve_host: .*token"):
            bound_socket(serve_host=host)
    monkeypatch.setenv("NEOX_SERVE_TOKEN", "from-the-environment")
    assert bound_socket(serve_host="0.0.0.0").token == "from-the-environment"
    for content in ("", "two words", "\u00e9"):
        (tmp_path / "token").write_text(content)
        with pytest.raises(ConfigError, match="serve_token_file: .*ASCII"):
            bound_socket(serve_token_file=str(tmp_path / "token"))
    with pytest.raises(ConfigError, match="serve_token_file: .*/no: "):
        bound_socket(serve_token_file=str(tmp_path / "no"))
    with pytest.raises(ConfigError, match="serve_host: 203.0.113.7: |serve_port: 0 on 203.0.113.7: "):
        bound_socket(serve_host="203.0.113.7")  # of documentation, RFC 5737


def test_a_port_that_is_taken() -> None:
    first_socket = open_server_socket(NeoXArgs.from_dict({**SHAPE, "serve_port": 0}))
    port = int(first_socket.address.rpartition(":")[2])
    second_socket = open_server_socket(NeoXArgs.from_dict({**SHAPE, "serve_port": port}))  # as long as nobody listens
    first_socket.socket.listen()
    stops = []
    with second_socket.socket, pytest.raises(OSError, match="already in use"):
        HTTPServerThread(second_socket.socket, None, lambda: stops.append(True), header_seconds=1.0)
    assert stops == [True]
    with (
        first_socket.socket,
        pytest.raises(ConfigError, match=f"serve_port: {port} on 127.0.0.1: Address already in use"),
    ):
        bound_socket(serve_port=port)


def test_connections_that_bring_no_request_are_closed() -> None:
    """Silent ones, and those whose headers trickle in; also after a request that was answered."""
    bound = open_server_socket(NeoXArgs.from_dict({**SHAPE, "serve_port": 0}))
    http_server = HTTPServerThread(bound.socket, JSONResponse({}), lambda: None, header_seconds=0.5)
    port = int(bound.address.rpartition(":")[2])
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    connections = [socket.create_connection(("127.0.0.1", port), timeout=100) for _ in range(3)]
    connections[1].sendall(head)
    connections[2].sendall(head + b"\r\n")
    answer = b""
    while not answer.endswith(b"{}"):
        answer += connections[2].recv(1000)
    connections[2].sendall(head)
    for _ in range(1000):  # it trickles on until it is closed
        if select.select([connections[1]], [], [], 0.1)[0]:
            break
        connections[1].sendall(b"a: b\r\n")
    for connection in connections:
        assert connection.recv(1000) == b""
        connection.close()
    http_server.close()


def test_a_job_that_nobody_waits_for_is_never_begun() -> None:
    async def come_and_go() -> RequestQueue:
        queue = RequestQueue(2)
        with queue.submit([Request([1])]):
            assert [job_id for job_id, _ in queue.take(0).new] == [0]
        with queue.submit([Request([1]), Request([2])]):
            pass
        return queue

    queue = asyncio.run(come_and_go())
    assert queue.take(0) == StepCommands(cancelled=(0,)) and queue.take(0) == StepCommands()
    assert queue.streams == {}
