"""Steps on a GPU: precisions, the loss scale, resume, waiting for the device, compiled blocks, beside the
CPU."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.generation import SamplingParams, complete
from megatron.objectives import LANGUAGE_MODELLING
from megatron.training import NonFiniteError, train
from megatron.training.loop import batches_of
from tests.generation.runs import GIVEN, LAYOUTS, golden_model
from tests.gpu.runs import CPU, GPU, WIDE, run, stage_on
from tests.model.runs import MODELS
from tests.model.stages import gradients, random_batch, small
from tests.objectives.steps import as_head
from tests.training.runs import ADAMW, LLAMA, NEOX, bit_equal, config
from tests.training.test_nonfinite import poison

pytestmark = pytest.mark.gpu


@pytest.fixture
def repeatable() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def fp16(power: int) -> dict[str, Any]:
    return {"precision": "fp16", "fp16": {"enabled": True, "initial_scale_power": power, "hysteresis": 1}}


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bfloat16"},
    "fp16": fp16(8),
}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_learns(precision: str, zero: int) -> None:
    values = config(LLAMA, PRECISIONS[precision], train_micro_batch_size_per_gpu=4, zero_optimization={"stage": zero})
    with run(values) as training:
        batch = next(batches_of(training))
        results = [training.engine.train_step(batch, 1e-3) for _ in range(10)]
        assert not any(result.skipped for result in results)
        losses = [float(result.loss) for result in results]
        assert training.groups.device == GPU and results[0].loss.device == GPU
        assert losses[0] == pytest.approx(math.log(384), rel=0.1) and losses[-1] < losses[0] - 0.2
        norm = results[0].grad_norm
        assert norm is not None and math.isfinite(float(norm))


def test_an_overflow_halves_the_scale_and_leaves_the_weights() -> None:
    with run(config(NEOX, fp16(32), train_micro_batch_size_per_gpu=8)) as training:
        batch, engine = next(batches_of(training)), training.engine
        before = engine.weights(master=True)
        result = engine.train_step(batch, 1e-3)
        assert result.skipped and result.loss_scale == 2.0**31
        assert bit_equal(before, engine.weights(master=True))
        tries = 1
        while result.skipped and tries < 40:
            result, tries = engine.train_step(batch, 1e-3), tries + 1
        assert not result.skipped and result.loss_scale == 2.0 ** (32 - (tries - 1))
        assert not bit_equal(before, engine.weights(master=True))


def test_a_scale_that_never_fits_ends_the_run() -> None:
    with run(config(NEOX, fp16(4), train_micro_batch_size_per_gpu=8, train_iters=60)) as training:
        poison(training, set(range(1, 61)), math.inf)
        with pytest.raises(NonFiniteError, match="step 51: 51 fp16 overflows in a row"):
            train(training)
        assert training.engine.model_state()["loss_scaler"]["cur_scale"] == 1.0, "the least"


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_cpu(name: str) -> None:
    args, losses_and_gradients = small(**{**MODELS[name], "attention_backend": "auto"}), []
    for device in (CPU, GPU):
        stage, batch = stage_on(args, device).train(), random_batch(args).to(device)
        loss = LANGUAGE_MODELLING.loss_sum(as_head(stage(None, batch)), batch, None)[0]
        loss = loss / LANGUAGE_MODELLING.weight(batch)
        loss.backward()
        losses_and_gradients.append(
            (loss.detach().cpu(), {key: value.cpu() for key, value in gradients(stage).items()})
        )
    torch.testing.assert_close(losses_and_gradients[1][0], losses_and_gradients[0][0], rtol=1e-4, atol=0)
    for key, expected in losses_and_gradients[0][1].items():
        assert (losses_and_gradients[1][1][key] - expected).norm() <= 1e-4 * expected.norm() + 1e-6, key


def test_compiled_blocks_equal_eager_ones() -> None:
    if not any(shutil.which(name) for name in ("gcc", "clang")):
        pytest.skip("Triton needs gcc or clang")
    losses_and_gradients: list[tuple[Tensor, dict[tuple[int, str], Tensor]]] = []
    for compile_ in (False, "block"):
        args = small(**WIDE, compile=compile_, gpt_j_residual=True)
        stage, batch = stage_on(args, GPU).train(), random_batch(args).to(GPU)
        loss = LANGUAGE_MODELLING.loss_sum(as_head(stage(None, batch)), batch, None)[0]
        loss.backward()
        losses_and_gradients.append((loss.detach(), gradients(stage)))
    torch.testing.assert_close(losses_and_gradients[1][0], losses_and_gradients[0][0], rtol=1e-5, atol=0)
    for key, expected in losses_and_gradients[0][1].items():
        assert (losses_and_gradients[1][1][key] - expected).norm() <= 1e-4 * expected.norm() + 1e-6, key


def weights_after(values: dict[str, Any]) -> tuple[int, dict[int, dict[str, Tensor]]]:
    """Iteration and fp32 weights at the end of a run."""
    with run(values) as training:
        train(training)
        return training.progress.iteration, training.engine.weights(master=True)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_is_bit_equal(precision: str, tmp_path: Path, repeatable: None) -> None:
    values = config(
        NEOX, ADAMW, PRECISIONS[precision], train_micro_batch_size_per_gpu=4, train_iters=6, hidden_dropout=0.1,
        attention_backend="math", checkpoint_factor=100,
    )  # fmt: skip
    through = weights_after({**values, "save": str(tmp_path / "through")})
    parts = {**values, "save": str(tmp_path / "parts")}
    assert weights_after({**parts, "exit_interval": 3})[0] == 3
    resumed = weights_after(parts)
    assert through[0] == resumed[0] == 6
    assert bit_equal(through[1], resumed[1])


@pytest.mark.parametrize("changes", [{}, {"precision": "bfloat16"}, {"precision": "bfloat16", "hidden_dropout": 0.1}])
def test_steps_do_not_wait_for_the_device(changes: dict[str, Any]) -> None:
    """Outside the optimizer step, whose norm and overflow are the engine's own."""
    values = config(NEOX, changes, train_micro_batch_size_per_gpu=2, zero_optimization={"stage": 1})
    with run(values) as training:
        batches, engine = batches_of(training), training.engine
        for _ in range(2):
            engine.train_step(next(batches), 1e-3)
        step = engine._ds.step

        def step_may_wait() -> None:
            torch.cuda.set_sync_debug_mode("default")
            step()
            torch.cuda.set_sync_debug_mode("error")

        engine._ds.step = step_may_wait
        try:
            torch.cuda.set_sync_debug_mode("error")
            losses = [engine.train_step(next(batches), 1e-3).loss for _ in range(2)]
            with pytest.raises(RuntimeError, match="synchroniz"):
                losses[0].item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            engine._ds.step = step


@pytest.mark.parametrize("name", ["neox_pp1_mp1", "llama_pp1_mp1"])
def test_greedy_text_is_that_of_the_cpu(name: str) -> None:
    texts = []
    for backend in ("gloo", "nccl"):
        model = golden_model(name, {**LAYOUTS["one process"][1], "distributed_backend": backend, "precision": "fp32"})
        assert model.groups.device.type == {"gloo": "cpu", "nccl": "cuda"}[backend]
        texts.append(
            [c.tokens for c in complete(model, GIVEN, SamplingParams(), maximum_tokens=32, seeds=range(len(GIVEN)))]
        )
    assert texts[0] == texts[1]
