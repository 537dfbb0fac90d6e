"""A set that begins behind the first document, as a validation split, keeps its order too when its run is
extended."""

import numpy as np
import pytest

from megatron.data import build_packed

SIZES = np.random.RandomState(0).randint(1, 40, 30).astype(np.int32)


@pytest.mark.parametrize(("first", "last"), [(0, 30), (11, 30), (20, 27)])
def test_windows_stay_and_the_rest_is_shuffled_by_itself(first: int, last: int) -> None:
    before = build_packed(SIZES, first, last, 120, 8, 3)
    windows, documents = len(before.shuffle_idx), len(before.doc_idx)
    after = build_packed(SIZES, first, last, 3 * windows, 8, 3, before=(windows,))
    for name, count in (("doc_idx", documents), ("sample_idx", windows + 1), ("shuffle_idx", windows)):
        np.testing.assert_array_equal(getattr(after, name)[:count], getattr(before, name)[:count])
    # Behind them each document once an epoch, in another order than they lie in
    added = after.doc_idx[documents:]
    assert len(added) and set(np.bincount(added, minlength=last)[first:]) == {len(added) // (last - first)}
    assert added.tolist() != np.tile(np.arange(first, last), len(added) // (last - first)).tolist()
