"""Brings the ranks of a run together: store, rendezvous and its checks, process group, watchdog.

Launchers and ranks share it at the start and end of a run. It also has the work that all ranks do together.

Launchers import `distributed.store` alone; the other names import torch, which takes seconds, when they are
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.distributed.process_group import (
        World,
        check_transport,
        configure_logging,
        init_process_group,
        on_rank_zero,
        run_on_all_ranks,
        run_on_all_ranks_of,
        run_on_each_rank,
    )
    from megatron.distributed.rendezvous import Process, StartError
    from megatron.distributed.startup_checks import rendezvous_and_check
    from megatron.distributed.watchdog import Watchdog

_MODULES = {
    "process_group": (
        "World", "check_transport", "configure_logging", "init_process_group", "on_rank_zero", "run_on_all_ranks",
        "run_on_all_ranks_of", "run_on_each_rank",
    ),
    "rendezvous": ("Process", "StartError"),
    "startup_checks": ("rendezvous_and_check",),
    "watchdog": ("Watchdog",),
}  # fmt: skip
__all__ = [
    "Process", "StartError", "Watchdog", "World", "check_transport", "configure_logging", "init_process_group",
    "rendezvous_and_check", "on_rank_zero", "run_on_all_ranks", "run_on_all_ranks_of", "run_on_each_rank",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
