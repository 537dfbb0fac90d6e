"""Moments in bf16: rounding keeps the mean, and the memory is halved.

Data ranks and a restart give the bits of one process, and losses are near fp32's."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import OptimizerFiles
from megatron.model import named_params
from megatron.training import train
from megatron.training.native.fused_update import FusedAdamW
from megatron.training.native.stochastic_rounding import Stream, noise, rounded, step_keys, stream_number
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.checkpoint.test_resume import assert_refused, losses
from tests.training.layout_runs import zero
from tests.training.native.in_turn import TIMEOUT, assert_resumes, to_their_ends
from tests.training.runs import ADAMW, LLAMA, NEOX, begin, begin_each, bit_equal, cells, config, curves_of

BF16, FUSED = {"optimizer_state_dtype": "bf16"}, {"fused_update": True, "train_micro_batch_size_per_gpu": 8}
EXPERTS = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk"}


def values(save: Path | None, *parts: dict[str, Any]) -> dict[str, Any]:
    common = {"precision": "bfloat16", "train_micro_batch_size_per_gpu": 4, "hidden_dropout": 0.1, "engine": "native"}
    saved = {"save": str(save), "checkpoint_factor": 100} if save is not None else {}
    return config(ADAMW, NEOX, common, BF16, saved, *parts)


def words(size: int, offset: int = 0, step: int = 1, name: str = "a") -> Tensor:
    keys = step_keys(torch.tensor([stream_number(7, name)]), torch.tensor([step]))
    return noise(keys[0], offset, size)


@pytest.mark.parametrize("shift", [0, 16])
def test_rounding_keeps_the_mean(shift: int) -> None:
    """The share of 40,000 numbers rounded up is the distance from the lower neighbour, within four standard
    deviations. 1 + 2^-7 comes after 1 in bf16."""
    bits = words(40000) >> shift & 0xFFFF
    for exact in (1 + 2**-9, 1 + 0.9 * 2**-7, -(1 + 2**-10)):
        results = rounded(torch.full((40000,), exact), bits).double()
        share = (abs(exact) - 1) * 2**7
        assert set(results.abs().tolist()) == {1.0, 1 + 2**-7}
        bound = 4 * 2**-7 * (share * (1 - share) / 40000) ** 0.5
        assert abs(results.mean().item() - exact) < bound
    for exact in (0.0, 1.0, -3e-40, 2.0**-126, float("inf")):
        value = torch.full((40000,), exact).bfloat16()
        assert torch.equal(rounded(value.float(), bits), value), "what bf16 has stays"


def test_bits_belong_to_places_steps_and_parameters() -> None:
    reference = words(100)
    assert torch.equal(words(60, offset=40), reference[40:])
    other_streams = [words(100, step=2), words(100, name="b"), words(100, offset=2**32)]
    assert all((stream != reference).all() for stream in other_streams)


def test_a_second_moment_moves_where_nearest_stands_still() -> None:
    """After 400 steps of gradient 1 it is 1 - 0.999^400, in the mean of 4096 within 1 %. To nearest it would
    stop where a step, 0.001, is less than half of the distance between two numbers."""
    master = torch.nn.Parameter(torch.zeros(4096))
    streams = {master: Stream(stream_number(1, "a"), 0)}
    optimizer = FusedAdamW([{"params": [master]}], {}, 1e-3, (0.9, 0.999), 1e-8, streams)
    nearest = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(400):
        optimizer.gradients = {master: torch.ones(4096)}
        optimizer.step()
        nearest = (0.999 * nearest.float() + 0.001).bfloat16()
    moment, exact = optimizer.state[master]["exp_avg_sq"], 1 - 0.999**400
    assert moment.dtype == torch.bfloat16
    assert moment.float().mean().item() == pytest.approx(exact, rel=0.01) and float(nearest) < 0.8 * exact
    old_state = {key: value.clone() for key, value in optimizer.state[master].items()}
    optimizer.gradients, optimizer.found_inf = {master: torch.ones(4096)}, torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    torch.testing.assert_close(optimizer.state[master], old_state, rtol=0, atol=0)


@pytest.mark.parametrize("stage", cells([2], [0, 3], [1]))
def test_data_ranks_have_the_bits_of_one_process(stage: int) -> None:
    """Two micro-batches: two gradients have one sum. (Clipping divides by a norm that is summed by ranks.)"""
    run = values(None, {"gradient_clipping": 0.0, "hidden_dropout": 0.0})
    one_rank, two_ranks = (
        curves_of({"": run}, 6, ranks=ranks)[""] for ranks, run in ((1, run), (2, {**run, **zero(stage)}))
    )
    assert bit_equal(one_rank.weights, two_ranks.weights)


def test_experts_shared_out_are_as_those_of_one_process() -> None:
    run = values(None, LLAMA, EXPERTS, {"gradient_clipping": 0.0, "hidden_dropout": 0.0, "precision": "fp32"})
    split = {**run, **zero(3), "expert_parallel_size": 2}
    one_rank, two_ranks = curves_of({"": run}, 4)[""], curves_of({"": split}, 4, ranks=2)[""]
    assert one_rank.losses == pytest.approx(two_ranks.losses, rel=1e-5)


@pytest.mark.parametrize(("ranks", "overrides"), cells([(1, FUSED)], [(1, {"precision": "fp32"})], [(2, zero(2))]))
def test_goes_on_as_without_an_end(ranks: int, overrides: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes(values(tmp_path, overrides, {"train_iters": 4}), tmp_path, ranks)


def changed_over(
    rank: int, world_size: int, first_values: dict[str, Any], resumed_values: dict[str, Any]
) -> tuple[list[str], list[Any]]:
    """For the pool: the log of a run resumed with `resumed_values`, and its moments before its first step.

    Each moment comes with the one on disk."""
    lines: list[str] = []
    for training in begin_each([first_values]):
        train(training)
    logging.Logger.info = lambda self, text, *values: lines.append(text)  # type: ignore[method-assign, assignment]
    training = begin(resumed_values)
    specs, states = named_params(training.args), training.engine.sharded_states()
    files = OptimizerFiles(Path(first_values["save"]) / "global_step2")
    pairs = [
        (part.clone(), files.read(layer, specs[layer, name], 0, 1)[key].view(part.shape).clone())
        for key, parts in states.items() for (layer, name), part in parts
    ]  # fmt: skip
    return lines, pairs


@pytest.mark.parametrize(("engine", "first_dtype", "resumed_dtype"), [
    ("native", "fp32", "bf16"), ("native", "bf16", "fp32"), ("deepspeed", "bf16", "fp32"),
])  # fmt: skip
def test_goes_on_with_the_other_dtype(engine: str, first_dtype: str, resumed_dtype: str, tmp_path: Path) -> None:
    """Files have moments in the dtype of the run that wrote them. fp32 takes these as they are."""
    run = values(tmp_path, {"train_iters": 2, "optimizer_state_dtype": first_dtype})
    resumed = {**run, "load": run["save"], "train_iters": 4, "optimizer_state_dtype": resumed_dtype, "engine": engine}
    ((lines, pairs),) = run_ranks(changed_over, 1, run, resumed, timeout=TIMEOUT)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    assert pairs and all(
        saved.dtype == types[first_dtype] and now.dtype == types[resumed_dtype] for now, saved in pairs
    )
    assert all(torch.equal(now, saved.to(now.dtype)) for now, saved in pairs)
    assert any(line.startswith("optimizer_state_dtype") for line in lines)


def memory(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """For the pool: (bytes of optimizer states, parameters) of runs after a step."""
    sizes = []
    for training in begin_each(configs):
        training.engine.train_step(next(batches_of(training)), 1e-3)
        states = training.engine.tensors()["optimizer states"]
        size = sum(param.numel() for param in training.engine.stage.parameters())
        sizes.append((sum(t.nbytes for t in states if t.dim()), size))
    return sizes


def test_moments_take_half_the_memory() -> None:
    runs = [values(None, FUSED, {"optimizer_state_dtype": dtype}) for dtype in ("fp32", "bf16")]
    (sizes,) = run_ranks(memory, 1, runs)
    assert [states / size for states, size in sizes] == [12.0, 8.0], "masters and two moments"


@pytest.mark.more
def test_losses_are_near_those_of_fp32(tmp_path: Path) -> None:
    """60 steps, in which the loss falls by more than 1: within 0.3 % at each."""
    steps = {"train_iters": 60, "hidden_dropout": 0.0, "lr_decay_style": "cosine"}
    runs = [values(tmp_path / dtype, FUSED, steps, {"optimizer_state_dtype": dtype}) for dtype in ("fp32", "bf16")]
    run_ranks(to_their_ends, 1, runs, timeout=TIMEOUT)
    full, half = (list(losses(tmp_path / dtype).values()) for dtype in ("fp32", "bf16"))
    assert full[-1] < full[0] - 1 and full != half
    assert half == pytest.approx(full, rel=3e-3)


def test_refused_where_there_are_no_such_moments(tmp_path: Path) -> None:
    message = "optimizer_state_dtype.*bf16 needs"
    assert_refused(
        (values(tmp_path, {"engine": "deepspeed"}), f"{message} engine: native"),
        *((values(tmp_path, {"optimizer": {"type": name, "params": {"lr": 1e-3}}}), f"{message} Adam")
          for name in ("Muon", "Lion", "SGD")),
    )  # fmt: skip
