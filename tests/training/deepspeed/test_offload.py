"""Optimizer state and weights kept on the CPU: the numbers of the same run without, resumed bit for bit."""

import fcntl
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.model import build_stage
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.deepspeed.optimizers import build_sharded_optimizer, fitting_state
from tests.model.stages import Weights
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.native.in_turn import TIMEOUT, assert_resumes, interrupted_runs, to_their_ends
from tests.training.runs import LLAMA, Curve, config, curves, furthest, metric_rows

CPU = {"device": "cpu"}
BF16, TIED = {"precision": "bfloat16"}, {"pipe_parallel_size": 2, "no_weight_tying": False}
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") and shutil.which("ninja")), reason="DeepSpeedCPUAdam is compiled: needs g++ and ninja"
)
pytestmark = pytest.mark.timeout(1500)  # a minute or two of g++ on idle cores, once


def compiled_once(rank: int, world_size: int) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))])


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    """The environment of ranks that find DeepSpeedCPUAdam compiled, by one process at a time.

    A compilation that is killed leaves torch's lock, on which all later ones would wait without end."""
    folder = Path(__file__).resolve().parents[3] / ".cache" / "torch_extensions"
    folder.mkdir(parents=True, exist_ok=True)
    env = {"TORCH_EXTENSIONS_DIR": str(folder)}
    with open(folder / "in_use", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for left in folder.rglob("lock"):
            left.unlink()
        run_ranks(compiled_once, 1, env=env, init=False, timeout=1200)
    return env


def run(stage: int, kind: str, *parts: dict[str, Any], **offload: Any) -> dict[str, Any]:
    optimizer = {"type": kind, "params": {"lr": 1e-3, "eps": 1e-6}}
    return config(LLAMA, *parts, optimizer=optimizer, gradient_clipping=0.5, train_micro_batch_size_per_gpu=2,
                  train_iters=4, engine="deepspeed", lr_decay_style="cosine", warmup=0.3,
                  zero_optimization={"stage": stage, **offload})  # fmt: skip


CASES = {
    "CPU_Adam without ZeRO, bf16": run(0, "CPU_Adam", BF16),
    "Adam, ZeRO 1, old spelling": run(1, "Adam", cpu_offload=True),
    "AdamW, ZeRO 1, bf16": run(1, "AdamW", BF16, offload_optimizer=CPU),
    "CPU_Torch_Adam, ZeRO 2": run(2, "CPU_Torch_Adam", offload_optimizer=CPU),
    "CPU_Adam, ZeRO 3, weights too": run(3, "CPU_Adam", BF16, offload_optimizer=CPU, offload_param=CPU),
    "CPU_Torch_Adam, two stages, tied, bf16": run(1, "CPU_Torch_Adam", BF16, TIED, offload_optimizer=CPU),
}


def without_offload(values: dict[str, Any]) -> dict[str, Any]:
    optimizer = {**values["optimizer"], "type": "AdamW"}
    return {**values, "optimizer": optimizer, "zero_optimization": {"stage": values["zero_optimization"]["stage"]}}


TORCH_CASES = [name for name in CASES if "Torch" in name]
COMPILED = [name for name in CASES if name not in TORCH_CASES]


@pytest.mark.parametrize("names", [
    pytest.param(TORCH_CASES, id="torch", marks=pytest.mark.product),
    pytest.param(COMPILED, id="compiled", marks=[pytest.mark.product, needs_compiler]),
])  # fmt: skip
def test_same_numbers_and_bits_when_resumed(names: list[str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """fp32 sums are in another order; moments that differ so round to other bf16 weights now and then.
    DeepSpeed's compiled Adam multiplies its powers of beta step by step, and computes them when it goes on,
    which is the last bit of a weight."""
    env = {} if names == TORCH_CASES else request.getfixturevalue("env")
    for name in names:
        values, save = CASES[name], tmp_path / "plain" / name
        on_device = {**without_offload(values), "save": str(save), "checkpoint_factor": 4}
        weights = assert_resumes(
            values, tmp_path / name, ranks=2, tolerance=0.0 if names == TORCH_CASES else 1e-6, env=env
        )
        on_device_weights = run_ranks(to_their_ends, 2, [on_device], env=env, timeout=TIMEOUT)
        # Of bf16 weights a gradient norm is 5e-4 off on one CPU, losses and weights below 1e-4.
        limit = 1e-3 if values["precision"] != "fp32" else 1e-6
        for offloaded, [resident] in zip(weights, on_device_weights, strict=True):
            differences = furthest(curve(tmp_path / name / "through", offloaded), curve(save, resident))
            assert all(difference < limit for difference in differences), (name, differences)


def curve(save: Path, weights: Weights) -> Curve:
    rows = metric_rows(save)
    return Curve([row["train/lm_loss"] for row in rows], [row["train/grad_norm"] for row in rows], weights)


@pytest.mark.product
@needs_compiler
def test_offload_can_change_on_resume(tmp_path: Path, env: dict[str, str]) -> None:
    """Out of memory at step 2: offload on (or off again), go on. A lost optimizer state is 1e-4 away, and
    rounding 1e-6."""
    cases = [CASES["Adam, ZeRO 1, old spelling"], CASES["AdamW, ZeRO 1, bf16"], run(3, "AdamW", offload_optimizer=CPU)]
    pairs = [pair for case in cases for pair in ((case, without_offload(case)), (without_offload(case), case))]
    pairs.append((cases[0], {**without_offload(cases[0]), "no_load_optim": True, "no_load_rng": True}))
    folders = [tmp_path / str(i) for i in range(len(pairs))]
    runs = [
        interrupted_runs(first_values, folder, resume_keys=resumed_values)
        for folder, (first_values, resumed_values) in zip(folders, pairs, strict=True)
    ]
    run_ranks(to_their_ends, 2, sum(runs, []), env=env, timeout=TIMEOUT)
    *changed, (lost, uninterrupted) = ((losses(folder / "cut"), losses(folder / "through")) for folder in folders)
    for (now, expected), (first_values, _) in zip(changed, pairs, strict=False):
        assert now == pytest.approx(expected, rel=2e-4 if first_values["precision"] != "fp32" else 1e-6)
    assert max(abs(lost[step] / loss - 1) for step, loss in uninterrupted.items()) > 2e-5


def test_torch_state_becomes_the_compiled_adams() -> None:
    """The compiled Adam counts steps in int, and weight decay takes the value configured now."""
    param = torch.nn.Parameter(torch.zeros(3))
    saved = torch.optim.AdamW([param], lr=0.1, weight_decay=0.5)
    param.grad = torch.ones(3)
    saved.step()
    now = torch.optim.AdamW([param], lr=0.1, weight_decay=0.25)
    fitted = fitting_state(saved.state_dict(), now)
    assert fitted["param_groups"][0]["weight_decay"] == 0.25 and fitted["param_groups"][0]["params"] == [0]
    now.ds_opt_adam = object()  # type: ignore[attr-defined] # its mark
    assert isinstance(fitting_state(saved.state_dict(), now)["state"][0]["step"], int)


def test_no_compiler_says_so(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="CPU_Adam .*compiled.*ninja.*CPU_Torch_Adam"):
        run_ranks(curves, 1, [run(0, "CPU_Adam")], env={"PATH": "", "TORCH_EXTENSIONS_DIR": str(tmp_path)})


def test_cpu_optimizer_for_weights_on_a_device() -> None:
    args = NeoXArgs.from_dict({**run(0, "CPU_Torch_Adam"), "padded_vocab_size": 384})
    groups = ParallelGroups.single()
    with pytest.raises(ConfigError, match="CPU_Torch_Adam .*AdamW.*zero_optimization"):
        build_sharded_optimizer(build_stage(args, groups), args, groups)
