"""Keys of unlearning: which steps are on the forget set, and what does not go together."""

from typing import Any

import pytest

from megatron.methods.unlearning.schedule import ascent_steps, begins_burst, is_ascent, optimizer_steps
from megatron.neox_arguments import NeoXArgs
from tests.neox_arguments.conftest import MODEL, refused

BASE: dict[str, Any] = {**MODEL, "train_batch_size": 8, "train_iters": 10, "data_path": "a",
                        "tokenizer_type": "HFTokenizer", "vocab_file": "t.json"}  # fmt: skip


def args(**keys: Any) -> NeoXArgs:
    return NeoXArgs.from_dict({**BASE, **keys})


def calls_of_the_fork(iterations: int, keys: dict[str, Any]) -> str:
    """Returns the fork's calls of train_step, a letter each, in its loop's order (reference: its `train`)."""
    calls = ""
    for iteration in range(iterations):
        if keys["ga_mode"] == "interleaved":
            calls += "a" if iteration > 0 and iteration % (keys["ga_interleave_ratio"] + 1) == 0 else "o"
        else:
            calls += "a" * keys["ga_iters"] if iteration > 0 and iteration % keys["ga_interval"] == 0 else "o"
    return calls


@pytest.mark.parametrize("keys", [
    *({"ga_mode": "interleaved", "ga_interleave_ratio": ratio} for ratio in (1, 2, 8)),
    *({"ga_mode": "interval", "ga_interval": n, "ga_iters": m} for n, m in ((2, 1), (2, 3), (5, 4), (30, 2))),
], ids=str)  # fmt: skip
def test_steps_are_those_of_the_fork(keys: dict[str, Any]) -> None:
    values, calls = args(ga_dataset="b", **keys), calls_of_the_fork(23, keys)
    steps = "".join("a" if is_ascent(values, step) else "o" for step in range(len(calls)))
    assert steps == calls and optimizer_steps(values, 23) == len(calls)
    for start in (0, 1, 3, 7, len(calls)):
        assert ascent_steps(values, start, len(calls)) == calls[start:].count("a")
    bursts = [step for step in range(len(calls)) if begins_burst(values, step)]
    any_burst = keys["ga_mode"] == "interleaved" or keys["ga_iters"] == 1
    assert bursts == [i for i, c in enumerate(calls) if c == "a" and (any_burst or calls[i - 1] == "o")]


INTERLEAVED = {"ga_dataset": "b", "ga_mode": "interleaved"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ga_lr_scale": 2.0}, "ga_lr_scale: ga_dataset"),
    ({"gd_mode": True}, "gd_mode: ga_dataset"),
    ({"ga_dataset": "b"}, "ga_interval: required ga_mode"),
    ({"ga_dataset": "b", "ga_interval": 1, "ga_iters": 1}, "ga_interval: 2 1"),
    (INTERLEAVED | {"ga_interval": 3}, "ga_interval: ga_mode interval interleaved"),
    (INTERLEAVED | {"gd_mode": True}, "gd_retain_dataset: required gd_mode"),
    (INTERLEAVED | {"gd_retain_dataset": "c"}, "gd_retain_dataset: gd_mode true"),
    (INTERLEAVED | {"ga_threshold_check_mode": "ema"}, "ga_threshold_check_mode: ga_loss_threshold"),
    (INTERLEAVED | {"skip_step_above_sigma": 6.0}, "skip_step_above_sigma: ga_dataset"),
    (INTERLEAVED | {"train_iters": None, "train_epochs": 1}, "train_epochs: ga_dataset train_iters"),
    (INTERLEAVED | {"train_impl": "dpo", "dataset_impl": "pairwise"}, "ga_dataset: unlearning language"),
]


@pytest.mark.parametrize(("keys", "facts"), REFUSED)
def test_what_does_not_go_together(keys: dict[str, Any], facts: str) -> None:
    assert refused(facts, BASE | keys)


def test_a_file_may_switch_the_difference_off() -> None:
    values = args(ga_dataset="b", ga_mode="interleaved", gd_mode=False, gd_retain_dataset="c", gd_retain_weight=80.0)
    assert not values.gd_mode
