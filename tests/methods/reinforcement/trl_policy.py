"""As `trl_reference`, of TRL's GRPOTrainer, RLOOTrainer and OnlineDPOTrainer, and advantages:
`python -m tests.methods.reinforcement.trl_policy tests/data/posttrain`.

Answers are given instead of drawn, and their rewards; all that follows is TRL's own code. Log-probabilities
before the first step are those of a model whose weights are a little apart, so that ratios are clipped."""

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.trainer.utils import split_tensor_dict

from tests.objectives.cases import VOCAB
from tests.objectives.trl_reference import flat, keep, metrics, model, settings, words

GROUP, MAX_COMPLETION = 4, 12  # answers to a prompt, tokens of an answer
WEIGHT_NOISE = 0.03  # of the weights before the first step
LENGTHS = (3, (2, 9, 5, 12)), (7, (4, 1, 8, 6))  # of each prompt, and of its answers
REWARDS = [0.5, 2.0, -1.0, 0.25, 3.0, 1.0, 1.5, -0.5]
SCORED: dict[str, list[list[float | None]]] = {
    "all": [[0.5, 2.0, -1.0, 0.25], [1.0, 1.0, 1.0, 1.0], [3.0, 2.0, 100.0, -7.0], [0.0, 0.0, 0.0, 1.0]],
    "some": [
        [0.5, None, -1.0, 0.25], [0.5, 0.5, None, 0.5], [None] * 4, [None, None, 2.0, None], [None, 3.0, -1.0, None],
        [0.0, 0.0, 0.0, 0.0], [-2.0, 5.0, 1.0, 1.5],
    ],
    "one": [[None, None, 2.0, None], [None] * 4],
    "none": [[None] * 4, [None] * 4],
}  # fmt: skip


def rollouts() -> dict[str, Any]:
    """Token ids; of each of an answer how far the sampler's log-probability is below, if it is trained."""
    generator = np.random.default_rng(7)
    rows: list[tuple[list[int], list[int]]] = []
    for size, lengths in LENGTHS:
        prompt = generator.integers(4, VOCAB, size).tolist()
        rows += [(prompt, generator.integers(4, VOCAB, length).tolist()) for length in lengths]
    differences = [(0.4 * generator.standard_normal(len(answer))).tolist() for _, answer in rows]
    mask = [[1] * len(answer) for _, answer in rows]
    mask[1][2:5], mask[3][0:2], mask[4], mask[6][7:] = [0] * 3, [0] * 2, [0] * 4, [0]
    return {"prompts": [prompt for prompt, _ in rows], "answers": [answer for _, answer in rows], "below": differences,
            "mask": mask, "rewards": REWARDS, "group": GROUP, "max_completion_length": MAX_COMPLETION}  # fmt: skip


def moved(seed: int) -> LlamaForCausalLM:
    policy, generator = model(1), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in policy.parameters():
            param.add_(WEIGHT_NOISE * torch.randn(param.shape, generator=generator))
    return policy


def trainer_of(folder: str, kind: str, accumulation: int = 1, first_step: bool = False, **options: Any) -> Any:
    """TRL's trainer, whose model is as before the first step and whose reference is `model(2)`."""
    trainer_class, config = (GRPOTrainer, GRPOConfig) if kind == "grpo" else (RLOOTrainer, RLOOConfig)
    reference = Path(folder) / "reference"
    if not reference.exists():
        model(2).save_pretrained(reference)
    policy = model(1) if first_step else moved(3)
    policy.config._name_or_path = str(reference)
    args = config(**settings(folder, per_device_train_batch_size=len(REWARDS) // accumulation),
                  gradient_accumulation_steps=accumulation, num_generations=GROUP, max_completion_length=MAX_COMPLETION,
                  num_iterations=1 if first_step else 2, **options)  # fmt: skip
    return trainer_class(model=policy, args=args, train_dataset=Dataset.from_list([{"prompt": "a b"}] * 8),
                processing_class=words(), reward_funcs=lambda completions, **_: [0.0] * len(completions))  # fmt: skip


def scored(trainer: Any, rewards: list[float], tools: bool, weighed: list[list[float]] | None = None) -> dict[str, Any]:
    """Returns TRL's inputs of a step for answers and rewards. weighed: the sampler's log-probabilities."""
    stored_rollouts = rollouts()
    times = len(rewards) // len(REWARDS) + 1
    prompts, answers = ((stored_rollouts[name] * times)[: len(rewards)] for name in ("prompts", "answers"))
    masks = stored_rollouts["mask"] if tools else None
    written = [""] * len(answers)
    generated = (prompts, answers, masks, written, weighed, {}, None, [])
    trainer._generate = lambda _: generated if isinstance(trainer, GRPOTrainer) else (prompts, answers, written)
    trainer._calculate_rewards = lambda *_: torch.tensor(rewards).unsqueeze(1)
    trainer.use_vllm = weighed is not None
    trainer.model.train()
    return trainer._generate_and_score_completions([{"prompt": "a b"}] * len(rewards))


def logprobs(trainer: Any, policy: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Returns log-probabilities of the answers' tokens, 0 at padding."""
    ids, mask = (torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask"))
    with torch.no_grad():
        values, *_ = trainer._get_per_token_logps_and_entropies(policy, ids, mask, inputs["completion_ids"].shape[1])
    return values * inputs["completion_mask"]


def run(folder: str, kind: str, tools: bool = False, vllm: bool = False, accumulation: int = 1,
        **options: Any) -> tuple[float, dict[str, np.ndarray], dict[str, float]]:  # fmt: skip
    """Returns loss, arrays and metrics of a case.

    tools: with tokens that are not trained. vllm: with weights for the sampler's probabilities.
    accumulation: micro-batches; metrics are those of the last. options: TRL's, and `first`: of a first step.
    """
    first_step = options.pop("first", False)
    if vllm:
        options = {**options, "vllm_importance_sampling_mode": "token_truncate"}
    trainer = trainer_of(folder, kind, accumulation, first_step, **options)
    inputs = scored(trainer, REWARDS, tools)
    old = logprobs(trainer, trainer.model, inputs)
    if vllm:
        differences = rollouts()["below"]
        weighed = [[float(value) - difference for value, difference in zip(row, shifts, strict=False)]
                   for row, shifts in zip(old, differences, strict=True)]  # fmt: skip
        inputs = scored(trainer, REWARDS, tools, weighed)
    arrays = {"old": old, "advantages": inputs["advantages"]}
    if trainer.ref_model is not None:
        arrays["reference"] = logprobs(trainer, trainer.ref_model, inputs)
    trainer.model.load_state_dict(model(1).state_dict())
    trainer.current_gradient_accumulation_steps = accumulation  # `Trainer.train` sets it
    loss = torch.zeros(())
    for part in split_tensor_dict(inputs, accumulation):
        loss = loss + trainer._compute_loss(trainer.model, part)
    loss.backward()
    grads: dict[str, Any] = {name: param.grad for name, param in trainer.model.named_parameters()}
    stored = {name: value.numpy().astype(np.float32) for name, value in arrays.items()}
    return float(loss.detach()), {**stored, "gradient": flat(grads)}, metrics(trainer)


def cases() -> dict[str, dict[str, Any]]:
    bounds = {"epsilon": 0.1, "epsilon_high": 0.28}
    losses: dict[str, dict[str, Any]] = {name: {"kind": "grpo", "loss_type": name, **bounds}
                                         for name in ("grpo", "dapo", "dr_grpo")}  # fmt: skip
    losses["cispo"] = {"kind": "grpo", "loss_type": "cispo", "epsilon_high": 1.1}
    losses["gspo"] = {"kind": "grpo", "loss_type": "grpo", "importance_sampling_level": "sequence", **bounds}
    kl: dict[str, Any] = {"beta": 0.05, "use_bias_correction_kl": False}
    all_cases: dict[str, dict[str, Any]] = {}
    for name, options in losses.items():
        all_cases[name] = {**options, "beta": 0.0, "temperature": 1.0}
        all_cases[f"{name}_kl"] = {**options, **kl, "temperature": 0.7}
        all_cases[f"{name}_kl_by_ratio"] = {**options, "beta": 0.05, "use_bias_correction_kl": True, "temperature": 1.0}
        all_cases[f"{name}_tools_cap"] = {**options, **kl, "temperature": 1.3, "tools": True, "vllm": True,
                                        "vllm_importance_sampling_clip_max": 1.2}  # fmt: skip
    all_cases["dapo_first"] = {**losses["dapo"], "beta": 0.0, "temperature": 0.7, "first": True}
    all_cases["grpo_first_cap"] = {**losses["grpo"], **kl, "temperature": 1.0, "first": True, "vllm": True,
                                 "vllm_importance_sampling_clip_max": 1.2}  # fmt: skip
    all_cases["bnpo"] = {"kind": "grpo", "loss_type": "bnpo", **bounds, **kl, "temperature": 0.7}
    for name in ("grpo", "dapo", "dr_grpo", "cispo"):
        all_cases[f"{name}_accumulated"] = {**losses[name], **kl, "temperature": 0.7, "accumulation": 2}
    for beta, temperature in ((0.0, 1.0), (0.0, 0.7), (0.05, 1.3)):
        all_cases[f"rloo_{beta}_{temperature}"] = {"kind": "rloo", **bounds, "beta": beta, "temperature": temperature}
    return all_cases


def advantages(folder: str) -> dict[str, dict[str, Any]]:
    """Returns by matrix: rewards, advantages by scale or leave_one_out, share of groups of equal rewards."""
    grpo, rloo = trainer_of(folder, "grpo", beta=0.0), trainer_of(folder, "rloo", beta=0.0)
    results: dict[str, dict[str, Any]] = {}
    for name, groups in SCORED.items():
        rewards = [math.nan if value is None else value for group in groups for value in group]
        results[name] = {"rewards": groups}
        for scale in ("group", "batch", "none"):
            grpo.scale_rewards = scale
            results[name][scale] = scored(grpo, rewards, False)["advantages"].tolist()
        results[name]["equal"] = metrics(grpo)["frac_reward_zero_std"]
        results[name]["leave_one_out"] = scored(rloo, rewards, False)["advantages"].tolist()
    return results


ONLINE_MAX_COMPLETION, PAD, END = 10, 0, 1
ONLINE_LENGTHS = (3, (2, 9)), (7, (10, 1)), (1, (4, 10)), (5, (10, 10))  # of prompts, and of their two answers
ONLINE_REWARDS = [(0.5, 2.0), (1.25, 1.0), (-1.0, 0.5), (3.0, -2.0)]  # the penalty turns the second and the third
ONLINE: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss_type": "sigmoid", "beta": 0.1, "missing_eos_penalty": None},
    "sigmoid_penalty": {"loss_type": "sigmoid", "beta": 0.5, "missing_eos_penalty": 2.0},
}


def answers() -> list[tuple[list[int], tuple[list[int], list[int]]]]:
    """Prompts with two answers each; those that are shorter than they may be end with the token for that."""
    generator, prompts_and_answers = np.random.default_rng(11), []
    for size, lengths in ONLINE_LENGTHS:
        pair = [generator.integers(4, VOCAB, length).tolist() for length in lengths]
        first_answer, second_answer = (
            answer if len(answer) == ONLINE_MAX_COMPLETION else [*answer[:-1], END] for answer in pair
        )
        prompts_and_answers.append((generator.integers(4, VOCAB, size).tolist(), (first_answer, second_answer)))
    return prompts_and_answers


def padded(rows: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
    width, padded_arrays = max(map(len, rows)), []
    for values, padding in ((rows, PAD), ([[1] * len(row) for row in rows], 0)):
        margins = [[padding] * (width - len(row)) for row in rows]
        padded_arrays.append(
            [margin + row if left else row + margin for row, margin in zip(values, margins, strict=True)]
        )
    return torch.tensor(padded_arrays[0]), torch.tensor(padded_arrays[1])


def run_online(folder: str, **options: Any) -> tuple[float, np.ndarray, dict[str, float]]:
    prompts_and_answers = answers()
    args = OnlineDPOConfig(**settings(folder), per_device_train_batch_size=len(prompts_and_answers),
                           max_new_tokens=ONLINE_MAX_COMPLETION, max_length=64, **options)  # fmt: skip
    trainer_class: Any = OnlineDPOTrainer
    trainer = trainer_class(
        model=model(1), ref_model=model(2), args=args, processing_class=words(),
        train_dataset=Dataset.from_list([{"prompt": "a b"}] * len(prompts_and_answers)),
        reward_funcs=lambda completions, **_: [pair[place] for place in (0, 1) for pair in ONLINE_REWARDS],
    )  # fmt: skip
    written = [pair[place] for place in (0, 1) for _, pair in prompts_and_answers]
    generated = (
        *padded([prompt for prompt, _ in prompts_and_answers] * 2, left=True),
        *padded(written, left=False),
        None,
    )
    trainer._generate = lambda *_: generated
    loss = trainer.training_step(trainer.model, {"prompt": ["a b"] * len(prompts_and_answers)})
    grads: dict[str, Any] = {name: param.grad for name, param in trainer.model.named_parameters()}
    return float(loss), flat(grads), {name: float(values[-1]) for name, values in trainer.stats.items() if values}


def main(folder: Path) -> None:
    arrays, facts = {"policy": flat(dict(model(1).named_parameters()))}, {}
    with tempfile.TemporaryDirectory() as place:
        for name, options in cases().items():
            loss, case_arrays, logged = run(place, **options)
            arrays |= {f"{key}_{name}": value for key, value in case_arrays.items()}
            facts[name] = {**options, "loss": loss, "metrics": logged}
            print(name, loss, {key: value for key, value in logged.items() if "clip" in key and "mean" in key})
        keep(folder, "trl_policy", {"rollouts": rollouts(), "cases": facts, "advantages": advantages(place)}, arrays)
        arrays, facts = {}, {}
        for name, options in ONLINE.items():
            loss, arrays[name], logged = run_online(place, **options)
            facts[name] = {**options, "loss": loss, "metrics": logged}
    stored = {"answers": answers(), "rewards": ONLINE_REWARDS, "most": ONLINE_MAX_COMPLETION, "cases": facts}
    keep(folder, "trl_online_dpo", stored, arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
