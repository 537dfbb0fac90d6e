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
        configure_logging,
        init_process_group,
        on_rank_zero,
        run_on_all_ranks,
        run_on_all_ranks_of,
        run_on_each_rank,
    )
    from megatron.distributed.rendezvous import Process, StartError
    from megatron.distributed.startup_checks import rendezvous_and_check
    from megatron.distributed.transport import check_transport
    from megatron.distributed.watchdog import Watchdog

_MODULES = {
    "Process": "rendezvous",
    "StartError": "rendezvous",
    "Watchdog": "watchdog",
    "World": "process_group",
    "check_transport": "transport",
    "configure_logging": "process_group",
    "init_process_group": "process_group",
    "rendezvous_and_check": "startup_checks",
    "on_rank_zero": "process_group",
    "run_on_all_ranks": "process_group",
    "run_on_all_ranks_of": "process_group",
    "run_on_each_rank": "process_group",
}
__all__ = [
    "Process",
    "StartError",
    "Watchdog",
    "World",
    "check_transport",
    "configure_logging",
    "init_process_group",
    "rendezvous_and_check",
    "on_rank_zero",
    "run_on_all_ranks",
    "run_on_all_ranks_of",
    "run_on_each_rank",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
