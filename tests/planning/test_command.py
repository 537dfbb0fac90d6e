"""`deepy.py plan`: what it prints for people and as JSON, and what it refuses."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.launch import install_root
from megatron.neox_arguments import ConfigError
from megatron.planning.fake_cuda import shim
from megatron.planning.ranks import expected_groups, ranks_of_axes
from megatron.planning.report import Collective, RankReport
from megatron.planning.traffic import sent_bytes
from megatron.training.builtin_callbacks.plan_comparison import PlanComparison
from tests.fake.layouts import DPO, HIDDEN, MODEL, VOCAB
from tests.training.layout_runs import args_of

# What these tests depend on and no import names: spawned processes run it.
DEPENDS_ON = ("megatron.planning.dry_run", "megatron.planning.tracing")
needs_compiler = pytest.mark.skipif(shim.lacking() is not None, reason=f"left out: {shim.lacking()}")


@needs_compiler
def test_two_stages(plan: Callable[..., tuple[int, str, str]]) -> None:
    """Every stage has a line; sizes are those of the parameters, by hand."""
    pipeline = {"pipe_parallel_size": 2, "model_parallel_size": 2, "gradient_accumulation_steps": 8}
    code, out, _ = plan("--gpus", "8", "--json", "--gpu-memory", "0.001", **pipeline)
    report = json.loads(out)
    block = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * MODEL["intermediate_size"] + 2 * HIDDEN
    total = 2 * block + 2 * VOCAB * HIDDEN + HIDDEN
    assert report["model"]["total"] == report["model"]["active"] == report["model"]["trained"] == total
    assert report["layout"] == {"tensor": 2, "context": 1, "data": 2, "pipe": 2} and report["world_size"] == 8
    assert report["micro_batches"] == 8 and report["time"] is None
    stage_0, stage_1 = report["stages"]
    assert [layer for rank in (stage_0, stage_1) for layer in rank["layers"]] == [0, 2, 3, 5, 6]
    norms = 2 * HIDDEN  # not sharded
    assert stage_0["weights"] == 2 * ((block - norms + VOCAB * HIDDEN) // 2 + norms)
    assert stage_0["step"] > stage_0["between_steps"] >= stage_0["weights"] + stage_0["optimizer_states"]
    assert report["fits"] is False and code == 1 and report["problems"] == []
    kinds = {(row["axis"], row["kind"]) for row in report["sent"]}
    assert {("tensor", "all_reduce"), ("pipe", "send")} <= kinds


@pytest.mark.more
@needs_compiler
def test_forks_of_the_command(plan: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """The command gives itself fake CUDA and forks; the numbers are those of processes that start anew."""
    flags = ("--gpus", "2", "--gpu", "h100", "--json")
    file = tmp_path / "model.yml"
    expected = json.loads(plan(*flags, pipe_parallel_size=2)[1])
    command = [sys.executable, "deepy.py", "plan", str(file), *flags, "--processes", "2"]
    done = subprocess.run(command, cwd=install_root(), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected


@pytest.mark.more
@needs_compiler
def test_lines_of_a_dry_run(plan: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = plan("--dry-run-ranks", "4", "--gpus-per-node", "2", model_parallel_size=2, compile="block")
    assert code == 0
    lines = out.splitlines()
    assert any("4 ranks" in line for line in lines) and "agree" in lines[-1]
    axes = {line.split()[0]: line.split()[-1] for line in lines if "all_reduce" in line}
    assert axes["tensor"] == "within" and axes["data"] == "between"


@pytest.mark.more
@needs_compiler
def test_seconds_days_and_price(plan: Callable[..., tuple[int, str, str]]) -> None:
    """All follow from the seconds of a step."""
    flags = ("--gpus", "4", "--gpu", "gh200", "--gpus-per-node", "2", "--net", "tcp", "--price", "3", "--json")
    report = json.loads(plan(*flags, train_iters=7200)[1])
    time, model = report["time"], report["model"]
    assert sum(time["parts"].values()) == pytest.approx(time["seconds"]) and report["fits"] is True
    assert time["tokens_per_s_per_gpu"] == pytest.approx(model["tokens"] / time["seconds"] / 4)
    assert time["gpu_hours"] == pytest.approx(4 * 2 * time["seconds"]) == time["price"] / 3
    assert time["days"] == pytest.approx(time["seconds"] / 12)
    assert time["mwh"] == pytest.approx(time["gpu_hours"] * 9e-4)
    assert time["share_of_peak"] == pytest.approx(model["flops"] / time["seconds"] / 4 / 989.4e12)
    fast = json.loads(plan("--gpus", "4", "--gpu", "gh200", "--json", train_iters=7200)[1])
    assert fast["time"]["parts"]["data"] < time["parts"]["data"], "all four are on one machine"


@pytest.mark.more
@needs_compiler
def test_the_plan_of_a_run(plan: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan("--gpus", "1", "--gpu", "h100", "--json")[1])
    args = args_of({**MODEL, "plan_file": str(file)}, {}, 1)
    groups = SimpleNamespace(world_size=1, world_rank=0, device=torch.device("cpu"))
    PlanComparison(SimpleNamespace(args=args, iteration=0, groups=groups))
    with pytest.raises(ConfigError, match="micro-batches 1, here 2"):
        changed = args_of({**MODEL, "plan_file": str(file), "gradient_accumulation_steps": 2}, {}, 1)
        PlanComparison(SimpleNamespace(args=changed, iteration=0, groups=groups))


@needs_compiler
def test_ways_to_fit(plan: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """A step that does not fit: the cheapest changes that do, and each, planned by itself, fits."""
    memory = ("--gpus", "2", "--gpu", "h100", "--gpu-memory")
    keys = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    planned = json.loads(plan(*memory, "1", "--json", **keys)[1])
    assert planned["fits"] is True and planned["ways"] is None
    limit = str(0.8 * planned["stages"][0]["step"] / 2**30)
    code, out, _ = plan(*memory, limit, "--json", **keys)
    report = json.loads(out)
    assert code == 1 and report["fits"] is False and len(report["ways"]) == 3
    assert [way["seconds"] for way in report["ways"]] == sorted(way["seconds"] for way in report["ways"])
    changes = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in report["ways"][0]["changes"].items()]
    code, out, _ = plan(*memory, limit, "--json", "--set", *changes, **keys)
    planned = json.loads(out)
    assert code == 0 and planned["fits"] is True and planned["model"]["tokens"] == report["model"]["tokens"]
    assert max(stage["step"] for stage in planned["stages"]) == report["ways"][0]["step_bytes"]
    assert planned["time"]["seconds"] == pytest.approx(report["ways"][0]["seconds"])


@pytest.mark.more
@needs_compiler
def test_other_values_of_a_key(plan: Callable[..., tuple[int, str, str]]) -> None:
    """Each is as a plan of its own; what the run cannot have says why."""
    flags = ("--gpus", "4", "--gpu", "h100", "--json")
    stages = {"zero_optimization": {"stage": 1}, "train_batch_size": 8, "gradient_accumulation_steps": None}
    rows = json.loads(plan(*flags, "--explain", "model_parallel_size=2,3", **stages)[1])["explained"]
    assert [row["value"] for row in rows] == [1, 2, 3] and "3" in rows[2]["refusal"] and rows[2]["way"] is None
    for row in rows[:2]:
        report = json.loads(plan(*flags, **stages, model_parallel_size=row["value"])[1])
        assert row["way"]["step_bytes"] == report["stages"][0]["step"]
    assert "tensor" in rows[1]["way"]["parts"] and "tensor" not in rows[0]["way"]["parts"]
    for key, values in {"gradient_accumulation_steps": [1, 2], "optimizer.params.betas": [[0.9, 0.95]]}.items():
        words = f"{key}=[0.9, 0.95]" if key.startswith("optim") else key
        rows = json.loads(plan(*flags, "--explain", words, **stages)[1])["explained"][1:]
        assert [row["value"] for row in rows] == values[-len(rows) :] and all(row["way"] for row in rows)
    lines = plan(*flags[:-1], "--explain", "zero_optimization.stage", **stages)[1].splitlines()
    assert [line.split()[0] for line in lines[-4:]] == ["1", "0", "2", "3"]


@needs_compiler
def test_a_rank_that_fails(plan: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    failed = RankReport(0, error="RuntimeError: gone (megatron/model/stage.py:1)")
    monkeypatch.setattr("megatron.planning.plan.run_ranks", lambda *args: iter([failed]))
    code, out, _ = plan("--dry-run-ranks", "1", "--gpu", "h100")
    assert code == 1 and "problem: rank 0: RuntimeError: gone" in out


@pytest.mark.parametrize(
    ("flags", "keys", "facts"),
    [
        ((), {"engine": "deepspeed"}, ("engine", "deepspeed", "native")),
        ((), {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
         ("zero_optimization", "host")),
        (("--gpus", "16", "--gpus-per-node", "4"),
         {"moe_num_experts": 8, "moe_top_k": 2, "moe_router_type": "topk", "expert_parallel_size": 8},
         ("expert_parallel_size", "expert_parallel_across_nodes")),
        ((), {"skip_step_above_sigma": 6.0}, ("skip_step_above_sigma",)),
        ((), {"distillation": {"teacher": "teacher"}}, ("distillation", "language_modelling")),
        ((), {**DPO, "dpo_reference": "on_the_fly"}, ("dpo_reference", "cache")),
        ((), {"padded_vocab_size": None}, ("padded_vocab_size", "vocab_file")),
        ((), {"train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": None},
         ("train_micro_batch_size_per_gpu",)),
        (("--gpus", "3"), {"model_parallel_size": 2}, ("model_parallel_size", "3 ranks")),
        (("--gpus", "2", "--dry-run-ranks", "2"), {}, ("--gpus", "--dry-run-ranks")),
        (("--net", "tcp"), {}, ("--net", "--gpu")),
        (("--search",), {}, ("--search", "--gpu")),
        (("--gpu", "h100", "--explain", "num_layer"), {}, ("num_layer", "no such key")),
        (("--gpu", "h100", "--explain", "vocab_file"), {}, ("vocab_file", "VALUE")),
        (("--gpu", "h100", "--explain", "optimizer.params.l"), {}, ("optimizer.params", "lr")),
        (("--gpu", "h100", "--explain", "num_layers.x"), {}, ("num_layers.x", "it is 2")),
        (("--gpu", "h100", "--explain", "seq_length=[1"), {}, ("seq_length", "not valid YAML")),
    ],
    ids=["engine", "offload", "experts", "spikes", "method", "reference", "vocabulary", "batch", "layout", "flags",
         "network",
         "search", "unknown key", "key without neighbours", "sub-key", "no section", "values"],
)  # fmt: skip
def test_refusals(
    flags: tuple[str, ...], keys: dict[str, Any], facts: tuple[str, ...], plan: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = plan(*flags, **keys)
    assert code == 1 and out == "" and all(fact in err for fact in facts), err


def test_ranks_that_stand_for_all() -> None:
    args = args_of({**MODEL, "pipe_parallel_size": 2, "model_parallel_size": 2}, {}, 16)
    groups = expected_groups(args, 7)
    assert [groups[axis] for axis in ("tensor", "context", "data", "pipe")] == [(6, 7), (7,), (1, 3, 5, 7), (7, 15)]
    assert groups["data_context"] == groups["expert_data"] == groups["data"] and groups["expert"] == (7,)
    assert ranks_of_axes(args) == [0, 1, 2, 4, 6, 8, 15]


def test_bytes_that_a_rank_sends() -> None:
    sizes = {"all_reduce": 150, "all_gather": 75, "reduce_scatter": 75, "all_to_all": 75, "send": 100, "broadcast": 100}
    assert {kind: sent_bytes(Collective((0, 1, 2, 3), kind, 100, "float32")) for kind in sizes} == sizes
