"""Reward models from files to trained weights: layouts, resumed, begun from a language model, refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpointing import find_checkpoint, load_tensors
from megatron.data import IndexedDatasetWriter
from megatron.data.preferences.preference_sets import preference_samples_per_epoch
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.methods.preferences.test_pairs_train import pairs, pairwise
from tests.pool import run_ranks
from tests.training import runs
from tests.training.checkpoint.test_resume import assert_goes_on, refused
from tests.training.runs import ADAMW, LLAMA, TABLE, Curve, bit_equal, cells, config, curves, run_to_end

MORE_LAYOUTS = ["tp2 sp", "pp2", "zero3"]
LAYOUTS = {name: TABLE[name] for name in (*MORE_LAYOUTS, "tp2", "dp2", "zero1", "zero1, deepspeed", "zero3, deepspeed")}
LAYOUTS |= {"tp2 sp, deepspeed": (2, TABLE["tp2 sp"][1] | {"engine": "deepspeed"}), "tp2 pp2 sp": TABLE["tp2 pp2 sp"]}


def reward_data(folder: Path, count: int = 24) -> dict[str, Any]:
    with IndexedDatasetWriter(str(folder / "margin"), np.float32) as writer:
        for margin in np.random.default_rng(5).normal(0.5, 0.5, count):
            writer.add_document(np.array([margin], np.float32))
    margins = {f"{name}_reward_data_paths": [str(folder / "margin")] for name in ("train", "valid")}
    return {**pairs(folder, count), **margins}


def values_of(data: dict[str, Any], *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    return pairwise(data, {"train_impl": "rm", "center_rewards_coefficient": 0.01}, *parts, **overrides)


def packed(folder: Path, *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    keys = {"pack_impl": "best_fit", "train_micro_batch_size_per_gpu": 4}
    return values_of(reward_data(folder), keys, *parts, **overrides)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Curve]:
    """Six steps of a micro-batch of 4 packed rows."""
    values = packed(tmp_path_factory.mktemp("rewards"))
    curve = runs.curves_of({"": values}, 6)[""]
    assert curve.losses[-1] != curve.losses[0], "the model must move, or equality says little"
    return values, curve


@pytest.mark.parametrize("names", [
    MORE_LAYOUTS, *(pytest.param([name], marks=pytest.mark.product) for name in LAYOUTS if name not in MORE_LAYOUTS),
], ids=" and ".join)  # fmt: skip
def test_layouts_equal_one_process(names: list[str], one_process: tuple[dict[str, Any], Curve]) -> None:
    values, expected = one_process
    configs = {name: {**values, **LAYOUTS[name][1], "train_micro_batch_size_per_gpu": 2} for name in names}
    runs.assert_alike(runs.curves_of(configs, 6, LAYOUTS[names[0]][0]), dict.fromkeys(names, expected))


@pytest.mark.parametrize("train_impl", ["rm", "dpo"])
def test_padded_pairs_and_shared_prompts_train_the_same(train_impl: str, tmp_path: Path) -> None:
    """Steps of all pairs: losses, which fall, and weights. Rows hold just their tokens, the last one too."""
    ends, data = [], reward_data(tmp_path, 12) if train_impl == "rm" else pairs(tmp_path, 12)
    for changes in ({"pack_impl": "unpacked"}, {"pack_impl": "best_fit", "prefix_sharing": True}):
        if train_impl == "rm":
            keys = values_of(data, changes, train_iters=3, seq_length=12 if changes["pack_impl"] == "unpacked" else 24)
        else:
            dpo = {"dpo_loss_type": ["sigmoid", "sft", "aot"], "dpo_beta": 2.0, "train_iters": 3}
            keys = pairwise(data, changes, dpo, reference_cache_dir=str(tmp_path / str(changes["pack_impl"])))
        rows = preference_samples_per_epoch(NeoXArgs.from_dict({**keys, "train_batch_size": 1}))
        keys |= {"train_batch_size": rows, "train_micro_batch_size_per_gpu": 1}
        ((part,),) = run_ranks(curves, 1, [keys], 3)
        ends.append((rows, part))
    (num_padded_rows, padded), (num_shared_rows, shared) = ends
    assert num_padded_rows == 12 > num_shared_rows
    assert shared.losses == pytest.approx(padded.losses, rel=1e-5) and padded.losses[2] < padded.losses[0]
    torch.testing.assert_close(shared.weights, padded.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", cells(["tp2"], product=["zero3", "pp2", "zero1, deepspeed"]))
def test_a_run_goes_on_bit_for_bit_and_is_validated(name: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    precision = {"precision": "bfloat16"} if "zero" in name else {}
    steps = {"train_iters": 6, "checkpoint_factor": 3, "eval_iters": 1, "eval_interval": 3}
    assert_goes_on(ranks, packed(tmp_path, layout, precision, steps, train_micro_batch_size_per_gpu=2), tmp_path)
    lines = (tmp_path / "resumed/logs/metrics.jsonl").read_text()
    names = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin", "pos_values", "neg_values")
    assert all(f'"{prefix}/{name}"' in lines for prefix in ("train", "validation") for name in names)
    files = sorted((tmp_path / "through/global_step6").glob("layer_08-model_*-model_states.pt"))
    shapes = [tuple(load_tensors(file)["rm_linear.weight"].shape) for file in files]
    tensor = layout.get("model_parallel_size", 1)
    assert shapes == [(1, 32 // tensor)] * tensor, "GPT-NeoX's: cut along the input"


def test_it_begins_with_a_language_model_and_refuses_what_is_something_else(tmp_path: Path) -> None:
    language = tmp_path / "language"
    saved = {"train_iters": 2, "checkpoint_factor": 2, "save_hf": 0}
    run_ranks(run_to_end, 1, config(LLAMA, ADAMW, saved, save=str(language)))
    keys = packed(tmp_path, saved, load=str(language), finetune=True, save=str(tmp_path / "reward"))
    ((_, trained),) = run_ranks(run_to_end, 1, keys)
    exported = tmp_path / "reward/huggingface/global_step2"
    other_run = {**keys, "save": str(tmp_path / "other")}
    hf = str(language / "huggingface/global_step2")
    (parts,) = run_ranks(curves, 1, [other_run, {**other_run, "load": hf}, {**other_run, "load": str(exported)}], 0)
    stored = {int(file.name[6:8]): load_tensors(file) for file in find_checkpoint(language).glob("layer_*")}
    for initial in (parts[0].weights, parts[1].weights):
        head = initial.pop(8)["rm_linear.weight"]
        assert bit_equal(initial, {layer: stored[layer] for layer in initial})
        assert 0.012 < float(head.std()) < 0.028, "normal, init_method_std 0.02"
    assert bit_equal(parts[2].weights, trained)

    bare = {key: value for key, value in keys.items() if key not in ("finetune", "save", "save_hf")}
    language_run = config(LLAMA, ADAMW, train_iters=2, load=str(tmp_path / "reward"), finetune=True)
    for place, message in zip((language, tmp_path / "reward"), refused(bare, language_run), strict=True):
        assert str(place) in message and "reward model" in message


SIDES = {f"{side}_train_data_paths": [side] for side in ("pos", "neg")}


@pytest.mark.parametrize(("changes", "message"), [
    ({"score_head": False}, "score_head: .*train_impl rm"),
    ({"max_length": 33}, "max_length: .*32"),
    ({"compat_pack_impl": True, "pack_impl": "unpacked"}, "compat_pack_impl: "),
    ({"train_reward_data_paths": ["a", "b"]}, "train_reward_data_paths: .*1 pos_train_data_paths"),
    ({"dpo_beta": 0.3, "dpo_loss_type": "ipo"}, "dpo_loss_type: .*train_impl: dpo.*rm"),
])  # fmt: skip
def test_refused(changes: dict[str, Any], message: str) -> None:
    keys = {**values_of(SIDES, pack_impl="best_fit"), "train_micro_batch_size_per_gpu": 1, **changes}
    with pytest.raises(ConfigError, match=message):
        NeoXArgs.from_dict(keys)


def test_reward_models_write_no_text() -> None:
    common = values_of(SIDES, pack_impl="best_fit", load="a", eval_tasks=["lambada_openai"], train_batch_size=4)
    args = NeoXArgs.from_dict(common)
    for check in (args.check_generation, args.check_evaluation, args.check_serving):
        with pytest.raises(ConfigError, match="train_impl: rm: .*scores"):
            check()
    with pytest.raises(ConfigError, match="eval_tasks: .*scores"):
        args.check_training()
    with pytest.raises(ConfigError, match="score_head: train_impl normal "):
        NeoXArgs.from_dict(config(LLAMA, score_head=True)).check_training()


def test_changed_margins_are_named(tmp_path: Path) -> None:
    keys = packed(tmp_path, train_iters=2, checkpoint_factor=1, save=str(tmp_path / "reward"))
    run_ranks(run_to_end, 1, keys)
    with IndexedDatasetWriter(str(tmp_path / "margin"), np.float32) as writer:
        for _ in range(24):
            writer.add_document(np.array([2.0], np.float32))
    (message,) = refused({**keys, "train_iters": 3})
    assert "train_reward_data_paths: bin_blocks_sha256" in message
    (tmp_path / "margin.bin").write_bytes((tmp_path / "margin.bin").read_bytes()[:-4] + b"\0\0\xc0\x7f")  # NaN
    (message,) = refused({**keys, "restart": True})
    assert "margin.bin: document 23" in message and "finite" in message
