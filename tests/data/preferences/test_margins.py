"""Pairs of a reward model: rows are read to their last token, and each pair has its margin."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.preferences.test_preference_sets import (
    LAYOUTS,
    PAIRS,
    SEQ,
    answers_of,
    batches,
    build,
    configuration,
    random_pairs,
    write_pairs,
)
from tests.data.samples import write_rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_pair_has_its_margin_and_its_last_token(layout: str, tmp_path: Path) -> None:
    pairs = random_pairs(4)
    # One that fills what there is: a row of its own, or half of one for each side.
    size = SEQ // 2 if layout == "best_fit" else SEQ
    pairs[7] = ([431], [432] * (size - 1), [433] * (size - 1))
    margins = np.random.default_rng(0).normal(size=PAIRS).astype(np.float32)
    paths = write_pairs(tmp_path, pairs)
    paths["train_reward_data_paths"] = (write_rows(tmp_path / "margin", margins[:, None].tolist(), np.float32),)
    changes = {"train_impl": "rm", "pack_impl": layout, "prefix_sharing": False if layout == "best_fit" else "auto"}
    args = configuration(tmp_path, **changes, **paths)
    seen = set()
    for batch in batches(args, build(args, epochs=1).train):
        assert batch.tokens.shape[1] == SEQ
        answers = answers_of(batch)
        assert batch.margins is not None and len(batch.margins) == len(answers) // 2
        for pair, margin in enumerate(batch.margins.tolist()):
            chosen, rejected = answers[2 * pair][0], answers[2 * pair + 1][0]
            number = 7 if 431 in chosen else (chosen[0] - 10) // 7
            prompt, *both = pairs[number]
            assert [chosen, rejected] == [prompt + both[0], prompt + both[1]], "whole, to their last token"
            assert margin == margins[number]
            seen.add(number)
    assert 7 in seen and len(seen) > PAIRS // 2
