"""A run with experts goes on bit for bit, and from one size of expert parallelism to another as if nothing
had happened."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointError, layer_file, load_tensors
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import assert_goes_on, losses, stop_after
from tests.training.runs import ADAMW, LLAMA, begin, config, run_to_end
from tools.ckpts.reshard import main as reshard_main

MOE: dict[str, Any] = {
    "moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "moe_aux_loss_coeff": 0.02,
    "moe_aux_loss_scope": "sequence", "moe_router_bias_update_rate": 0.01, "moe_router_score_function": "sigmoid",
    "num_layers": 2,
}  # fmt: skip


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "ep2": (2, {"expert_parallel_size": 2}),
    "ep2 zero3": (4, {"expert_parallel_size": 2, **zero(3)}),
    "ep4 zero1": (4, {"expert_parallel_size": 4, **zero(1)}),
    "ep2 tp2": (4, {"expert_parallel_size": 2, "model_parallel_size": 2, **zero(2)}),
    "pp2": (2, {"pipe_parallel_size": 2}),
    "cut": (2, {"model_parallel_size": 2, "moe_expert_tensor_parallel": "cut"}),
    "whole": (2, {"model_parallel_size": 2}),
}  # fmt: skip


def values(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    common = {"train_micro_batch_size_per_gpu": 2, "train_iters": 6, "checkpoint_factor": 3, "warmup": 0.3}
    return config(LLAMA, MOE, ADAMW, common, *parts, **more)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("ep2 zero3", "bfloat16"), *(
        pytest.param(*each, marks=pytest.mark.more)
        for each in (("ep2", "fp32"), ("ep4 zero1", "fp32"), ("pp2", "bfloat16"), ("one process", "bfloat16"))
    )],
)  # fmt: skip
def test_bit_equal(layout: str, precision: str, tmp_path: Path) -> None:
    ranks, keys = LAYOUTS[layout]
    assert_goes_on(ranks, values(keys, precision=precision), tmp_path)


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("through")
    run_ranks(run_to_end, 1, values(save=str(save)))
    return save


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("one process", "ep4 zero1"),
        ("ep4 zero1", "ep2 zero3"),
        *(
            pytest.param(*each, marks=pytest.mark.more)
            for each in (
                ("ep2 zero3", "one process"), ("ep2 zero3", "ep4 zero1"), ("ep2 tp2", "ep2"), ("ep2", "ep2 tp2"),
                ("pp2", "ep2"), ("cut", "cut"),
            )
        ),
    ],
)  # fmt: skip
def test_on_another_layout(first: str, then: str, through: Path, tmp_path: Path) -> None:
    ranks, keys = LAYOUTS[first]
    run_ranks(stop_after, ranks, values(keys, save=str(tmp_path), load=str(tmp_path)), 3)
    ranks, keys = LAYOUTS[then]
    engine = {"engine": "native"} if first == "pp2" else {}
    run_ranks(run_to_end, ranks, values(keys, engine, save=str(tmp_path), load=str(tmp_path)))
    assert losses(tmp_path) == pytest.approx(losses(through), rel=1e-5)


def test_a_bias_that_balances_can_come_later_and_stay(tmp_path: Path) -> None:
    """It begins with zeros; a run without it does not read over it."""
    more, without = {"finetune": True, "train_iters": 2}, {"moe_router_bias_update_rate": None}
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run_ranks(run_to_end, 1, values(without, save=first, train_iters=1))
    weights = run_ranks(run_to_end, 1, values(load=first, save=second, **more))[0][1]
    steps = weights[2]["mlp.router.expert_bias"] / 0.01
    assert 0.5 < steps.abs().max() < 2.5 and torch.allclose(steps, steps.round(), atol=1e-4)
    message = run_ranks(refusal, 1, values(without, load=second, **more))[0]
    assert "extra mlp.router.expert_bias; set moe_router_bias_update_rate: 0" in message


def refusal(rank: int, world_size: int, given: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        begin(given)
    return str(caught.value)


def test_slices_and_whole_experts_are_not_mixed_up(tmp_path: Path) -> None:
    run_ranks(run_to_end, 2, values(LAYOUTS["cut"][1], train_iters=3, save=str(tmp_path)))
    given = values(LAYOUTS["whole"][1], save=str(tmp_path), load=str(tmp_path))
    for told in run_ranks(refusal, 2, given):
        assert "moe_expert_tensor_parallel" in told and "cut" in told
    assert load_tensors(tmp_path / "global_step3" / layer_file(2, 0))["mlp.experts.mlp.w1"].shape == (4 * 24, 32)


@pytest.mark.more
def test_slices_become_whole_experts_by_way_of_one_rank(through: Path, tmp_path: Path) -> None:
    begun, one = tmp_path / "begun", tmp_path / "one"
    run_ranks(stop_after, 2, values(LAYOUTS["cut"][1], save=str(begun), load=str(begun)), 3)
    reshard_main(["--input_dir", str(begun), "--output_dir", str(one), "--tp", "1"])
    run_ranks(run_to_end, 2, values(LAYOUTS["whole"][1], save=str(begun.with_name("on")), load=str(one)))
    later = {step: loss for step, loss in losses(through).items() if step > 3}
    assert losses(begun.with_name("on")) == pytest.approx(later, rel=1e-5)
