"""As `trl_reference`, of OnlineDPOTrainer: `python -m tests.objectives.trl_online_dpo tests/data/posttrain`.

Answers are given instead of drawn, and their rewards; all that follows is TRL's own code."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

from tests.objectives.cases import VOCAB
from tests.objectives.trl_reference import flat, keep, model, settings, words

MOST, PAD, END = 10, 0, 1
LENGTHS = (3, (2, 9)), (7, (10, 1)), (1, (4, 10)), (5, (10, 10))  # of prompts, and of their two answers
REWARDS = [(0.5, 2.0), (1.25, 1.0), (-1.0, 0.5), (3.0, -2.0)]  # the penalty turns the second and the third
CASES: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss_type": "sigmoid", "beta": 0.1, "missing_eos_penalty": None},
    "sigmoid_penalty": {"loss_type": "sigmoid", "beta": 0.5, "missing_eos_penalty": 2.0},
}


def answers() -> list[tuple[list[int], tuple[list[int], list[int]]]]:
    """Prompts with two answers each; those that are shorter than they may be end with the token for that."""
    generator, found = np.random.default_rng(11), []
    for size, lengths in LENGTHS:
        two = [generator.integers(4, VOCAB, length).tolist() for length in lengths]
        first, second = (one if len(one) == MOST else [*one[:-1], END] for one in two)
        found.append((generator.integers(4, VOCAB, size).tolist(), (first, second)))
    return found


def padded(rows: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
    """Token ids and mask."""
    width = max(map(len, rows))
    ids = [[PAD] * (width - len(row)) + row if left else row + [PAD] * (width - len(row)) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) if left else [1] * len(row) + [0] * (width - len(row))
            for row in rows]  # fmt: skip
    return torch.tensor(ids), torch.tensor(mask)


def run(folder: str, **options: Any) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient and metrics of a case."""
    known = answers()
    args = OnlineDPOConfig(**settings(folder), per_device_train_batch_size=len(known), max_new_tokens=MOST,
                           max_length=64, **options)  # fmt: skip
    made: Any = OnlineDPOTrainer
    trainer = made(
        model=model(1), ref_model=model(2), args=args, processing_class=words(),
        train_dataset=Dataset.from_list([{"prompt": "a b"}] * len(known)),
        reward_funcs=lambda completions, **_: [pair[place] for place in (0, 1) for pair in REWARDS],
    )  # fmt: skip
    written = [pair[place] for place in (0, 1) for _, pair in known]
    given = (*padded([prompt for prompt, _ in known] * 2, left=True), *padded(written, left=False), None)
    trainer._generate = lambda *_: given
    loss = trainer.training_step(trainer.model, {"prompt": ["a b"] * len(known)})
    grads: dict[str, Any] = {name: param.grad for name, param in trainer.model.named_parameters()}
    return float(loss), flat(grads), {name: float(values[-1]) for name, values in trainer.stats.items() if values}


def main(folder: Path) -> None:
    arrays, facts = {}, {}
    with tempfile.TemporaryDirectory() as place:
        for name, options in CASES.items():
            loss, arrays[name], logged = run(place, **options)
            facts[name] = {**options, "loss": loss, "metrics": logged}
    whole = {"answers": answers(), "rewards": REWARDS, "most": MOST, "cases": facts}
    keep(folder, "trl_online_dpo", whole, arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
