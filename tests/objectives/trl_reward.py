"""Losses, gradients and metrics of TRL's RewardTrainer for one tiny model and a few token ids: made once,
kept in tests/data/posttrain. To make them again:
`python -m tests.objectives.trl_reward tests/data/posttrain`."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

from tests.objectives.cases import MARGINS, PAIRS, VOCAB
from tests.objectives.trl_reference import ROW, flat, metrics, words

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "margin": {"margin": True},
    "centred": {"center_rewards_coefficient": 0.05},
    "both": {"margin": True, "center_rewards_coefficient": 0.01},
}


def model() -> LlamaForSequenceClassification:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, rms_norm_eps=1e-5, max_position_embeddings=64, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    made, generator = LlamaForSequenceClassification(config), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, param in made.named_parameters():
            value = 0.3 * torch.randn(param.shape, generator=generator)
            param.copy_(1 + value if "norm" in name else value)
    return made.eval()


def flat_scores(tensors: dict[str, Tensor]) -> np.ndarray:
    """By layer and name as here, one vector; the score comes last."""
    return flat({**tensors, "lm_head.weight": tensors["score.weight"]})


def run(folder: str, margin: bool = False, **options: Any) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient and metrics of a case."""
    settings: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
        "per_device_train_batch_size": 4, "disable_tqdm": True, **options,
    }  # fmt: skip
    trainer = RewardTrainer(
        model=model(), args=RewardConfig(**settings), train_dataset=Dataset.from_list([ROW] * 2),
        processing_class=words(),
    )  # fmt: skip
    rows = [
        {"chosen_ids": p + c, "rejected_ids": p + r, **({"margin": by} if margin else {})}
        for (p, c, r), by in zip(PAIRS, MARGINS, strict=True)
    ]
    loss = trainer.compute_loss(trainer.model.eval(), trainer.data_collator(rows))
    loss.backward()
    grads: dict[str, Any] = {name: param.grad for name, param in trainer.model.named_parameters()}
    return float(loss.detach()), flat_scores(grads), metrics(trainer)


def main(folder: Path) -> None:
    arrays, facts = {"policy": flat_scores(dict(model().named_parameters()))}, {}
    with tempfile.TemporaryDirectory() as place:
        for name, options in CASES.items():
            loss, arrays[f"gradient_{name}"], logged = run(place, **options)
            facts[name] = {**options, "loss": loss, "metrics": logged}
    np.savez_compressed(folder / "trl_reward.npz", **arrays)  # type: ignore[arg-type]
    (folder / "trl_reward.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
