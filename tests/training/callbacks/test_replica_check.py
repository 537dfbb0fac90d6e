"""A flipped bit in a copy of a weight ends the run on all ranks and is named; equal copies raise no alarm."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.tensor import DTensor

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training import train
from megatron.training.builtin_callbacks.replica_check import ReplicaMismatchError
from megatron.training.engine import Engine
from tests.launch.runs import DEEPY, PIPED_OUTPUT, ROOT, environment
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, NEOX, RPE, SP2, begin, cells, config, metric_rows, output_of_run

NORM, MATRIX = "2.input_layernorm.weight", "3.mlp.linear1.weight"
BF16 = {"precision": "bfloat16"}
HPZ = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
DEEPSPEED = {"engine": "deepspeed"}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "momentum": 0.95}}}


def flip(engine: Engine, name: str, bit: int, master: bool = False) -> None:
    """Flip a bit of the last element of this rank's part of a parameter. master: of its fp32 master."""
    param: Any = dict(engine.stage.named_parameters())[f"layers.{name}"]
    if master:
        param = next(s.local for s in engine.shards.trained if s.param is param)  # type: ignore[attr-defined]
    values = (param.to_local() if isinstance(param, DTensor) else param).detach().view(-1)
    values.view(torch.int32 if values.itemsize == 4 else torch.int16)[-1] ^= 1 << bit


def run_flipped(
    rank: int, world_size: int, values: dict[str, Any], flips: dict[int, tuple[Any, ...]], step: int
) -> tuple[str | None, int]:
    """For the pool: the message and exit code that end a run.

    flips: by rank, arguments of `flip`, called after the step and before anything reads the weights."""
    training = begin(values)
    train_step: Callable[..., Any] = training.engine.train_step

    def wrong_step(*args: Any) -> Any:
        result = train_step(*args)
        if training.iteration + 1 == step and rank in flips:
            flip(training.engine, *flips[rank])
        return result

    training.engine.train_step = wrong_step  # type: ignore[method-assign]
    try:
        train(training)
    except ReplicaMismatchError as problem:
        return str(problem), problem.exit_code
    return None, 0


def values_of(folder: Path, layout: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    values = {"num_layers": 2, "train_micro_batch_size_per_gpu": 1, "train_batch_size": 12, "train_iters": 7}
    return config(
        NEOX, values, {"replica_check_interval": 3, "checkpoint_factor": 4, "save": str(folder)}, layout, **overrides
    )


FLIPS = {
    "dp2": (2, {}, {1: (NORM, 0)}, NORM, None),
    "dp3": (3, {}, {1: (MATRIX, 31)}, MATRIX, ("rank 1", "ranks 0, 2")),
    "dp4, one half": (4, {}, {0: (NORM, 3), 3: (NORM, 3)}, NORM, None),
    "dp4, two ranks": (4, {}, {0: (NORM, 3), 3: (NORM, 4)}, NORM, ("ranks 0, 3", "ranks 1-2")),
    "dp3 master": (3, BF16, {2: (MATRIX, 0, True)}, MATRIX, ("rank 2", "ranks 0-1")),
    "dp3 16 bits": (
        3, {**BF16, "replica_check_interval": 1}, {0: (MATRIX, 2)}, f"{MATRIX}, bf16", ("rank 0", "ranks 1-2")
    ),
    "tp2": (2, {"model_parallel_size": 2}, {1: (NORM, 22)}, NORM, None),
    "pp2 dp3": (6, {"pipe_parallel_size": 2}, {4: (MATRIX, 7)}, MATRIX, ("rank 4", "ranks 3, 5")),
    "tp2 dp3": (6, {"model_parallel_size": 2}, {3: (MATRIX, 1)}, f"{MATRIX}, part 1", ("rank 3", "ranks 1, 5")),
    "zero3 hpz": (4, HPZ, {3: (MATRIX, 5)}, f"{MATRIX}, elements", None),
    "zero1 tp2": (4, {"model_parallel_size": 2, "zero_optimization": {"stage": 1}}, {2: (NORM, 5)}, NORM, None),
    "deepspeed dp3": (3, DEEPSPEED, {2: (MATRIX, 0)}, MATRIX, ("rank 2", "ranks 0-1")),
    "deepspeed zero1": (
        3, {**DEEPSPEED, **BF16, "zero_optimization": {"stage": 1}, "replica_check_interval": 1}, {0: (NORM, 0)}, NORM,
        ("rank 0", "ranks 1-2"),
    ),
    "deepspeed pp2 dp2": (
        4, {**DEEPSPEED, "pipe_parallel_size": 2, "replica_check_interval": 1}, {3: (MATRIX, 9)}, MATRIX, None
    ),
}  # fmt: skip
AT_ONCE = ["dp2", "dp3", "tp2", "deepspeed zero1"]


@pytest.mark.parametrize("name", cells(AT_ONCE, [name for name in FLIPS if name not in AT_ONCE]))
def test_a_flipped_bit_ends_the_run_on_all_ranks(name: str, tmp_path: Path) -> None:
    """After step 5, which the check of step 6 finds, or its own; the checkpoint of step 4 is the last one."""
    ranks, layout, flips, weight, minority = FLIPS[name]
    values = values_of(tmp_path / "run", layout)
    outcomes = run_ranks(run_flipped, ranks, values, flips, 5)
    message, exit_code = outcomes[0]
    assert message is not None and all(outcome == outcomes[0] for outcome in outcomes) and exit_code not in (0, 1)
    step = 5 if values["replica_check_interval"] == 1 else 6
    assert re.match(rf"step {step}: .* equal after step 4\n", message), message
    assert "global_step4" in message
    assert (tmp_path / "run" / "latest").read_text() == "global_step4"
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"
    (line,) = (line for line in message.splitlines() if line.startswith(weight))
    if minority is None:
        assert re.search(rf": ranks? .*\b{max(flips)}\b.* differ; ", line), line
    else:
        assert re.search(rf": {minority[0]} \(rank .*: host .*, cpu\) .* from {minority[1]}$", line), line


def test_nothing_is_saved_between_checks(tmp_path: Path) -> None:
    """A save that is due before the next check compares the weights, too."""
    values = values_of(tmp_path / "run", {}, replica_check_interval=100)
    message, _ = run_ranks(run_flipped, 2, values, {1: (NORM, 0)}, 5)[0]
    assert message is not None and message.startswith("step 7: ")
    assert [path.name for path in (tmp_path / "run").glob("*global_step*")] == ["global_step4"]


QUIET: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 muon": (2, {**BF16, **MUON}),
    "tp2 pp2 sp": (4, {**SP2, **BF16, "pipe_parallel_size": 2, "checkpoint_activations": True, "hidden_dropout": 0.1}),
    "pp2 tied rpe": (2, {**RPE, "pipe_parallel_size": 2, "no_weight_tying": False}),
    "zero2 tp2": (4, {**BF16, "model_parallel_size": 2, "zero_optimization": {"stage": 2}}),
    "experts": (2, {**LLAMA, "moe_num_experts": 4, "moe_top_k": 2, "expert_parallel_size": 2}),
    "tp2 muon": (4, {**MUON, "model_parallel_size": 2}),
    "hpz": (4, {**BF16, **HPZ}),
    "context": (4, {"context_parallel_size": 2, **BF16}),
    "bf16 states": (2, {**BF16, **ADAMW, "optimizer_state_dtype": "bf16"}),
    "deepspeed zero2 tp2": (4, {**DEEPSPEED, **BF16, "model_parallel_size": 2, "zero_optimization": {"stage": 2}}),
    "deepspeed pp2 tied": (4, {**DEEPSPEED, **BF16, "pipe_parallel_size": 2, "no_weight_tying": False}),
    "deepspeed zero1 fp32": (2, {**DEEPSPEED, "zero_optimization": {"stage": 1}}),
}  # fmt: skip
QUIET_AT_ONCE = ["dp2 muon", "pp2 tied rpe"]


@pytest.mark.parametrize("name", cells(QUIET_AT_ONCE, [name for name in QUIET if name not in QUIET_AT_ONCE]))
def test_equal_copies_raise_no_alarm(name: str, tmp_path: Path) -> None:
    """After every step, and after a resume."""
    ranks, layout = QUIET[name]
    values = values_of(tmp_path / "run", layout, replica_check_interval=1, checkpoint_factor=7, lr_decay_iters=14)
    for end in (7, 14):
        run_ranks(run_flipped, ranks, {**values, "train_iters": end}, {}, 0)
    assert len(metric_rows(tmp_path / "run")) == 14


def test_the_start_says_how_much_is_compared(tmp_path: Path) -> None:
    values = values_of(tmp_path / "run", {"model_parallel_size": 2}, save=None, train_iters=1)
    output = run_ranks(output_of_run, 2, values, True)[0]
    (line,) = re.findall(r"replica_check_interval: every 3 .* compare (\d+) of its (\d+)", output)
    norms_and_biases, weights = map(int, line)
    assert 0 < norms_and_biases < weights


def refusal(rank: int, world_size: int, values: dict[str, Any]) -> str:
    training = begin(values)
    with pytest.raises(ConfigError) as caught:
        train(training)
    return str(caught.value)


@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (2, {"zero_optimization": {"stage": 3}})])
def test_a_layout_without_copies_is_refused(ranks: int, layout: dict[str, Any], tmp_path: Path) -> None:
    message = run_ranks(refusal, ranks, values_of(tmp_path / "run", layout))[0]
    assert "replica_check_interval: " in message and f"{ranks} rank" in message
    assert NeoXArgs.from_dict(values_of(tmp_path / "run", layout)).replica_check_interval == 3


FLIP_ONCE = """
import os
import torch
from megatron.callbacks import Callback

class Flip(Callback):
    def on_step_end(self, run, step):
        if (step.iteration, run.groups.world_rank, os.environ.get("NEOX_RESTARTS")) == (5, 1, "0"):
            param = dict(run.engine.stage.named_parameters())["layers.2.input_layernorm.weight"]
            param.data.view(torch.int32)[0] ^= 1 << 20
"""


@pytest.mark.more
def test_a_restarted_run_repeats_the_steps(tmp_path: Path) -> None:
    """With max_restarts the run goes on from the last checkpoint, to the losses of an undisturbed run."""
    (tmp_path / "flip.py").write_text(FLIP_ONCE)
    rows = {}
    for name in ("quiet", "flipped"):
        values = values_of(tmp_path / name, {"max_restarts": 1, "num_gpus": 2})
        values |= {"callbacks": [f"{tmp_path}/flip.py:Flip"]} if name == "flipped" else {}
        (tmp_path / "run.yml").write_text(yaml.safe_dump(values))
        done = subprocess.run(
            [*DEEPY, str(ROOT / "train.py"), "run.yml"], cwd=tmp_path, env=environment(), timeout=300, **PIPED_OUTPUT
        )
        assert done.returncode == 0, done.stdout
        rows[name] = {row["iteration"]: row["train/lm_loss"] for row in metric_rows(tmp_path / name)}
        assert ("restart 1 of 1" in done.stdout) == (name == "flipped"), done.stdout
        assert ("step 6: " in done.stdout) == (name == "flipped"), done.stdout
    assert rows["quiet"] == rows["flipped"] and len(rows["quiet"]) == 7
