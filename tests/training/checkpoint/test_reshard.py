"""A run saved in one layout goes on in another, optimizer state included, as if nothing had happened."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import OptimizerFiles, layer_file, load_tensors
from megatron.training.checkpoint import writer as saving
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import MOE, as_stopped_at, losses, refusals, refused, stop_after
from tests.training.layout_runs import zero
from tests.training.native.in_turn import to_their_ends
from tests.training.runs import ADAMW, LLAMA, NEOX, RPE, begin, bit_equal, cells, config, run_to_end
from tools.ckpts.reshard import main as reshard_main

TP2, TP4 = {"model_parallel_size": 2}, {"model_parallel_size": 4}
EP2, EP4 = {"expert_parallel_size": 2}, {"expert_parallel_size": 4}
# A run goes on with the engine of its checkpoint, which is the native one until "pp4".
PP2, PP4 = {"pipe_parallel_size": 2}, {"pipe_parallel_size": 4, "engine": "deepspeed"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}), "tp2 x pp2": (4, TP2 | PP2), "tp4": (4, TP4), "pp2": (2, PP2), "pp4": (4, PP4),
    "pp2, native": (2, PP2 | {"engine": "native"}), "interleaved": (2, PP2 | {"pipeline_schedule": "interleaved"}),
    "zbv zero1": (4, PP2 | zero(1) | {"pipeline_schedule": "zbv"}),
    "dp4": (4, {}), "dp4 zero1": (4, zero(1)), "dp4 zero3": (4, zero(3)), "dp2 zero2": (2, zero(2)),
    "dp2, deepspeed": (2, zero(1) | {"engine": "deepspeed"}),
    "dp2 x tp2 zero1": (4, TP2 | zero(1)), "dp2 x tp2 zero3": (4, TP2 | zero(3)),
    "ep2": (2, EP2), "ep2 zero3": (4, EP2 | zero(3)), "ep4 zero1": (4, EP4 | zero(1)),
    "ep2 tp2": (4, EP2 | TP2 | zero(2) | {"engine": "native"}),
    "pp2 ep2 zero1": (4, PP2 | EP2 | zero(1)),
    "cut": (2, TP2 | {"moe_expert_tensor_parallel": "cut"}), "whole": (2, TP2),
}  # fmt: skip
MODELS = {"neox": NEOX | {"no_weight_tying": True}, "llama, tied": LLAMA, "rpe": RPE, "experts": LLAMA | MOE}
MODELS["one head"] = LLAMA | {"num_kv_heads": 1}
MODELS["lion"] = NEOX | {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
# Model, precision; after a step of one process each layout for two steps, the last one to the end.
CHAINS: dict[str, tuple[str, ...]] = {
    "a pipeline": ("rpe", "fp32", "tp2 x pp2", "one process"),
    "tied": ("llama, tied", "bfloat16", "pp2", "dp2 zero2"),
    "experts": ("experts", "fp32", "ep2", "one process"),
    "shared heads": ("one head", "fp32", "whole", "tp4", "one process"),  # more
    "stages": ("neox", "fp32", "dp4 zero3", "dp4 zero1", "tp4"),
    "schedules": ("llama, tied", "fp32", "interleaved", "zbv zero1", "pp2, native"),
    "fp16": ("neox", "fp16", "dp2 zero2", "dp2, deepspeed", "pp2, native"),
    "experts and stages": ("experts", "fp32", "pp2 ep2 zero1", "ep2 zero3"),
    "schedules back": ("rpe", "bfloat16", "zbv zero1", "interleaved", "one process"),
    "more pipelines": ("rpe", "fp32", "pp4", "pp2, native", "dp4"),  # product
    "tied, more ranks": ("llama, tied", "bfloat16", "tp2 x pp2", "dp4 zero1"),
    "experts and tensors": ("experts", "fp32", "ep2 tp2", "ep4 zero1", "ep2"),
    "back": ("neox", "fp32", "dp4 zero1", "dp4 zero3", "tp2 x pp2"),
    "with tensors": ("neox", "bfloat16", "dp2 zero2", "dp2 x tp2 zero3"),
    "lion": ("lion", "fp32", "tp2 x pp2", "dp2 zero2"),
    "lion, bf16": ("lion", "bfloat16", "dp4 zero3", "dp2 x tp2 zero1"),
    "sliced experts": ("experts", "fp32", "cut", "cut"),
    "pipeline of experts": ("experts", "fp32", "pp2", "ep2 tp2"),
}
NAMES = list(CHAINS)
STEPS, SAVED = 6, 3


def values(save: Path, layout: str, model: str, precision: str, **overrides: Any) -> dict[str, Any]:
    kv = {"num_kv_heads": 4} if model == "llama, tied" else {}
    common = {"precision": precision, "train_micro_batch_size_per_gpu": 2, "train_iters": STEPS}
    schedule = {"lr_decay_style": "cosine", "warmup": 0.3, "min_lr": 1e-5, "checkpoint_factor": SAVED}
    return config(ADAMW, MODELS[model], LAYOUTS[layout][1], kv, common, schedule, {"save": str(save), **overrides})


@pytest.mark.parametrize("name", cells(NAMES[:1], NAMES[1:3], NAMES[3:]))
def test_goes_on(name: str, tmp_path: Path) -> None:
    model, precision, *layouts = CHAINS[name]
    full_run, save = tmp_path / "through", tmp_path / "run"
    run_ranks(run_to_end, 1, values(full_run, "one process", model, precision, extra_save_iters=[1]))
    as_stopped_at(1, full_run, save)
    for stop, layout in zip((3, 5), layouts[:-1], strict=False):
        run_ranks(stop_after, LAYOUTS[layout][0], values(save, layout, model, precision, checkpoint_factor=1), stop)
    ranks = LAYOUTS[layouts[-1]][0]
    if name == "a pipeline":
        fresh = tmp_path / "fresh"
        fresh_values = values(fresh, layouts[-1], model, precision, load=str(save), no_load_optim=True)
        run_ranks(run_to_end, ranks, fresh_values)
        assert losses(fresh) != near_losses(full_run, losses(fresh), 1e-4), "or it proves little"
    run_ranks(run_to_end, ranks, values(save, layouts[-1], model, precision))
    # Sums in another order, rounded to 8 bits in bf16.
    assert losses(save) == near_losses(full_run, range(2, STEPS + 1), 1e-5 if precision == "fp32" else 1e-3)


def near_losses(save: Path, steps: Iterable[int], tolerance: float) -> Any:
    """The losses of a run in these steps, relatively."""
    return pytest.approx({step: losses(save)[step] for step in steps}, rel=tolerance)


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints after the first step, by ZeRO stage."""
    folders = [tmp_path_factory.mktemp(f"zero{stage}") for stage in range(4)]
    overrides = {"train_micro_batch_size_per_gpu": 4, "exit_interval": 1}
    runs = [values(folder, "dp4", "neox", "fp32", **zero(stage), **overrides) for stage, folder in enumerate(folders)]
    run_ranks(to_their_ends, 2, runs)
    return [folder / "global_step1" for folder in folders]


def states_of(step: Path) -> dict[Any, Any]:
    return {key: load_tensors(path) for key, path in sorted(OptimizerFiles(step).files.items())}


def test_files_are_the_same_from_any_zero_stage(first_steps: list[Path]) -> None:
    expected, *other_stages = map(states_of, first_steps)
    for stage_states in other_stages:
        assert stage_states.keys() == expected.keys()
        for key, states in expected.items():
            assert states.keys() == stage_states[key].keys()
            for name, state in states.items():
                assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["step"] == 1.0
                for state_name, value in state.items():
                    assert value.shape == stage_states[key][name][state_name].shape
                    assert value.allclose(stage_states[key][name][state_name], rtol=1e-4, atol=1e-9), (
                        key,
                        name,
                        state_name,
                    )


def test_there_and_back_is_bit_equal(first_steps: list[Path], tmp_path: Path) -> None:
    """Loaded at ZeRO 3 and saved at once, the state is the one that a same-layout resume would have."""
    run_ranks(save_at_once, 2, values(tmp_path, "dp4", "neox", "fp32", **zero(3), load=str(first_steps[1].parent)))
    resaved, original = states_of(tmp_path / "global_step1"), states_of(first_steps[1])
    assert resaved.keys() == original.keys() and all(bit_equal(resaved[key], original[key]) for key in original)


def save_at_once(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: load, and write what was loaded."""
    training = begin(values)
    training.checkpointer.save(training.progress)
    training.checkpointer.wait()


def old_run(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: a run that writes its state as DeepSpeed keeps it."""
    saving.is_state_per_parameter = lambda args: False
    run_to_end(rank, world_size, values)


@pytest.mark.parametrize("layout", cells(["one process"], ["dp2 zero2"], ["dp4 zero3"]))
def test_state_as_deepspeed_keeps_it(layout: str, tmp_path: Path) -> None:
    """Earlier checkpoints, and those of 8-bit Adam: their layout goes on, another is told why not."""
    ranks, full_run, save = LAYOUTS[layout][0], tmp_path / "through", tmp_path / "run"
    run_values = values(full_run, layout, "neox", "fp32", engine="deepspeed")
    run_ranks(old_run, ranks, run_values)
    as_stopped_at(SAVED, full_run, save)
    assert not list((save / f"global_step{SAVED}").glob("optim_*"))
    (message,) = refused(values(tmp_path / "on", "one process", "neox", "fp32", **PP2, load=str(save)), ranks=2)
    assert re.search(r"pipe_parallel_size: 2 \(program\), .* 1", message)
    run_values = {**run_values, "save": str(save)}
    (message,) = refused({**run_values, "engine": "native"}, ranks=ranks)
    assert "DeepSpeed" in message and "engine: deepspeed" in message
    run_ranks(run_to_end, ranks, run_values)
    expected = losses(full_run)
    assert losses(save) == {step: expected[step] for step in range(SAVED + 1, STEPS + 1)}


def test_a_bias_that_balances_can_come_later_and_stay(tmp_path: Path) -> None:
    """The bias begins with zeros; a run without it does not read over it."""
    cell, no_bias = ("one process", "experts", "fp32"), {"moe_router_bias_update_rate": None}
    first_save, second_save = tmp_path / "first", tmp_path / "second"
    run_ranks(run_to_end, 1, values(first_save, *cell, **no_bias, train_iters=1))
    tuned = values(second_save, *cell, load=str(first_save), finetune=True, train_iters=2)
    steps = run_ranks(run_to_end, 1, tuned)[0][1][2]["mlp.router.expert_bias"] / 0.01
    assert 0.5 < steps.abs().max() < 2.5 and torch.allclose(steps, steps.round(), atol=1e-4)
    (message,) = refused({**tuned, **no_bias, "load": str(second_save), "save": None})
    assert "mlp.router.expert_bias" in message and "moe_router_bias_update_rate: 0" in message


def test_slices_and_whole_experts_are_not_mixed_up(tmp_path: Path) -> None:
    run_ranks(run_to_end, 2, values(tmp_path, "cut", "experts", "fp32", train_iters=1))
    for (message,) in run_ranks(refusals, 2, [values(tmp_path, "whole", "experts", "fp32")]):
        assert "moe_expert_tensor_parallel" in message and "cut" in message
    assert load_tensors(tmp_path / "global_step1" / layer_file(2, 0))["mlp.experts.mlp.w1"].shape == (4 * 24, 32)


@pytest.mark.product
def test_slices_become_whole_experts_by_way_of_one_rank(tmp_path: Path) -> None:
    sharded, merged, resumed = tmp_path / "cut", tmp_path / "one", tmp_path / "on"
    run_ranks(run_to_end, 2, values(sharded, "cut", "experts", "fp32"))
    reshard_main(["--input_dir", str(sharded), "--iteration", str(SAVED), "--output_dir", str(merged), "--tp", "1"])
    run_ranks(run_to_end, 2, values(resumed, "whole", "experts", "fp32", load=str(merged)))
    assert losses(resumed) == near_losses(sharded, (4, 5, 6), 1e-5)
