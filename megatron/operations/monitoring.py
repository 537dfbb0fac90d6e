"""Serves the numbers of a running training to a monitoring system, from rank 0 at
`metrics_host:metrics_port`.

`/metrics` is in Prometheus' text format, `/status` is JSON.
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
"""HTTP code, content type, body."""


class Monitoring(Callback):
    """Serves a run's metrics on rank 0, from a thread. Training steps never wait for it.

    The port opens in the constructor, so a port in use is reported before a model is loaded. It closes with
    the run. Values appear as soon as they are in metrics.jsonl.
    """

    def __init__(self, args: NeoXArgs) -> None:
        """Raises ConfigError if prometheus-client is missing or the port is in use."""
        missing = args.error("metrics_port", "needs prometheus-client: pip install 'neox[monitoring]'")
        self._prometheus = import_optional("prometheus_client", missing)
        self._gauge = import_optional("prometheus_client.core", missing).GaugeMetricFamily
        self._args = args
        self._run: TrainingRun | None = None
        self._state = "starting"
        self._earlier: dict[str, float | int] = {}  # values of rows before that of `_step`, the newest of each
        self._step: Step | None = None
        self._server = _listen(args, {"/metrics": self._metrics_page, "/status": self._status_page})
        threading.Thread(target=self._server.serve_forever, name="metrics_port", daemon=True).start()

    @property
    def port(self) -> int:
        """The open port; with `metrics_port: 0` the one that the system chose."""
        return self._server.server_address[1]

    def on_train_start(self, run: TrainingRun) -> None:
        """Starts to report the run's position and activity."""
        self._run, self._state = run, "running"
        run.logger.info(f"metrics: http://{self._args.metrics_host}:{self.port}/metrics, and /status")

    def on_completed_run(self, run: TrainingRun) -> None:
        """As at the start of steps: a checkpoint may still have to be published."""
        self.on_train_start(run)

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Publishes the newest values; those of a step may become known only after later steps."""
        self._earlier, self._step = self.values(), step

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """Shows the state `failed` until the run has ended."""
        self._state = "failed"

    def close(self) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()

    def values(self) -> dict[str, float | int]:
        """The newest value of every metric by its name in metrics.jsonl; {} before the first row."""
        step = self._step
        row = dict(step.row) if step is not None and step.settled else {}
        return self._earlier | {name: value for name, value in row.items() if name not in POSITION}

    def status(self) -> dict[str, Any]:
        """Returns the state of the run for `/status`.

        It has the fields of status.json with current `status` and `iteration`. `doing` describes the current
        activity; `metrics` has the newest values by name, null if not finite.
        """
        saved: dict[str, Any] = {}
        if self._run is not None and self._args.save_dir is not None:
            saved = RunFolder(Path(self._args.save_dir), Path()).status()
        metrics = {name: value if math.isfinite(value) else None for name, value in self.values().items()}
        return {**saved, "status": self._state, **self._place(), "metrics": metrics}

    def collect(self) -> Iterator[Any]:
        """Yields the families of /metrics to prometheus_client: a gauge `neox_NAME` for each value."""
        place = self._place()
        state = self._gauge("neox_state", "1 for what the run is doing", labels=["state"])
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
    """The Prometheus name of a metric: `neox_train_lm_loss` for train/lm_loss."""
    return "neox_" + re.sub(r"[^a-zA-Z0-9]+", "_", name).strip("_").lower()


def phase_of(state: str, activity: str) -> str:
    """Returns a word for what a run does. It is its state; while it runs, `training` or such as `saving`.

    activity: description of its current activity."""
    if state != "running":
        return state
    if re.match(r"in (the first )?step", activity):
        return "training"
    return re.sub(r"[\d\s]+", " ", activity).strip() or state


def _listen(args: NeoXArgs, pages: Mapping[str, Callable[[], Answer]]) -> ThreadingHTTPServer:
    """Opens an HTTP server at metrics_host:metrics_port. Raises ConfigError if the port cannot be opened.

    pages: function for each URL path, which returns the response."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            text = f"no such page; this server has {' and '.join(pages)}\n".encode()
            code, kind, body = page() if page is not None else (404, "text/plain; charset=utf-8", text)
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            """Does nothing: a line for every request would hide the run's log lines."""

    try:
        return _Server((args.metrics_host, args.metrics_port or 0), Pages)
    except OSError as problem:
        problem_text = (
            f"port {args.metrics_port} of {args.metrics_host} cannot be opened ({problem.strerror or problem})"
        )
        advice = "set another port, or set metrics_host to an address of this machine"
        raise args.error("metrics_port", f"{problem_text}; {advice}") from None


class _Server(ThreadingHTTPServer):
    """An HTTP server with one daemon thread per connection. A client that disconnects is not reported."""

    daemon_threads = True

    def server_bind(self) -> None:
        # HTTPServer's own method looks up this machine's name, which may take long to fail.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints the exception of a request, unless the client has disconnected."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
