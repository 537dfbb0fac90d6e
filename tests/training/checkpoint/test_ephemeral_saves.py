"""Checkpoints without optimizer or random states, and at which iterations they are written."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpointing import Manifest, load_tensors, read_manifest
from megatron.training.callbacks.saving import SaveCallback
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import losses, stop_after
from tests.training.runs import ADAMW, LAYOUTS, NEOX, bit_equal, config, run_to_end

DROPOUT = {"hidden_dropout": 0.1}


def values(save: Path, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_iters": 4, "train_micro_batch_size_per_gpu": 4, "checkpoint_factor": 2}
    return config(NEOX, ADAMW, DROPOUT, small, *parts, {"save": str(save), **more})


def run(given: dict[str, Any], ranks: int = 1) -> Any:
    return run_ranks(run_to_end, ranks, given)[0][1]


@pytest.mark.parametrize("name", with_more(["plain", "zero1", "zero3", "pp2"], "pp2", product=["plain", "zero1"]))
def test_no_optimizer_state_is_written(name: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    common = layout | {"precision": "bfloat16"}
    full = run(values(tmp_path / "full", common), ranks)
    less = run(values(tmp_path / "less", common, no_save_optim=True), ranks)
    assert bit_equal(full, less)
    before, after = (tmp_path / part / "global_step4" for part in ("full", "less"))
    assert list(before.glob("optim_*")) and not list(after.glob("optim_*"))
    for file in before.glob("layer_*"):
        assert bit_equal({0: load_tensors(file)}, {0: load_tensors(after / file.name)})
    manifests = [read_manifest(path) for path in (before, after)]
    assert [manifest is not None and manifest.optimizer for manifest in manifests] == [True, False]
    raw = json.loads((before / "manifest.json").read_text())
    del raw["optimizer"], raw["checksum"]
    raw["format_version"] = 1
    assert Manifest.from_json(json.dumps(raw)).optimizer, "older ones do not say"


@pytest.mark.parametrize("name", with_more(["plain", "zero2"], product=["plain"]))
def test_going_on_without_is_refused_unless_told(name: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    less = values(tmp_path / "less", layout, no_save_optim=True)
    run_ranks(stop_after, ranks, less, 2)
    with pytest.raises(AssertionError, match=r"without the optimizer's state.*no_load_optim: true .* or restart: true"):
        run(less, ranks)
    elsewhere = values(tmp_path / "other", layout, load=str(tmp_path / "less"))
    with pytest.raises(
        AssertionError, match=r"without the optimizer's state.*no_load_optim: true .* or finetune: true"
    ):
        run(elsewhere, ranks)
    run({**less, "no_load_optim": True}, ranks)
    assert sorted(losses(tmp_path / "less")) == [1, 2, 3, 4], "went on at iteration 2"
    run({**elsewhere, "finetune": True}, ranks)
    assert sorted(losses(tmp_path / "other")) == [1, 2, 3, 4], "began at iteration 0"


def test_finished_and_unbegun_runs_need_no_state(tmp_path: Path) -> None:
    less = values(tmp_path, no_save_optim=True, extra_save_iters=[0], checkpoint_factor=4)
    first = run(less)
    assert bit_equal(first, run(less)), "left alone"
    # As if the run had ended before its second save
    for path in (tmp_path / "global_step4").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / "global_step4").rmdir()
    (tmp_path / "latest").write_text("global_step0")
    assert bit_equal(first, run(less)), "the state was empty at iteration 0"


def test_no_random_states(tmp_path: Path) -> None:
    through = run(values(tmp_path / "through"))
    less = values(tmp_path / "less", no_save_rng=True)
    run_ranks(stop_after, 1, less, 2)
    state = load_tensors(tmp_path / "less" / "global_step2" / "mp_rank_00_model_states.pt")
    assert "torch_rng_state" not in state and list((tmp_path / "less" / "global_step2").glob("optim_*"))
    with pytest.raises(AssertionError, match=r"no random_rng_state.*set no_load_rng: true"):
        run(less)
    # Dropout follows from the batch, not from these states
    assert bit_equal(through, run({**less, "no_load_rng": True}))


def is_save_iter(args: Any, iteration: int) -> bool:
    """When GPT-NeoX saves (its training.py, in our words)."""
    if iteration in (args.extra_save_iters or ()):
        return True
    if not args.checkpoint_factor:
        return False
    if args.checkpoint_scale == "linear":
        return iteration % args.checkpoint_factor == 0
    return iteration in {int(args.checkpoint_factor**k) for k in range(60)}


@pytest.mark.parametrize(
    ("scale", "factor", "extra"),
    [("linear", 7, None), ("linear", 10.0, (3, 9)), ("log", 2, None), ("log", 1.3, (5,)), ("log", 3.7, None),
     ("linear", None, (0, 4)), ("linear", 1000000, None)],
)  # fmt: skip
def test_saves_when_neox_does(scale: str, factor: float | None, extra: tuple[int, ...] | None) -> None:
    args = SimpleNamespace(
        save_hf=None,
        save="x",
        train_iters=10**9,
        checkpoint_scale=scale,
        checkpoint_factor=factor,
        extra_save_iters=extra,
    )
    save = SaveCallback(SimpleNamespace(args=args))  # type: ignore[arg-type]
    assert [i for i in range(1, 500) if save.is_due(i)] == [i for i in range(1, 500) if is_save_iter(args, i)]
    assert save.is_due(0) == (0 in (extra or ())), "asked once before the first step"
