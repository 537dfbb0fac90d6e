"""Labels and weights, from keys to losses: what is trained, what never is, and what is said of it."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch, IndexedDataset, IndexedDatasetWriter
from megatron.data.batch import places_of_loss
from megatron.mpu import HeadInput, token_logprobs
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.objectives import LANGUAGE_MODELLING, Objective
from megatron.tokenizer import build_tokenizer, with_masked_ids
from megatron.training.engine_choice import choose_engine
from megatron.training.parallelize import parallelize
from tests.model import runs as small_runs
from tests.model.stages import Weights, document_batch, groups_of, make_stage, random_weights, small
from tests.pool import run_ranks
from tests.training.runs import GOLDEN, LLAMA, SGD, TABLE, bit_equal, cells, config, curves, metric_rows, output_of_run

CHAT, INSTRUCT = (str(GOLDEN / "dataset" / name) for name in ("chat_conversation", "instruct_text"))
TEXT, LABELS = f"{CHAT}_document", (f"{CHAT}_label_document", str(GOLDEN / "dataset" / "instruct_label_document"))
CORPUS = str(GOLDEN / "dataset" / "corpusA_text_document")
ROWS: dict[str, Any] = {
    "data_path": None, "pack_impl": "best_fit", "reset_attention_mask": True, "reset_position_ids": True,
    "eod_mask_loss": False, "seq_length": 128, "max_position_embeddings": 128, "train_micro_batch_size_per_gpu": 2,
}  # fmt: skip
SFT: dict[str, Any] = {
    **ROWS, "train_data_paths": [TEXT, f"{INSTRUCT}_document"], "train_label_data_paths": LABELS,
    "valid_data_paths": [TEXT], "valid_label_data_paths": LABELS[:1],
    "test_data_paths": [TEXT], "test_label_data_paths": LABELS[:1],
}  # fmt: skip


@pytest.fixture(scope="module")
def labelled_losses() -> list[float]:
    unlabelled = {key: None for key in SFT if "label" in key}
    labelled, unlabelled_part = run_ranks(curves, 1, [config(LLAMA, SFT), config(LLAMA, SFT, unlabelled)], 3)[0]
    assert unlabelled_part.losses != pytest.approx(labelled.losses, rel=1e-3), "labels change what is trained"
    return labelled.losses


@pytest.mark.parametrize("name", ["dp2", "tp2 sp", "pp2"])
def test_labelled_rows_train_alike_in_every_layout(name: str, labelled_losses: list[float]) -> None:
    ranks, layout = TABLE[name]
    for rank_curves in run_ranks(curves, ranks, [config(LLAMA, SFT, layout)], 3):
        assert rank_curves[0].losses == pytest.approx(labelled_losses, rel=1e-5)


def test_labels_that_are_not_listed_are_named_at_start() -> None:
    outputs = run_ranks(output_of_run, 2, config(LLAMA, SFT, train_label_data_paths=None, train_iters=1))
    lines = [line for line in outputs[0].splitlines() if "all tokens are trained" in line]
    assert len(lines) == 2 and all("train_label_data_paths" in line for line in lines)
    assert "all tokens are trained" not in outputs[1], "said once"


@pytest.mark.parametrize("name", ["dp2", "pp2"])
def test_padding_and_trained_tokens_are_said_and_logged(name: str, tmp_path: Path) -> None:
    """At the start of all rows, and of each step; here one step is all rows."""
    text, labels = IndexedDataset(TEXT), IndexedDataset(LABELS[0])
    used_sizes = np.minimum(text.sizes, 129)
    trained = sum(int((labels.get(i, 1, int(count) - 1) >= 0).sum()) for i, count in enumerate(used_sizes))
    ranks, layout = TABLE[name]
    step = {"train_iters": 1, "train_batch_size": 24, "eval_iters": 1, "save": str(tmp_path), "checkpoint_factor": 1}
    one_set = {"train_data_paths": [TEXT], "train_label_data_paths": LABELS[:1], "pack_impl": "unpacked"}
    output = run_ranks(output_of_run, ranks, config(LLAMA, SFT, layout, step, one_set), True)[0]
    padding, share = 100 * (1 - used_sizes.sum() / (24 * 129)), 100 * trained / used_sizes.sum()
    shares = rf"{padding:.1f} % padding.* {share:.1f} %"
    assert re.search(rf"chat_conversation_document.*24 documents in 24 rows of 128.* 24\.0 .* {shares}", output), output
    (row,) = metric_rows(tmp_path)
    places = np.minimum(text.sizes, 128).sum()
    assert row["train/padding_share"] == pytest.approx(1 - places / (24 * 128))
    assert row["train/packing_efficiency"] == pytest.approx(places / (24 * 128))
    assert row["train/trained_share"] == pytest.approx(trained / places)
    assert 0 <= row["train/mean_token_accuracy"] < 0.1 and 5.0 < row["train/entropy"] < 6.0
    assert row["validation/lm_loss_ppl"] > 1 and "validation/mean_token_accuracy" in row
    # Before the first step validation sees what that step sees
    first_row = metric_rows(tmp_path, "iteration")[0]
    for metric in ("lm_loss", "entropy", "mean_token_accuracy"):
        assert first_row[f"validation/{metric}"] == pytest.approx(row[f"train/{metric}"], rel=1e-5)
    assert " mean_token_accuracy value: " in output


# -- tokens that are never trained: as if their labels had been masked by hand
PRETRAINING = {"data_path": None, "split": None, "train_data_paths": [CORPUS], "eod_mask_loss": False}


def frequent(prefix: str, count: int = 3) -> list[int]:
    return [int(token) for token in np.argsort(np.bincount(IndexedDataset(prefix).tokens))[::-1][:count]]


def masked_by_hand(text: str, labels: str, ids: list[int], target: Path) -> str:
    """A file of labels in which `ids` are -100."""
    with IndexedDatasetWriter(target, np.int32) as writer:
        source, tokens = IndexedDataset(labels), IndexedDataset(text)
        for document in range(len(source)):
            row = source[document].astype(np.int32)
            assert len(row) == len(tokens[document])
            writer.add_document(np.where(np.isin(row, ids), -100, row))
    return str(target)


@pytest.mark.parametrize("layout", cells(["plain", "pp2"], ["tp2"]))
def test_gradients_are_those_of_labels_masked_by_hand(layout: str, tmp_path: Path) -> None:
    """In pre-training and in SFT of packed chats; with SGD the weights after two steps are the gradients."""
    ranks, keys = TABLE[layout]
    chat = config(LLAMA, SGD, PRETRAINING, ROWS, keys, train_data_paths=[TEXT], train_label_data_paths=[LABELS[0]])
    text = config(LLAMA, SGD, PRETRAINING, keys)
    chat_ids, text_ids = frequent(TEXT), frequent(CORPUS)
    runs = [
        {**chat, "train_label_data_paths": [masked_by_hand(TEXT, LABELS[0], chat_ids, tmp_path / "chat")]},
        {**chat, "loss_mask_token_ids": chat_ids}, chat,
        {**text, "train_label_data_paths": [masked_by_hand(CORPUS, CORPUS, text_ids, tmp_path / "text")]},
        {**text, "loss_mask_token_ids": text_ids},
    ]  # fmt: skip
    for chat_by_hand, chat_by_id, unmasked, text_by_hand, text_by_id in run_ranks(curves, ranks, runs, 2):
        for actual, expected in ((chat_by_id, chat_by_hand), (text_by_id, text_by_hand)):
            assert actual.losses == expected.losses and actual.norms == expected.norms
            assert bit_equal(actual.weights, expected.weights)
        assert chat_by_id.losses != pytest.approx(unmasked.losses, rel=1e-4)


def test_what_is_masked_is_counted_at_start() -> None:
    tokens, (token,) = IndexedDataset(CORPUS).tokens, frequent(CORPUS, 1)
    unused = next(i for i in range(1, 380) if not (tokens == i).any())
    end = int(IndexedDataset(CORPUS)[0][-1])
    output = run_ranks(
        output_of_run, 1, config(LLAMA, PRETRAINING, loss_mask_token_ids=[unused, token, "<|endoftext|>"])
    )[0]
    counts = {i: int((tokens == i).sum()) for i in sorted({token, end})}
    token_counts = ", ".join(f"{i}: {count}" for i, count in counts.items())
    assert re.search(rf"masks {sum(counts.values())} of {len(tokens)} .*{token_counts}.*never.* {unused}\b", output), (
        output
    )


def test_a_set_of_which_all_is_masked_trains_nothing(tmp_path: Path) -> None:
    """Rows and steps without a token to train go by, in validation too."""
    ids = np.unique(IndexedDataset(CORPUS).tokens).tolist()
    values = config(LLAMA, PRETRAINING, loss_mask_token_ids=ids, train_iters=2, valid_data_paths=[CORPUS], eval_iters=1)
    output = run_ranks(output_of_run, 1, {**values, "save": str(tmp_path), "checkpoint_factor": 9}, True)[0]
    assert "none of its tokens is trained" in output and "run finished at iteration 2" in output


@pytest.mark.parametrize(("tokens", "facts"), [
    (["several words"], r'"several words".*\d+ tokens \[\d+, '),
    ([100000], r"100000.*vocabulary.*\d+"),
    ([-1], "at least 0"),
    ([""], r'"" .*0 tokens'),
])  # fmt: skip
def test_what_is_no_token_is_refused(tokens: list[Any], facts: str) -> None:
    with pytest.raises(ConfigError, match=f"loss_mask_token_ids.*{facts}"):
        args = NeoXArgs.from_dict(config(LLAMA, PRETRAINING, loss_mask_token_ids=tokens))
        with_masked_ids(args, build_tokenizer(args))


@pytest.mark.parametrize(("config_file", "ids", "problem"), [
    ({"loss_mask_token_ids": [5, "<|endoftext|>"]}, [0, 5], None),
    ({"loss_mask_token_ids": [100000]}, None, "100000"),
    ({"loss_mask_token_ids": [-1]}, None, "-1"),
    ({"loss_mask_token_ids": 5}, None, r"tokenizer_config\.json has 5"),
    ({"eos_token": "x"}, None, r"tokenizer_config\.json has no field"),
    (None, None, r"tokenizer_config\.json cannot be read"),
])  # fmt: skip
def test_the_tokenizers_own_list(tmp_path: Path, config_file: Any, ids: list[int] | None, problem: str | None) -> None:
    values = config(LLAMA, PRETRAINING, loss_mask_token_ids="auto")
    shutil.copy(values["vocab_file"], tmp_path / "tokenizer.json")
    if config_file is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config_file))
    args = NeoXArgs.from_dict({**values, "vocab_file": str(tmp_path / "tokenizer.json")})
    if problem is None:
        assert list(with_masked_ids(args, build_tokenizer(args)).loss_mask_token_ids or ()) == ids
        return
    with pytest.raises(ConfigError, match=f"loss_mask_token_ids.*{problem}"):
        with_masked_ids(args, build_tokenizer(args))


# -- few trained tokens: micro-batches, ranks and whole steps without any
def chats(folder: Path, trained: int) -> dict[str, Any]:
    """24 chats of 200 random tokens, the last few of each trained, in rows of 64; keys of a run on them."""
    chance = np.random.default_rng(3)
    text, labels = (folder / name for name in ("text_document", "label_document"))
    with IndexedDatasetWriter(text, np.int32) as ids, IndexedDatasetWriter(labels, np.int32) as marks:
        for document in chance.integers(2, 380, (24, 200)).astype(np.int32):
            ids.add_document(document)
            marks.add_document(np.where(np.arange(200) >= 200 - trained, document, -100).astype(np.int32))
    return {
        "data_path": None, "train_data_paths": [str(text)], "train_label_data_paths": [str(labels)],
        "pack_impl": "packed", "seq_length": 64, "max_position_embeddings": 64, "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1, "eod_mask_loss": False, "train_iters": 6, "lr_decay_style": "linear",
    }  # fmt: skip


def steps_of(layout: str, values: dict[str, Any], folder: Path) -> tuple[str, list[dict[str, Any]]]:
    ranks, keys = TABLE[layout]
    save_keys = {"save": str(folder), "checkpoint_factor": 100}
    return run_ranks(output_of_run, ranks, config(values, keys, save_keys), True)[0], metric_rows(
        folder, "train/learning_rate"
    )


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two of three rows have no trained token, and some steps."""
    return config(LLAMA, chats(tmp_path_factory.mktemp("sparse"), 3))


@pytest.fixture(scope="module")
def one_process_rows(sparse: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    output, rows = steps_of("plain", sparse, tmp_path_factory.mktemp("runs"))
    losses = [row["train/lm_loss"] for row in rows]
    untrained = [n for n, loss in enumerate(losses, 1) if loss is None]
    assert untrained and len(untrained) < len(losses) == 6
    assert re.search(f"step {untrained[0]}: .*none of its tokens is trained", output)
    assert "run finished at iteration 6" in output and "not finite" not in output
    assert all(row.get("train/untrained_steps", 0) == (n in untrained) for n, row in enumerate(rows, 1))
    assert not any(row["train/skipped_steps"] for row in rows), "they are counted apart"
    lines = [line for line in output.splitlines() if " lm_loss: " in line]
    assert [n for n, line in enumerate(lines, 1) if " lm_loss: untrained |" in line] == untrained
    assert all(f"number of nan iterations: {0:3d} |" in line for line in lines)
    assert output.count(f"number of untrained iterations: {1:3d} |") == len(untrained)
    assert len({row["train/learning_rate"] for row in rows}) == len(rows), "the rate goes on"
    return rows


@pytest.mark.parametrize("layout", cells(["tp2", "pp2", "zero3"], ["zero1"], ["dp2"]))
def test_ranks_and_steps_without_a_trained_token(
    layout: str, sparse: Any, one_process_rows: Any, tmp_path: Path
) -> None:
    """A rank without one contributes zero, a step without one changes nothing; as in one process."""
    output, rows = steps_of(layout, sparse, tmp_path)
    assert "run finished at iteration 6" in output
    for key in ("train/lm_loss", "train/grad_norm", "train/learning_rate"):
        actual, expected = (
            [math.nan if row[key] is None else row[key] for row in run_rows] for run_rows in (rows, one_process_rows)
        )
        assert actual == pytest.approx(expected, rel=1e-5, nan_ok=True), key


def test_a_step_without_a_trained_token_is_no_overflow(tmp_path: Path) -> None:
    """fp16: the loss scale stays, and the weights, which would otherwise decay."""
    fp16 = {"precision": "fp16", "fp16": {"hysteresis": 1}}
    output, rows = steps_of("plain", config(LLAMA, chats(tmp_path, 0), fp16), tmp_path / "run")
    assert len({row["train/loss_scale"] for row in rows}) == 1 and len(rows) == 6
    assert re.search("step 4: .*none of its tokens is trained.* 4 such steps", output)


@pytest.mark.parametrize("layout", cells(["plain", "pp2", "zero3"], ["zero1"]))
def test_nothing_is_updated_by_nothing(layout: str, tmp_path: Path) -> None:
    """Not even by weight decay or momenta."""
    ranks, keys = TABLE[layout]
    values = config(LLAMA, chats(tmp_path, 0), keys, weight_decay=0.5)
    for untrained, trained in zip(*(run_ranks(curves, ranks, [values], steps) for steps in (0, 3)), strict=True):
        assert bit_equal(untrained[0].weights, trained[0].weights) and len(trained[0].losses) == 3


# -- chosen places
def in_chunks(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative log-likelihood, from logits of the places that count, a half of the sequence at a time."""
    assert head.hidden_states.shape[:2] == batch.labels.t().shape
    total, num_logits = torch.zeros(1, device=batch.labels.device), 0
    halves = zip(*(x.chunk(2) for x in (head.hidden_states, batch.labels.t(), batch.loss_weights.t())), strict=True)
    for hidden_states, labels, weights in halves:
        chosen = HeadInput(hidden_states[weights > 0], head.head)
        total = total - token_logprobs(chosen, labels[weights > 0], group).sum()
        num_logits += len(chosen.hidden_states)
    assert num_logits == int(batch.loss_weights.sum()) < batch.labels.numel()
    return total, {}


def batches_of(args: NeoXArgs, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    batches = [document_batch(args, seed=seed + i) for i in range(2)]
    weights = [torch.randint(0, 4, b.tokens.shape, generator=generator) // 3 for b in batches]
    pairs = zip(batches, weights, strict=True)
    with_places = [replace(b, loss_weights=w, loss_places=places_of_loss(w.numpy())) for b, w in pairs]
    assert all(batch.loss_places is not None for batch in with_places)
    return with_places


def full_and_chunked(rank: int, world_size: int, values: dict[str, Any]) -> list[tuple[Tensor, Weights, Weights]]:
    """For the pool: of the whole loss and of that in chunks a step's loss, weights before it and after it."""
    steps = []
    for objective in (LANGUAGE_MODELLING, Objective(LANGUAGE_MODELLING.weight, in_chunks)):
        args = small(**small_runs.SGD, **values).for_world(world_size)
        groups = groups_of(args, world_size)
        stage = make_stage(args, random_weights(args), groups)
        engine = parallelize(stage, objective, args, groups, choose_engine(args).load())
        old_weights, batches = engine.weights(), batches_of(args, 3 + 10 * groups.rank("data"))
        steps.append((engine.train_step(batches, small_runs.LR).loss.detach(), old_weights, engine.weights()))
        engine.close()
    return steps


LAYOUT_NAMES, MODEL_KEYS = ("plain", "tp2 sp", "pp2", "zero3"), (small_runs.NEOX, small_runs.LLAMA)
DEFAULT_CELLS, PRODUCT_CELLS = (
    list(zip(LAYOUT_NAMES, models * 2, strict=True)) for models in (MODEL_KEYS, MODEL_KEYS[::-1])
)


@pytest.mark.parametrize(("name", "model"), cells(DEFAULT_CELLS, product=PRODUCT_CELLS))
def test_chunks_and_chosen_places_are_the_same_step(name: str, model: dict[str, Any]) -> None:
    world_size, layout = TABLE[name]
    steps = run_ranks(full_and_chunked, world_size, {**model, **layout})
    for (loss, old_weights, new_weights), (chunked, _, chunked_after) in steps:
        torch.testing.assert_close(chunked, loss, rtol=1e-6, atol=0)
        for layer, tensors in new_weights.items():
            for key, expected in tensors.items():
                start, difference = old_weights[layer][key], (chunked_after[layer][key] - expected).norm()
                # A step rounds its weight to about 1e-7 of that.
                assert difference <= 1e-6 * (expected - start).norm() + 1e-7 * start.norm() + 1e-9, key
                assert not expected.equal(start), key
