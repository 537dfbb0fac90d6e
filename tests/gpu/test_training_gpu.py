"""Steps on a GPU: precisions, the loss scale, waiting for the device."""

import math
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.training import NonFiniteError, train
from tests.gpu.runs import PRECISIONS, fp16, no_waiting, run
from tests.training.batches import batches_of
from tests.training.runs import LLAMA, NEOX, bit_equal, config
from tests.training.test_nonfinite import poison

pytestmark = pytest.mark.gpu


# The native engine cuts nothing on one rank.
@pytest.mark.parametrize(("engine", "zero"), [("native", 0), *(("deepspeed", stage) for stage in range(4))])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_learns(precision: str, engine: str, zero: int, device: torch.device) -> None:
    values = config(LLAMA, PRECISIONS[precision], train_micro_batch_size_per_gpu=4, zero_optimization={"stage": zero})
    with run({**values, "engine": engine}) as training:
        batch = next(batches_of(training))
        results = [training.engine.train_step(batch, 1e-3) for _ in range(10)]
        assert not any(result.skipped for result in results)
        losses = [float(result.loss) for result in results]
        assert training.groups.device == device and results[0].loss.device == device
        assert losses[0] == pytest.approx(math.log(384), rel=0.1) and losses[-1] < losses[0] - 0.2
        assert math.isfinite(float(results[0].grad_norm))  # type: ignore[arg-type]


def test_an_overflow_halves_the_scale_and_leaves_the_weights() -> None:
    with run(config(NEOX, fp16(32), train_micro_batch_size_per_gpu=8)) as training:
        batch, engine = next(batches_of(training)), training.engine
        initial = engine.weights(master=True)
        result = engine.train_step(batch, 1e-3)
        assert result.skipped and result.loss_scale == 2.0**31
        assert bit_equal(initial, engine.weights(master=True))
        tries = 1
        while result.skipped and tries < 40:
            result, tries = engine.train_step(batch, 1e-3), tries + 1
        assert not result.skipped and result.loss_scale == 2.0 ** (32 - (tries - 1))
        assert not bit_equal(initial, engine.weights(master=True))


def test_a_scale_that_never_fits_ends_the_run() -> None:
    # Eager: in compiled blocks the hook that poisons a gradient is not called.
    with run(config(NEOX, fp16(4), train_micro_batch_size_per_gpu=8, train_iters=60, compile=False)) as training:
        poison(training, set(range(1, 61)), math.inf)
        with pytest.raises(NonFiniteError, match="step 51: 51 .*overflow"):
            train(training)
        assert training.engine.model_state()["loss_scaler"]["cur_scale"] == 1.0, "the least"


@pytest.mark.only_gpu("torch watches waits for CUDA alone")
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Lion", "Muon"])
def test_native_steps_do_not_wait(optimizer: str) -> None:
    changes = {"precision": "bfloat16", "hidden_dropout": 0.1, "optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}
    with run(config(NEOX, changes, train_micro_batch_size_per_gpu=2)) as training:
        batches, engine = batches_of(training), training.engine
        for _ in range(2):
            engine.train_step(next(batches), 1e-3)
        with no_waiting():
            losses = [engine.train_step(next(batches), 1e-3).loss for _ in range(2)]
        assert all(math.isfinite(float(loss)) for loss in losses)


@pytest.mark.only_gpu("torch watches waits for CUDA alone")
@pytest.mark.parametrize("compiled", [False, "block"])
def test_steps_with_experts_do_not_wait(compiled: bool | str) -> None:
    """In bf16 torch multiplies groups of rows without asking the host for their sizes."""
    experts = {"moe_num_experts": 8, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.01}
    values = config(LLAMA, {**experts, "precision": "bfloat16"}, train_micro_batch_size_per_gpu=2, compile=compiled)
    with run(values) as training:
        batches, engine = batches_of(training), training.engine
        losses = [engine.train_step(next(batches), 1e-3).loss for _ in range(2)]
        with no_waiting():
            losses += [engine.train_step(next(batches), 1e-3).loss for _ in range(8)]
        assert float(losses[-1]) < float(losses[0]) - 0.1


@pytest.mark.only_gpu("torch watches waits for CUDA alone")
@pytest.mark.parametrize("changes", [{}, {"precision": "bfloat16"}, {"precision": "bfloat16", "hidden_dropout": 0.1}])
def test_deepspeeds_steps_wait_only_in_the_update(changes: dict[str, Any]) -> None:
    """DeepSpeed computes its own norm and overflow."""
    values = config(NEOX, changes, train_micro_batch_size_per_gpu=2, zero_optimization={"stage": 1})
    with run({**values, "engine": "deepspeed"}) as training:
        batches, engine = batches_of(training), training.engine
        for _ in range(2):
            engine.train_step(next(batches), 1e-3)
        step = engine._ds.step

        def step_may_wait() -> None:
            torch.cuda.set_sync_debug_mode("default")
            step()
            torch.cuda.set_sync_debug_mode("error")

        with mock.patch.object(engine._ds, "step", step_may_wait), no_waiting():
            losses = [engine.train_step(next(batches), 1e-3).loss for _ in range(2)]
            with pytest.raises(RuntimeError, match="synchroniz"):
                losses[0].item()
