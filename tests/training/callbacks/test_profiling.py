"""Traces of a window of steps, one a rank; the line of facts at the start; graphs of torch.compile."""

import json
import logging
import re
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

import megatron
from megatron.callbacks import Step
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.builtin_callbacks.compiled_graphs import CompiledGraphs
from megatron.training.builtin_callbacks.profiling import StepProfiler, record_memory_history
from megatron.training.evaluation import evaluate, evaluate_objective
from megatron.training.metrics.run_metadata import PACKAGE, git_hash, metadata_line, run_metadata
from tests.methods.preferences.test_reference import FLY, PADDED, preferences
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.runs import LAYOUTS, LLAMA, NEOX, begin, begin_each, cells, config, run_to_end


def profiler_of(**keys: Any) -> StepProfiler:
    """Returns the profiler of a process without ranks, which has no collectives to settle."""
    args = NeoXArgs.from_dict(config(NEOX, keys))
    return StepProfiler(args, ParallelGroups.single(), logging.getLogger("test"), lambda: None)


def annotated_steps(trace: Path) -> list[str]:
    """torch's marks of the steps that a trace holds."""
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted({e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#") and e.get("ph") == "X"})


def profile_with_a_late_rank(rank: int, world_size: int, values: dict[str, Any]) -> list[bool]:
    """For the pool: whether each background collective was done as the trace ended; rank 1 comes late."""
    pending, done = list[dist.Work](), list[bool]()
    reduce, stop = dist.all_reduce, torch.profiler.profile.stop_trace

    def all_reduce(*args: Any, async_op: bool = False, **kwargs: Any) -> dist.Work | None:
        if async_op and rank == 1:
            time.sleep(0.05)
        work = reduce(*args, async_op=async_op, **kwargs)
        if async_op:
            pending.append(work)
        return work

    def stop_trace(profile: torch.profiler.profile) -> None:
        done.extend(work.is_completed() for work in pending)
        stop(profile)

    dist.all_reduce, torch.profiler.profile.stop_trace = all_reduce, stop_trace  # type: ignore[method-assign]
    run_to_end(rank, world_size, values)
    return done


@pytest.mark.parametrize("name", cells([], ["tp2"], ["plain", "pp2", "zero1"]))
def test_one_trace_a_rank(name: str, tmp_path: Path) -> None:
    """Nothing is under way when it ends: torch frees the records that gloo's threads still write to then."""
    ranks, layout = LAYOUTS[name]
    values = config(NEOX, layout, train_iters=6, num_layers=2, train_micro_batch_size_per_gpu=4, profile=True,
                   profile_step_start=3, profile_step_stop=5, tensorboard_dir=str(tmp_path),
                   log_interval=100)  # fmt: skip
    for done in run_ranks(profile_with_a_late_rank, ranks, values):
        assert (ranks == 1 or len(done) >= 3) and all(done)
    traces = sorted(tmp_path.glob("*.pt.trace.json"))
    assert [path.name.split(".")[0] for path in traces] == [f"rank{rank}" for rank in range(ranks)]
    for trace in traces:
        assert len(annotated_steps(trace)) == 2, "iterations 4 and 5"
        text = trace.read_text()
        assert "aten::mm" in text and "[memory]" in text and (ranks == 1 or "gloo:all_reduce" in text)
        assert "python_function" not in text, "hooks into Python crash where gloo's threads enter it"


@pytest.mark.parametrize(("start", "end", "steps"), [(1, 8, 2), (3, 8, 2), (4, 8, 1), (5, 8, 0), (1, 4, 1)])
def test_window_of_a_resumed_run(start: int, end: int, steps: int, tmp_path: Path) -> None:
    output_keys: dict[str, Any] = {"memory_profiling": True, "memory_profiling_path": str(tmp_path / "profile")}
    if end == 4:
        output_keys = {"profile": True, "log_dir": str(tmp_path)}
    profiler = profiler_of(**output_keys, profile_step_start=3, profile_step_stop=5)
    for iteration in range(start, end):
        profiler.before_step(iteration)
    profiler.close()
    traces = list((tmp_path / "profile").glob("rank0.*.pt.trace.json"))
    assert len(traces) == (steps > 0) and all(len(annotated_steps(trace)) == steps for trace in traces)
    assert all("python_function" in trace.read_text() for trace in traces)


@pytest.mark.parametrize("key", ["profile", "memory_profiling"])
def test_nowhere_to_write(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: .*folder"):
        profiler_of(**{key: True})


@pytest.mark.gpu
def test_memory_snapshot(tmp_path: Path) -> None:
    args = NeoXArgs.from_dict(config(NEOX, memory_profiling=True, memory_profiling_path=str(tmp_path)))
    groups = ParallelGroups.single("cuda:0")
    record_memory_history(args, groups)
    held = torch.zeros(2**20, device="cuda:0")
    StepProfiler(args, groups, logging.getLogger("test"), lambda: None).before_step(12)
    assert (tmp_path / "mem_snapshot_rank0.pickle").stat().st_size > 0 and held.is_cuda


def test_git_hash(tmp_path: Path) -> None:
    args, package = NeoXArgs.from_dict(config(NEOX)), tmp_path / "megatron"
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


def facts(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For the pool: the facts of each model, one norm of it frozen."""
    metadata = []
    for training in begin_each(configs):
        for name, param in training.engine.stage.named_parameters():
            param.requires_grad_("post_attention_layernorm.weight" not in name)
        metadata.append(run_metadata(training.args, training.groups, training.engine.stage))
    return metadata


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameter_counts(ranks: int) -> None:
    common = {"num_layers": 2, "no_weight_tying": False, "train_micro_batch_size_per_gpu": 4, "git_hash": "f00"}
    configs = [config(NEOX, layout, common) for size, layout in LAYOUTS.values() if size == ranks]
    hidden = 32
    block = 4 * hidden * hidden + 4 * hidden + 8 * hidden * hidden + 5 * hidden + 4 * hidden
    total = 384 * hidden + 2 * block + 2 * hidden
    trainable = total - 2 * hidden
    expected: dict[str, Any] = {"git_hash": "f00", "total_params": total, "trainable_params": trainable}
    expected["trainable_share"] = trainable / total
    assert run_ranks(facts, ranks, configs) == [[expected] * len(configs)] * ranks
    assert metadata_line(expected).startswith(f" > total params: {total:,} | trainable: {trainable:,} (99.")


# -- graphs of torch.compile ---------------------------------------------------------------------------------
def test_metric_and_one_warning_with_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    double = torch.compile(lambda x: 2 * x, backend=CompileCounter(), dynamic=False)
    run: Any = SimpleNamespace(args=SimpleNamespace(log_interval=2), logger=logging.getLogger("graphs"))
    callback, rows = CompiledGraphs(), []
    for iteration in range(1, 14):
        double(torch.ones(iteration // 2 + 1))
        step = Step(iteration, 0, 0, SimpleNamespace())  # type: ignore[arg-type]
        callback.on_step_end(run, step)
        rows.append({name: step.row[name] for name in step.row if name.startswith("runtime/")})
    assert rows[0] == rows[2] == {}
    assert rows[1] == {"runtime/compiled_graphs": 2, "runtime/recompilations": 0}
    assert rows[9] == {"runtime/compiled_graphs": 6, "runtime/recompilations": 4}
    (record,) = [record for record in caplog.records if record.name == "graphs"]  # torch writes its own
    assert "torch.compile" in record.message and re.search(r"\b5\b.* graphs", record.message)
    assert "size mismatch at index 0. expected" in record.message
    torch._dynamo.reset()


def graphs_of(rank: int, world_size: int, values: dict[str, Any]) -> list[int]:
    """For the pool: graphs after each of two steps, a validation whose last batch is smaller, a step."""
    from torch._dynamo.utils import counters

    torch.compile = partial(torch.compile, backend="eager")  # of blocks and of what is done to logits
    training = begin(values)
    batches, num_graphs, eod = batches_of(training), [], training.tokenizer.eod
    validate: Any = evaluate_objective if "train_impl" in values else evaluate
    for part in ("step", "step", "validation", "step"):
        if part == "step":
            training.engine.train_step(next(batches), 1e-4)
        else:
            validate(training.engine, training.datasets.train, 3, eod)
        num_graphs.append(counters["stats"]["unique_graphs"])
    return num_graphs


@pytest.mark.parametrize("kind", cells(["language modelling"], ["DPO"]))
def test_validation_makes_no_graphs(kind: str, tmp_path: Path) -> None:
    """One of blocks and two of logits; DPO two of logits, and one of the reference's blocks."""
    if kind == "DPO":
        values, graphs = preferences(tmp_path, FLY, PADDED, compile="block"), 4
    else:
        values, graphs = config(LLAMA, compile="block", train_micro_batch_size_per_gpu=2), 3
    assert run_ranks(graphs_of, 1, values) == [[graphs] * 4]
