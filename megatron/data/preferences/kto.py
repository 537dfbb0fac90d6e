"""KTO's second set: each prompt with the answer to another one, which tells how far the model is from the reference.

"KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv 2402.01306), section 4.1.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron.data.errors import DataError
from megatron.data.index_maps import IndexMaps, Packing
from megatron.data.labels import MASKED
from megatron.data.packed_dataset import Sample
from megatron.data.packing import build_maps
from megatron.data.preferences.preference_dataset import AnswerMaps, Answers
from megatron.data.slices import Slices


def partners(documents: np.ndarray, answers_per_prompt: int, seed: int) -> np.ndarray:
    """For each of `documents` another one, each once, of another prompt: one that stands after it when prompts go
    round in random order. Documents d with the same d // answers_per_prompt (1 or 2) have one prompt.

    Raises DataError where there are too few.
    """
    prompts, of = np.unique(documents // answers_per_prompt, return_inverse=True)
    order = np.argsort(np.random.RandomState(seed).permutation(len(prompts))[of], kind="stable")
    found = np.empty_like(documents)
    found[order] = documents[np.roll(order, -1 if len(prompts) == len(documents) else -2)]
    if (found // answers_per_prompt == documents // answers_per_prompt).any():
        raise DataError(
            f"KTO compares with answers to other prompts, but {len(documents)} answers to {len(prompts)} prompts can "
            "be trained; it needs more"
        )
    return found


def mismatched(
    maps: AnswerMaps,
    sources: int,
    paired: bool,
    seq_length: int,
    seed: int,
    packing: Packing,
    max_length: int | None,
    before: Sequence[int] = (),
) -> tuple[list[Slices], np.ndarray, IndexMaps]:
    """Slices, prompts and maps of a set in which every prompt that is trained has another one's answer, cut to
    max_length. Unpacked, sample i has the prompt of sample i.

    paired: documents 2p and 2p + 1 have one prompt. before: as `build_packed`.
    """
    kept, everyone = np.unique(maps.doc_idx), np.arange(len(maps.size))
    other = everyone.copy()
    other[kept] = partners(kept, 2 if paired else 1, seed)
    most = min(max_length or seq_length + 1, seq_length + 1)
    answer = np.minimum((maps.size - maps.prompt)[other], np.maximum(0, most - maps.prompt))
    prompt = Slices(everyone % sources, everyone // sources, maps.begin, maps.prompt)
    answers = Slices(other % sources, other // sources, (maps.begin + maps.prompt)[other], answer)
    rows: IndexMaps = maps
    if packing.pack_impl != "unpacked":
        lengths = np.zeros(len(everyone), np.int64)
        lengths[kept] = (maps.prompt + answer)[kept]
        plain = replace(packing, truncate_documents=None)
        rows = build_maps(lengths, 0, len(lengths), len(rows.shuffle_idx), seq_length, seed, plain, None, before)
    return [prompt, answers], maps.prompt, rows


def rotated(items: Sequence[Answers], max_length: int | None) -> list[Answers]:
    """Examples, each in a row of its own, with `kl` as TRL has it: prompt i, and answer i - 1 of the micro-batch."""
    real = [item for item in items if item.preference_labels.any()]
    pieces = [_cut(item) for item in real]
    turned = [
        replace(item, kl_sample=_joined(item, prompt, pieces[i - 1][1], max_length or len(item.response_ids[0])))
        for i, (item, (prompt, _)) in enumerate(zip(real, pieces, strict=True))
    ]
    return turned + [replace(item, kl_sample=item).as_padding() for item in items if not item.preference_labels.any()]


def _cut(item: Answers) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """(prompt, (answer, its labels)) of an example."""
    (row,), (numbers,) = item.rows, item.response_ids
    used = int((numbers >= 0).sum())
    first = 1 + int(np.argmax(row.labels[1:] >= 0))
    return row.tokens[:first], (row.tokens[first:used], row.labels[first:used])


def _joined(item: Answers, prompt: np.ndarray, answer: tuple[np.ndarray, np.ndarray], most: int) -> Answers:
    (row,), (numbers,) = item.rows, item.response_ids
    end = min(most, len(row.tokens), len(prompt) + len(answer[0]))
    tokens, labels = np.zeros_like(row.tokens), np.full_like(row.labels, MASKED)
    begins, number = np.zeros_like(row.begins), np.full_like(numbers, -1)
    tokens[: len(prompt)] = prompt
    tokens[len(prompt) : end], labels[len(prompt) : end] = (part[: end - len(prompt)] for part in answer)
    begins[0], begins[end : end + 1], number[:end] = True, True, 0
    return Answers((Sample(tokens, labels, begins, True),), (number,), np.ones(1, np.float32))
