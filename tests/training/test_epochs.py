"""The length of runs, in epochs, longer or shorter; data that is not shared; the length of rows."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpointing import read_manifest
from megatron.neox_arguments import NeoXArgs
from megatron.training import loop, train
from megatron.training.checkpoint.resume import TrainingProgress
from megatron.training.loop import _advance
from megatron.training.method import StepData
from tests.pool import run_ranks
from tests.training import runs
from tests.training.checkpoint.test_resume import assert_goes_on, losses, stop_after
from tests.training.runs import (
    ADAMW,
    GOLDEN,
    LLAMA,
    NEOX,
    Curve,
    begin,
    bit_equal,
    config,
    curves,
    metric_rows,
    output_of_run,
    run_to_end,
)


def in_epochs(**overrides: Any) -> dict[str, Any]:
    small = {"num_layers": 1, "train_batch_size": 48, "lr_decay_style": "cosine", "split": "100,0,0"}
    values = config(NEOX, ADAMW, small, {"train_epochs": 2, "train_iters": None, **overrides})
    return {key: value for key, value in values.items() if value is not None}


def facts(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    """For the pool: what a run became of the epochs."""
    training = begin(values)
    args, train = training.args, training.datasets.train
    assert train is not None and training.schedule.end == args.lr_decay_iters
    return {"iterations": args.train_iters, "decay": args.lr_decay_iters, "samples": len(train)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_iterations_follow_from_the_data(ranks: int) -> None:
    everyone = run_ranks(facts, ranks, in_epochs())
    samples = everyone[0]["samples"]
    assert samples % 2 == 0 and samples % 48
    iterations = samples // 48
    assert everyone == [{"iterations": iterations, "decay": iterations, "samples": samples}] * ranks
    assert run_ranks(facts, ranks, in_epochs(lr_decay_fraction=0.5))[0]["decay"] == int(iterations * 0.5)


def test_a_run_ends_goes_on_and_can_get_longer(tmp_path: Path) -> None:
    run_values = in_epochs(save=str(tmp_path / "a"), checkpoint_factor=3, hidden_dropout=0.1)
    full_weights = run_ranks(run_to_end, 1, run_values)[0][1]
    stopped = {**run_values, "save": str(tmp_path / "b")}
    run_ranks(stop_after, 1, stopped, 3)
    assert bit_equal(full_weights, run_ranks(run_to_end, 1, stopped)[0][1])
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    iterations = max(losses(tmp_path / "a"))
    assert json.loads((tmp_path / "a" / "status.json").read_text())["train_iters"] == iterations
    with pytest.raises(AssertionError, match=rf"train_epochs: end_iter \d+ .*{iterations}"):
        run_ranks(run_to_end, 1, {**stopped, "train_epochs": 3})
    longer = {**stopped, "train_epochs": 3, "lr_decay_iters": iterations}
    run_ranks(run_to_end, 1, longer)
    assert max(losses(tmp_path / "b")) == run_ranks(facts, 1, longer)[0]["iterations"] > iterations


def test_the_second_epoch_is_the_first_again() -> None:
    """Without learning, losses of the second pass are those of the first."""
    no_learning = {"optimizer": {"type": "SGD", "params": {"lr": 1e-12}}, "train_batch_size": 1, "warmup": 0.0}
    no_learning |= {
        "seq_length": 512,
        "max_position_embeddings": 512,
        "lr_decay_style": "constant",
        "weight_decay": 0.0,
    }
    steps = run_ranks(facts, 1, in_epochs(**no_learning))[0]["iterations"]
    step_losses = run_ranks(curves, 1, [in_epochs(**no_learning)], steps)[0][0].losses
    assert step_losses[: steps // 2] == pytest.approx(step_losses[steps // 2 :], rel=1e-6) and len(set(step_losses)) > 3


def on_own_machine(rank: int, world_size: int, values: dict[str, Any]) -> list[float]:
    """For the pool: each rank is the first of a machine with its own folders."""
    os.environ["LOCAL_RANK"] = "0"
    machine_keys = {key: values[key].format(rank) for key in ("index_cache_dir", "data_path")}
    return curves(rank, world_size, [{**values, **machine_keys}], 2)[0].losses


def test_machines_without_shared_files_make_their_own_maps(tmp_path: Path) -> None:
    run_values = config(NEOX, num_layers=1, train_iters=2, use_shared_fs=False, index_cache_dir=f"{tmp_path}/cache{{}}")
    losses_by_rank = run_ranks(on_own_machine, 2, run_values)
    assert (
        losses_by_rank[0]
        == losses_by_rank[1]
        == pytest.approx(run_ranks(curves, 1, [config(NEOX, num_layers=1)], 2)[0][0].losses)
    )
    names = [sorted(path.name for path in (tmp_path / f"cache{rank}").iterdir()) for rank in range(2)]
    assert names[0] == names[1] != []


def test_machines_with_different_data_are_refused(tmp_path: Path) -> None:
    for rank, name in enumerate("AB"):
        for suffix in ("bin", "idx"):
            shutil.copy(GOLDEN / f"dataset/corpus{name}_text_document.{suffix}", tmp_path / f"data{rank}.{suffix}")
    run_values = config(
        NEOX, use_shared_fs=False, data_path=f"{tmp_path}/data{{}}", index_cache_dir=f"{tmp_path}/cache{{}}"
    )
    with pytest.raises(AssertionError, match="use_shared_fs: false.*data.*rank 1.*rank 0"):
        run_ranks(on_own_machine, 2, run_values)


# -- runs that get longer or shorter
def drawn_samples(
    rank: int, world_size: int, values: dict[str, Any]
) -> tuple[list[list[int]], dict[int, dict[str, Any]]]:
    """For the pool: of a run the tokens of every sample that it drew, and the weights at its end."""
    training, samples, steps_of = begin(values), [], loop.steps_of

    def watched(training: Any) -> Any:
        for data in steps_of(training):
            samples.extend(row.tolist() for batch in data.batches for row in batch.tokens)
            yield data

    loop.steps_of = watched  # this process is the pool's throw-away fork
    train(training)
    return samples, training.engine.weights(master=True)


def laid_out(save: Path, steps: int, **overrides: Any) -> dict[str, Any]:
    """Steps of 48 windows; an epoch has about four of them."""
    rates = {"lr_decay_style": "cosine", "warmup": 0.0, "min_lr": 1e-5, "lr_decay_iters": steps, **overrides}
    size = {"num_layers": 2, "train_batch_size": 48, "train_iters": steps}
    return config(NEOX, size, rates, save=str(save), checkpoint_factor=3)


def windows(save: Path) -> list[int]:
    """The ends of the stretches of a run's order."""
    manifest: Any = read_manifest(sorted(save.glob("global_step*"))[-1])
    (ends,) = manifest.data["laid_out"]["train"]
    return ends


def test_a_run_is_extended_over_the_end_of_its_epoch(tmp_path: Path) -> None:
    """Three steps of the first epoch, then to twelve: the rest of that epoch, and whole ones behind it."""
    save, longer = tmp_path / "run", {"override_lr_scheduler": True, "lr_decay_iters": 12}
    first_samples, _ = run_ranks(drawn_samples, 1, laid_out(save, 3))[0]
    (end,) = windows(save)
    assert 3 * 48 < end < 6 * 48, "an epoch, which the first three steps do not use up"
    later_samples, weights = run_ranks(drawn_samples, 1, laid_out(save, 12, **longer))[0]
    assert max(losses(save)) == 12 and windows(save)[0] == end
    # The epoch that was begun is that of the run as it was typed first
    all_samples, (epoch, _) = (
        first_samples + later_samples,
        run_ranks(drawn_samples, 1, laid_out(tmp_path / "as first", end // 48))[0],
    )
    assert epoch == all_samples[: len(epoch)]
    assert len({tuple(row) for row in all_samples[:end]}) == end, "every window of it once, and none in two places"
    # Stopped at nine, it goes on bit for bit
    for steps, keys in ((3, {}), (9, longer), (12, longer)):
        last_samples, last_weights = run_ranks(drawn_samples, 1, laid_out(tmp_path / "stopped", steps, **keys))[0]
    assert (
        last_samples == all_samples[-len(last_samples) :]
        and len(last_samples) == 3 * 48
        and bit_equal(weights, last_weights)
    )


@pytest.mark.product
@pytest.mark.parametrize("layout", ["pp2, deepspeed", "zero1"])
def test_a_run_is_extended_in_another_layout(layout: str, tmp_path: Path) -> None:
    losses_by_layout = []
    for ranks, keys in ((1, {}), runs.TABLE[layout]):
        save = tmp_path / str(ranks)
        run_ranks(drawn_samples, 1, laid_out(save, 3))
        run_ranks(drawn_samples, ranks, {**laid_out(save, 12, override_lr_scheduler=True), **keys})
        losses_by_layout.append(losses(save))
    assert len(losses_by_layout[0]) == 12 and losses_by_layout[1] == pytest.approx(losses_by_layout[0], rel=1e-5)


@pytest.mark.parametrize("keys", [{"pack_impl": "best_fit"}, {"lr_decay_style": "constant"}], ids=["rows", "one epoch"])
def test_where_nothing_is_laid_out_anew_it_is_the_longer_run(keys: dict[str, Any], tmp_path: Path) -> None:
    """Rows of whole documents, and windows within the epochs that both have: bit for bit."""
    steps = (3, 8) if "pack_impl" in keys else (2, 4)
    runs_of = [("run", steps[0]), ("run", steps[1]), ("through", steps[1])]
    configs = [laid_out(tmp_path / name, end) | {"lr_decay_style": "constant", **keys} for name, end in runs_of]
    (first_samples, _), (later_samples, extended), (all_samples, full_weights) = (
        run_ranks(drawn_samples, 1, run_values)[0] for run_values in configs
    )
    assert first_samples + later_samples == all_samples and bit_equal(extended, full_weights)


def test_a_run_is_shortened(tmp_path: Path) -> None:
    """Twelve steps mix three epochs; ended after six, they are the first six of these."""
    save = tmp_path / "run"
    all_samples, _ = run_ranks(drawn_samples, 1, laid_out(tmp_path / "whole", 12))[0]
    started = laid_out(save, 12, exit_interval=3)
    first_samples, _ = run_ranks(drawn_samples, 1, started)[0]
    later_samples, _ = run_ranks(drawn_samples, 1, {**started, "train_iters": 6, "exit_interval": None})[0]
    assert first_samples + later_samples == all_samples[: 6 * 48] and max(losses(save)) == 6 and len(windows(save)) == 1


def test_a_checkpoint_of_before_stretches_were_written_goes_on(tmp_path: Path) -> None:
    """An old checkpoint holds the number of samples laid out, and fewer keys."""
    rests = []
    for save in (tmp_path / "then", tmp_path / "now"):
        first_samples, _ = run_ranks(drawn_samples, 1, laid_out(save, 3))[0]
        if save.name == "then":
            manifest: Any = read_manifest(save / "global_step3")
            order = {"train_samples": windows(save)[0], "seq_length": 32, "split": "90,10,0"}
            old_manifest = replace(manifest, data={"files": manifest.data["files"], "order": order})
            (save / "global_step3" / "manifest.json").write_text(old_manifest.to_json())
        rests.append(run_ranks(drawn_samples, 1, laid_out(save, 12, override_lr_scheduler=True))[0][0])
    assert rests[0] == rests[1] and rests[0][: len(first_samples)] != first_samples


# -- the length of rows
CURRICULUM: dict[str, Any] = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32,
    "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 8},
}  # fmt: skip
PHASES: dict[str, Any] = {"seq_curriculum": {"seq_len": [8, 16, 32], "until": [2, 5]}}
PHASES |= {"reset_attention_mask": True, "reset_position_ids": True}
# Keys, and the lengths of steps: one that stays, ones that change, and the whole.
KINDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "growing": ({"curriculum_learning": CURRICULUM}, [8, 16, 16, 24, 24, 32]),
    "phases": (PHASES, [8, 8, 16, 16, 16, 32]),
}
STEPS = 6


def curves_in(ranks: int, layout: dict[str, Any]) -> dict[tuple[str, str], Curve]:
    configs = {
        (kind, name): config(model, ADAMW, keys, {"train_micro_batch_size_per_gpu": 2, **layout})
        for kind, (keys, _) in KINDS.items() for name, model in (("neox", NEOX), ("llama", LLAMA))
    }  # fmt: skip
    return runs.curves_of(configs, STEPS, ranks)


@pytest.fixture(scope="module")
def references() -> dict[tuple[str, str], Curve]:
    """One process, one micro-batch of 8."""
    return curves_in(1, {"train_micro_batch_size_per_gpu": 8})


@pytest.mark.parametrize("name", runs.cells([], ["zero3"], ["tp2 pp2 sp", "tp2 sp", "zero1", "pp2"]))
def test_layout_equals_one_process(name: str, references: dict[tuple[str, str], Curve]) -> None:
    runs.assert_alike(curves_in(*runs.TABLE[name]), references)


def test_short_sequences_change_the_run(references: dict[tuple[str, str], Curve]) -> None:
    full_length = runs.curves_of({"plain": config(NEOX, ADAMW, train_micro_batch_size_per_gpu=8)}, STEPS)["plain"]
    for kind in KINDS:
        assert runs.furthest(full_length, references[kind, "neox"])[0] > 1e-3


@pytest.mark.parametrize(
    ("kind", "layout"), runs.cells([("growing", "pp2"), ("phases", "pp2")], [("growing", "zero1")])
)
def test_resume_and_log(kind: str, layout: str, tmp_path: Path) -> None:
    """Stopped after three steps, which is inside a phase."""
    keys, lengths = KINDS[kind]
    ranks, layout_keys = runs.TABLE[layout]
    run = {"train_micro_batch_size_per_gpu": 2, "train_iters": 6, "checkpoint_factor": 3, "hidden_dropout": 0.1}
    assert_goes_on(ranks, config(NEOX, ADAMW, keys, run, layout_keys), tmp_path)
    rows = [*runs.metric_rows(tmp_path / "through")[:3], *runs.metric_rows(tmp_path / "resumed")]
    assert [row["curriculum_seqlen"] for row in rows] == lengths
    if kind == "phases":
        assert [row["consumed_tokens"] for row in rows] == [8 * 32 * i for i in range(1, 7)]
        assert [row["curriculum_tokens"] for row in rows] == [256 * n for n in (1, 2, 1, 2, 3, 1)]
    else:
        assert [row["consumed_tokens"] for row in rows] == [8 * sum(lengths[: i + 1]) for i in range(6)]
        speeds = [row["runtime/tokens_per_sec"] / row["runtime/samples_per_sec"] for row in rows]
        assert speeds == pytest.approx(lengths)


def test_what_was_read_is_said_when_a_phase_ends() -> None:
    lines: list[str] = []
    args = NeoXArgs.from_dict(config(NEOX, PHASES, train_micro_batch_size_per_gpu=2))
    training = SimpleNamespace(args=args, progress=TrainingProgress(), logger=SimpleNamespace(info=lines.append))
    for _ in range(8):
        _advance(training, StepData([]))  # type: ignore[arg-type]
    for line, facts in zip(lines, (("512", "8", "16", "3"), ("768", "16", "32", "6")), strict=True):
        assert line.startswith("seq_curriculum: ") and tuple(re.findall(r"\d+", line)) == facts
    assert training.progress.row_tokens == {8: 512, 16: 768, 32: 768} and training.progress.consumed_tokens == 2048


def test_a_warm_up_longer_than_the_epochs_lasts_to_the_end(tmp_path: Path) -> None:
    """As in stacks whose recipes warm up for 500 steps, whatever the data."""
    keys = {"train_epochs": 1, "train_iters": None, "warmup": None, "warmup_iters": 500, "lr_decay_style": "linear",
            "limit_samples": 12, "split": "100,0,0"}  # fmt: skip
    log = run_ranks(
        output_of_run, 1, config(NEOX, {"num_layers": 1}, keys, save=str(tmp_path), checkpoint_factor=10**6), True
    )[0]
    rows = metric_rows(tmp_path)
    assert 0 < len(rows) < 500 and re.search(rf"warmup_iters: 500 .*\b{rows[-1]['iteration'] / 500:.2g} of lr", log)
    assert [row["train/learning_rate"] for row in rows] == [1e-3 * row["iteration"] / 500 for row in rows]
