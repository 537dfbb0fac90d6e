"""Rows of text as sequences: which tokens belong to which, and which of them are trained."""

import numpy as np
import pytest

from megatron.data.packed_dataset import TokenSample
from megatron.methods.unlearning.method import SequenceDataset

TOKENS = [5, 6, 0, 7, 8, 9, 0, 5, 0, 0]  # 0 ends documents; two places of padding
BEGINS = [1, 0, 0, 1, 0, 0, 0, 1, 1, 0]


def one_row(labelled: bool) -> list[TokenSample]:
    """A dataset of one row."""
    labels = np.array([*([-100] * 4 if labelled else TOKENS[:4]), *TOKENS[4:8], -100, -100])
    return [TokenSample(np.array(TOKENS), labels, np.array(BEGINS, bool), labelled, None, 8)]


@pytest.mark.parametrize(("options", "labelled", "ids", "trained"), [
    ({"separate_documents": True}, False, [0, 0, 0, 1, 1, 1, 1, 2, -1, -1], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]),
    ({"separate_documents": False}, False, [0] * 8 + [-1, -1], [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]),
    ({"separate_documents": False, "mask_after_eod": True}, False, [0] * 8 + [-1, -1], [1, 1, 1, 0, 1, 1, 1, 0, 0, 0]),
    ({"separate_documents": False, "masked_ids": (5, 9)}, False, [0] * 8 + [-1, -1], [0, 1, 1, 1, 1, 0, 1, 0, 0, 0]),
    ({"separate_documents": True}, True, [0, 0, 0, 1, 1, 1, 1, 2, -1, -1], [0, 0, 0, 0, 1, 1, 1, 1, 0, 0]),
])  # fmt: skip
def test_sequences_of_a_row(options: dict, labelled: bool, ids: list[int], trained: list[int]) -> None:
    options = {"eod": 0, "mask_after_eod": False, **options}
    sample = SequenceDataset(one_row(labelled), **options)[0]  # type: ignore[arg-type]
    assert sample.response_ids[0].tolist() == ids
    assert (sample.rows[0].labels >= 0).astype(int).tolist() == trained
    assert len(sample.preference_labels) == max(ids) + 1


def test_the_end_of_a_document_within_one_begins_a_sequence() -> None:
    """In sets without labels; a conversation's turns may end with it."""
    for labelled, begins in ((False, [0, 0, 0, 1, 1, 1, 1, 2]), (True, [0] * 8)):
        rows = one_row(labelled)
        rows[0].begins[1:8] = False
        sample = SequenceDataset(rows, separate_documents=True, eod=0, mask_after_eod=False)[0]  # type: ignore[arg-type]
        assert sample.response_ids[0].tolist()[:8] == begins
