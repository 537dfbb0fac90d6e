"""A run that gets longer, or shorter, goes on in the order it began in; a new run has GPT-NeoX's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.checkpointing import read_manifest
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses
from tests.training.runs import LAYOUTS, NEOX, begin, bit_equal, config

Drawn = tuple[list[list[int]], dict[int, dict[str, Any]]]  # tokens of every sample, and the weights at the end


def drawn(rank: int, world_size: int, values: dict[str, Any]) -> Drawn:
    """For the pool: a run to its end, and the samples that it drew."""
    from megatron.training import loop, train

    training, seen, batches_of = begin(values), [], loop.batches_of

    def watched(training: Any) -> Any:
        for step in batches_of(training):
            seen.extend(row.tolist() for batch in step for row in batch.tokens)
            yield step

    loop.batches_of = watched  # this process is the pool's throw-away fork
    train(training)
    return seen, training.engine.weights(master=True)


def given(save: Path, steps: int, **more: Any) -> dict[str, Any]:
    """Steps of 48 windows; an epoch has about four of them."""
    return config(
        NEOX, num_layers=2, save=str(save), train_batch_size=48, lr_decay_style="cosine", warmup=0.0, min_lr=1e-5,
        train_iters=steps, lr_decay_iters=steps, checkpoint_factor=3, **more,
    )  # fmt: skip


def windows(name: str, save: Path) -> list[int]:
    """Where the stretches of a run's order end."""
    manifest = read_manifest(next(iter(sorted(save.glob("global_step*"))[-1:])))
    assert manifest is not None and manifest.data["laid_out"].keys() >= {name}
    (ends,) = manifest.data["laid_out"][name]
    return ends


@pytest.mark.parametrize("layout", with_more(["plain", "pp2", "zero1"], "pp2", product=["zero1"]))
def test_a_run_is_extended_over_the_end_of_its_epoch(layout: str, tmp_path: Path) -> None:
    """Three steps of the first epoch, then to twelve: the rest of that epoch, and whole ones behind it."""
    ranks, keys = LAYOUTS[layout]
    save = tmp_path / "run"
    first, _ = run_ranks(drawn, 1, given(save, 3))[0]
    (end,) = windows("train", save)
    assert 3 * 48 < end < 6 * 48, "an epoch, which the first three steps do not use up"
    again = {"override_lr_scheduler": True, **keys, **({"engine": "deepspeed"} if layout == "pp2" else {})}
    parts = run_ranks(drawn, ranks, given(save, 12, **again))
    assert max(losses(save)) == 12 and windows("train", save)[0] == end
    if layout == "plain":
        whole, weights = first + parts[0][0], parts[0][1]
        # The epoch that was begun is that of the run as it was typed first
        epoch, _ = run_ranks(drawn, 1, given(tmp_path / "as first", end // 48))[0]
        assert epoch == whole[: len(epoch)]
        # Every window of it once, and none of them in two places
        assert len({tuple(row) for row in whole[:end]}) == end
        # Stopped at nine, it goes on bit for bit
        stopped = given(tmp_path / "stopped", 3)
        run_ranks(drawn, 1, stopped)
        run_ranks(drawn, 1, {**stopped, **again, "train_iters": 9, "lr_decay_iters": 12})
        rest, last = run_ranks(drawn, 1, {**stopped, **again, "train_iters": 12, "lr_decay_iters": 12})[0]
        assert rest == whole[-len(rest) :] and len(rest) == 3 * 48 and bit_equal(weights, last)
    else:
        plain = tmp_path / "plain"
        run_ranks(drawn, 1, given(plain, 3))
        run_ranks(drawn, 1, given(plain, 12, override_lr_scheduler=True))
        assert list(losses(save).values()) == pytest.approx(list(losses(plain).values()), rel=1e-5)


@pytest.mark.parametrize("keys", [{"pack_impl": "best_fit"}, {"lr_decay_style": "constant"}], ids=["rows", "one epoch"])
def test_where_nothing_is_laid_out_anew_it_is_the_longer_run(keys: dict[str, Any], tmp_path: Path) -> None:
    """Rows of whole documents, and windows within the epochs that both have: bit for bit."""
    steps = (3, 8) if "pack_impl" in keys else (2, 4)
    constant = {"lr_decay_style": "constant", **keys}
    save = tmp_path / "run"
    first, _ = run_ranks(drawn, 1, {**given(save, steps[0]), **constant})[0]
    rest, extended = run_ranks(drawn, 1, {**given(save, steps[1]), **constant})[0]
    whole, through = run_ranks(drawn, 1, {**given(tmp_path / "through", steps[1]), **constant})[0]
    assert first + rest == whole and bit_equal(extended, through)


def test_a_run_is_shortened(tmp_path: Path) -> None:
    """Twelve steps mix three epochs; ended after six, they are the first six of these."""
    save = tmp_path / "run"
    whole, _ = run_ranks(drawn, 1, given(tmp_path / "whole", 12))[0]
    started = given(save, 12, exit_interval=3)
    first, _ = run_ranks(drawn, 1, started)[0]
    rest, _ = run_ranks(drawn, 1, {**started, "train_iters": 6, "exit_interval": None})[0]
    assert first + rest == whole[: 6 * 48] and max(losses(save)) == 6
    assert len(windows("train", save)) == 1


def test_a_checkpoint_of_before_stretches_were_written_goes_on(tmp_path: Path) -> None:
    """It said how many samples were laid out, and less of the keys."""
    save = tmp_path / "run"
    first, _ = run_ranks(drawn, 1, given(save, 3))[0]
    _rewrite(save / "global_step3" / "manifest.json", windows("train", save)[0])
    rest, _ = run_ranks(drawn, 1, given(save, 12, override_lr_scheduler=True))[0]
    now = tmp_path / "now"
    run_ranks(drawn, 1, given(now, 3))
    assert rest == run_ranks(drawn, 1, given(now, 12, override_lr_scheduler=True))[0][0]
    assert not np.array_equal(first, rest[: len(first)])


def _rewrite(file: Path, samples: int) -> None:
    from dataclasses import replace

    manifest = read_manifest(file.parent)
    assert manifest is not None
    order = {"train_samples": samples, "seq_length": 32, "split": "90,10,0"}
    file.write_text(replace(manifest, data={"files": manifest.data["files"], "order": order}).to_json())
