"""Preference samples of random data: what is once in an epoch, together in a row, trained or not."""

import re
from collections import Counter
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.data import train_loader as loader
from megatron.data.build import build_datasets, epoch_iterations
from megatron.data.errors import DataError
from megatron.data.fingerprints import order_keys, order_sha256
from megatron.data.index_maps import Packing
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.labels import first_labelled_token
from megatron.data.loader import collation, eval_batches
from megatron.data.open_dataset import open_dataset
from megatron.data.preferences.mismatched_answers import mismatched_documents
from megatron.data.preferences.preference_maps import COUNTS, LengthLimits, build_preference_maps
from megatron.data.preferences.reference_scores import Response, pack_responses, responses_of
from megatron.data.preferences.responses import batch_responses, collate_preferences
from megatron.data.sliced_documents import DocumentSlices, PromptMaskedLabels, SlicedDocuments
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.data.samples import rows_of, write_rows

SEQ, PAIRS = 48, 60
LAYOUTS = ["unpacked", "pack_until_overflow", "best_fit"]
ONE_SAMPLE = {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 1}


def random_pairs(seed: int, count: int = PAIRS) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, chosen, rejected), each pair with tokens of its own."""
    sizes = np.random.default_rng(seed).integers([1, 1, 1], [12, 14, 14], (count, 3))
    return [tuple([10 + 7 * pair + part] * size for part, size in enumerate(row)) for pair, row in enumerate(sizes)]


def write_pairs(folder: Path, pairs: list, name: str = "") -> dict:
    paths = {}
    for side, place in (("pos", 1), ("neg", 2)):
        rows = [row[0] + row[place] for row in pairs]
        labels = [[-100] * len(row[0]) + row[place] for row in pairs]
        paths[f"{side}_train_data_paths"] = (write_rows(folder / f"{name}{side}", rows),)
        paths[f"{side}_train_label_data_paths"] = (write_rows(folder / f"{name}{side}_label", labels),)
    return paths


def configuration(folder: Path, world: int = 1, **changes) -> NeoXArgs:
    values = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": SEQ,
              "max_position_embeddings": SEQ, "train_impl": "dpo", "dataset_impl": "pairwise", "pack_impl": "best_fit",
              "train_iters": 8, "eval_iters": 0, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
              "num_workers": 0, "padded_vocab_size": 512, "tokenizer_type": "CharLevelTokenizer",
              "index_cache_dir": str(folder / "cache"),
              "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}  # fmt: skip
    return NeoXArgs.from_dict(values | changes).for_world(world)


def build(args: NeoXArgs, epochs: int | None = None):
    return build_datasets(args, train_batch_size=args.train_batch_size, on_one_rank=lambda work: work(), epochs=epochs)


def answers_of(batch) -> dict[int, tuple[list[int], list[int]]]:
    """Answer -> (tokens, trained labels), read as a model reads them: each in one piece of one row."""
    answers = {}
    for row in range(len(batch.tokens)):
        for number in batch_responses(batch).response_ids[row].unique().tolist():
            places = torch.where(batch_responses(batch).response_ids[row] == number)[0]
            assert torch.equal(places, torch.arange(places[0], places[-1] + 1))
            weights = batch.loss_weights[row, places] > 0
            if number < 0:
                assert not weights.any(), "padding is trained"
                continue
            assert number not in answers
            row_start = row * batch.tokens.shape[1]
            answer_places, prefix = row_start + places, prefix_places(batch, row_start + int(places[0]))
            assert set(batch_responses(batch).response_ids.view(-1)[prefix].tolist()) <= {number - 1}
            tokens = batch.tokens.view(-1)[torch.cat([prefix, answer_places])]
            answers[number] = tokens.tolist(), batch.labels[row, places][weights].tolist()
            if batch.positions is not None:
                positions = batch.positions.view(-1)[torch.cat([prefix, answer_places])]
                assert torch.equal(positions, torch.arange(len(tokens)))
                assert row_start + int(places[0]) in batch.documents.cu_seqlens.tolist()
    assert set(answers) == set(range(len(batch_responses(batch).preference_labels)))
    return answers


def prefix_places(batch, start: int) -> torch.Tensor:
    """The places, over the flattened batch, of the tokens before a document that stand in the one before."""
    if batch.documents is None or batch.documents.prefixes is None:
        return torch.zeros(0, dtype=torch.int64)
    own_index, bounds = int(batch.documents.prefixes.own_places[start]), batch.documents.prefixes.cu_seqlens
    assert batch.documents.prefixes.places[own_index] == start
    return batch.documents.prefixes.places[int(bounds[bounds <= own_index].max()) : own_index]


def batches(args: NeoXArgs, dataset, consumed: int = 0, **rank) -> list:
    rank = rank or {"data_rank": 0, "data_size": 1}
    return [batch for step in loader(dataset, args, consumed_samples=consumed, **rank) for batch in step]


@pytest.mark.parametrize("pack_impl", LAYOUTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_full_pair_once_an_epoch(pack_impl: str, seed: int, tmp_path: Path):
    pairs = random_pairs(seed)
    changes = {"pack_impl": pack_impl, "seed": seed, "train_epochs": 2, "train_iters": None, **ONE_SAMPLE}
    args = configuration(tmp_path, **changes, **write_pairs(tmp_path, pairs))
    steps = epoch_iterations(args, 1)
    args = args.replace(train_epochs=None, train_iters=steps)
    dataset = build(args, epochs=2).train
    assert len(dataset) == steps
    pair_counts, orders = Counter(), []
    for i, batch in enumerate(batches(args, dataset)):
        assert batch.tokens.shape == (1 if pack_impl == "best_fit" else 2, SEQ)
        assert (batch.positions is None) == (batch.documents is None) == (pack_impl == "unpacked")
        answers = answers_of(batch)
        assert batch_responses(batch).preference_labels.tolist() == [1.0] * len(answers)
        for number in range(0, len(answers), 2):
            (chosen, trained), (rejected, rejected_labels) = answers[number], answers[number + 1]
            pair = next(p for p in pairs if p[1] == trained)
            # What only the last token of a full row predicts is no input
            assert chosen in (pair[0] + pair[1], (pair[0] + pair[1])[:-1])
            assert rejected in (pair[0] + pair[2], (pair[0] + pair[2])[:-1]) and rejected_labels == pair[2]
            pair_counts[pair[1][0], 2 * i // steps] += 1
            orders.append(pair[1][0])
        assert (batch.documents is None or batch.documents.prefixes is None) == (pack_impl != "best_fit")
        if pack_impl == "best_fit":
            assert batch.documents.cu_seqlens[0] == 0 and batch.documents.cu_seqlens[-1] == SEQ
    assert pair_counts == {(pair[1][0], epoch): 1 for pair in pairs for epoch in (0, 1)}
    assert orders[:PAIRS] != orders[PAIRS:], "each epoch has an order of its own"


def test_what_a_pair_begins_with_stands_once(tmp_path: Path):
    """Rows hold more pairs; answers, and their names for the reference's scores, are those without sharing.
    Prompts that differ, lose their beginning or are short are shared as far as they are alike."""
    pairs = random_pairs(4)
    pairs += [([400, 401, 402, 403], [7, 7], [8, 8, 8]), ([500], [7, 9], [8, 9]), (list(range(420, 450)), [3], [4])]
    paths = write_pairs(tmp_path, pairs)
    rows = rows_of(paths["neg_train_data_paths"][0])
    rows[PAIRS][2] = 410  # the prompts of one pair differ in their third token
    write_rows(tmp_path / "neg", rows)

    def build_set(**changes) -> tuple[dict, int, list]:
        args = configuration(tmp_path, max_prompt_length=20, max_length=30, **paths, **changes)
        datasets = build(args)
        epoch = len(datasets.train.maps.sample_idx) - 1
        responses = {r.name: r for i in range(epoch) for r in responses_of(datasets.train[i])}
        return responses, epoch, [line for line in datasets.log_lines if "prefix_sharing" in line]

    (shared, num_shared_rows, sharing_lines), (unshared, num_unshared_rows, unshared_lines) = (
        build_set(),
        build_set(prefix_sharing=False),
    )
    assert num_shared_rows < num_unshared_rows and set(shared) == set(unshared) and not unshared_lines
    for name, response in shared.items():
        np.testing.assert_array_equal(response.tokens, unshared[name].tokens)
        np.testing.assert_array_equal(response.labels >= 0, unshared[name].labels >= 0)
    prompts = [min(20, len(pair[0])) for pair in pairs]
    prompts[PAIRS] = 2
    saved = sum(prompt - 1 for prompt in prompts)
    assert f"{saved} tokens that chosen and rejected begin with" in sharing_lines[0] and sharing_lines[0].endswith(
        "are laid out once"
    )
    unlike_pairs = [([10 + n], [7] * 12, [8] * 12) for n in range(20)] + [([1, 2, 3], [7] * 12, [8] * 12)]
    lone = configuration(tmp_path, **write_pairs(tmp_path, unlike_pairs, "far"))
    assert build(lone).train[0].prefix_lengths is None, "2 of 500 tokens do not pay"
    assert build(lone.replace(prefix_sharing=True)).train.shared.sum() == 2
    assert order_keys(lone)["prefix_sharing"] and not order_keys(lone.replace(prefix_sharing=False))["prefix_sharing"]
    assert "prefix_sharing" not in order_keys(lone.replace(pack_impl="unpacked"))


def test_answers_to_be_scored_share_what_they_begin_with():
    random = np.random.default_rng(0)
    responses = []
    for prompt, answers in zip(random.integers(1, 9, 20), random.integers(1, 9, (20, 2)), strict=True):
        begin = random.integers(10, 99, prompt)
        for answer in answers:
            tokens = np.concatenate([begin, random.integers(10, 99, answer)])
            responses.append(Response(tokens, np.where(np.arange(len(tokens)) < prompt, -100, tokens)))
    responses += [responses[3], responses[2]]  # of another order, and a lone one
    samples, order = pack_responses(responses, 24, True, 0.02)
    assert sorted(order) == list(range(42)) and sum(sample.prefix_lengths is not None for sample in samples) > 10
    unshared, _ = pack_responses(responses, 24, True)
    assert len(samples) < len(unshared) and all(sample.prefix_lengths is None for sample in unshared)
    single_samples = [pack_responses([responses[i]], 24, False)[0][0] for i in order]
    packed_responses = [response for sample in samples for response in responses_of(sample)]
    assert [response.name for response in packed_responses] == [
        responses_of(single)[0].name for single in single_samples
    ]
    batch = collate_preferences(samples, packed=True)
    for (tokens, trained), number in zip(answers_of(batch).values(), order, strict=True):
        full_tokens, masked = responses[number].tokens.tolist(), responses[number].labels
        assert (
            tokens in (full_tokens, full_tokens[:-1])
            and trained == masked[max(1, int(np.argmax(masked >= 0))) :].tolist()
        )
    unprofitable, _ = pack_responses(responses, 24, True, 0.9)
    assert all(sample.prefix_lengths is None for sample in unprofitable), "it does not pay"


@pytest.mark.parametrize("pack_impl", LAYOUTS)
@pytest.mark.parametrize("train_impl", ["dpo", "kto"])
def test_a_run_goes_on_exactly_and_ranks_share_its_samples(train_impl: str, pack_impl: str, tmp_path: Path):
    def flat(loaded_batches) -> list:
        parts = ("tokens", "labels", "loss_weights", "method.response_ids", "method.preference_labels", "positions")
        rows = [
            [
                *attrgetter(*parts)(b),
                b.documents and b.documents.cu_seqlens,
                b.method.kl_batch and b.method.kl_batch.tokens,
            ]
            for b in loaded_batches
        ]
        return [[None if value is None else value.tolist() for value in row] for row in rows]

    changes = {"train_impl": train_impl, "pack_impl": pack_impl, **write_pairs(tmp_path, random_pairs(3))}
    args = configuration(tmp_path, **changes)
    dataset = build(args).train
    all_batches = flat(batches(args, dataset))
    assert len(all_batches) >= 16
    longer = build(args.replace(train_iters=30, num_workers=1)).train
    assert flat(batches(args.replace(num_workers=1), longer, 12))[: len(all_batches) - 6] == all_batches[6:]
    assert order_sha256(longer, 20) == order_sha256(dataset, 20) != order_sha256(dataset, 19)
    two_rank_args = configuration(tmp_path, **changes, gradient_accumulation_steps=1, world=2)
    ranks = [flat(batches(two_rank_args, dataset, data_rank=rank, data_size=2)) for rank in (0, 1)]
    assert [batch for step in zip(*ranks, strict=True) for batch in step] == all_batches


def test_lengths_left_and_right(tmp_path: Path):
    pairs = [([1, 2, 3, 4, 5, 6], [7, 8, 9], [7, 9, 9, 9, 9]), ([1, 2], [3] * 20, [4] * 30), ([5], [6], [7])]
    paths = write_pairs(tmp_path, pairs)

    def texts(**changes) -> tuple[dict, str]:
        args = configuration(tmp_path, pack_impl="unpacked", train_iters=3, **ONE_SAMPLE, **paths, **changes)
        datasets = build(args)
        batch_answers = [answers_of(batch) for batch in batches(args, datasets.train)]
        return {answers[0][1][0]: answers for answers in batch_answers}, "\n".join(datasets.log_lines)

    answers_by_label, notes = texts(max_prompt_length=4, max_length=10)
    assert answers_by_label[7] == {
        0: ([3, 4, 5, 6, 7, 8, 9], [7, 8, 9]),
        1: ([3, 4, 5, 6, 7, 9, 9, 9, 9], [7, 9, 9, 9, 9]),
    }
    assert answers_by_label[3] == {0: ([1, 2] + [3] * 8, [3] * 8), 1: ([1, 2] + [4] * 8, [4] * 8)}
    assert re.search(r"2 prompts .*4 tokens", notes) and re.search(r"2 answers .*34 tokens", notes)
    answers_by_label, notes = texts(max_length=10, allow_chopped=False)
    assert set(answers_by_label) == {6} and re.search("2 pairs .*allow_chopped: false", notes)
    answers_by_label, notes = texts(max_length=6)
    assert set(answers_by_label) == {3, 6} and re.search("1 pairs .*number 0", notes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_pair_has_its_margin_and_its_last_token(layout: str, tmp_path: Path) -> None:
    """A reward model reads rows to their last token."""
    pairs = random_pairs(4)
    size = SEQ // 2 if layout == "best_fit" else SEQ  # of a row of its own, or half of one for each side
    pairs[7] = ([431], [432] * (size - 1), [433] * (size - 1))
    margins = np.random.default_rng(0).normal(size=PAIRS).astype(np.float32)
    paths = write_pairs(tmp_path, pairs)
    paths["train_reward_data_paths"] = (write_rows(tmp_path / "margin", margins[:, None].tolist(), np.float32),)
    changes = {"train_impl": "rm", "pack_impl": layout, "prefix_sharing": False if layout == "best_fit" else "auto"}
    args = configuration(tmp_path, **changes, **paths)
    pair_numbers = set()
    for batch in batches(args, build(args, epochs=1).train):
        assert batch.tokens.shape[1] == SEQ
        answers = answers_of(batch)
        assert batch_responses(batch).margins is not None and len(batch_responses(batch).margins) == len(answers) // 2
        for pair, margin in enumerate(batch_responses(batch).margins.tolist()):
            chosen, rejected = answers[2 * pair][0], answers[2 * pair + 1][0]
            number = 7 if 431 in chosen else (chosen[0] - 10) // 7
            prompt, *responses = pairs[number]
            assert [chosen, rejected] == [prompt + responses[0], prompt + responses[1]], "whole, to their last token"
            assert margin == margins[number]
            pair_numbers.add(number)
    assert 7 in pair_numbers and len(pair_numbers) > PAIRS // 2


def test_pairs_longer_than_a_row_are_truncated_evenly():
    sizes, answer_starts = np.array([[30, 40], [3, 60], [10, 10]]), np.full((3, 2), 2)
    maps = build_preference_maps(sizes, answer_starts, 3, 48, 0, Packing("best_fit"), LengthLimits())
    assert maps.size.tolist() == [24, 24, 3, 46, 10, 10]
    retained = build_preference_maps(
        sizes, answer_starts, 3, 48, 0, Packing("best_fit", allow_chopped=False), LengthLimits()
    )
    assert retained.doc_idx.tolist() == [4, 5] and retained.counts[COUNTS.index("too_long")] == 2


@pytest.mark.parametrize("median, p95, seq", [(2138, 15433, 16384), (682, 3521, 4096)])
def test_padding_of_lengths_like_olmo_3(median: int, p95: int, seq: int):
    """Lengths of Dolci-Think-DPO-7B and Dolci-Instruct-DPO, by 8: log-normal, cut at half a row."""
    random = np.random.default_rng(0)
    sizes = np.exp(random.normal(np.log(median / 8), np.log(p95 / median) / 1.6449, (4000, 2)))
    sizes = np.maximum(4, sizes.astype(np.int64))
    answer_starts, limits = np.full_like(sizes, 2), LengthLimits(seq // 16)
    maps = build_preference_maps(sizes, answer_starts, 1, seq // 8, 0, Packing("best_fit"), limits)
    count = dict(zip(COUNTS, maps.counts.tolist(), strict=True))
    assert count["units"] == 4000
    assert 1 - count["tokens"] / (count["samples"] * (seq // 8 + 1)) < 0.03
    # Rows of like lengths do not follow each other: the number of pairs in a row says nothing about its place
    rows = np.diff(maps.sample_idx[:, 0])[maps.shuffle_idx] // 2
    assert abs(np.corrcoef(rows, np.arange(len(rows)))[0, 1]) < 0.1


@pytest.mark.parametrize("pack_impl", LAYOUTS)
def test_kto_compares_with_answers_to_other_prompts(pack_impl: str, tmp_path: Path):
    pairs = random_pairs(5)
    changes = {
        "train_impl": "kto",
        "pack_impl": pack_impl,
        "kto_undesirable_weight": 0.5,
        "train_iters": 1,
        **ONE_SAMPLE,
    }
    args = configuration(tmp_path, **changes, **write_pairs(tmp_path, pairs))
    dataset = build(args).train
    prompts = {pair[0][0]: pair[0] for pair in pairs}
    good, bad = ({tuple(pair[place]) for pair in pairs} for place in (1, 2))
    answer_counts, compared = Counter(), Counter()
    for batch in batches(args, dataset):
        for number, (tokens, trained) in answers_of(batch).items():
            assert tuple(trained) in (good if batch_responses(batch).preference_labels[number] > 0 else bad)
            assert tokens[: len(prompts[tokens[0]])] == prompts[tokens[0]]
            answer_counts[tuple(trained)] += 1
        for tokens, trained in answers_of(batch_responses(batch).kl_batch).values():
            prompt = prompts[tokens[0]]
            assert tokens[: len(prompt)] == prompt and trained[0] - prompt[0] not in range(3)
            compared[tuple(trained)] += 1
        if pack_impl == "unpacked":
            assert batch_responses(batch).kl_batch.tokens[0, 0] == batch.tokens[0, 0]
    assert answer_counts == dict.fromkeys(good | bad, 1)
    assert set(compared) <= good | bad and max(compared.values()) <= 2


def test_examples_with_rewards_and_no_kl(tmp_path: Path):
    paths = {
        "train_data_paths": (write_rows(tmp_path / "t", [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),),
        "train_label_data_paths": (write_rows(tmp_path / "l", [[-100, 2, 3], [-100, -100, 6], [-100, 8, 9]]),),
        "train_reward_data_paths": (write_rows(tmp_path / "r", [[1], [-1], [1]], np.float32),),
    }
    args = configuration(tmp_path, train_impl="kto", dataset_impl="gpt2", train_iters=1, **ONE_SAMPLE, **paths)
    (batch,) = batches(args, build(args).train)
    answers = zip(answers_of(batch).values(), batch_responses(batch).preference_labels.tolist(), strict=True)
    assert {trained[0]: sign for (_, trained), sign in answers} == {2: 1.0, 6: -1.0, 8: 1.0}
    assert len(batch_responses(batch_responses(batch).kl_batch).preference_labels) == 3
    free = args.replace(kto_loss_type="apo_zero_unpaired")
    assert batch_responses(batches(free, build(free).train)[0]).kl_batch is None
    limited = args.replace(limit_samples=2)
    assert batch_responses(batches(limited, build(limited).train)[0]).preference_labels.tolist() == [1.0, -1.0]
    with pytest.raises(DataError, match="KTO .*1 answers .*1 prompts"):
        build(args.replace(limit_samples=1))
    write_rows(tmp_path / "r", [[1], [0], [1]], np.float32)
    with pytest.raises(DataError, match=r"r\.bin: document 1 .*reward 0"):
        build(args)


def test_rotated_answers_equal_trl(tmp_path: Path):
    trl = pytest.importorskip("trl.trainer.kto_trainer", reason="pip install trl==1.16.0")
    changes = {"train_impl": "kto", "pack_impl": "unpacked", "kto_kl": "rotated", "dpo_reference": "on_the_fly"}
    sizes = dict.fromkeys(("seq_length", "max_position_embeddings", "max_length"), 20)
    args = configuration(tmp_path, **changes, **sizes, train_micro_batch_size_per_gpu=6, train_iters=5,
                         **write_pairs(tmp_path, random_pairs(7, 20)))  # fmt: skip
    for batch in batches(args, build(args).train):
        examples = [{"prompt_ids": tokens[: -len(trained)], "completion_ids": tokens[-len(trained) :], "label": True}
                    for tokens, trained in answers_of(batch).values()]  # fmt: skip
        for i, example in enumerate(examples):
            example["KL_completion_ids"] = examples[i - 1]["completion_ids"]
        trl_batch = trl.DataCollatorForUnpairedPreference(pad_token_id=0, max_length=20)(examples)
        width = trl_batch["KL_input_ids"].shape[1]
        assert torch.equal(batch_responses(batch).kl_batch.tokens[:, :width], trl_batch["KL_input_ids"])
        assert not batch_responses(batch).kl_batch.tokens[:, width:].any()
        # A place predicts the next one
        shifted = trl_batch["KL_completion_mask"][:, 1:]
        assert torch.equal(batch_responses(batch).kl_batch.loss_weights[:, : width - 1], shifted)
        assert int(batch_responses(batch).kl_batch.loss_weights.sum()) == int(shifted.sum())


@pytest.mark.parametrize("pack_impl", LAYOUTS)
@pytest.mark.parametrize("train_impl", ["dpo", "kto"])
def test_validation_counts_every_pair_once(train_impl: str, pack_impl: str, tmp_path: Path):
    args = configuration(tmp_path, train_impl=train_impl, pack_impl=pack_impl, **write_pairs(tmp_path, random_pairs(1)))
    dataset, collate = build(args).train, collation(args, None)
    rank_batches = [batch for rank in range(4) for batch in eval_batches(dataset, 5, 2, rank, 4, collate)]
    for batch in rank_batches:
        if batch_responses(batch).kl_batch is not None:
            assert (
                not batch_responses(batch_responses(batch).kl_batch).preference_labels.any()
                or batch_responses(batch).preference_labels.any()
            )
    (full_batch,) = eval_batches(dataset, 5, 5, 0, 1, collate)
    assert sum(batch_responses(batch).preference_labels.count_nonzero() for batch in rank_batches) == len(
        batch_responses(full_batch).preference_labels
    )
    assert sum(batch.loss_weights.sum() for batch in rank_batches) == full_batch.loss_weights.sum()
    assert len({batch.tokens.shape for batch in rank_batches}) == 1


@pytest.mark.parametrize("sizes", [(7,), (7, 30)])
@pytest.mark.parametrize("pack_impl", LAYOUTS)
def test_small_sets_are_validated_with_once_each_pair_by_weight(pack_impl: str, sizes: tuple[int, ...], tmp_path: Path):
    train = write_pairs(tmp_path, random_pairs(1))
    parts = [write_pairs(tmp_path, random_pairs(size, size), f"v{size}") for size in sizes]
    valid = {key.replace("train", "valid"): sum((part[key] for part in parts), ()) for key in train}
    weights = {"valid_data_weights": (3, 1)} if len(sizes) > 1 else {}
    args = configuration(tmp_path, pack_impl=pack_impl, eval_iters=10, eval_interval=2, **train, **valid, **weights)
    dataset = build(args).valid
    validation_batches = eval_batches(dataset, 10 * args.train_batch_size, 2, 0, 1, collation(args, None))
    assert sum(int((batch_responses(batch).preference_labels != 0).sum()) for batch in validation_batches) == 2 * sum(
        sizes
    )
    if weights:
        assert dataset.maps.dataset_index[:4].sum() == 1, "three of the first set for one of the second"


def test_several_sets_and_limits(tmp_path: Path):
    pairs_b = [tuple([300 + 3 * n + part] * 3 for part in range(3)) for n in range(40)]
    paths_a, paths_b = write_pairs(tmp_path, random_pairs(1, 20), "a"), write_pairs(tmp_path, pairs_b, "b")
    paths = {key: paths_a[key] + paths_b[key] for key in paths_a}
    args = configuration(tmp_path, **paths, train_data_weights=(3, 1), pack_impl="unpacked", limit_samples=10)
    batch_answers = [answers_of(batch) for batch in batches(args, build(args).train)]
    drawn_tokens = [answer[1][0] for answers in batch_answers for number, answer in answers.items() if number % 2 == 0]
    assert len(drawn_tokens) == 32 and len(set(drawn_tokens)) == 10 + 8
    assert sum(token >= 300 for token in drawn_tokens) == len(drawn_tokens) / 4
    args = args.replace(train_data_weights=None)
    steps = epoch_iterations(args.replace(train_epochs=1, train_iters=None), 4)
    assert steps == 5
    dataset = build(args.replace(train_iters=steps), epochs=1).train
    assert len({dataset[i].rows[0].tokens.tobytes() for i in range(20)}) == 20


def test_first_labelled_of_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    random = np.random.default_rng(0)
    rows = [np.where(random.random(size) < 0.2, 5, -100) for size in random.integers(1, 30, 200)]
    expected = [next((i for i in range(1, len(row)) if row[i] >= 0), len(row)) for row in rows]
    monkeypatch.setattr("megatron.data.labels.CHUNK", 64)
    assert first_labelled_token(open_dataset(write_rows(tmp_path / "l", rows))).tolist() == expected


@pytest.mark.parametrize("count, per_prompt", [(9, 1), (40, 2), (5, 2), (4, 2)])
def test_partners(count: int, per_prompt: int):
    documents = np.arange(count) + 10
    partners = mismatched_documents(documents, per_prompt, 3)
    assert sorted(partners) == documents.tolist() and (partners // per_prompt != documents // per_prompt).all()


@pytest.mark.parametrize(("changes", "message"), [
    ({"prefix_sharing": True, "pack_impl": "unpacked"}, "prefix_sharing: "),
    ({"pack_impl": "packed"}, "pack_impl: "),
    ({"max_length": 60}, "max_length: .*48"),
    ({"max_length": 8, "max_prompt_length": 8}, "max_prompt_length: .*max_length 8"),
    ({"kto_kl": "rotated"}, "kto_kl: .*train_impl: kto.*dpo"),
    ({"train_impl": "normal"}, "dataset_impl: .*dpo, kto and rm"),
    ({"eod_mask_loss": True}, "eod_mask_loss: "),
    ({"train_impl": "kto", "kto_kl": "rotated", "pack_impl": "best_fit"}, "kto_kl: .*row"),
])  # fmt: skip
def test_keys_that_contradict_each_other(changes: dict, message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        configuration(tmp_path, **{"pos_train_data_paths": ("p",), "neg_train_data_paths": ("n",)} | changes)


def test_prompts_are_masked_where_a_row_begins_within_a_document(tmp_path: Path):
    indexed = IndexedDataset(write_rows(tmp_path / "x", [[1, 2, 3, 4, 5, 6]]))
    documents = SlicedDocuments([indexed], [DocumentSlices(*np.array([[0], [0], [0], [6]]))])
    labels = PromptMaskedLabels(documents, np.array([3]))
    assert labels.get(0, 0, 4).tolist() == [-100, -100, -100, 4]
    assert labels.get(0, 2, 4).tolist() == [-100, 4, 5, 6]
