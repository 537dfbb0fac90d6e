"""The best model of a run: which it is, that it is the model of that step, that it stays, and what is
refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron.checkpointing import find_checkpoint
from megatron.checkpointing.huggingface import export_hf, load_checkpoint_args
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.values.best_metric import best_metric
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import stop_after
from tests.training.preference.test_pairs_train import pairs
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, config, run_to_end
from tests.training.test_huggingface import MODEL, TOKENIZER

# A rate at which the loss goes up and down.
ROUGH = {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "eps": 1e-6}}, "gradient_clipping": 0.0}


def given(save: Path, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    common = {"eval_interval": 1, "eval_iters": 1, "checkpoint_factor": 1, "save_best": "validation/lm_loss"}
    files = {"save": str(save), "load": str(save), "vocab_file": str(TOKENIZER)}
    return config(MODEL, ROUGH, common, files, {"num_layers": 2, "train_iters": 4}, *parts, **more)


def values(save: Path) -> dict[int, float]:
    """validation/lm_loss by iteration."""
    rows = [json.loads(line) for line in (save / "logs" / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: row["validation/lm_loss"] for row in rows if "validation/lm_loss" in row}


def note(save: Path) -> dict[str, Any]:
    return json.loads((save / "best_model" / "best.json").read_text())


@pytest.mark.parametrize("layout", with_more(["pp2", "zero3"], "pp2"))
def test_it_is_the_model_of_the_best_step(layout: str, tmp_path: Path) -> None:
    ranks, keys = LAYOUTS[layout]
    run_ranks(run_to_end, ranks, given(tmp_path / "run", keys), timeout=120)
    losses = values(tmp_path / "run")
    best = min((value, iteration) for iteration, value in losses.items() if iteration > 0)
    assert 1 < best[1] < 4, f"neither the first nor the last: {losses}"
    best_note = note(tmp_path / "run")
    assert (best_note["value"], best_note["iteration"]) == best
    assert (best_note["metric"], best_note["mode"]) == ("validation/lm_loss", "min")
    saved = find_checkpoint(tmp_path / "run", best[1])
    export_hf(saved, load_checkpoint_args(saved)[0], tmp_path / "saved", check=False)
    folder = tmp_path / "run" / "best_model"
    ours, theirs = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "hello"}]
    expected = transformers.AutoTokenizer.from_pretrained(TOKENIZER).apply_chat_template(chat, tokenize=False)
    assert transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, tokenize=False) == expected
    assert not list((tmp_path / "run").glob(".*best*"))


def test_a_worse_one_after_an_interruption_does_not_replace_it(tmp_path: Path) -> None:
    """By most loss, the first step is best: after step 3 all are worse."""
    smooth = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "save_best": "validation/lm_loss:max"}
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    run_ranks(run_to_end, 1, given(through, smooth))
    run_ranks(stop_after, 1, given(resumed, smooth), 3)
    # As an interrupted replacement would leave it.
    (resumed / "best_model").rename(resumed / ".old_best_model")
    run_ranks(run_to_end, 1, given(resumed, smooth))
    assert values(resumed) == values(through) and note(resumed)["iteration"] == 1
    assert {**note(resumed), "run_id": ""} == {**note(through), "run_id": ""}
    files = [(save / "best_model" / "model.safetensors").read_bytes() for save in (through, resumed)]
    assert files[0] == files[1]
    # Another run in the same folder has one of its own.
    run_ranks(run_to_end, 1, given(resumed, smooth, restart=True, train_iters=2, save_best="validation/lm_loss"))
    assert (note(resumed)["iteration"], note(resumed)["mode"]) == (2, "min")


def of_pairs(folder: Path, **more: Any) -> dict[str, Any]:
    keys = config(
        LLAMA, ADAMW, pairs(folder), {"no_weight_tying": True, "eod_mask_loss": False}, num_layers=2,
        train_impl="dpo", dataset_impl="pairwise", pack_impl="best_fit", train_batch_size=4,
        train_iters=4, eval_interval=1, eval_iters=1, checkpoint_factor=4, save=str(folder / "run"), **more,
    )  # fmt: skip
    return {key: value for key, value in keys.items() if key not in ("data_path", "split")}


def test_a_metric_is_refused_before_a_reference_is_scored(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="this run has no such metric; it has .*, validation/rewards/accuracies, "):
        keys = {"save_best": "validation/kl:min", "reference_cache_dir": str(tmp_path / "references")}
        run_ranks(run_to_end, 1, of_pairs(tmp_path, **keys))
    assert not (tmp_path / "references").exists()


def test_by_a_metric_of_pairs(tmp_path: Path) -> None:
    run_ranks(run_to_end, 1, of_pairs(tmp_path, dpo_loss_type="simpo", save_best="validation/rewards/margins"))
    rows = [json.loads(line) for line in (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()]
    best = max((row["validation/rewards/margins"], row["iteration"]) for row in rows[1:])
    summary = json.loads((tmp_path / "run" / "training_summary.json").read_text())
    assert (summary["best"]["value"], summary["best"]["iteration"]) == best
    assert (note(tmp_path / "run")["value"], note(tmp_path / "run")["iteration"]) == best
    assert 4 < summary["effective_batch"]["pairs"] < 40, "several in a packed row"


@pytest.mark.parametrize(
    ("text", "metric", "mode"),
    [
        ("validation/lm_loss", "validation/lm_loss", "min"),
        ("validation/rewards/accuracies", "validation/rewards/accuracies", "max"),
        ("eval_tasks/arc_easy_acc_norm", "eval_tasks/arc_easy_acc_norm", "max"),
        ("eval_tasks/wikitext_word_perplexity", "eval_tasks/wikitext_word_perplexity", "min"),
        ("validation/entropy:min", "validation/entropy", "min"),
        ("validation/lm_loss:max", "validation/lm_loss", "max"),
    ],
)
def test_which_values_are_better(text: str, metric: str, mode: str) -> None:
    assert best_metric(text) == (metric, mode)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"save_best": "train/lm_loss"}, "save_best: train/lm_loss: is no metric of the validation"),
        ({"save_best": "validation/entropy"}, "validation/entropy: does not say whether less is better; write .*:max"),
        ({"save_best": "eval_tasks/x_acc"}, "save_best: eval_tasks/x_acc: eval_tasks names no task"),
        ({"eval_iters": 0}, "save_best: needs validations: eval_iters is 0"),
        ({"save": None}, "save_best: needs save"),
        ({"save": "s3://bucket/run"}, "save_best: keeps one folder up to date, which s3://bucket/run .* cannot"),
    ],
)
def test_what_is_refused_as_it_is_written(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        NeoXArgs.from_dict(given(tmp_path, changes)).check_training()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"save_best": "validation/rewards/margins"}, "this run has no such metric; it has validation/lm_loss, valid"),
        ({"split": "100,0,0"}, "save_best: validation/lm_loss: there is no validation data"),
        ({"pos_emb": "alibi"}, "HuggingFace has no such model"),
    ],
)
def test_what_is_refused_before_the_first_step(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=text):
        run_ranks(run_to_end, 1, given(tmp_path / "run", changes, load=None))
    assert not (tmp_path / "run" / "latest").exists()
