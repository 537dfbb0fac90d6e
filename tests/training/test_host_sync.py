"""No host sync in a step; what became of it, and what is logged, is read when the next has been started."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.callbacks import Step
from megatron.model.norms import LayerNorm
from megatron.training.builtin_callbacks.gradient_probes import build_probes, joined
from megatron.training.builtin_callbacks.log import LogCallback
from megatron.training.builtin_callbacks.spikes import build_spike_reports
from megatron.training.metrics.host_copy import HostCopy
from megatron.training.step_results import StepResults
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.runs import BASE, GOLDEN, NEOX, TABLE, begin, cells, config

WAITS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy", "nonzero")
# (end of file name, functions): DeepSpeed's checks within the optimizer step, torch's counter of Adam's.
ENGINE = {
    "deepspeed/runtime/utils.py": None,
    "deepspeed/runtime/bf16_optimizer.py": {"step"},
    "deepspeed/runtime/zero/stage_1_and_2.py": {"step", "scaled_global_norm", "unscale_and_clip_grads",
                                                "check_overflow"},
    "deepspeed/runtime/zero/stage3.py": {"step", "unscale_and_clip_grads", "_get_norm_groups", "get_grad_norm_direct"},
    "torch/optim/optimizer.py": None,
    "megatron/mpu/random.py": {"dropout"},  # of a seed on the host
    "megatron/model/attention/seeded_attention.py": {"seeded_attention"},  # of one too
    "megatron/data/loader.py": {"_trained"},  # of a batch on the host, before it goes to the device
}  # fmt: skip
READ = {"megatron/training/metrics/host_copy.py": {"read"}}
_OTHER_CORPUS = str(GOLDEN / "dataset" / "corpusB_text_document")
UNLEARNING = {
    "ga_dataset": _OTHER_CORPUS,
    "ga_mode": "interleaved",
    "gd_mode": True,
    "gd_retain_dataset": _OTHER_CORPUS,
}
NPO = {"ga_loss_type": "npo", "gd_retain_loss_type": "kl", "dpo_reference": "on_the_fly"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **TABLE,
    "plain bf16": (1, {"precision": "bfloat16", "pos_emb": "alibi"}),
    "pp2 bf16": (2, {"pipe_parallel_size": 2, "precision": "bfloat16"}),
    "difference": (1, UNLEARNING), "npo, pp2": (2, {**UNLEARNING, **NPO, "pipe_parallel_size": 2}),
}  # fmt: skip


class HostSync(AssertionError):
    pass


def _called_from(places: dict[str, set[str] | None]) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        for name, functions in places.items():
            if frame.f_code.co_filename.endswith(name) and (functions is None or frame.f_code.co_name in functions):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def forbid(allowed: dict[str, set[str] | None], reads: list[str]) -> None:
    """Make waiting raise in this process, which is the pool's throw-away fork."""

    def guard(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if _called_from(READ):
                reads.append("read")
            elif not _called_from(allowed):
                raise HostSync(f"Tensor.{name}")
            return original(tensor, *args, **kwargs)

        return wait

    for name in WAITS:
        setattr(torch.Tensor, name, guard(name, getattr(torch.Tensor, name)))
    make = torch.tensor

    def copy(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        # A GPU waits for what it is sent from memory that is not pinned.
        if isinstance(device, torch.device) and not _called_from(allowed):
            raise HostSync("torch.tensor")
        return make(*args, device=device, **kwargs)

    torch.tensor = copy


def steps(rank: int, world_size: int, values: dict[str, Any]) -> tuple[int, list[str]]:
    """For the pool: two free steps, then four without waiting; reads, each a step late, and probes."""
    training = begin(values)
    batches, progress, (probes, gradients) = batches_of(training), training.progress, build_probes(training)
    log, results, spikes = LogCallback(training, probes=probes), StepResults(training), build_spike_reports(training)
    reads: list[str] = []
    step_count, begin_reading, read, steps_of = [0], HostCopy.__init__, HostCopy.read, {}

    def noted(reading: Any, values: torch.Tensor) -> None:
        steps_of[reading] = step_count[0]
        begin_reading(reading, values)

    def read_a_step_later(reading: Any) -> list[float]:
        assert steps_of.pop(reading) == step_count[0] - 1, "it is read in its own step"
        return read(reading)

    HostCopy.__init__, HostCopy.read = noted, read_a_step_later  # type: ignore[method-assign]

    def take_step() -> None:
        step_count[0] += 1
        step = next(batches)
        hooks = [callback.on_step_start(training, step) for callback in (gradients, *spikes)]
        show = joined([hook for hook in hooks if hook is not None])
        result = training.engine.train_step(step, training.schedule(progress.iteration), show)
        results.settle()
        results.begin(result)
        progress.iteration += 1
        for callback in (log, *spikes):
            callback.on_step_end(training, Step(progress.iteration, 8 * progress.iteration, 32, result))

    take_step()
    take_step()
    forbid(ENGINE, reads)
    for _ in range(4):
        take_step()
    if training.engine.name == "deepspeed":
        timers = training.engine._ds.timers.get_timers()  # type: ignore[attr-defined]
        assert not any(timer.event_timers for timer in timers.values()), "DeepSpeed keeps two CUDA events a step"
    return len(reads), log.probed


@pytest.mark.parametrize("name", cells(
    ["tp2 sp", "zero3", "npo, pp2"],
    ["pp2 bf16"],
    ["plain", "plain bf16", "dp2", "pp2", "zero1", "zero2", "difference"],
))  # fmt: skip
def test_steps_do_not_wait(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    values = config(NEOX, layout, train_micro_batch_size_per_gpu=2, gradient_clipping=0.5, hidden_dropout=0.1)
    assert run_ranks(steps, ranks, {**values, "log_interval": 100}) == [(4, [])] * ranks
    assert run_ranks(steps, ranks, {**values, "log_interval": 1}) == [(8, [])] * ranks


@pytest.mark.parametrize("name", cells(["dp2"], ["tp2 sp", "pp2", "zero2"]))
def test_losses_by_source_and_spikes_do_not_wait(name: str, tmp_path: Path) -> None:
    """Each step's values are read when the next has begun, beside its other results."""
    ranks, layout = LAYOUTS[name]
    values = config(
        NEOX, layout, data_path=None, train_data_paths=[BASE["data_path"], _OTHER_CORPUS], log_interval=100,
        train_micro_batch_size_per_gpu=2, log_loss_by_source=True, log_spikes_above_sigma=6.0, log_dir=str(tmp_path),
    )  # fmt: skip
    assert run_ranks(steps, ranks, values) == [(8, [])] * ranks


def waiting_model(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: the same with a model that waits."""
    forward = LayerNorm.forward

    def wait(self: Any, x: torch.Tensor) -> torch.Tensor:
        float(x.sum())
        return forward(self, x)

    LayerNorm.forward = wait  # type: ignore[method-assign]
    steps(rank, world_size, values)


def test_the_test_can_fail() -> None:
    values = config(NEOX, train_micro_batch_size_per_gpu=2, log_interval=100)
    with pytest.raises(AssertionError, match=r"HostSync: Tensor.__float__"):
        run_ranks(waiting_model, 1, values)
