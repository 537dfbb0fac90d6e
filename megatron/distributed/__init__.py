"""What launchers and ranks share at the start and end of a run: the store, the rendezvous and its checks, the process
group, work that all ranks do together, the watch over ranks that do not move."""

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
from megatron.distributed.startup_checks import meet
from megatron.distributed.transport import check_transport
from megatron.distributed.watchdog import Watchdog

__all__ = [
    "Process",
    "StartError",
    "Watchdog",
    "World",
    "check_transport",
    "configure_logging",
    "init_process_group",
    "meet",
    "on_rank_zero",
    "run_on_all_ranks",
    "run_on_all_ranks_of",
    "run_on_each_rank",
]
