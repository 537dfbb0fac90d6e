"""Stand-ins for servers that are not installed here: they answer the JSON that vLLM and SGLang document."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LOGPROB = -1.5


@dataclass
class StandIn:
    """A running server that answers by a rule.

    requests: (path, body) of every POST. version: of its weights, as SGLang has it. failures: answers of 500
    still to come. garbage: what it answers in the place of JSON. deaf: whether it ignores new weights.
    token: what it requires of clients. settings: what it tells of itself.
    """

    address: str = ""
    requests: list[tuple[str, Any]] = field(default_factory=list)
    version: str = "default"
    failures: int = 0
    garbage: bytes | None = None
    deaf: bool = False
    token: str | None = None
    settings: Any = None

    def answer(self, path: str, body: Any) -> Any:
        """The JSON of an answer; None: an empty one."""
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "toy", "object": "model"}]}
        if path in ("/server_info", "/get_server_info"):
            return self.settings
        if path == "/v1/completions":  # vLLM's, with return_token_ids
            tokens = [1 + sum(body["prompt"]) % 10, 0]
            logprobs = {"tokens": ["x", "<eod>"], "token_logprobs": [LOGPROB] * 2, "top_logprobs": [{}, {}]}
            choice = {"index": 0, "text": "x", "logprobs": logprobs, "finish_reason": "stop", "stop_reason": None}
            return {"object": "text_completion", "choices": [{**choice, "token_ids": tokens}]}
        if path == "/generate":  # SGLang's, with return_logprob
            tokens = [1 + sum(body["input_ids"]) % 10, 0]
            meta = {"finish_reason": {"type": "stop", "matched": 0}, "weight_version": self.version}
            token_logprobs = [[LOGPROB, token, None] for token in tokens]
            return {"text": "x", "output_ids": tokens, "meta_info": {**meta, "output_token_logprobs": token_logprobs}}
        if path == "/update_weights_from_disk":
            if not self.deaf:
                self.version = body["weight_version"]
            return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        if path == "/collective_rpc":
            return {"results": [None]}
        assert path == "/reset_prefix_cache", path
        return None


@contextmanager
def standing_in(**changes: Any) -> Iterator[StandIn]:
    """A stand-in behind a port of its own."""
    server = StandIn(**changes)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if server.token is not None and self.headers["authorization"] != f"Bearer {server.token}":
                self._send(401, b'{"error": {"message": "a token is needed"}}')
            else:
                self._send(200, json.dumps(server.answer(self.path, None)).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.requests.append((self.path, body))
            is_completion = self.path in ("/v1/completions", "/generate")
            if is_completion and server.failures > 0:
                server.failures -= 1
                self._send(500, b'{"error": {"message": "out of memory"}}')
            elif is_completion and server.garbage is not None:
                self._send(200, server.garbage)
            else:
                answer = server.answer(self.path, body)
                self._send(200, b"" if answer is None else json.dumps(answer).encode())

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Listener(http.server.ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A run that ends breaks what it has asked for."""

    with Listener(("127.0.0.1", 0), Handler) as listener:
        server.address = f"http://127.0.0.1:{listener.server_port}"
        threading.Thread(target=listener.serve_forever).start()
        try:
            yield server
        finally:
            listener.shutdown()
