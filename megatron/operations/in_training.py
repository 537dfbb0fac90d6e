"""Provides a training run with checks before it starts, callbacks for `push_to_hub` and `metrics_port`, and a
report at its end."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.neox_arguments import NeoXArgs, require_report

if TYPE_CHECKING:  # importing torch would delay --help and errors of a configuration
    from megatron.callbacks import Callback


def check_operations(args: NeoXArgs) -> None:
    """Raises ConfigError, before anything is built, if `push_to_hub` or `report` cannot work here."""
    require_report(args)
    if args.push_to_hub:
        from megatron.operations.hub.in_training import hub_repository

        hub_repository(args)


def operation_callbacks(args: NeoXArgs, rank: int) -> "list[Callback]":
    """Creates the callbacks of `push_to_hub` and `metrics_port`; raises ConfigError if one cannot work.

    They are created before the model is loaded, so that a port in use is reported at once."""
    callbacks: list[Callback] = []
    if args.push_to_hub:
        from megatron.operations.hub.in_training import PushToHub, hub_repository

        callbacks.append(PushToHub(args, hub_repository(args)))
    if args.metrics_port is not None and rank == 0:
        from megatron.operations.monitoring import Monitoring

        callbacks.append(Monitoring(args))  # closed last, so that it serves its pages while `close` waits for uploads
    return callbacks


def report_at_end(args: NeoXArgs, logs: Path | None, logger: logging.Logger) -> None:
    """Writes the HTML report if `report: true` is set, whether the run finished or failed. logs: its log
    folder."""
    if args.report and logs is not None:
        from megatron.operations import report

        report.report_at_end(args, logs, logger)
