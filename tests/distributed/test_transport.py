"""A run does not start on a connection slower than asked for."""

import logging
import os
import re
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron.distributed import StartError, check_transport, process_group
from megatron.distributed.process_group import bus_bandwidth
from megatron.launch import process_info
from megatron.mpu import ParallelGroups, build_groups
from megatron.neox_arguments import ConfigError
from tests.model.stages import small
from tests.pool import run_ranks


def groups(world_size: int) -> ParallelGroups:
    return build_groups(pipe=1, data=world_size, tensor=1, device=torch.device("cpu"))


def outcome(rank: int, world_size: int, key: float | None, variable: dict[int, str]) -> tuple[str, list[str]]:
    """Returns the error of the check, and the lines that rank 0 logs. variable: the site's, by rank."""
    os.environ.pop("NEOX_MIN_ALLREDUCE_GB_S", None)
    if rank in variable:
        os.environ["NEOX_MIN_ALLREDUCE_GB_S"] = variable[rank]
    lines: list[str] = []
    logger = logging.getLogger("tests.transport")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    args = small(min_allreduce_gb_s=key).for_world(world_size)
    try:
        check_transport(args, groups(world_size), process_info(), logger)
    except (StartError, ConfigError) as problem:
        return f"{type(problem).__name__}: {problem}", lines
    return "passes", lines


def test_below_the_bound_every_rank_stops_with_the_reason() -> None:
    texts = [text for text, _ in run_ranks(outcome, 2, 1000.0, {}, env={"FI_PROVIDER": "tcp"})]
    assert texts[0] == texts[1], "one number for all"
    assert re.match(r"StartError: program: min_allreduce_gb_s: .*1000 GB/s.* 8 MiB .*2 ranks \(gloo\)", texts[0])
    assert all(part in texts[0] for part in ("NCCL_NET=(unset)", "FI_PROVIDER=tcp", "NCCL_DEBUG=INFO"))


def test_the_sites_variable_bounds_too_and_rank_zeros_counts_for_all() -> None:
    texts = [text for text, _ in run_ranks(outcome, 2, None, {0: "1000"})]
    assert texts[0] == texts[1] and texts[0].startswith("StartError: NEOX_MIN_ALLREDUCE_GB_S")
    (text, lines), _ = run_ranks(outcome, 2, 0.001, {0: "1000"})
    assert text == "passes" and "0.001" in lines[-1], "the key wins"
    refused = [text for text, _ in run_ranks(outcome, 2, None, {0: "fast"})]
    assert all(text.startswith("ConfigError: NEOX_MIN_ALLREDUCE_GB_S='fast'") for text in refused)
    assert run_ranks(outcome, 2, None, {}) == [("passes", [])] * 2


def clocked(rank: int, world_size: int, seconds: float) -> float:
    """The bandwidth found where an all-reduce takes so long by a clock that nothing else moves."""
    reduce, now = dist.all_reduce, [0.0]

    def timed(tensor: torch.Tensor, *args: object, **kwargs: object) -> None:
        now[0] += seconds * (1 + rank)
        reduce(tensor, *args, **kwargs)

    dist.all_reduce, process_group.time = timed, SimpleNamespace(perf_counter=lambda: now[0])  # type: ignore[attr-defined]
    return bus_bandwidth(groups(world_size), 2**20)


def test_bandwidth_is_the_bus_bandwidth_of_nccl_tests() -> None:
    """An all-reduce of S bytes over n ranks in t s, the slowest rank's: S/t x 2(n-1)/n."""
    assert run_ranks(clocked, 3, 0.25) == [2**20 / 0.75 * 4 / 3 / 1e9] * 3
