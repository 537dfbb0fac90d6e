"""Losses, gradients and metrics of TRL's trainers for one tiny model and a few token ids: made once, kept in
tests/data/posttrain. To make them again: `python -m tests.objectives.trl_reference tests/data/posttrain`."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.model.test_transformers import llama_weights
from tests.objectives.cases import ANSWERS, MARGINS, PAIRS, VOCAB

ROW = {"prompt": "a b", "chosen": "a c", "rejected": "a d"}
DPO_TYPES = (
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop sft "
    "sigmoid_norm"
).split()
ACCUMULATED: dict[str, Any] = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0], "beta": 0.3}
SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")
REWARDS: dict[str, dict[str, Any]] = {"plain": {}, "margin": {"margin": True},
                                      "centred": {"center_rewards_coefficient": 0.05},
                                      "both": {"margin": True, "center_rewards_coefficient": 0.01}}  # fmt: skip
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
                         "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
                         "max_position_embeddings": 64}  # fmt: skip


@torch.no_grad()
def randomized(network: Any, seed: int) -> Any:
    """A model with random weights, those of norms about one."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in network.named_parameters():
        value = 0.3 * torch.randn(param.shape, generator=generator)
        param.copy_(1 + value if "norm" in name else value)
    return network.eval()


def model(seed: int) -> transformers.LlamaForCausalLM:
    return randomized(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False)), seed)


def reward_model() -> transformers.LlamaForSequenceClassification:
    config = transformers.LlamaConfig(**SHAPE, num_labels=1, pad_token_id=0)
    return randomized(transformers.LlamaForSequenceClassification(config), 3)


def settings(folder: str | Path, **options: Any) -> dict[str, Any]:
    common = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none",
              "disable_tqdm": True}  # fmt: skip
    return {"output_dir": str(folder), **common, **options}


def keep(folder: Path, name: str, facts: Any, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
    (folder / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")


def words() -> transformers.PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>", "<bos>"]
    vocabulary = {name: i for i, name in enumerate([*names, *(chr(97 + i) for i in range(26))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special_tokens = dict(zip(("pad_token", "eos_token", "unk_token", "bos_token"), names, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)


def flat(tensors: dict[str, Tensor]) -> np.ndarray:
    """By layer and name as here, one vector; the score of a reward model comes last."""
    layers = llama_weights({"lm_head.weight": tensors.get("score.weight"), **tensors}, 2, 2)
    parts = [layers[layer][name].flatten() for layer in sorted(layers) for name in sorted(layers[layer])]
    return torch.cat(parts).detach().numpy().astype(np.float32)


def full_row(prompt: list[int], answer: list[int]) -> dict[str, list[int]]:
    return {"input_ids": prompt + answer, "attention_mask": [1] * len(prompt + answer),
            "labels": [-100] * len(prompt) + answer}  # fmt: skip


def pair_inputs(trainer: Any, kind: str, pairs: Any = PAIRS) -> Any:
    if kind == "dpo":
        rows: list[Any] = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in pairs]
    else:
        rows = [
            {f"{side}_{name}": ids for side, answer in (("chosen", c), ("rejected", r))
             for name, ids in full_row(p, answer).items()}
            for p, c, r in pairs
        ]  # fmt: skip
    return trainer.data_collator(rows)


def kto_inputs(trainer: Any) -> Any:
    rows = [{"prompt_ids": p, "completion_ids": a, "label": good} for p, a, good in ANSWERS]
    for row, previous_row in zip(rows, [rows[-1], *rows[:-1]], strict=True):
        row["KL_completion_ids"] = previous_row["completion_ids"]
    return trainer.data_collator(rows)


def reward_inputs(trainer: Any, margin: bool) -> Any:
    return trainer.data_collator([{"chosen_ids": p + c, "rejected_ids": p + r, **({"margin": value} if margin else {})}
                                  for (p, c, r), value in zip(PAIRS, MARGINS, strict=True)])  # fmt: skip


def sft_inputs(trainer: Any, assistant_only: bool) -> Any:
    rows = [full_row(p, c) for p, c, _ in PAIRS]
    return trainer.data_collator([
        {"input_ids": row["input_ids"], "labels": row["labels" if assistant_only else "input_ids"]} for row in rows
    ])  # fmt: skip


def metrics(trainer: Any) -> dict[str, float]:
    for store in ("_metrics", "_stored_metrics"):
        stored = getattr(trainer, store, {})
        for mode in ("eval", "train"):
            if stored.get(mode):
                return {name: float(values[-1]) for name, values in stored[mode].items()}
    return {}


TRAINERS: dict[str, tuple[Any, Any]] = {"dpo": (trl.DPOTrainer, trl.DPOConfig), "cpo": (CPOTrainer, CPOConfig),
                                        "orpo": (ORPOTrainer, ORPOConfig), "kto": (trl.KTOTrainer, trl.KTOConfig),
                                        "sft": (trl.SFTTrainer, trl.SFTConfig),
                                        "reward": (trl.RewardTrainer, trl.RewardConfig)}  # fmt: skip


def trainer_of(folder: str | Path, kind: str, policy: Any, reference: Any = None, **options: Any) -> Any:
    """TRL's, with a set of its form that is not read."""
    trainer_class, config = TRAINERS[kind]
    judged = [{"prompt": "a b", "completion": "a c", "label": good} for good in (True, False) * 2]
    rows: Any = {"sft": [{"text": "a b c"}] * 2, "kto": judged}.get(kind, [ROW] * 2)
    extra_settings = {"remove_unused_columns": False} if kind in ("cpo", "orpo") else {}
    args = config(**settings(folder, **extra_settings, **options))
    return trainer_class(model=policy, args=args, train_dataset=Dataset.from_list(rows), processing_class=words(),
                         **({} if reference is None else {"ref_model": reference}))  # fmt: skip


def run(folder: str, kind: str, micro_batches: tuple[Any, ...] = (), assistant_only: bool = False,
        margin: bool = False, **options: Any) -> tuple[float, np.ndarray, dict[str, float]]:  # fmt: skip
    """Loss, gradient and metrics of a case, or of the step that accumulates micro_batches of pairs."""
    reference = model(2) if kind in ("dpo", "kto") else None
    policy = reward_model() if kind == "reward" else model(1)
    trainer = trainer_of(folder, kind, policy, reference, per_device_train_batch_size=4, **options)
    trainer.model.eval()
    if getattr(trainer, "ref_model", None) is not None:
        trainer.ref_model.eval()
    if micro_batches:
        # `Trainer.train` sets it; `training_step` divides by it and runs backwards.
        trainer.current_gradient_accumulation_steps = len(micro_batches)
        parts = [pair_inputs(trainer, kind, part) for part in micro_batches]
        loss = torch.stack([trainer.training_step(trainer.model, part) for part in parts]).sum()
    else:
        if kind in ("sft", "reward"):
            inputs = sft_inputs(trainer, assistant_only) if kind == "sft" else reward_inputs(trainer, margin)
        else:
            inputs = kto_inputs(trainer) if kind == "kto" else pair_inputs(trainer, kind)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
    grads: dict[str, Any] = {name: param.grad for name, param in trainer.model.named_parameters()}
    return float(loss.detach()), flat(grads), metrics(trainer)


def first_loss(model: Path, folder: Path, kind: str, texts: list[dict[str, list[int]]], **options: Any) -> float:
    """Returns a HuggingFace model's loss on token ids: all in SFT, else chosen and rejected in turns."""
    trainer = trainer_of(folder, kind, transformers.AutoModelForCausalLM.from_pretrained(model), **options)
    rows: list[dict[str, Any]] = []
    if kind == "sft":
        rows = [{name: text[name] for name in ("input_ids", "labels")} for text in texts]
    elif kind == "cpo":
        sides = ("chosen", "rejected")
        rows = [{f"{side}_{name}": ids for side, text in zip(sides, pair, strict=True) for name, ids in text.items()}
                for pair in zip(texts[0::2], texts[1::2], strict=True)]  # fmt: skip
    else:
        for chosen, rejected in zip(texts[0::2], texts[1::2], strict=True):
            start = next(i for i, label in enumerate(chosen["labels"]) if label >= 0)
            ids = {"chosen_ids": chosen["input_ids"][start:], "rejected_ids": rejected["input_ids"][start:]}
            rows.append({"prompt_ids": chosen["input_ids"][:start], **ids})
    return float(trainer.compute_loss(trainer.model.eval(), trainer.data_collator(rows)).detach())


def cases() -> dict[str, dict[str, Any]]:
    all_cases: dict[str, dict[str, Any]] = {}
    for name in DPO_TYPES:
        smoothing = {"label_smoothing": 0.1} if name in SMOOTHED else {}
        beta = {"sigmoid_norm": 5.0, "ipo": 0.5}.get(name, 0.1)
        all_cases[f"dpo_{name}"] = {"kind": "dpo", "loss_type": [name], "beta": beta, **smoothing}
    all_cases["dpo_mix"] = {"kind": "dpo", "loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 0.5],
                          "beta": 0.3}  # fmt: skip
    all_cases["cpo"] = {"kind": "cpo", "beta": 0.1, "cpo_alpha": 1.0}
    all_cases["cpo_smoothed"] = {"kind": "cpo", "beta": 0.2, "cpo_alpha": 0.5, "label_smoothing": 0.1}
    all_cases["cpo_hinge"] = {"kind": "cpo", "loss_type": "hinge", "beta": 0.1, "cpo_alpha": 1.0}
    all_cases["simpo"] = {"kind": "cpo", "loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0, "simpo_gamma": 0.6}
    all_cases["orpo"] = {"kind": "orpo", "beta": 0.1}
    for name in ("kto", "apo_zero_unpaired"):
        all_cases[f"kto_{name}"] = {"kind": "kto", "loss_type": name, "beta": 0.2, "desirable_weight": 1.2,
                                  "undesirable_weight": 0.7}  # fmt: skip
    for loss in ("nll", "dft"):
        for scope in ("full", "assistant"):
            all_cases[f"sft_{loss}_{scope}"] = {
                "kind": "sft",
                "loss_type": loss,
                "assistant_only": scope == "assistant",
            }
    return all_cases


def main(folder: Path) -> None:
    drawn_models = {"trl": {"policy": model(1), "reference": model(2)}, "trl_reward": {"policy": reward_model()}}
    with tempfile.TemporaryDirectory() as place:
        for name, table in (("trl", cases()), ("trl_reward", REWARDS)):
            named_models = drawn_models[name].items()
            arrays, facts = {key: flat(dict(network.named_parameters())) for key, network in named_models}, {}
            for case, options in table.items():
                loss, arrays[f"gradient_{case}"], logged = run(place, **{"kind": "reward", **options})
                facts[case] = {**options, "loss": loss, "metrics": logged}
                print(case, loss)
            keep(folder, name, facts, arrays)
        loss, gradient, _ = run(place, "dpo", (PAIRS[:2], PAIRS[2:]), **ACCUMULATED)
    np.savez_compressed(folder / "trl_accumulated.npz", loss=np.float32(loss), gradient=gradient)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
