"""Serves the files of weight folders over HTTP, to inference servers that do not see the trainer's disk."""

import hmac
import http.server
import json
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from megatron.generation.weight_updates import WeightUpdate
from megatron.methods.reinforcement.keys import ReinforcementKeys, rollout_servers
from megatron.methods.reinforcement.server_calls import ServerError
from megatron.neox_arguments import NeoXArgs


class WeightServer:
    """Answers GET /SECRET/VERSION/FILE for the files of offered weight versions, in a thread.

    FILE manifest.json lists the files with their SHA-256. The secret is sent only in update requests, so only
    the run's servers know it.
    """

    def __init__(self, args: NeoXArgs) -> None:
        """Starts the thread. Raises ConfigError if the port in `weight_server_port` is in use."""
        port = ReinforcementKeys.read_from(args).weight_server_port
        self._versions: dict[str, WeightUpdate] = {}
        self._secret = secrets.token_urlsafe(24)
        # If all servers are on this machine, only this machine can connect.
        is_local = all(
            re.fullmatch(r"127(\.\d+){3}", urlsplit(server).hostname or "") for server in rollout_servers(args)
        )
        try:
            self._server = _Listener(
                ("127.0.0.1" if is_local else "", port if isinstance(port, int) else port[0]),
                _handler(self._secret, self._versions),
            )
        except (OSError, OverflowError) as problem:  # OverflowError: the number is too large for a port
            reason = problem.strerror if isinstance(problem, OSError) else problem
            raise args.error("weight_server_port", f"{port}: {reason}; choose another port") from None
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="weights", daemon=True).start()

    def offer(self, update: WeightUpdate, num_versions: int) -> None:
        """Starts to serve a version of the weights, and stops to serve all but the last `num_versions`."""
        self._versions[str(update.version)] = update
        for version in [name for name in self._versions if int(name) <= update.version - num_versions]:
            del self._versions[version]

    def url(self, version: int, server: str) -> str:
        """Returns the URL at which the server at address `server` can fetch a version of the weights.

        The URL's host is this machine's IPv4 or IPv6 address on the route to that server. Raises ServerError
        if there is no route.
        """
        parts = urlsplit(server)
        try:
            family, kind, _, _, place = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:  # sends nothing
                probe.connect(place)
                host = probe.getsockname()[0]
        except OSError as problem:
            raise ServerError(
                f"rollout.servers: {server}: this machine has no network route to the server ({problem}), so it cannot "
                "serve weights to it; check the server's name and the network"
            ) from None
        host = f"[{host}]" if family == socket.AF_INET6 else host
        return f"http://{host}:{self.port}/{self._secret}/{version}"

    def close(self) -> None:
        """Stops the thread and closes the port."""
        self._server.shutdown()
        self._server.server_close()


class _Listener(http.server.ThreadingHTTPServer):
    """An HTTP server at an IPv4 address; without an address it listens on IPv6 and IPv4, where the machine
    has both."""

    def __init__(self, place: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        dual_stack = not place[0] and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if dual_stack else socket.AF_INET
        super().__init__(place, handler)

    def server_bind(self) -> None:
        """Binds the socket: an IPv6 socket to both address families."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def _handler(secret: str, versions: Mapping[str, WeightUpdate]) -> type[http.server.BaseHTTPRequestHandler]:
    """Returns the class that handles requests for weights.

    versions: the offered versions by number; handlers look into this mapping at each request.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 60.0  # seconds after which an idle connection is closed

        def do_GET(self) -> None:
            _, *parts = self.path.split("/")
            is_authorized = len(parts) == 3 and hmac.compare_digest(parts[0].encode(), secret.encode())
            update = versions.get(parts[1]) if is_authorized else None
            if update is None:
                self.send_error(HTTPStatus.NOT_FOUND)
            elif parts[2] == "manifest.json":
                content = json.dumps({"version": update.version, "sha256": dict(update.sha256)}).encode()
                self._begin(len(content))
                self.wfile.write(content)
            elif parts[2] in update.sha256:
                with (Path(update.path) / parts[2]).open("rb") as file:
                    self._begin(Path(file.name).stat().st_size)
                    shutil.copyfileobj(file, self.wfile, 1 << 20)
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _begin(self, length: int) -> None:
            self.send_response(HTTPStatus.OK)
            self.send_header("content-type", "application/octet-stream")
            self.send_header("content-length", str(length))
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Logs nothing, because the URLs of requests contain the secret."""

    return Handler
