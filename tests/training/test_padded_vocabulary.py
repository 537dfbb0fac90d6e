"""Rows that pad an imported model's vocabulary: losses are those of the model without them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron.neox_arguments import NeoXArgs
from megatron.training.loop import batches_of
from tests.pool import run_ranks
from tests.training.preference.test_pairs_train import pairs
from tests.training.runs import GOLDEN, TABLE, begin, cells, config, run_to_end
from tests.training.test_huggingface import MODEL, folder

CHAT = str(GOLDEN / "dataset" / "chat_conversation")
COMMON: dict[str, Any] = {
    **MODEL, "make_vocab_size_divisible_by": 128, "seq_length": 32, "train_batch_size": 4, "data_path": None,
    "weight_decay": 0.0, "reset_attention_mask": True, "reset_position_ids": True,
}  # fmt: skip
SFT = {
    **COMMON, "train_data_paths": [f"{CHAT}_document"], "train_label_data_paths": [f"{CHAT}_label_document"],
    "pack_impl": "packed", "eod_mask_loss": False,
}  # fmt: skip
TP4 = (4, {"model_parallel_size": 4})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 tokens, which a run pads to 640; with four ranks the last holds 120 of its 160."""
    return folder(tmp_path_factory.mktemp("model"), vocab=600)


def first_step(rank: int, world_size: int, values: dict[str, Any]) -> tuple[float, float, list[Any], int | None, Any]:
    """For the pool: loss and gradient norm of a run's first step, its batches, the rows that count, and its
    metrics."""
    training = begin(values)
    batches = next(batches_of(training))
    fields = [(b.tokens, b.labels, b.loss_weights, *([] if b.positions is None else [b.positions])) for b in batches]
    result = training.engine.train_step(batches, 0.0)
    metrics = {name: float(value) for name, value in result.metrics.items()}
    assert training.args.padded_vocab_size == 640
    training.engine.close()
    return float(result.loss), float(result.grad_norm or math.nan), fields, training.args.softmax_rows, metrics


def by_transformers(model: Path, batches: list[Any]) -> tuple[float, float]:
    """Loss over the weighted tokens, and norm of its gradient; each document attended alone."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    total, count = torch.zeros(()), 0.0
    for tokens, labels, weights, positions in batches:
        for row in range(len(tokens)):
            starts = [*(positions[row] == 0).nonzero().flatten().tolist(), tokens.shape[1]]
            for first, end in zip(starts, starts[1:], strict=False):
                logits = reference(tokens[row : row + 1, first:end]).logits[0].float()
                logprobs = logits.log_softmax(-1).gather(-1, labels[row, first:end, None]).squeeze(-1)
                total = total - (logprobs * weights[row, first:end]).sum()
        count += float(weights.sum())
    loss = total / count
    loss.backward()
    return float(loss), float(torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm())


@pytest.mark.parametrize("layout", ["tp4", "pp2"])
def test_the_first_loss_is_that_of_the_model_as_it_came(layout: str, model: Path) -> None:
    ranks, keys = TABLE.get(layout, TP4)
    loss, norm, batches, rows, _ = run_ranks(first_step, ranks, config(SFT, keys, load=str(model)))[0]
    assert rows == 600
    assert (loss, norm) == pytest.approx(by_transformers(model, batches), rel=1e-5)


SIMPO = {
    "dpo_loss_type": "simpo", "dpo_beta": 2.0, "simpo_gamma": 0.5, "train_impl": "dpo", "dataset_impl": "pairwise",
    "eod_mask_loss": False, "pack_impl": "unpacked", "train_micro_batch_size_per_gpu": 4,
}  # fmt: skip


@pytest.mark.parametrize("layout", cells(["tp4"], ["plain"]))
def test_preferences_of_an_imported_model(layout: str, model: Path, tmp_path: Path) -> None:
    """SimPO, whose first loss is not ln 2, by its formula in TRL from the log-probabilities of
    transformers."""
    ranks, keys = TABLE.get(layout, TP4)
    values = config(COMMON, pairs(tmp_path), SIMPO, keys, load=str(model))
    values = {key: value for key, value in values.items() if value is not None and key != "split"}
    loss, _, batches, _, metrics = run_ranks(first_step, ranks, values)[0]
    reference = transformers.AutoModelForCausalLM.from_pretrained(model)
    sums, averages = [], []
    with torch.no_grad():
        for tokens, labels, weights, *_ in batches:
            logprobs = reference(tokens).logits.float().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
            sums.append((logprobs * weights).sum(1))
            averages.append(sums[-1] / weights.sum(1))
    above = torch.cat([average[0::2] - average[1::2] for average in averages])
    expected = -torch.nn.functional.logsigmoid(2.0 * above - 0.5).mean()
    assert loss == pytest.approx(float(expected), rel=1e-5)
    chosen = torch.cat([average[0::2] for average in averages]).mean()
    assert metrics["logps/chosen"] == pytest.approx(float(chosen), rel=1e-5)


def test_what_masks_and_what_does_not(model: Path, tmp_path: Path) -> None:
    """auto leaves a run of our own as GPT-NeoX has it; false brings the padding in, true leaves it out of any
    run."""
    as_it_came = run_ranks(first_step, 1, config(SFT, load=str(model)))[0]
    padded = run_ranks(first_step, 1, config(SFT, load=str(model), mask_padded_vocab=False))[0]
    assert padded[3] is None and padded[0] > as_it_came[0] + 1e-3
    native = {"padded_vocab_size": 640}
    assert run_ranks(first_step, 1, config(SFT, native))[0][3] is None
    assert run_ranks(first_step, 1, config(SFT, native, mask_padded_vocab=True))[0][3] == 380
    with pytest.raises(AssertionError, match="program: mask_padded_vocab: 379.*380"):
        run_ranks(first_step, 1, config(SFT, native, mask_padded_vocab=379))


def test_the_number_goes_on_with_the_run(model: Path, tmp_path: Path) -> None:
    """A checkpoint of ours carries the configuration that the model came with."""
    values = config(SFT, load=str(model), save=str(tmp_path / "run"), train_iters=1, checkpoint_factor=1)
    run_ranks(run_to_end, 1, values)
    again = config(SFT, save=str(tmp_path / "run"), train_iters=2, checkpoint_factor=2, override_lr_scheduler=True)
    assert run_ranks(first_step, 1, {**again, "allow_changed_data": True})[0][3] == 600
    assert json.loads(NeoXArgs.from_dict(values).to_json())["given"].get("mask_padded_vocab") is None
