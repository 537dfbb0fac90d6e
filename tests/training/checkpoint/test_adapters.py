"""Checkpoints of runs with `lora`: adapters alone, in other layouts, and the weights that they belong to."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing import read_manifest
from megatron.checkpointing.tensor_files import load_tensors
from megatron.model.weight_map import is_adapter
from tests.methods.preferences.test_reference import PACKED, PADDED, first_losses, preferences
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import BF16, DORA, LORA, as_stopped_at, losses, refused, stop_after
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, config, run_to_end


def values(*parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    common = {"train_micro_batch_size_per_gpu": 2, "train_iters": 6, "checkpoint_factor": 3, "warmup": 0.3}
    return config(LLAMA, ADAMW, common, *parts, **overrides)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, whose weights others begin with."""
    save = tmp_path_factory.mktemp("base")
    run_ranks(run_to_end, 1, values(train_iters=2, checkpoint_factor=2, save=str(save)))
    return save


def tuned_values(base: Path, save: Path, *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    base_keys = {"load": str(base), "finetune": True, "save": str(save), "lora": {**DORA, "dropout": 0.0}}
    return values(base_keys, *parts, **overrides)


@pytest.fixture(scope="module")
def full_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("through")
    run_ranks(run_to_end, 1, tuned_values(base, save))
    return save


@pytest.mark.product
@pytest.mark.parametrize("layout_name", ["tp2", "pp2", "zero3"])
def test_on_another_layout(layout_name: str, base: Path, full_run: Path, tmp_path: Path) -> None:
    """From one process to two ranks, and back."""
    as_stopped_at(3, full_run, tmp_path / "there")
    ranks, layout = LAYOUTS[layout_name]
    layout = {**layout, "engine": "deepspeed"} if layout_name == "pp2" else layout
    run_ranks(stop_after, ranks, tuned_values(base, tmp_path / "there", layout, checkpoint_factor=1), 5)
    run_ranks(run_to_end, 1, tuned_values(base, tmp_path / "there"))
    expected = losses(full_run)
    assert losses(tmp_path / "there") == pytest.approx({step: expected[step] for step in (4, 5, 6)}, rel=1e-5)


def test_it_holds_adapters_alone(base: Path, full_run: Path) -> None:
    path = full_run / "global_step6"
    names = {name for file in path.glob("layer_*") for name in load_tensors(file)}
    assert names and all(is_adapter(name) for name in names)
    manifest = read_manifest(path)
    assert manifest is not None and manifest.base is not None
    assert manifest.base["path"] == str(base / "global_step2")


def test_refusals(base: Path, full_run: Path, tmp_path: Path) -> None:
    other_base = tmp_path / "other"
    run_ranks(run_to_end, 1, values(train_iters=2, checkpoint_factor=2, save=str(other_base), seed=4))
    adapter_keys = {
        "load": str(full_run),
        "finetune": True,
        "num_layers": 4,
        "lora": DORA,
        "dpo_reference": "on_the_fly",
    }
    cases: list[tuple[dict[str, Any], list[str]]] = [
        (tuned_values(base, full_run, lora={**DORA, "base": str(other_base)}), ["adapters", str(other_base)]),
        (tuned_values(base, full_run, lora={**DORA, "alpha": 9}), ["lora", "alpha"]),
        (tuned_values(base, full_run, lora=None), ["adapters", "lora"]),
        (tuned_values(base, base, load=None, finetune=False), ["adapters", "finetune: true"]),
        (preferences(tmp_path, PADDED, adapter_keys, padded_vocab_size=384), ["adapter.py merge"]),
        (preferences(tmp_path, PADDED, {"lora": LORA, "dpo_reference": "cache"}), ["dpo_reference", "cache", "lora"]),
        (values(lora=LORA, trainable={"head": True}), ["trainable", "lora"]),
        (values(lora={"target": ["gate"]}), ["lora.target", "gate"]),
        (values(lora={"target": ["query_key_value", "k_proj"]}), ["lora.target", "query_key_value", "k_proj"]),
        (values(lora={"modules_to_save": ["lm_head"]}), ["lm_head", "embed_tokens"]),
    ]
    for message, (_, facts) in zip(refused(*(run_values for run_values, _ in cases)), cases, strict=True):
        assert all(fact in message for fact in facts), (facts, message)


def test_ln_2_at_the_first_step(tmp_path: Path) -> None:
    """The reference is the policy without its adapters, which at first add nothing."""
    looks = {"plain": PADDED, "tp2": PACKED, "pp2": PADDED, "zero3": PADDED | BF16}
    common = {"lora": DORA, "reference_cache_dir": None}
    runs = [preferences(tmp_path, LAYOUTS[name][1], look, common) for name, look in looks.items()]
    losses_by_rank = run_ranks(first_losses, 1, runs[:1]) + run_ranks(first_losses, 2, runs[1:])
    assert [loss for rank in losses_by_rank for loss in rank] == pytest.approx([0.6931472] * 7, abs=1e-6)
