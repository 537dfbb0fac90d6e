"""The best model of a run: which it is, that it is that step's model and stays, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron.callbacks import Step
from megatron.checkpointing import find_checkpoint
from megatron.checkpointing.huggingface import export_hf
from megatron.checkpointing.saved_config import load_checkpoint_args
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.values.best_metric import best_metric
from megatron.training.builtin_callbacks.best_model import BestModelCallback
from tests.methods.preferences.test_pairs_train import pairs, pairwise
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import as_stopped_at, assert_refused, metrics
from tests.training.runs import ADAMW, LAYOUTS, cells, config, run_to_end
from tests.training.test_huggingface import MODEL, TOKENIZER

LOSSES = {0: 0.5, 1: 3.0, 2: 1.0, 3: 2.0, 4: 1.0}  # of validations, by iteration


def run_keys(save: Path, *parts: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    common = {"eval_interval": 1, "eval_iters": 1, "checkpoint_factor": 1, "save_best": "validation/lm_loss"}
    files = {"save": str(save), "load": str(save), "vocab_file": str(TOKENIZER)}
    return config(MODEL, ADAMW, common, files, {"num_layers": 2, "train_iters": 4}, *parts, **overrides)


def run_with_losses(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """For the pool: a run whose validations give LOSSES."""
    better = BestModelCallback._better

    def with_loss(self: BestModelCallback, step: Step) -> Any:
        step.row["validation/lm_loss"] = LOSSES[step.iteration]
        return better(self, step)

    BestModelCallback._better = with_loss  # type: ignore[method-assign] # this process is the pool's throw-away fork
    run_to_end(rank, world_size, values)


def note(save: Path) -> dict[str, Any]:
    return json.loads((save / "best_model" / "best.json").read_text())


@pytest.mark.parametrize("layout", cells(["zero3"], product=["pp2"]))
def test_it_is_the_model_of_the_best_step(layout: str, tmp_path: Path) -> None:
    ranks, keys = LAYOUTS[layout]
    run_ranks(run_with_losses, ranks, run_keys(tmp_path / "run", keys))
    best = note(tmp_path / "run")
    del best["run_id"]
    assert best == {"metric": "validation/lm_loss", "mode": "min", "value": 1.0, "iteration": 2}
    saved = find_checkpoint(tmp_path / "run", 2)
    export_hf(saved, load_checkpoint_args(saved)[0], tmp_path / "saved", check=False)
    folder = tmp_path / "run" / "best_model"
    best_weights, saved_weights = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "saved" / "model.safetensors"),
    )
    assert best_weights.keys() == saved_weights.keys() and all(
        torch.equal(best_weights[name], saved_weights[name]) for name in saved_weights
    )
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "hello"}]
    expected = transformers.AutoTokenizer.from_pretrained(TOKENIZER).apply_chat_template(chat, tokenize=False)
    assert transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False) == expected
    assert not list((tmp_path / "run").glob(".*best*"))


def test_a_worse_one_after_an_interruption_does_not_replace_it(tmp_path: Path) -> None:
    """By most loss, the first step is best."""
    uninterrupted, resumed = tmp_path / "through", tmp_path / "resumed"
    run_ranks(run_with_losses, 1, run_keys(uninterrupted, save_best="validation/lm_loss:max"))
    as_stopped_at(3, uninterrupted, resumed)
    # As an interrupted replacement would leave it.
    (resumed / "best_model").rename(resumed / ".old_best_model")
    run_ranks(run_with_losses, 1, run_keys(resumed, save_best="validation/lm_loss:max"))
    assert note(resumed) == note(uninterrupted) and (note(resumed)["iteration"], note(resumed)["value"]) == (1, 3.0)
    assert (resumed / "latest").read_text() == "global_step4" and not (resumed / ".old_best_model").exists()
    # Another run in the same folder has one of its own.
    run_ranks(run_with_losses, 1, run_keys(resumed, restart=True, train_iters=2))
    assert (note(resumed)["iteration"], note(resumed)["mode"]) == (2, "min")


def pair_keys(folder: Path, **overrides: Any) -> dict[str, Any]:
    keys = {"num_layers": 2, "pack_impl": "best_fit", "train_iters": 4, "eval_interval": 1, "eval_iters": 1}
    return pairwise(pairs(folder), keys, checkpoint_factor=4, save=str(folder / "run"), **overrides)


def test_a_metric_is_refused_before_a_reference_is_scored(tmp_path: Path) -> None:
    keys = {"save_best": "validation/kl:min", "reference_cache_dir": str(tmp_path / "references")}
    with pytest.raises(AssertionError, match="save_best: validation/kl: .*, validation/rewards/accuracies, "):
        run_ranks(run_to_end, 1, pair_keys(tmp_path, **keys))
    assert not (tmp_path / "references").exists()


def test_by_a_metric_of_pairs(tmp_path: Path) -> None:
    run_ranks(run_to_end, 1, pair_keys(tmp_path, dpo_loss_type="simpo", save_best="validation/rewards/margins"))
    best = max((row["validation/rewards/margins"], row["iteration"]) for row in metrics(tmp_path / "run")[1:])
    summary = json.loads((tmp_path / "run" / "training_summary.json").read_text())
    for record in (summary["best"], note(tmp_path / "run")):
        assert (record["value"], record["iteration"]) == best
    assert 4 < summary["effective_batch"]["pairs"] < 40, "several in a packed row"


def test_which_values_are_better() -> None:
    lower_is_better = ("validation/lm_loss", "eval_tasks/wikitext_word_perplexity", "validation/entropy:min")
    higher_is_better = ("validation/rewards/accuracies", "eval_tasks/arc_easy_acc_norm", "validation/lm_loss:max")
    for mode, texts in (("min", lower_is_better), ("max", higher_is_better)):
        assert [best_metric(text) for text in texts] == [(text.split(":")[0], mode) for text in texts]


@pytest.mark.parametrize(("changes", "text"), [
    ({"save_best": "train/lm_loss"}, "save_best: train/lm_loss: .*validation"),
    ({"save_best": "validation/entropy"}, "validation/entropy: .*:max"),
    ({"save_best": "eval_tasks/x_acc"}, "save_best: eval_tasks/x_acc: eval_tasks "),
    ({"eval_iters": 0}, "save_best: .*eval_iters"),
    ({"save": None}, "save_best: .*save"),
    ({"save": "s3://bucket/run"}, "save_best: .*s3://bucket/run"),
])  # fmt: skip
def test_what_is_refused_as_it_is_written(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        NeoXArgs.from_dict(run_keys(tmp_path, changes)).check_training()


def test_what_is_refused_before_the_first_step(tmp_path: Path) -> None:
    assert_refused(*((run_keys(tmp_path / "run", changes, load=None), text) for changes, text in (
        ({"save_best": "validation/rewards/margins"}, "save_best: validation/rewards/margins: .*validation/lm_loss"),
        ({"split": "100,0,0"}, "save_best: validation/lm_loss: .*data"),
        ({"pos_emb": "alibi"}, "HuggingFace"),
    )))  # fmt: skip
    assert not (tmp_path / "run" / "latest").exists()
