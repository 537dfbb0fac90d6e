"""Declares reinforcement learning: its keys and losses, which runs use it, and which prompts it reads."""

from collections.abc import Mapping
from typing import Any

from megatron.methods.reinforcement.keys import LOSSES, REWARD_OPTIONS, ReinforcementKeys
from megatron.neox_arguments.keys.losses import TrainImpl
from megatron.neox_arguments.methods import MethodDeclaration

# Sub-keys of `rollout` that decide which samples are made from the prompt files, and in which order.
ORDER_OF_PROMPTS = (
    "prompt_key", "chat", "num_generations", "shuffle", "max_prompt_length", "steps_per_generation", "num_iterations",
)  # fmt: skip


def _rollout(args: Any) -> Mapping[str, Any]:
    """Returns the sub-keys of `rollout`; {} if `rollout` is unset."""
    return ReinforcementKeys.read_from(args).rollout or {}


def _loss_temperature(args: Any) -> float | None:
    """Returns the temperature that divides the logits in the loss: the sampler's. None if unset or 0."""
    return _rollout(args).get("temperature") or None


def _order_keys(args: Any) -> dict[str, Any]:
    rollout = _rollout(args)
    return {f"rollout.{key}": rollout[key] for key in ORDER_OF_PROMPTS if key in rollout}


def _eager_reason(args: Any) -> str | None:
    is_exact = _rollout(args).get("exact")
    return "rollout.exact, since compiled blocks round differently in passes without gradients" if is_exact else None


METHOD = MethodDeclaration(
    trains=lambda args: args.train_impl == "reinforce",
    impl=TrainImpl(
        "reinforce", "generated", "rl_loss_type", LOSSES,
        (
            *REWARD_OPTIONS, "kl_impl", "kl_div_beta", "rl_kl_in_reward", "rl_kl_by_ratio", "rl_importance_cap",
            "rl_mask_truncated", "rl_overlong_buffer",
        ),
    ),
    keys=ReinforcementKeys,
    needs_reference=lambda args: ReinforcementKeys.read_from(args).kl_div_beta > 0.0,
    loss_temperature=_loss_temperature,
    prompts_key="rollout.prompts",
    prompt_files=lambda args: tuple(_rollout(args).get("prompts", ())),
    order_keys=_order_keys,
    eager_reason=_eager_reason,
)  # fmt: skip
