"""Optimizer state and weights kept on the CPU: the numbers of the same run without, resumed bit for bit."""

import fcntl
import functools
import shutil
from pathlib import Path
from typing import Any

import cpuinfo
import pytest
import torch

from megatron.model import build_stage
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.deepspeed.optimizers import build_sharded_optimizer, fitting_state
from tests.pool import run_ranks
from tests.training.runs import LLAMA, Part, batches_of, begin, bit_equal, config, curves, furthest, whole

CPU = {"device": "cpu"}
BF16 = {"precision": "bfloat16"}
PP2_TIED = {"pipe_parallel_size": 2, "no_weight_tying": False}
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") and shutil.which("ninja")), reason="DeepSpeedCPUAdam is compiled: needs g++ and ninja"
)
pytestmark = pytest.mark.timeout(1500)  # a minute or two of g++ on idle cores, once


def compiled_once(rank: int, world_size: int) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))])


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    """Of ranks that find DeepSpeedCPUAdam compiled. A compilation that is killed leaves torch's lock, on
    which all later ones wait without end; here one process compiles at a time, and takes away what was
    left."""
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
    return config(
        LLAMA, *parts, optimizer=optimizer, gradient_clipping=0.5, train_micro_batch_size_per_gpu=2, train_iters=4,
        engine="deepspeed", lr_decay_style="cosine", warmup=0.3, zero_optimization={"stage": stage, **offload},
    )  # fmt: skip


CASES = {
    "CPU_Adam without ZeRO, bf16": run(0, "CPU_Adam", BF16),
    "Adam, ZeRO 1, old spelling": run(1, "Adam", cpu_offload=True),
    "AdamW, ZeRO 1, bf16": run(1, "AdamW", BF16, offload_optimizer=CPU),
    "CPU_Torch_Adam, ZeRO 2": run(2, "CPU_Torch_Adam", offload_optimizer=CPU),
    "CPU_Adam, ZeRO 3, weights too": run(3, "CPU_Adam", BF16, offload_optimizer=CPU, offload_param=CPU),
    "CPU_Torch_Adam, two stages, tied, bf16": run(1, "CPU_Torch_Adam", BF16, PP2_TIED, offload_optimizer=CPU),
}


def without(values: dict[str, Any]) -> dict[str, Any]:
    """The same run with AdamW, nothing offloaded."""
    optimizer = {**values["optimizer"], "type": "AdamW"}
    return {**values, "optimizer": optimizer, "zero_optimization": {"stage": values["zero_optimization"]["stage"]}}


def stop_and_go_on(
    rank: int, world_size: int, pairs: list[tuple[dict[str, Any], dict[str, Any]]], folder: str
) -> list[tuple[Part, Part]]:
    """For the pool: (before, after) -> `before` going on through its save at step 2, `after` resumed from
    there."""
    # DeepSpeedCPUAdam asks the machine what it is, for a second, each time it is made.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    results = []
    for i, (before, after) in enumerate(pairs):
        save, parts = f"{folder}/{i}", []
        for values, first in (({**before, "save": save}, 0), ({**after, "load": save}, 2)):
            training = begin(values)
            batches, progress, losses, norms = batches_of(training), training.progress, [], []
            assert progress.iteration == first
            while progress.iteration < 4:
                result = training.engine.train_step(next(batches), training.schedule(progress.iteration))
                progress.iteration, progress.consumed_samples = progress.iteration + 1, progress.consumed_samples + 8
                losses.append(float(result.loss))
                norms.append(float(result.grad_norm))  # type: ignore[arg-type]
                if "save" in values and progress.iteration == 2:
                    training.checkpointer.save(progress)
                    training.checkpointer.wait()
            weights = training.engine.weights(master=True)
            parts.append(Part(losses, norms, training.groups.rank("tensor"), weights))
            training.engine.close()
        results.append((parts[0], parts[1]))
    return results


def compared(rank: int, world_size: int, cases: list[dict[str, Any]], folder: str) -> list[tuple[Part, Part, Part]]:
    """For the pool: of each run through, resumed, and the same without offload."""
    both = stop_and_go_on(rank, world_size, [(case, case) for case in cases], folder)
    plain = curves(rank, world_size, [without(case) for case in cases], steps=4)
    return [(through, resumed, other) for (through, resumed), other in zip(both, plain, strict=True)]


OF_TORCH = [name for name in CASES if "Torch" in name]
COMPILED = [name for name in CASES if "Torch" not in name]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OF_TORCH, id="torch", marks=pytest.mark.more),
        pytest.param(COMPILED, id="compiled", marks=[pytest.mark.product, needs_compiler]),
    ],
)
def test_same_numbers_and_bits_when_resumed(names: list[str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Tolerance: fp32 sums in another order; moments that differ so round to other bf16 weights (2^-8) now
    and then."""
    env = {} if names == OF_TORCH else request.getfixturevalue("env")
    by_rank = run_ranks(compared, 2, [CASES[name] for name in names], str(tmp_path), env=env, timeout=280)
    for i, name in enumerate(names):
        for through, resumed, _ in (results[i] for results in by_rank):
            assert resumed.losses == through.losses[2:] and bit_equal(resumed.weights, through.weights), name
        ours, plain = (whole([results[i][kind] for results in by_rank], CASES[name]) for kind in (0, 2))
        # Of bf16 weights a gradient norm is 5e-4 off on one CPU, losses and weights below 1e-4.
        limit = 1e-3 if CASES[name]["precision"] != "fp32" else 1e-6
        assert max(furthest(ours, plain)) < limit, name


@pytest.mark.product
@needs_compiler
def test_offload_can_change_on_resume(tmp_path: Path, env: dict[str, str]) -> None:
    """Out of memory at step 2: offload on (or off again), go on. A lost optimizer state is 3e-4 away."""
    cases = [CASES["Adam, ZeRO 1, old spelling"], CASES["AdamW, ZeRO 1, bf16"], run(3, "AdamW", offload_optimizer=CPU)]
    pairs = [pair for case in cases for pair in ((case, without(case)), (without(case), case))]
    fresh = {**without(cases[0]), "no_load_optim": True, "no_load_rng": True}
    runs = [*pairs, (cases[0], fresh)]
    *changed, lost = run_ranks(stop_and_go_on, 2, runs, str(tmp_path), env=env, timeout=280)[0]
    for (through, resumed), (before, _) in zip(changed, pairs, strict=True):
        assert resumed.losses == pytest.approx(through.losses[2:], rel=2e-4 if before["precision"] != "fp32" else 1e-6)
    assert max(abs(a / b - 1) for a, b in zip(lost[0].losses[2:], lost[1].losses, strict=True)) > 2e-4


def test_torch_state_becomes_the_compiled_adams() -> None:
    """It counts steps in int, and weight decay is what is configured now."""
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
    stage = build_stage(args, ParallelGroups.single())
    with pytest.raises(ConfigError, match="CPU_Torch_Adam .*AdamW.*zero_optimization"):
        build_sharded_optimizer(stage, args, ParallelGroups.single())
