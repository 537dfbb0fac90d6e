"""fp16's loss scale without a GPU: DeepSpeed's scaler under the settings we hand it, and the stop at a broken
run."""

from typing import Any

import pytest
import torch

import megatron.training.loop as loop
from megatron.callbacks import StepResult
from megatron.neox_arguments import NeoXArgs
from megatron.training.deepspeed.attach import attach_deepspeed
from megatron.training.deepspeed.config import deepspeed_config
from megatron.training.nonfinite_guard import FP16_OVERFLOWS_IN_A_ROW, NonFiniteError, most_skips
from tests.pool import run_ranks
from tests.training.runs import begin, config


def args_of(**fp16: Any) -> NeoXArgs:
    values = config(precision="fp16", train_micro_batch_size_per_gpu=2, fp16={"enabled": True, **fp16})
    return NeoXArgs.from_dict({**values, "padded_vocab_size": 384}).for_world(1)


def test_deepspeed_is_told_everything() -> None:
    """All that its scaler reads, so that none of it is left to its defaults; NeoX's values."""
    expected = {
        "enabled": True, "loss_scale": 0.0, "initial_scale_power": 16, "loss_scale_window": 1000,
        "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1.0,
    }  # fmt: skip
    assert deepspeed_config(args_of())["fp16"] == expected
    assert deepspeed_config(args_of(initial_scale_power=12, hysteresis=1))["fp16"] == {
        **expected, "initial_scale_power": 12, "hysteresis": 1,
    }  # fmt: skip
    assert "fp16" not in deepspeed_config(args_of().replace(precision="bfloat16", fp16=None))


def scales(rank: int, world_size: int, fp16: dict[str, Any], overflows: list[bool]) -> list[float]:
    """For the pool: the scale after each step, from DeepSpeed's own reading of our settings."""
    from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
    from deepspeed.runtime.precision_config import get_float16_config

    attach_deepspeed()
    fp16_config = get_float16_config(deepspeed_config(args_of(**fp16)))
    scaler = CreateLossScaler(
        torch.half, fp16_config.loss_scale, fp16_config.loss_scale == 0, fp16_config.dynamic_loss_scale_args()
    )
    seen = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        seen.append(scaler.loss_scale)
    return seen


CASES: dict[str, tuple[dict[str, Any], list[bool], list[float]]] = {
    "hysteresis: the second overflow halves": ({"initial_scale_power": 8}, [True, True, True], [256, 128, 64]),
    "without hysteresis every one does": (
        {"initial_scale_power": 8, "hysteresis": 1}, [True, True, False], [128, 64, 64],
    ),
    "a window without overflow doubles": (
        {"initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2},
        [False, True, False, False, False, False, False],
        [16, 8, 8, 8, 16, 16, 32],
    ),
    "never below the least": (
        {"initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 4.0}, [True], [4],
    ),
    "a fixed scale stays": ({"loss_scale": 32.0}, [True, True, False], [32, 32, 32]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_scale(case: str) -> None:
    fp16, overflows, expected = CASES[case]
    assert run_ranks(scales, 1, fp16, overflows)[0] == expected


class FakeEngine:
    """Overflows in the steps it is told to; changes nothing."""

    def __init__(self, overflow: set[int], stage: Any) -> None:
        self.overflow, self.steps, self.stage = overflow, 0, stage

    def train_step(self, *given: Any) -> StepResult:
        self.steps += 1
        skipped = self.steps in self.overflow
        return StepResult(torch.tensor(float("nan") if skipped else 1.0), torch.tensor(1.0), skipped)

    def tensors(self) -> dict[str, Any]:
        return {}


def run_fake(rank: int, world_size: int, overflow: set[int], steps: int) -> tuple[str | None, int, int]:
    """For the pool: the loop over such an engine; what it raised, steps taken and steps left out."""
    from dataclasses import replace

    fp16 = {"precision": "fp16", "fp16": {"enabled": True}}
    training = begin(config(fp16, train_iters=steps, train_micro_batch_size_per_gpu=8, log_interval=1000))
    engine = FakeEngine(overflow, training.engine.stage)
    training = replace(training, engine=engine)  # type: ignore[arg-type]
    try:
        loop.train(training)
    except NonFiniteError as problem:
        return str(problem), engine.steps, training.progress.skipped
    return None, engine.steps, training.progress.skipped


def test_the_run_stops_after_fifty_overflows_in_a_row() -> None:
    limit = FP16_OVERFLOWS_IN_A_ROW
    assert limit == 50, "as GPT-NeoX"
    bearable = {3, *range(10, 10 + limit)}
    assert run_ranks(run_fake, 1, bearable, 70)[0] == (None, 70, limit + 1)
    message, steps, _ = run_ranks(run_fake, 1, set(range(10, 70)), 70)[0]
    assert steps == 11 + limit, "known when the next has begun"
    assert message is not None
    assert message.startswith(
        f"step {steps - 1}: 51 fp16 overflows in a row, the loss scale cannot recover; weights are"
    )


def test_an_overflow_is_not_a_step_that_is_not_finite() -> None:
    """`on_nonfinite: stop` is for losses and gradients that no smaller scale would mend."""
    assert most_skips(args_of()) == FP16_OVERFLOWS_IN_A_ROW
    assert most_skips(args_of().replace(precision="bfloat16", fp16=None)) == 0
