"""A run goes on under the other engine, and stays with its own unless told otherwise."""

import re
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import read_manifest
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.engine_choice import choose_engine
from megatron.training.native.engine import NativeEngine
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.runs import ADAMW, LLAMA, NEOX, bit_equal, config, run_to_end

STEPS = 9
PARTS = [("deepspeed", 1), ("native", 3), ("deepspeed", 3), ("native", 0)]


def values(save: Path, **more: Any) -> dict[str, Any]:
    common: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "train_iters": STEPS, "checkpoint_factor": 100}
    common |= {"hidden_dropout": 0.1, "lr_decay_style": "cosine"}
    return config(ADAMW, LLAMA, common, {"save": str(save), "load": str(save)}, more)


@pytest.mark.parametrize("precision", with_more(["fp32", "bfloat16"], "bfloat16"))
def test_deepspeed_and_native_in_turn(precision: str, tmp_path: Path) -> None:
    """Whatever wrote the moments and master weights, the next losses are those of a run without a change."""
    through = values(tmp_path / "through", precision=precision, engine="deepspeed")
    run_ranks(run_to_end, 2, {**through, "zero_optimization": {"stage": 1}}, timeout=120)
    expected, save = losses(tmp_path / "through"), tmp_path / "turns"
    for i, (engine, stage) in enumerate(PARTS[: 4 if precision == "fp32" else 3]):
        given = values(save, precision=precision, engine=engine, zero_optimization={"stage": stage})
        run_ranks(run_to_end, 2, {**given, "exit_interval": min(STEPS, 2 * i + 2)}, timeout=120)
        manifest = read_manifest(save / (save / "latest").read_text())
        assert manifest is not None and manifest.engine == engine
    now = losses(save)
    worst = max(abs(now[step] - expected[step]) / expected[step] for step in now)
    # bf16 gradients are summed in another order, and its losses have 8 bits.
    assert worst < (1e-5 if precision == "fp32" else 1e-3), worst


def test_auto_keeps_the_engine_of_a_run(tmp_path: Path) -> None:
    """One that is found under `save` alone, too."""
    given = values(tmp_path, exit_interval=2, load=None)
    for name, more in (("deepspeed", {"engine": "deepspeed"}), ("deepspeed", {"exit_interval": 4})):
        run_ranks(run_to_end, 2, {**given, **more})
        manifest = read_manifest(tmp_path / (tmp_path / "latest").read_text())
        assert manifest is not None and manifest.engine == name


@pytest.mark.parametrize(
    ("more", "on_gpu", "recorded", "name", "reason"),
    [
        ({}, False, None, "native", "auto: on CPUs"),
        ({}, True, None, "deepspeed", "auto: on GPUs, until"),
        ({}, True, "native", "native", "auto: that of the run it goes on from"),
        ({"engine": "native"}, True, "deepspeed", "native", "program"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, True, None, "native", "optimizer.type .* Muon is"),
        ({"pipe_parallel_size": 2}, False, None, "deepspeed", r"auto: pipe_parallel_size \(program\) 2: pipelines"),
        ({"precision": "fp16", "fp16": {"enabled": True}}, False, None, "deepspeed", "auto: precision .* fp16"),
        ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, False, None, "deepspeed", "cpu_offload"),
    ],
    ids=str,
)
def test_choice(more: dict[str, Any], on_gpu: bool, recorded: str | None, name: str, reason: str) -> None:
    choice = choose_engine(NeoXArgs.from_dict(config(NEOX, more)), on_gpu, recorded)
    assert choice.name == name and re.search(reason, choice.reason), choice


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("AdamW", "Muon"),
        *(pytest.param(*pair, marks=pytest.mark.more) for pair in (("Muon", "AdamW"), ("Lion", "SGD"))),
    ],
)
def test_another_optimizers_state_is_refused(before: str, after: str, tmp_path: Path) -> None:
    def given(kind: str, **more: Any) -> dict[str, Any]:
        return values(tmp_path, optimizer={"type": kind, "params": {"lr": 1e-3}}, **more)

    run_ranks(run_to_end, 1, given(before, exit_interval=1))
    with pytest.raises(
        AssertionError, match=rf"optimizer.type: {after} .*, but the run of \S+ had {before}: .* no_load_o"
    ):
        run_ranks(run_to_end, 1, given(after))
    run_ranks(run_to_end, 1, given(after, no_load_optim=True, exit_interval=2))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tensor", with_more([1, 2], 1, product=[2]))
def test_groups_of_neighbours_go_on(tensor: int, tmp_path: Path) -> None:
    """Copies in groups of two: resumed bit for bit, and gone on without them and by DeepSpeed."""
    ranks, zero = 4 * tensor, {"stage": 3, "zero_hpz_partition_size": 2}
    common = {"precision": "bfloat16", "model_parallel_size": tensor, "zero_optimization": zero, "train_batch_size": 8}
    through = values(tmp_path / "through", **common)
    weights = run_ranks(run_to_end, ranks, through, timeout=200)
    stopped = values(tmp_path / "stopped", **common)
    run_ranks(run_to_end, ranks, {**stopped, "exit_interval": 4}, timeout=200)
    for engine, stage in (("native", 1), ("deepspeed", 1)):
        other = values(tmp_path / f"other-{engine}", **common, engine=engine, load=str(tmp_path / "stopped"))
        run_ranks(run_to_end, ranks, {**other, "zero_optimization": {"stage": stage}}, timeout=200)
        now, expected = losses(tmp_path / f"other-{engine}"), losses(tmp_path / "through")
        assert max(abs(now[step] - expected[step]) / expected[step] for step in range(5, STEPS + 1)) < 1e-3
    resumed = run_ranks(run_to_end, ranks, stopped, timeout=200)
    assert all(bit_equal(a[1], b[1]) for a, b in zip(weights, resumed, strict=True))


def test_keys_without_effect_are_named() -> None:
    given = {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 5e8, "zero_hpz_partition_size": 1}
    args = NeoXArgs.from_dict(config(NEOX, zero_optimization=given)).for_world(1)
    expected = "zero_optimization: the native engine does without reduce_bucket_size, overlap_comm"
    assert NativeEngine.notes(args) == [expected]
    assert NativeEngine.notes(NeoXArgs.from_dict(config(NEOX)).for_world(1)) == []


@pytest.mark.parametrize(
    ("ranks", "stage", "message"), [(2, 1, "needs zero_optimization.stage 3, not 1"), (4, 3, "does not divide the 4")]
)
def test_neighbours_must_fit(ranks: int, stage: int, message: str) -> None:
    zero = {"stage": stage, "zero_hpz_partition_size": 3}
    with pytest.raises(ConfigError, match=message):
        NativeEngine.check(NeoXArgs.from_dict(config(NEOX, zero_optimization=zero)).for_world(ranks))


def test_an_unknown_engine_of_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match="engine bare .* is not known here; write engine: native or deepspeed"):
        choose_engine(NeoXArgs.from_dict(config(NEOX)), False, "bare").load()


def test_native_says_what_it_leaves_to_deepspeed() -> None:
    given = config(NEOX, engine="native", pipe_parallel_size=2, comms_logger={"enabled": True})
    with pytest.raises(AssertionError, match=r"pipe_parallel_size 2: pipelines run on DeepSpeed; write engine: deeps"):
        run_ranks(run_to_end, 2, given)
