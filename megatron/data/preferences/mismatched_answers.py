"""Builds KTO's mismatched samples: each prompt with the response to another prompt.

Their log-probabilities estimate the KL from the reference model. "KTO: Model Alignment as Prospect Theoretic
Optimization" (arXiv 2402.01306), section 4.1.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron.data.errors import DataError
from megatron.data.index_maps import IndexMaps, Packing
from megatron.data.labels import MASKED
from megatron.data.packed_dataset import TokenSample
from megatron.data.packing import build_maps
from megatron.data.preferences.preference_dataset import PreferenceSample
from megatron.data.preferences.preference_maps import PreferenceMaps
from megatron.data.sliced_documents import DocumentSlices


def mismatched_documents(documents: np.ndarray, responses_per_prompt: int, seed: int) -> np.ndarray:
    """Choose, for each document, another document whose response its prompt is joined with; return these.

    The result is a permutation of `documents` in which no document gets a response to its own prompt.
    Documents d with the same d // responses_per_prompt (1 or 2) answer the same prompt. The prompts are
    shuffled by `seed`, and each gets the response to the next prompt. Raises DataError if there are too few
    prompts.
    """
    prompts, prompt_of = np.unique(documents // responses_per_prompt, return_inverse=True)
    order = np.argsort(np.random.RandomState(seed).permutation(len(prompts))[prompt_of], kind="stable")
    mismatched = np.empty_like(documents)
    mismatched[order] = documents[np.roll(order, -1 if len(prompts) == len(documents) else -2)]
    if (mismatched // responses_per_prompt == documents // responses_per_prompt).any():
        raise DataError(
            "KTO joins each prompt with an answer to another prompt, but too few can be trained: "
            f"{len(documents)} answers to {len(prompts)} prompts; use more data"
        )
    return mismatched


def mismatched_maps(
    maps: PreferenceMaps,
    sources: int,
    paired: bool,
    seq_length: int,
    seed: int,
    packing: Packing,
    max_length: int | None,
    earlier_ends: Sequence[int] = (),
) -> tuple[list[DocumentSlices], np.ndarray, IndexMaps]:
    """Return (slices, prompt lengths, index maps) of a dataset that joins each trained prompt with another
    prompt's response.

    slices: of the prompts and of the responses, in the data files. A prompt and its response together are
      truncated to max_length tokens. If unpacked, sample i has the prompt of sample i of `maps`.
    maps: the index maps of the trained prompts with their own responses.
    sources: number of data files.
    paired: documents 2p and 2p + 1 have the same prompt.
    earlier_ends: the ends of the earlier segments of the order, in samples (see `build_packed`).
    Raises DataError if there are too few prompts.
    """
    used_documents, documents = np.unique(maps.doc_idx), np.arange(len(maps.size))
    mismatched = documents.copy()
    mismatched[used_documents] = mismatched_documents(used_documents, 2 if paired else 1, seed)
    max_tokens = min(max_length or seq_length + 1, seq_length + 1)
    count = np.minimum((maps.size - maps.prompt)[mismatched], np.maximum(0, max_tokens - maps.prompt))
    prompts = DocumentSlices(documents % sources, documents // sources, maps.begin, maps.prompt)
    responses = DocumentSlices(
        mismatched % sources, mismatched // sources, (maps.begin + maps.prompt)[mismatched], count
    )
    rows: IndexMaps = maps
    if packing.pack_impl != "unpacked":
        lengths = np.zeros(len(documents), np.int64)
        lengths[used_documents] = (maps.prompt + count)[used_documents]
        untruncated = replace(packing, truncate_documents=None)
        rows = build_maps(
            lengths, 0, len(lengths), len(rows.shuffle_idx), seq_length, seed, untruncated, None, earlier_ends
        )
    return [prompts, responses], maps.prompt, rows


def rotate_responses(samples: Sequence[PreferenceSample], max_length: int | None) -> list[PreferenceSample]:
    """Return the samples of a micro-batch with `kl_sample` set as in TRL: prompt i with response i - 1.

    It is truncated to max_length tokens. Each sample must hold one response, alone in its row. Samples that
    are padding come last.
    """
    real = [sample for sample in samples if sample.preference_labels.any()]
    pieces = [_prompt_and_response(sample) for sample in real]
    rotated = [
        replace(
            sample, kl_sample=_joined(sample, prompt, *pieces[i - 1][1:], max_length or len(sample.response_ids[0]))
        )
        for i, (sample, (prompt, _, _)) in enumerate(zip(real, pieces, strict=True))
    ]
    padding = [sample for sample in samples if not sample.preference_labels.any()]
    return rotated + [replace(sample, kl_sample=sample).as_padding() for sample in padding]


def _prompt_and_response(sample: PreferenceSample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens of the prompt, tokens of the response, labels of the response) of a sample with one
    response."""
    (row,), (response_ids,) = sample.rows, sample.response_ids
    num_tokens = int((response_ids >= 0).sum())
    prompt_length = 1 + int(np.argmax(row.labels[1:] >= 0))
    return row.tokens[:prompt_length], row.tokens[prompt_length:num_tokens], row.labels[prompt_length:num_tokens]


def _joined(
    sample: PreferenceSample, prompt: np.ndarray, response: np.ndarray, response_labels: np.ndarray, max_length: int
) -> PreferenceSample:
    """Return a sample shaped like `sample` whose one row is the prompt, then the response, at most
    max_length tokens."""
    (row,), (response_ids,) = sample.rows, sample.response_ids
    end = min(max_length, len(row.tokens), len(prompt) + len(response))
    tokens, labels = np.zeros_like(row.tokens), np.full_like(row.labels, MASKED)
    begins, joined_ids = np.zeros_like(row.begins), np.full_like(response_ids, -1)
    tokens[: len(prompt)] = prompt
    tokens[len(prompt) : end] = response[: end - len(prompt)]
    labels[len(prompt) : end] = response_labels[: end - len(prompt)]
    begins[0], begins[end : end + 1], joined_ids[:end] = True, True, 0
    return PreferenceSample(
        (TokenSample(tokens, labels, begins, True, filled=end),), (joined_ids,), np.ones(1, np.float32)
    )
