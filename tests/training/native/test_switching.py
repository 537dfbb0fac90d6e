"""A run goes on under the other engine, and stays with its own unless told otherwise."""

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import read_manifest
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.engine_choice import choose_engine
from megatron.training.native.engine import NativeEngine
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import assert_refused, losses, refusals
from tests.training.layout_runs import zero
from tests.training.native.in_turn import TIMEOUT, to_their_ends
from tests.training.runs import ADAMW, LLAMA, NEOX, bit_equal, cells, config

STEPS = 5
PARTS = [("deepspeed", 1, 1), ("native", 3, 2), ("deepspeed", 3, 3), ("native", 0, STEPS)]  # stage, last step


def values(save: Path, **overrides: Any) -> dict[str, Any]:
    common = {"train_micro_batch_size_per_gpu": 2, "train_iters": STEPS, "hidden_dropout": 0.1}
    saved = {"save": str(save), "load": str(save), "checkpoint_factor": 100}
    return config(ADAMW, LLAMA, common, saved, {"lr_decay_style": "cosine"}, overrides)


def engine_of(save: Path, step: str) -> str | None:
    manifest = read_manifest(save / step)
    return manifest and manifest.engine


@pytest.mark.parametrize("precision", cells(["fp32"], product=["bfloat16"]))
def test_deepspeed_and_native_in_turn(precision: str, tmp_path: Path) -> None:
    """Whatever wrote the moments and master weights, the next losses are those of a run without a change."""
    uninterrupted, save = tmp_path / "through", tmp_path / "turns"
    runs = [values(uninterrupted, precision=precision, engine="deepspeed", **zero(1))]
    for engine, stage, last in PARTS:
        runs.append(values(save, precision=precision, engine=engine, exit_interval=last, **zero(stage)))
    run_ranks(to_their_ends, 2, runs, timeout=TIMEOUT)
    assert [engine_of(save, f"global_step{last}") for _, _, last in PARTS] == [engine for engine, _, _ in PARTS]
    # bf16 gradients are summed in another order, and its losses have 8 bits.
    assert losses(save) == pytest.approx(losses(uninterrupted), rel=1e-5 if precision == "fp32" else 1e-3)


def test_auto_keeps_the_engine_of_a_run(tmp_path: Path) -> None:
    """One that is found under `save` alone, too."""
    run_values = values(tmp_path, load=None, train_micro_batch_size_per_gpu=8)
    runs = [{**run_values, "engine": "deepspeed", "exit_interval": 1}, {**run_values, "exit_interval": 2}]
    run_ranks(to_their_ends, 1, runs)
    assert engine_of(tmp_path, "global_step1") == engine_of(tmp_path, "global_step2") == "deepspeed"


MUON: dict[str, Any] = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}


OFFLOADED_WEIGHTS = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


@pytest.mark.parametrize(("overrides", "ranks", "recorded", "name", "reason"), [
    ({}, 1, None, "native", "auto"),
    ({}, 2, "deepspeed", "deepspeed", "auto: .* resumed"),
    ({}, 2, "native", "native", "auto: .* resumed"),
    ({"engine": "native"}, 2, "deepspeed", "native", "program"),
    (MUON, 2, None, "native", "optimizer.type .* Muon"),
    ({"pipe_parallel_size": 2, **zero(1)}, 4, None, "native", "auto"),
    ({"pipe_parallel_size": 2, **zero(2)}, 4, None, "native", r"auto: .*pipe_parallel_size \(program\) 2 .*stage 2"),
    ({"precision": "fp16", "fp16": {"enabled": True}}, 2, None, "native", "auto"),
    ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, 2, None, "native", "auto"),
    (OFFLOADED_WEIGHTS, 2, None, "deepspeed", "offload_param"),
    ({"optimizer": {"type": "CPU_Adam", "params": {"lr": 1e-3}}}, 2, None, "deepspeed", "CPU_Adam"),
], ids=str)  # fmt: skip
def test_choice(overrides: dict[str, Any], ranks: int, recorded: str | None, name: str, reason: str) -> None:
    args = NeoXArgs.from_dict(config(NEOX, overrides)).for_world(ranks)
    choice = choose_engine(args, recorded)
    assert choice.name == name and re.search(reason, choice.reason), choice


@pytest.mark.parametrize(
    ("saved_type", "loaded_type"), cells([("AdamW", "Muon")], [("Lion", "SGD")], [("Muon", "AdamW")])
)
def test_another_optimizers_state_is_refused(saved_type: str, loaded_type: str, tmp_path: Path) -> None:
    def with_optimizer(kind: str, **overrides: Any) -> dict[str, Any]:
        optimizer = {"type": kind, "params": {"lr": 1e-3}}
        return values(tmp_path, optimizer=optimizer, train_micro_batch_size_per_gpu=8, **overrides)

    run_ranks(to_their_ends, 1, [with_optimizer(saved_type, exit_interval=1)])
    assert_refused(
        (
            with_optimizer(loaded_type),
            rf"optimizer.type: {loaded_type} .*{re.escape(str(tmp_path))}.* {saved_type}.*no_load_optim",
        )
    )
    run_ranks(to_their_ends, 1, [with_optimizer(loaded_type, no_load_optim=True, exit_interval=2)])


@pytest.mark.product
@pytest.mark.parametrize("tensor", [1, 2])
def test_groups_of_neighbours_go_on(tensor: int, tmp_path: Path) -> None:
    """Copies in groups of two: resumed bit for bit, and gone on without them and by DeepSpeed."""
    common = {"precision": "bfloat16", "model_parallel_size": tensor, "train_micro_batch_size_per_gpu": 2}
    grouped = {**common, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    stopped = values(tmp_path / "stopped", **grouped)
    common |= {"load": stopped["load"], "zero_optimization": {"stage": 1}}
    ungrouped = [values(tmp_path / engine, **common, engine=engine) for engine in ("native", "deepspeed")]
    runs = [values(tmp_path / "through", **grouped), {**stopped, "exit_interval": 2}, *ungrouped, stopped]
    for uninterrupted, *_, resumed in run_ranks(to_their_ends, 4 * tensor, runs, timeout=TIMEOUT):
        assert bit_equal(resumed, uninterrupted)
    expected = losses(tmp_path / "through")
    for engine in ("native", "deepspeed"):
        now = losses(tmp_path / engine)
        assert len(now) == STEPS - 2 and now == pytest.approx({step: expected[step] for step in now}, rel=1e-3)


def test_keys_without_effect_are_named() -> None:
    zero_keys = zero(1, overlap_comm=True, reduce_bucket_size=5e8)
    for neighbours, names in ((1, set()), (2, {"zero_hpz_partition_size"})):
        values = config(
            NEOX, zero_optimization={**zero_keys["zero_optimization"], "zero_hpz_partition_size": neighbours}
        )
        args = NeoXArgs.from_dict(values).for_world(1)
        NativeEngine.check(args)
        [note] = NativeEngine.notes(args)
        assert {*re.findall(r"\w+_\w+", note)} == {"zero_optimization", "reduce_bucket_size", "overlap_comm", *names}
    assert NativeEngine.notes(NeoXArgs.from_dict(config(NEOX)).for_world(1)) == []


def test_neighbours_must_fit() -> None:
    args = NeoXArgs.from_dict(config(NEOX, zero(3, zero_hpz_partition_size=3))).for_world(4)
    with pytest.raises(ConfigError, match="size 3 .* 4 data"):
        NativeEngine.check(args)


def test_an_unknown_engine_of_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match="engine bare .*native or deepspeed"):
        choose_engine(NeoXArgs.from_dict(config(NEOX)), "bare").load()


def test_an_engine_says_what_it_leaves_to_the_other() -> None:
    logger = config(NEOX, engine="native", pipe_parallel_size=2, comms_logger={"enabled": True})
    muon = config(NEOX, engine="deepspeed", optimizer={"type": "Muon", "params": {"lr": 1e-3}})
    pipeline = config(NEOX, zero(2), engine="deepspeed", pipe_parallel_size=2)
    for native_message, muon_message, pipeline_message in run_ranks(refusals, 2, [logger, muon, pipeline]):
        assert re.search("comms_logger.* engine: deepspeed", native_message)
        assert re.search("Muon.* engine: native", muon_message)
        assert re.search("pipe_parallel_size 2.*stage 2.* engine: native", pipeline_message)
