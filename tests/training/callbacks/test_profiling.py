"""Traces of a window of steps, one a rank; the line of facts at the start."""

import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest

import megatron
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.callbacks.profiling import StepProfiler
from megatron.training.metrics.run_metadata import PACKAGE, git_hash, metadata_line
from tests.pool import run_ranks
from tests.training.runs import LAYOUTS, NEOX, begin, config, run_to_end


def no_collectives() -> None:
    """What a StepProfiler without ranks settles."""


def annotated_steps(trace: Path) -> list[str]:
    """torch's marks of the steps that a trace holds."""
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted({e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#") and e.get("ph") == "X"})


@pytest.mark.parametrize("name", ["plain", "pp2", "tp2", "zero1"])
def test_one_trace_a_rank(name: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    given = config(
        NEOX, layout, train_iters=6, num_layers=2, train_micro_batch_size_per_gpu=4, profile=True,
        profile_step_start=3, profile_step_stop=5, tensorboard_dir=str(tmp_path), log_interval=100,
    )  # fmt: skip
    run_ranks(run_to_end, ranks, given)
    traces = sorted(tmp_path.glob("*.pt.trace.json"))
    assert [path.name.split(".")[0] for path in traces] == [f"rank{rank}" for rank in range(ranks)]
    for trace in traces:
        assert len(annotated_steps(trace)) == 2, "iterations 4 and 5"
        text = trace.read_text()
        assert "aten::mm" in text and "[memory]" in text and (ranks == 1 or "gloo:all_reduce" in text)
        assert "python_function" not in text, "hooks into Python crash where gloo's threads enter it"


def profile_with_a_late_rank(rank: int, world_size: int, values: dict[str, Any]) -> list[bool]:
    """For the pool: whether each collective begun in the background was done when the trace ended; rank 1
    comes late to them."""
    import time

    import torch
    import torch.distributed as dist

    begun: list[dist.Work] = []
    done: list[bool] = []
    reduce, stop = dist.all_reduce, torch.profiler.profile.stop_trace

    def all_reduce(*given: Any, async_op: bool = False, **more: Any) -> dist.Work | None:
        if async_op and rank == 1:
            time.sleep(0.05)
        work = reduce(*given, async_op=async_op, **more)
        if async_op:
            begun.append(work)
        return work

    def stop_trace(profile: torch.profiler.profile) -> None:
        done.extend(work.is_completed() for work in begun)
        stop(profile)

    dist.all_reduce, torch.profiler.profile.stop_trace = all_reduce, stop_trace  # type: ignore[method-assign]
    run_to_end(rank, world_size, values)
    return done


def test_nothing_is_under_way_when_the_trace_ends(tmp_path: Path) -> None:
    """torch frees the records that gloo's threads still write to then: it corrupted the heap."""
    given = config(
        NEOX, num_layers=2, train_micro_batch_size_per_gpu=4, train_iters=5, profile=True, profile_step_start=1,
        profile_step_stop=3, tensorboard_dir=str(tmp_path), log_interval=100,
    )  # fmt: skip
    for done in run_ranks(profile_with_a_late_rank, 2, given):
        assert len(done) >= 3 and all(done)


@pytest.mark.parametrize(("start", "steps"), [(1, 2), (3, 2), (4, 1), (5, 0)])
def test_window_of_a_resumed_run(start: int, steps: int, tmp_path: Path) -> None:
    """Also one that starts within it, or after it, or ends within it."""
    keys: dict[str, Any] = {"memory_profiling": True, "memory_profiling_path": str(tmp_path)}
    args = NeoXArgs.from_dict(config(NEOX, keys, profile_step_start=3, profile_step_stop=5))
    profiler = StepProfiler(args, ParallelGroups.single(), logging.getLogger("test"), no_collectives)
    for iteration in range(start, 8):
        profiler.before_step(iteration)
    profiler.close()
    traces = list(tmp_path.glob("rank0.*.pt.trace.json"))
    assert len(traces) == (steps > 0) and all(len(annotated_steps(trace)) == steps for trace in traces)


def test_run_that_ends_within_the_window(tmp_path: Path) -> None:
    args = NeoXArgs.from_dict(
        config(NEOX, profile=True, profile_step_start=1, profile_step_stop=9, log_dir=str(tmp_path))
    )
    profiler = StepProfiler(args, ParallelGroups.single(), logging.getLogger("test"), no_collectives)
    for iteration in range(4):
        profiler.before_step(iteration)
    profiler.close()
    (trace,) = (tmp_path / "profile").iterdir()
    assert len(annotated_steps(trace)) == 3 and "python_function" in trace.read_text()


@pytest.mark.parametrize("key", ["profile", "memory_profiling"])
def test_nowhere_to_write(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: there is no folder for its files"):
        args = NeoXArgs.from_dict(config(NEOX, {key: True}))
        StepProfiler(args, ParallelGroups.single(), logging.getLogger("test"), no_collectives)


@pytest.mark.gpu
def test_memory_snapshot(tmp_path: Path) -> None:
    import torch

    from megatron.training.callbacks.profiling import record_memory_history

    args = NeoXArgs.from_dict(config(NEOX, memory_profiling=True, memory_profiling_path=str(tmp_path)))
    groups = ParallelGroups.single("cuda:0")
    record_memory_history(args, groups)
    held = torch.zeros(2**20, device="cuda:0")
    profiler = StepProfiler(args, groups, logging.getLogger("test"), no_collectives)
    profiler.before_step(12)
    assert (tmp_path / "mem_snapshot_rank0.pickle").stat().st_size > 0 and held.is_cuda


def test_git_hash(tmp_path: Path) -> None:
    args = NeoXArgs.from_dict(config(NEOX))
    package = tmp_path / "megatron"
    package.mkdir()
    assert git_hash(args, package) is None, "no checkout"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    commit = git_hash(args, package)
    assert commit and head.startswith(commit) and len(commit) >= 7
    (package / "site-packages" / "megatron").mkdir(parents=True)
    assert git_hash(args, package / "site-packages" / "megatron") is None, "another project's checkout"
    assert git_hash(args.replace(git_hash="f00"), package) == "f00"
    assert Path(megatron.__file__).parent == PACKAGE, "else no run knows its commit"


def facts(rank: int, world_size: int, given: dict[str, Any]) -> dict[str, Any]:
    """For the pool: the facts of a model, one norm of it frozen."""
    from megatron.training.metrics.run_metadata import run_metadata

    training = begin(given)
    for name, param in training.engine.stage.named_parameters():
        if "post_attention_layernorm.weight" in name:
            param.requires_grad_(False)
    metadata = run_metadata(training.args, training.groups, training.engine.stage)
    training.engine.close()
    return metadata


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameter_counts(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    given = config(NEOX, layout, num_layers=2, no_weight_tying=False, train_micro_batch_size_per_gpu=4, git_hash="f00")
    everyone = run_ranks(facts, ranks, given)
    hidden, vocabulary = 32, 384
    block = 4 * hidden * hidden + 4 * hidden + 8 * hidden * hidden + 5 * hidden + 4 * hidden
    total = vocabulary * hidden + 2 * block + 2 * hidden
    trainable = total - 2 * hidden
    assert (
        everyone
        == [
            {
                "git_hash": "f00",
                "total_params": total,
                "trainable_params": trainable,
                "trainable_share": trainable / total,
            }
        ]
        * ranks
    )
    assert metadata_line(everyone[0]).startswith(f" > total params: {total:,} | trainable: {trainable:,} (99.")
