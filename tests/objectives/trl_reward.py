"""As `trl_reference`, of RewardTrainer: `python -m tests.objectives.trl_reward tests/data/posttrain`."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

from tests.objectives.cases import MARGINS, PAIRS
from tests.objectives.trl_reference import ROW, SHAPE, drawn, flat, keep, metrics, settings, words

CASES: dict[str, dict[str, Any]] = {"plain": {}, "margin": {"margin": True},
                                    "centred": {"center_rewards_coefficient": 0.05},
                                    "both": {"margin": True, "center_rewards_coefficient": 0.01}}  # fmt: skip


def model() -> LlamaForSequenceClassification:
    return drawn(LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1, pad_token_id=0)), 3)


def flat_scores(tensors: dict[str, Tensor]) -> np.ndarray:
    """By layer and name as here, one vector; the score comes last."""
    return flat({**tensors, "lm_head.weight": tensors["score.weight"]})


def run(folder: str, margin: bool = False, **options: Any) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient and metrics of a case."""
    args = RewardConfig(**settings(folder, per_device_train_batch_size=4, **options))
    rows = Dataset.from_list([ROW] * 2)
    trainer = RewardTrainer(model=model(), args=args, train_dataset=rows, processing_class=words())
    pairs = [{"chosen_ids": p + c, "rejected_ids": p + r, **({"margin": by} if margin else {})}
             for (p, c, r), by in zip(PAIRS, MARGINS, strict=True)]  # fmt: skip
    loss = trainer.compute_loss(trainer.model.eval(), trainer.data_collator(pairs))
    loss.backward()
    grads: dict[str, Any] = {name: param.grad for name, param in trainer.model.named_parameters()}
    return float(loss.detach()), flat_scores(grads), metrics(trainer)


def main(folder: Path) -> None:
    arrays, facts = {"policy": flat_scores(dict(model().named_parameters()))}, {}
    with tempfile.TemporaryDirectory() as place:
        for name, options in CASES.items():
            loss, arrays[f"gradient_{name}"], logged = run(place, **options)
            facts[name] = {**options, "loss": loss, "metrics": logged}
    keep(folder, "trl_reward", facts, arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
