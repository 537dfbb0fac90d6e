"""Preferences as token ids, and the batches that hold them: padded, one answer a row, or several in a row."""

from collections.abc import Sequence

import numpy as np
import torch

from megatron.data import Batch
from megatron.data.batch import document_starts
from megatron.data.preferences.responses import Responses, batch_responses, share_prefixes

VOCAB = 48


_DRAWS = np.random.default_rng(5)
# Prompt, chosen, rejected.
PAIRS: list[tuple[list[int], ...]] = [tuple(_DRAWS.integers(4, VOCAB, count).tolist() for count in size)
                                      for size in ((3, 5, 8), (7, 2, 3), (1, 9, 4), (5, 6, 6))]  # fmt: skip
# By which the chosen answer of each pair should win.
MARGINS = [0.5, 0.0, 1.25, -0.3]
# Prompt, answer, whether it is good: two thirds are.
ANSWERS = [(prompt, chosen, True) for prompt, chosen, _ in PAIRS[:3]]
ANSWERS += [(prompt, rejected, False) for prompt, _, rejected in (PAIRS[0], PAIRS[3])]
# Answers to the prompts before, as TRL turns them within a batch.
MISMATCHED = [(prompt, ANSWERS[i - 1][1]) for i, (prompt, _, _) in enumerate(ANSWERS)]

Document = tuple[list[int], list[int]]  # prompt, answer


def in_rows(documents: Sequence[Document], rows: Sequence[Sequence[int]], length: int, signs: Sequence[float]) -> Batch:
    """A batch whose row r holds the documents numbered `rows[r]`, each attending to itself, then padding."""
    tokens, labels, weights, positions = (np.zeros((len(rows), length), np.int64) for _ in range(4))
    answers = np.full((len(rows), length), -1)
    begins = np.zeros((len(rows), length), bool)
    for row, numbers in enumerate(rows):
        offset = 0
        for number in numbers:
            prompt, answer = documents[number]
            ids, end = np.array(prompt + answer), offset + len(prompt) + len(answer)
            begins[row, offset] = True
            tokens[row, offset:end], answers[row, offset:end] = ids, number
            positions[row, offset:end] = np.arange(len(ids))
            first_label = offset + max(len(prompt) - 1, 0)
            labels[row, first_label : end - 1] = ids[first_label - offset + 1 :]
            weights[row, first_label : end - 1] = 1
            offset = end
        if offset < length:
            begins[row, offset] = True
            positions[row, offset:] = np.arange(length - offset)
    return Batch(
        *map(torch.from_numpy, (tokens, labels, weights, positions)), documents=document_starts(begins),
        method=Responses(torch.from_numpy(answers), torch.tensor(signs)),
    )  # fmt: skip


def shared_in_rows(documents: Sequence[Document], rows: Sequence[Sequence[int]], length: int,
                   signs: Sequence[float]) -> Batch:  # fmt: skip
    """`in_rows` of pairs, the prompt of each (but for its last token) once, in the chosen document."""
    prefixes = [len(prompt) - 1 if number % 2 else 0 for number, (prompt, _) in enumerate(documents)]
    suffixes = [(prompt[prefix:], answer) for (prompt, answer), prefix in zip(documents, prefixes, strict=True)]
    batch = in_rows(suffixes, rows, length, signs)
    padding = [0] * (len(signs) - len(documents))
    return share_prefixes(batch, batch_responses(batch).response_ids, np.array(prefixes + padding))


def documents_of(pairs: Sequence[tuple[list[int], list[int], list[int]]]) -> list[Document]:
    return [(prompt, answer) for prompt, chosen, rejected in pairs for answer in (chosen, rejected)]
