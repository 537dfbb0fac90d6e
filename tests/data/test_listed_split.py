"""`split` over listed sets: which documents train, validate and test, with their labels and rewards."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import DataError, order_keys
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.data.samples import write_rows
from tests.data.test_text_sets import build, make_args
from tests.training.runs import LLAMA, config


def sets_of(tmp_path: Path, names: str = "a", split: str = "70,20,10", **changes: Any) -> Any:
    """Sets of ten documents of three tokens, numbered on, and the sets that `split` makes of them."""
    text, label, reward = ([], [], [])
    for k, name in enumerate(names):
        numbers = range(10 * k + 1, 10 * k + 11)
        text.append(write_rows(tmp_path / f"{name}_document", [[n] * 3 for n in numbers]))
        label.append(write_rows(tmp_path / f"{name}_label_document", [[-100, n, n] for n in numbers]))
        reward.append(write_rows(tmp_path / f"{name}_reward_document", [[n / 2] for n in numbers], np.float32))
    values = {"data_path": None, "split": split, "user_values": {"split": split}, "pack_impl": "unpacked",
              "seq_length": 4, "train_data_paths": tuple(text), "train_label_data_paths": tuple(label),
              "train_reward_data_paths": tuple(reward), "index_cache_dir": str(tmp_path / "cache")}  # fmt: skip
    return make_args(**values | changes)


def documents(samples: Any) -> set[int]:
    """The numbers of the documents, their labels and rewards checked."""
    numbers = set()
    for i in range(len(samples)):
        (number,) = set(samples[i].tokens[:3].tolist())
        assert samples[i].labels[:3].tolist() == [-100, number, number] and samples[i].reward == number / 2
        numbers.add(number)
    return numbers


def test_parts_of_one_set(tmp_path: Path):
    sets = build(sets_of(tmp_path))
    assert documents(sets.train) == set(range(1, 8))
    assert documents(sets.valid) == {8, 9} and documents(sets.test) == {10}


def test_parts_of_each_set_of_a_blend(tmp_path: Path):
    sets = build(sets_of(tmp_path, "ab"))
    assert documents(sets.train) == {*range(1, 8), *range(11, 18)}
    assert documents(sets.valid) == {8, 9, 18, 19} and documents(sets.test) == {10, 20}
    assert build(sets_of(tmp_path, "ab", split="80,20,0")).test is None
    with pytest.raises(DataError, match=r"leaves none of its 10 documents to valid; use another split"):
        longer = write_rows(tmp_path / "c_document", [[n] * 3 for n in range(1, 500)])
        paths = {"train_data_paths": (str(tmp_path / "a_document"), longer)}
        no_labels = {"train_label_data_paths": None, "train_reward_data_paths": None}
        build(sets_of(tmp_path, "ab", split="99,1,0", **paths, **no_labels))


def test_a_split_that_is_not_written_or_not_alone_cuts_nothing(tmp_path: Path):
    assert documents(build(sets_of(tmp_path, user_values={})).train) == set(range(1, 11))
    valid_set_args = sets_of(tmp_path, valid_data_paths=(str(tmp_path / "a_document"),))
    assert documents(build(valid_set_args).train) == set(range(1, 11))
    assert order_keys(sets_of(tmp_path))["split"] == "70,20,10" and order_keys(valid_set_args)["split"] is None


def test_validation_asks_for_a_split_or_a_set():
    keys = {"data_path": None, "train_data_paths": ["x"], "eval_iters": 2}
    with pytest.raises(ConfigError, match="needs valid_data_paths too .*eval_iters: 0.*or split"):
        NeoXArgs.from_dict(config(LLAMA, keys))
    assert NeoXArgs.from_dict(config(LLAMA, keys, split="80,20,0")).split == "80,20,0"
