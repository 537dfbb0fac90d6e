"""How a run starts, goes on, falls back and refuses; what it leaves on disk."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpointing import CheckpointError, load_tensors, read_manifest, verify
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, NEOX, begin, bit_equal, config, run_to_end

SMALL = config(NEOX, train_iters=4, train_micro_batch_size_per_gpu=4, checkpoint_factor=2, num_layers=2)


def values(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {**SMALL, "save": str(tmp_path / "run"), **more}


def run(given: dict[str, Any], ranks: int = 1) -> Any:
    return run_ranks(run_to_end, ranks, given)[0][1]


def steps(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("global_step*"))


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A finished run of four steps, saved at 2 and 4."""
    run(values(tmp_path))
    return tmp_path / "run"


def test_files_are_neox_and_whole(trained: Path) -> None:
    assert (trained / "latest").read_text() == "global_step4" and steps(trained) == ["global_step2", "global_step4"]
    names = sorted(p.name for p in (trained / "global_step4").iterdir())
    layers = [f"layer_{i:02d}-model_00-model_states.pt" for i in (0, 2, 3, 5)]
    states = [f"optim_layer_{i:02d}-model_00.pt" for i in (0, 2, 3, 5)]
    assert names == sorted([*layers, *states, "mp_rank_00_model_states.pt", "configs", "tokenizer", "manifest.json"])
    state = load_tensors(trained / "global_step4" / "mp_rank_00_model_states.pt")
    assert state["module"] is None and state["optimizer"] is None and state["iteration"] == 4
    assert state["lr_scheduler"]["start_lr"] == 1e-3 and state["args"]["hidden_size"] == 32
    manifest = read_manifest(trained / "global_step4")
    assert manifest is not None and manifest.consumed_samples == 32 and manifest.layout.tensor == 1


def test_a_run_that_ended_before_its_first_latest_goes_on(trained: Path, tmp_path: Path) -> None:
    def weights() -> dict[str, Any]:
        return {p.name: load_tensors(p) for p in (trained / "global_step4").glob("layer_*")}

    through, first = weights(), (trained / "global_step2" / "manifest.json").read_bytes()
    shutil.rmtree(trained / "global_step4")
    (trained / "latest").unlink()
    run(values(tmp_path))
    assert (trained / "latest").read_text() == "global_step4" and steps(trained) == ["global_step2", "global_step4"]
    assert (trained / "global_step2" / "manifest.json").read_bytes() == first, "it did not start afresh"
    assert bit_equal(through, weights())


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizer_files_do_not_tell_of_zero(ranks: int, tmp_path: Path) -> None:
    given = values(tmp_path, zero_optimization={"stage": 1}, precision="bfloat16", checkpoint_factor=4)
    run(given, ranks)
    optimizer_files = sorted((tmp_path / "run" / "global_step4").glob("*optim*"))
    assert [p.name for p in optimizer_files] == [f"optim_layer_{i:02d}-model_00.pt" for i in (0, 2, 3, 5)]
    state = load_tensors(optimizer_files[1])["mlp.linear1.weight"]
    assert {key: value.dtype for key, value in state.items()} == dict.fromkeys(
        ("master", "exp_avg", "exp_avg_sq", "step"), torch.float32
    )
    assert state["master"].shape == state["exp_avg"].shape == (128, 32)


def test_same_files_for_every_pipe_size(tmp_path: Path) -> None:
    """pipe 0, 1 and 2 write the same layer files, of the same initial weights."""
    files = {}
    for pipe, ranks in ((0, 1), (1, 1), (2, 2)):
        given = values(tmp_path / str(pipe), pipe_parallel_size=pipe, extra_save_iters=[0], checkpoint_factor=4)
        run(given, ranks)
        folder = tmp_path / str(pipe) / "run" / "global_step0"
        files[pipe] = {p.name: torch.load(p, weights_only=True) for p in folder.glob("layer_*")}
    assert bit_equal(files[0], files[1]) and bit_equal(files[0], files[2])


def test_row_bias_parts_sum_on_disk(tmp_path: Path) -> None:
    given = values(tmp_path, model_parallel_size=2, checkpoint_factor=4)
    whole = run(given, 2)
    parts = [
        torch.load(tmp_path / f"run/global_step4/layer_02-model_0{r}-model_states.pt", weights_only=True)
        for r in range(2)
    ]
    assert torch.equal(parts[0]["mlp.linear2.bias"] + parts[1]["mlp.linear2.bias"], whole[2]["mlp.linear2.bias"])
    assert whole[2]["mlp.linear2.bias"].abs().max() > 0


def test_finished_run_is_left_alone(trained: Path, tmp_path: Path) -> None:
    before = (trained / "logs" / "metrics.jsonl").read_text()
    run(values(tmp_path))
    assert (trained / "logs" / "metrics.jsonl").read_text() == before


def test_goes_on_from_save_though_load_names_another(trained: Path, tmp_path: Path) -> None:
    """A requeued fine-tuning job does not begin again from its base model."""
    tuned = values(tmp_path, save=str(tmp_path / "tuned"), load=str(trained), finetune=True)
    first = run({**tuned, "train_iters": 2, "lr_decay_iters": 4})
    rows = [json.loads(line) for line in (tmp_path / "tuned/logs/metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2], "fine-tuning starts at iteration 0"
    again = run({**tuned, "train_iters": 2, "lr_decay_iters": 4})
    assert bit_equal(first, again), "nothing was trained anew"
    restarted = run({**tuned, "train_iters": 2, "lr_decay_iters": 4, "restart": True, "seed": 5})
    assert not bit_equal(first, restarted), "restart: true begins again"


def test_finetune_takes_the_weights_alone(trained: Path, tmp_path: Path) -> None:
    tuned = values(tmp_path, save=str(tmp_path / "t"), load=str(trained), finetune=True, extra_save_iters=[0])
    run({**tuned, "train_iters": 1})
    for file in (trained / "global_step4").glob("layer_*"):
        ours = torch.load(tmp_path / "t" / "global_step0" / file.name, weights_only=True)
        assert all(torch.equal(ours[k], v) for k, v in torch.load(file, weights_only=True).items())


def test_iteration_chooses(trained: Path, tmp_path: Path) -> None:
    given = values(tmp_path, save=str(tmp_path / "other"), load=str(trained), iteration=2)
    assert bit_equal(run(given), run_ranks(run_to_end, 1, values(tmp_path))[0][1])
    assert steps(tmp_path / "other") == ["global_step4"]


def test_another_precision_takes_weights_without_optimizer(trained: Path, tmp_path: Path) -> None:
    given = values(tmp_path, save=str(tmp_path / "bf16"), load=str(trained), precision="bfloat16", train_iters=5)
    given |= {"allow_changed_data": True}
    with pytest.raises(AssertionError, match=r"precision: bf16 \(program\), but .* had fp32.*no_load_optim: true"):
        run(given)
    run({**given, "no_load_optim": True})
    assert steps(tmp_path / "bf16") == ["global_step5"]


def test_missing_load_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"nowhere: no such directory"):
        run(values(tmp_path, load=str(tmp_path / "nowhere")))
    assert not (tmp_path / "run" / "global_step4").exists()
    run(values(tmp_path, load=str(tmp_path / "run")))  # load == save and still empty: a first start


def test_another_run_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"seed: 7 \(program\), but the run of \S+ had 1234; .*restart: true"):
        run(values(tmp_path, seed=7))
    with pytest.raises(AssertionError, match=r"hidden_size: 64 \(program\), but the model of \S+ had 32"):
        run(values(tmp_path, hidden_size=64))
    assert steps(trained) == ["global_step2", "global_step4"]


def test_changed_data_is_refused(trained: Path, tmp_path: Path) -> None:
    other = {"data_path": str(GOLDEN / "dataset" / "corpusB_text_document"), "train_iters": 6}
    with pytest.raises(AssertionError, match=r"data_path: idx_sha256 \w+ \(program\), but .*allow_changed_data: true"):
        run(values(tmp_path, **other))
    run(values(tmp_path, **other, allow_changed_data=True))
    assert steps(trained)[-1] == "global_step6"


FILES = ("layer_03-model_00-model_states.pt", "optim_layer_02-model_00.pt", "mp_rank_00_model_states.pt")
FILES += ("manifest.json",)
DAMAGES = ("a byte", "the end", "the file")


@pytest.mark.parametrize(
    ("name", "damage"),  # each file in one way, the others by `make test-all`
    [
        pytest.param(name, damage, marks=() if i % 3 == j else pytest.mark.product)
        for i, name in enumerate(FILES) for j, damage in enumerate(DAMAGES)
    ],
)  # fmt: skip
def test_every_damage_is_refused_by_name(name: str, damage: str, trained: Path, tmp_path: Path) -> None:
    file = trained / "global_step4" / name
    content = bytearray(file.read_bytes())
    if damage == "the file":
        file.unlink()
    elif damage == "the end":
        file.write_bytes(content[:-3])
    elif name == "manifest.json":  # still JSON, and nothing else would find it
        assert b'"consumed_samples": 32' in content
        file.write_bytes(content.replace(b'"consumed_samples": 32', b'"consumed_samples": 36'))
    else:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        file.write_bytes(content)
    with pytest.raises(AssertionError, match=rf"global_step4[^\n]*{re.escape(name)}"):
        run(values(tmp_path, train_iters=5))
    run(values(tmp_path, train_iters=5, load_fallback=True))
    assert steps(trained)[-1] == "global_step5", "went on from step 2"


def test_damage_is_named_and_falls_back_only_when_told(trained: Path, tmp_path: Path) -> None:
    file = trained / "global_step4" / "layer_03-model_00-model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(AssertionError, match=r"damaged: layer_03-model_00-model_states.pt \(checksum\)"):
        run(values(tmp_path))
    run(values(tmp_path, load_fallback=True))
    rows = [json.loads(line) for line in (trained / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4], "steps 3 and 4 stand once"


def test_one_run_at_a_time(trained: Path, tmp_path: Path) -> None:
    """The lock belongs to a process: a dead run does not hold it."""
    import fcntl

    with (trained / ".lock").open("w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        with pytest.raises(AssertionError, match="another run is writing there"):
            run(values(tmp_path))
    run(values(tmp_path))


def killed_with_a_worker(rank: int, world_size: int, save: str) -> float:
    """For the pool: a run takes the lock, starts a worker and is killed; seconds until another has the
    lock."""
    import os
    import time

    from megatron.training.checkpoint.lock import lock_folder

    reader, writer = os.pipe()
    run = os.fork()
    if run == 0:
        held = lock_folder(Path(save))
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.write(writer, b"x")
        time.sleep(20)
        held.close()
    os.read(reader, 1)
    begun = time.monotonic()
    os.kill(run, 9)
    os.waitpid(run, 0)
    lock_folder(Path(save))
    return time.monotonic() - begun


def test_workers_of_a_killed_run_do_not_hold_its_lock(tmp_path: Path) -> None:
    assert run_ranks(killed_with_a_worker, 1, str(tmp_path), init=False)[0] < 1


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    from megatron.checkpointing.remote_staging import _alone
    from megatron.training.checkpoint.lock import lock_folder

    (tmp_path / "thesis").write_text("years of work")
    for name in (".lock", ".run.stamp"):
        (tmp_path / name).symlink_to(tmp_path / "thesis")
    with pytest.raises(CheckpointError, match=r"\.lock: is a link, not a file of this run; remove it"):
        lock_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"\.run\.stamp: is a link"), _alone(tmp_path / "run"):
        pass
    assert (tmp_path / "thesis").read_text() == "years of work"


def test_a_checkpoint_moved_to_an_archive_stays_a_link(tmp_path: Path) -> None:
    """keep_last_n_checkpoints leaves it alone, says so once, and the run goes on saving."""
    more = {"train_iters": 2, "lr_decay_iters": 8, "keep_last_n_checkpoints": 1}
    run(values(tmp_path, **more))
    (tmp_path / "archive").mkdir()
    link = tmp_path / "run" / "global_step2"
    shutil.move(link, tmp_path / "archive")
    link.symlink_to(tmp_path / "archive" / "global_step2")
    lines = run_ranks(warnings_of, 1, values(tmp_path, **{**more, "train_iters": 8}))[0]
    assert steps(tmp_path / "run") == ["global_step2", "global_step8"] and link.is_symlink()
    assert verify(tmp_path / "archive" / "global_step2") is not None
    assert lines == [f"{link}: is a link, and stays: keep_last_n_checkpoints deletes what is in {link.parent} itself"]


def warnings_of(rank: int, world_size: int, given: dict[str, Any]) -> list[str]:
    """For the pool: what a run warns of."""
    import logging

    warnings: list[str] = []
    logging.Logger.warning = lambda self, text, *a: warnings.append(text)  # type: ignore[method-assign, assignment]
    run_to_end(rank, world_size, given)
    return warnings


def test_changed_keys_are_listed(trained: Path, tmp_path: Path) -> None:
    lines = run_ranks(log_of, 1, values(tmp_path, train_iters=6, weight_decay=0.2))[0]
    (line,) = [line for line in lines if line.startswith("keys changed")]
    assert "train_iters was 4, is 6" in line and "weight_decay was 0.1, is 0.2" in line


def log_of(rank: int, world_size: int, given: dict[str, Any]) -> list[str]:
    """For the pool: the log of building a run."""
    import contextlib
    import io

    from megatron.launch import process_info
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import start

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        start(NeoXArgs.from_dict(given), process_info())
    return printed.getvalue().splitlines()


def test_keep_last_and_extra(tmp_path: Path) -> None:
    given = values(tmp_path, checkpoint_factor=1, keep_last_n_checkpoints=2, extra_save_iters=[0])
    run(given)
    assert steps(tmp_path / "run") == ["global_step3", "global_step4"]


def test_ephemeral_and_best(tmp_path: Path) -> None:
    """Every second one stands until the next; the best by validation loss outlasts
    `keep_last_n_checkpoints`."""
    common = {"checkpoint_factor": 4, "train_iters": 11, "lr_decay_iters": 12, "eval_iters": 1, "eval_interval": 4}
    run(values(tmp_path, **common, ephemeral_save_interval=2))
    assert steps(tmp_path / "run") == ["global_step11", "global_step4", "global_step8"]
    more = {"keep_last_n_checkpoints": 1, "keep_best_n_checkpoints": 1, "keep_checkpoints_every": 1000}
    rising = {"optimizer": {"type": "SGD", "params": {"lr": 30.0}}}
    run(values(tmp_path / "best", **common, **rising, **more))
    best = tmp_path / "best" / "run"
    rows = [json.loads(line) for line in (best / "logs" / "metrics.jsonl").read_text().splitlines()]
    losses = {row["iteration"]: row["validation/lm_loss"] for row in rows if "validation/lm_loss" in row}
    assert sorted(losses) == [0, 4, 8, 11]
    lowest = min((4, 8, 11), key=lambda step: losses[step])
    assert lowest != 11, "or it proves nothing"
    assert steps(best) == ["global_step11", f"global_step{lowest}"]
    with pytest.raises(AssertionError, match=r"keep_best_n_checkpoints: without keep_last_n_checkpoints nothing"):
        run(values(tmp_path, **common, keep_best_n_checkpoints=1))


@pytest.mark.parametrize("factor", [2, 1.5])
def test_log_scale(factor: float) -> None:
    """As upstream: iteration == int(factor ** k)."""
    from types import SimpleNamespace

    from megatron.training.callbacks.saving import SaveCallback

    args = SimpleNamespace(
        save="x",
        save_hf=None,
        train_iters=1000,
        checkpoint_scale="log",
        checkpoint_factor=factor,
        extra_save_iters=None,
    )
    save = SaveCallback(SimpleNamespace(args=args))  # type: ignore[arg-type]
    powers = {int(factor**k) for k in range(40)}
    assert [i for i in range(1, 300) if save.is_due(i)] == [i for i in range(1, 300) if i in powers]


def test_rng_of_the_process_is_restored(tmp_path: Path) -> None:
    """What a program's callback draws goes on as if the run had not been interrupted."""
    through = run_ranks(draws_of, 1, values(tmp_path))[0]
    later = {"load": str(tmp_path / "run"), "iteration": 2}
    assert run_ranks(draws_of, 1, values(tmp_path / "b", **later))[0] == through[-2:]
    fresh = run_ranks(draws_of, 1, values(tmp_path / "c", **later, no_load_rng=True))[0]
    assert fresh == through[:2], "begun with seed"
    assert len(set(through)) == len(through) == 5


def draws_of(rank: int, world_size: int, given: dict[str, Any]) -> list[tuple[float, float, float]]:
    """For the pool: what the generators give a callback after each step, whatever they were before."""
    from megatron.callbacks import Callback, Step, TrainingRun
    from megatron.training import train
    from tests.training.runs import begin

    drawn: list[tuple[float, float, float]] = []

    class Draws(Callback):
        def on_step_end(self, run: TrainingRun, step: Step) -> None:
            drawn.append((float(torch.rand(())), float(np.random.rand()), random.random()))

    for seed in (random.seed, np.random.seed, torch.seed):
        seed()
    training = begin(given)
    train(training, [Draws()])
    training.engine.close()
    return drawn


def sizes(rank: int, world_size: int, given: dict[str, Any]) -> int:
    """For the pool: what this rank says that a checkpoint of its run will take of it, bytes."""
    training = begin(given)
    training.engine.close()
    return training.checkpointer._bytes(optimizer=True)


@pytest.mark.parametrize("precision", ["fp32", "bfloat16"])
def test_space_asked_for_is_what_files_take(precision: str, tmp_path: Path) -> None:
    given = values(tmp_path, precision=precision, hidden_size=256, zero_optimization={"stage": 1}, train_iters=1)
    said = sum(run_ranks(sizes, 2, given))
    run_ranks(run_to_end, 2, given)
    written = sum(file.stat().st_size for file in (tmp_path / "run" / "global_step1").iterdir())
    assert written / 1.1 < said < written * 1.02, (said, written)
