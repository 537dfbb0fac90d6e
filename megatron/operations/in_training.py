"""What the keys of this package add to a training run: checks before it begins, callbacks beside its steps,
and a report when it is over."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.neox_arguments import NeoXArgs, require_report

if TYPE_CHECKING:  # it imports torch, which --help and a mistake in a configuration need not wait for
    from megatron.callbacks import Callback


def check_operations(args: NeoXArgs) -> None:
    """Raises ConfigError, before anything is built, where `push_to_hub` or `report` cannot be done here."""
    require_report(args)
    if args.push_to_hub:
        from megatron.operations.hub.in_training import hub_repository

        hub_repository(args)


def operation_callbacks(args: NeoXArgs, rank: int) -> "list[Callback]":
    """Callbacks of `push_to_hub` and `metrics_port`. They are made before a model is loaded, so that a port
    that is taken is said at once (ConfigError)."""
    callbacks: list[Callback] = []
    if args.push_to_hub:
        from megatron.operations.hub.in_training import PushToHub, hub_repository

        callbacks.append(PushToHub(args, hub_repository(args)))
    if args.metrics_port is not None and rank == 0:
        from megatron.operations.monitoring import Monitoring

        callbacks.append(Monitoring(args))  # the last to be closed: it also says that uploads are waited for
    return callbacks


def report_at_end(args: NeoXArgs, logs: Path | None, logger: logging.Logger) -> None:
    """Write the page of a run that is over, however it ended, with `report: true`. logs: its log folder."""
    if args.report and logs is not None:
        from megatron.operations import report

        report.report_at_end(args, logs, logger)
