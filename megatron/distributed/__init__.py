"""Connects the ranks of a run: key-value store, rendezvous, startup checks, process group and watchdog.

It also has helpers that run a function on rank 0 or on every rank (`on_rank_zero`, `run_on_all_ranks`).

Importing this package does not import torch, which takes seconds: torch is imported when one of the names in
`__all__` is first used. So launchers can import `distributed.store` without torch.
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
