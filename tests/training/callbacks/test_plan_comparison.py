"""A run beside its plan: one line after 50 steps, and plans of other runs are refused."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.builtin_callbacks.plan_comparison import PlanComparison
from tests.pool import run_ranks
from tests.training.runs import LLAMA, config, output_of_run

LINE = re.compile(r"plan: after (\d+) iterations ([\d,]+) tokens/s on each GPU \| planned: 1,000 \(([+-][\d,.]+)%\)")


def written_plan(file: Path, world: int, tokens: int, micro_batches: int = 1, **layout: int) -> str:
    """Writes the part of a plan that a run reads; tests/planning has full plans."""
    stage = {"weights": 2**30, "gradients": 2**30, "optimizer_states": 3 * 2**30, "step": 10 * 2**30}
    content = {
        "model": {"tokens": tokens}, "world_size": world,
        "settings": {"zero_optimization.stage": 0, "precision": "auto", "precision_fp8": "off"},
        "micro_batches": micro_batches, "stages": [stage],
        "layout": {"tensor": 1, "context": 1, "data": 1, "pipe": 1, **layout}, "time": {"tokens_per_s_per_gpu": 1000.0},
    }  # fmt: skip
    file.write_text(json.dumps(content))
    return str(file)


def test_the_line_of_a_run(tmp_path: Path) -> None:
    """One line, with the first row after 50 steps."""
    keys = {"num_layers": 2, "train_micro_batch_size_per_gpu": 2, "train_batch_size": 4, "train_iters": 75,
            "log_interval": 5}  # fmt: skip
    run = config(LLAMA, keys, model_parallel_size=1)
    plan = written_plan(tmp_path / "plan.json", 2, 4 * run["seq_length"], data=2)
    output = run_ranks(output_of_run, 2, {**run, "plan_file": plan}, True)[0]
    [(step, rate, share)] = LINE.findall(output)
    assert step == "50" and float(share) == pytest.approx(100 * (float(rate.replace(",", "")) / 1000 - 1), abs=0.1)


def training_of(log_interval: int, device: str = "cuda", **keys: Any) -> Any:
    """A run as the comparison sees it, whose tensors take 3 GiB of weights."""
    args = NeoXArgs.from_dict({**config(LLAMA), "log_interval": log_interval, **keys}).for_world(1)
    sizes = {"weights": 3 * 2**30, "gradients": 2**30, "optimizer states": 3 * 2**30}
    tensors = {
        part: [SimpleNamespace(numel=lambda size=size: size, element_size=lambda: 1, device=torch.device("cuda"))]
        for part, size in sizes.items()
    }
    logger = logging.getLogger("plan")
    groups = SimpleNamespace(world_rank=0, world_size=1, device=torch.device(device))
    engine = SimpleNamespace(tensors=lambda: tensors)
    return SimpleNamespace(args=args, iteration=100, groups=groups, engine=engine, logger=logger)


def test_memory_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Compared are steps after a resume, but not the slow ones at its start."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12 * 2**30)
    args = NeoXArgs.from_dict(config(LLAMA)).for_world(1)
    tokens = args.train_batch_size * args.seq_length
    plan = written_plan(tmp_path / "plan.json", 1, tokens, args.gradient_accumulation_steps)
    comparison = PlanComparison(training_of(45, plan_file=plan))
    caplog.set_level(logging.INFO)
    for iteration in (100, 135, 149, 154, 155, 160):
        comparison.on_settled(SimpleNamespace(iteration=iteration, row={"runtime/tokens_per_sec": 900.0}))
    [line] = caplog.messages
    assert "after 155 iterations 900 tokens/s" in line and "1,000 (-10.0%)" in line
    assert "12.00 GiB, planned 10.00 (+20.0%)" in line and "weights, by +2.00 GiB" in line


def test_plans_of_other_runs(tmp_path: Path) -> None:
    args = NeoXArgs.from_dict(config(LLAMA)).for_world(1)
    tokens, steps = args.train_batch_size * args.seq_length, args.gradient_accumulation_steps
    plans = {
        "ranks 8, here 1": written_plan(tmp_path / "ranks", 8, tokens, steps),
        "pipeline ranks 2, here 1": written_plan(tmp_path / "stages", 1, tokens, steps, pipe=2),
        "zero_optimization.stage 3, here 0": str(tmp_path / "zero"),
        f"tokens of a step 7, here {tokens}": written_plan(tmp_path / "tokens", 1, 7, steps),
        "FileNotFoundError": str(tmp_path / "nowhere"),
    }
    content = json.loads(Path(plans["ranks 8, here 1"]).read_text())
    (tmp_path / "time").write_text(json.dumps({**content, "time": None}))
    (tmp_path / "part").write_text("{}")
    plan = json.loads(Path(written_plan(tmp_path / "zero", 1, tokens, steps)).read_text())
    (tmp_path / "zero").write_text(json.dumps({**plan, "settings": {"zero_optimization.stage": 3}}))
    plans |= {"no seconds": str(tmp_path / "time"), "no plan": str(tmp_path / "part")}
    for fact, file in plans.items():
        with pytest.raises(ConfigError, match=f"plan_file.*{fact}"):
            PlanComparison(training_of(10, plan_file=file))
