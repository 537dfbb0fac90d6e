"""Serves the metrics of a run while it trains, from rank 0 over HTTP at `metrics_host:metrics_port`.

The page `/metrics` is in Prometheus' text format, `/status` is JSON.
"""

import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.optional_packages import import_optional
from megatron.operations.run_folder import RunFolder
from megatron.process.metrics_file import POSITION
from megatron.process.run_files import to_json

Answer = tuple[int, str, bytes]
"""An HTTP response: (status code, content type, body)."""


class Monitoring(Callback):
    """Serves a run's metrics over HTTP from a thread of rank 0. Training steps never wait for it.

    The constructor opens the port, so a port in use is reported before a model is loaded. The port closes
    with the run. A value is served as soon as it is in metrics.jsonl.
    """

    def __init__(self, args: NeoXArgs) -> None:
        """Opens the port `metrics_port`. Raises ConfigError if that fails or prometheus-client is missing."""
        missing = args.error("metrics_port", "needs prometheus-client: pip install 'neox[monitoring]'")
        self._prometheus = import_optional("prometheus_client", missing)
        self._gauge = import_optional("prometheus_client.core", missing).GaugeMetricFamily
        self._args = args
        self._run: TrainingRun | None = None
        self._state = "starting"
        self._earlier: dict[str, float | int] = {}  # newest value of each metric in the steps before `_step`
        self._step: Step | None = None
        self._server = _listen(args, {"/metrics": self._metrics_page, "/status": self._status_page})
        threading.Thread(target=self._server.serve_forever, name="metrics_port", daemon=True).start()

    @property
    def port(self) -> int:
        """The number of the open port; with `metrics_port: 0` the system chooses it."""
        return self._server.server_address[1]

    def on_train_start(self, run: TrainingRun) -> None:
        """Starts to serve the run's iteration and activity, and logs the URL."""
        self._run, self._state = run, "running"
        run.logger.info(f"metrics: http://{self._args.metrics_host}:{self.port}/metrics, and /status")

    def on_completed_run(self, run: TrainingRun) -> None:
        """Does the same as `on_train_start`: a run without steps left may still publish a checkpoint."""
        self.on_train_start(run)

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Makes `step` the newest step to serve. Its values may become known only after later steps."""
        self._earlier, self._step = self.values(), step

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """Sets the served state to `failed`."""
        self._state = "failed"

    def close(self) -> None:
        """Stops the HTTP server and closes its port."""
        self._server.shutdown()
        self._server.server_close()

    def values(self) -> dict[str, float | int]:
        """Returns the newest value of every metric, by its name in metrics.jsonl; {} before the first
        step."""
        step = self._step
        row = dict(step.row) if step is not None and step.settled else {}
        return self._earlier | {name: value for name, value in row.items() if name not in POSITION}

    def status(self) -> dict[str, Any]:
        """Returns the JSON content of the page `/status`.

        It has the fields of status.json, with current `status` and `iteration`. `doing` describes the current
        activity. `metrics` has the newest value of each metric by name; null for NaN and infinity.
        """
        saved: dict[str, Any] = {}
        if self._run is not None and self._args.save_dir is not None:
            saved = RunFolder(Path(self._args.save_dir), Path()).status()
        metrics = {name: value if math.isfinite(value) else None for name, value in self.values().items()}
        return {**saved, "status": self._state, **self._place(), "metrics": metrics}

    def collect(self) -> Iterator[Any]:
        """Yields the content of `/metrics` for prometheus_client: one gauge `neox_NAME` for each metric."""
        place = self._place()
        state = self._gauge("neox_state", "1 for the state that the run is in", labels=["state"])
        state.add_metric([phase_of(self._state, place.get("doing", ""))], 1)
        yield state
        numbers = {name: value for name, value in place.items() if name != "doing"} | self.values()
        for name, (metric, value) in {gauge_name(name): (name, value) for name, value in numbers.items()}.items():
            yield self._gauge(name, metric, value=value)

    def _place(self) -> dict[str, Any]:
        run = self._run
        if run is None:
            return {}
        return {
            "iteration": run.iteration, "train_iters": self._args.train_iters, "consumed_samples": run.consumed_samples,
            "consumed_tokens": run.consumed_tokens, "doing": run.watchdog.activity,
        }  # fmt: skip

    def _metrics_page(self) -> Answer:
        return 200, self._prometheus.CONTENT_TYPE_LATEST, self._prometheus.generate_latest(self)

    def _status_page(self) -> Answer:
        return 200, "application/json", (to_json(self.status(), indent=1) + "\n").encode()


def gauge_name(name: str) -> str:
    """Returns the Prometheus name of a metric, such as `neox_train_lm_loss` for train/lm_loss."""
    return "neox_" + re.sub(r"[^a-zA-Z0-9]+", "_", name).strip("_").lower()


def phase_of(state: str, activity: str) -> str:
    """Returns a word or two for what a run is doing, such as `training`, `saving` or `failed`.

    state: `starting`, `running` or `failed`; only for `running` the result differs from it.
    activity: the watchdog's description of the current activity; digits are removed."""
    if state != "running":
        return state
    if re.match(r"in (the first )?step", activity):
        return "training"
    return re.sub(r"[\d\s]+", " ", activity).strip() or state


def _listen(args: NeoXArgs, pages: Mapping[str, Callable[[], Answer]]) -> ThreadingHTTPServer:
    """Returns an HTTP server that listens at metrics_host:metrics_port. Raises ConfigError if it cannot.

    pages: by URL path, a function that returns the response."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            text = f"no such page; the pages of this server are {' and '.join(pages)}\n".encode()
            code, kind, body = page() if page is not None else (404, "text/plain; charset=utf-8", text)
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            """Logs nothing: a line for every request would hide the run's own log lines."""

    try:
        return _Server((args.metrics_host, args.metrics_port or 0), Pages)
    except OSError as problem:
        problem_text = (
            f"port {args.metrics_port} of {args.metrics_host} cannot be opened ({problem.strerror or problem})"
        )
        advice = "set another port, or set metrics_host to an address of this machine"
        raise args.error("metrics_port", f"{problem_text}; {advice}") from None


class _Server(ThreadingHTTPServer):
    """An HTTP server with one daemon thread per connection. It ignores clients that disconnect early."""

    daemon_threads = True

    def server_bind(self) -> None:
        # HTTPServer's own method looks up this machine's name, which may take long to fail.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints the exception that a request raised, unless it is an OSError (the client has
        disconnected)."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
