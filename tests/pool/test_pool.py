"""The worker pool itself: results, errors, time-outs, crashes, and nothing left over between jobs."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.pool import run_ranks


def _sum(rank: int, world_size: int, scale: float = 1.0) -> list[float]:
    values = torch.tensor([rank, 1.0]) * scale
    dist.all_reduce(values)
    return values.tolist()


def _rank_and_folder(rank: int, world_size: int) -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "PROBE"))


def _raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank one does not like this")
    dist.barrier()


def _hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def _crash_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _leave_a_trace(rank: int, world_size: int) -> bool:
    was_left = hasattr(torch, "left_by_a_job")
    torch.left_by_a_job = True  # type: ignore[attr-defined]
    return was_left


def _without_group(rank: int, world_size: int) -> bool:
    return dist.is_initialized()


def _own_group(rank: int, world_size: int) -> int:
    dist.init_process_group("gloo")  # from RANK, WORLD_SIZE and MASTER_*
    dist.barrier()
    return dist.get_world_size()


def _deepspeed_step(rank: int, world_size: int) -> float:
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4 // world_size,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    inputs = torch.arange(16.0).reshape(4, 4)[rank::world_size]
    engine.backward(engine(inputs).mean())
    engine.step()
    return engine(torch.ones(1, 4)).item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_reduce(world_size):
    total = sum(range(world_size))
    assert run_ranks(_sum, world_size, scale=2.0) == [[2.0 * total, 2.0 * world_size]] * world_size


def test_environment_of_a_rank():
    results = run_ranks(_rank_and_folder, 2, env={"PROBE": "x"})
    assert results == [("0", "0", "2", "127.0.0.1", "x"), ("1", "1", "2", "127.0.0.1", "x")]


def test_error_carries_the_traceback_of_the_rank_that_failed():
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed[\s\S]*_raise_on_one[\s\S]*does not like this"):
        run_ranks(_raise_on_one, 2)
    assert run_ranks(_sum, 2) == [[1.0, 2.0]] * 2


def test_time_out_shows_stacks_and_the_pool_goes_on():
    started_at = time.monotonic()
    with pytest.raises(AssertionError, match=r"after 1 s rank\(s\) 0, 1 of 2[\s\S]*_hang_on_one"):
        run_ranks(_hang_on_one, 2, timeout=1.0)
    assert time.monotonic() - started_at < 30
    assert run_ranks(_sum, 2) == [[1.0, 2.0]] * 2


def test_crash_is_reported_and_the_pool_goes_on():
    with pytest.raises(AssertionError, match="rank 1 of 2 failed\nthe process ended without a result .exit code 7."):
        run_ranks(_crash_on_one, 2)
    assert run_ranks(_sum, 2) == [[1.0, 2.0]] * 2


def test_nothing_is_left_for_the_next_job():
    assert run_ranks(_leave_a_trace, 2) == [False, False]
    assert run_ranks(_leave_a_trace, 2) == [False, False]


def test_group_is_made_only_on_request():
    assert run_ranks(_without_group, 2, init=False) == [False, False]
    assert run_ranks(_own_group, 2, init=False) == [2, 2]


def test_a_local_function_is_refused():
    with pytest.raises(TypeError, match="top level"):
        run_ranks(lambda rank, world_size: rank, 2)


def test_deepspeed_gives_the_single_process_result_on_two_ranks():
    one_process = run_ranks(_deepspeed_step, 1)[0]
    assert run_ranks(_deepspeed_step, 2) == pytest.approx([one_process, one_process], rel=1e-6)


def test_a_job_takes_well_under_a_second_once_warm():
    run_ranks(_sum, 4)
    started_at = time.monotonic()
    for _ in range(3):
        run_ranks(_sum, 4)
    assert (time.monotonic() - started_at) / 3 < 1.5, "a cold start of four ranks takes 9 s"


def test_output_of_the_ranks_is_passed_on(capfd):
    run_ranks(_print, 2)
    assert capfd.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"


def _print(rank: int, world_size: int) -> None:
    print(f"hello from {rank}", file=sys.stdout)
