"""KTO's second set: each prompt with the response to another one, which tells how far the model is from the
reference.

"KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv 2402.01306), section 4.1.
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
    """For each of `documents` another one of them, to another prompt; each is taken once, in an order of
    `seed`.

    Documents d with the same d // responses_per_prompt (1 or 2) answer the same prompt. The prompts are put
    in random order, and each is given the next one's response. Raises DataError where there are too few
    prompts.
    """
    prompts, prompt_of = np.unique(documents // responses_per_prompt, return_inverse=True)
    order = np.argsort(np.random.RandomState(seed).permutation(len(prompts))[prompt_of], kind="stable")
    others = np.empty_like(documents)
    others[order] = documents[np.roll(order, -1 if len(prompts) == len(documents) else -2)]
    if (others // responses_per_prompt == documents // responses_per_prompt).any():
        raise DataError(
            f"KTO compares with answers to other prompts, but {len(documents)} answers to {len(prompts)} prompts can "
            "be trained; it needs more"
        )
    return others


def mismatched_maps(
    maps: PreferenceMaps,
    sources: int,
    paired: bool,
    seq_length: int,
    seed: int,
    packing: Packing,
    max_length: int | None,
    before: Sequence[int] = (),
) -> tuple[list[DocumentSlices], np.ndarray, IndexMaps]:
    """Slices, prompt lengths and maps of a set in which every trained prompt has another one's response.

    Prompt and response are cut to max_length tokens. Unpacked, sample i has the prompt of sample i of `maps`.
    paired: documents 2p and 2p + 1 have one prompt. before: where the earlier segments of the order end, in
    samples (see `build_packed`). Raises DataError where there are too few prompts.
    """
    kept, documents = np.unique(maps.doc_idx), np.arange(len(maps.size))
    other = documents.copy()
    other[kept] = mismatched_documents(kept, 2 if paired else 1, seed)
    most = min(max_length or seq_length + 1, seq_length + 1)
    count = np.minimum((maps.size - maps.prompt)[other], np.maximum(0, most - maps.prompt))
    prompts = DocumentSlices(documents % sources, documents // sources, maps.begin, maps.prompt)
    responses = DocumentSlices(other % sources, other // sources, (maps.begin + maps.prompt)[other], count)
    rows: IndexMaps = maps
    if packing.pack_impl != "unpacked":
        lengths = np.zeros(len(documents), np.int64)
        lengths[kept] = (maps.prompt + count)[kept]
        whole = replace(packing, truncate_documents=None)
        rows = build_maps(lengths, 0, len(lengths), len(rows.shuffle_idx), seq_length, seed, whole, None, before)
    return [prompts, responses], maps.prompt, rows


def rotate_responses(samples: Sequence[PreferenceSample], max_length: int | None) -> list[PreferenceSample]:
    """Examples, each in a row of its own, with the `kl_sample` that TRL gives them: prompt i with response i
    - 1 of the micro-batch, cut to max_length tokens. Padding comes last."""
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
    """(tokens of the prompt, tokens of the response, labels of the response) of an example."""
    (row,), (response_ids,) = sample.rows, sample.response_ids
    used = int((response_ids >= 0).sum())
    first = 1 + int(np.argmax(row.labels[1:] >= 0))
    return row.tokens[:first], row.tokens[first:used], row.labels[first:used]


def _joined(
    sample: PreferenceSample, prompt: np.ndarray, response: np.ndarray, response_labels: np.ndarray, most: int
) -> PreferenceSample:
    """A sample of the shapes of `sample` with one row: the prompt, then the response, at most so many
    tokens."""
    (row,), (response_ids,) = sample.rows, sample.response_ids
    end = min(most, len(row.tokens), len(prompt) + len(response))
    tokens, labels = np.zeros_like(row.tokens), np.full_like(row.labels, MASKED)
    begins, joined_ids = np.zeros_like(row.begins), np.full_like(response_ids, -1)
    tokens[: len(prompt)] = prompt
    tokens[len(prompt) : end] = response[: end - len(prompt)]
    labels[len(prompt) : end] = response_labels[: end - len(prompt)]
    begins[0], begins[end : end + 1], joined_ids[:end] = True, True, 0
    return PreferenceSample(
        (TokenSample(tokens, labels, begins, True, filled=end),), (joined_ids,), np.ones(1, np.float32)
    )
