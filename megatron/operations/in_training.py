"""The parts of this package that a training run uses: checks before it starts, callbacks, a report at its
end."""

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
    """The callbacks of `push_to_hub` and `metrics_port`. They are created before a model is loaded, so that a
    port in use is reported at once (ConfigError)."""
    callbacks: list[Callback] = []
    if args.push_to_hub:
        from megatron.operations.hub.in_training import PushToHub, hub_repository

        callbacks.append(PushToHub(args, hub_repository(args)))
    if args.metrics_port is not None and rank == 0:
        from megatron.operations.monitoring import Monitoring

        callbacks.append(Monitoring(args))  # the last to be closed: it also says that uploads are waited for
    return callbacks


def report_at_end(args: NeoXArgs, logs: Path | None, logger: logging.Logger) -> None:
    """Writes the report of a run with `report: true`, however the run ended. logs: its log folder."""
    if args.report and logs is not None:
        from megatron.operations import report

        report.report_at_end(args, logs, logger)
