"""Tells configuration and data of training on answers that the model writes."""

from typing import Any

from megatron.methods.reinforcement.keys import LOSSES, REWARD_OPTIONS, ReinforcementKeys
from megatron.neox_arguments.keys.losses import TrainImpl
from megatron.neox_arguments.methods import MethodDeclaration

# Sub-keys of `rollout` that decide which samples the files give, and in which order.
ORDER_OF_PROMPTS = (
    "prompt_key", "chat", "num_generations", "shuffle", "max_prompt_length", "steps_per_generation", "num_iterations",
)  # fmt: skip


def _needs_reference(args: Any) -> bool:
    return ReinforcementKeys.read_from(args).kl_div_beta > 0.0


def _loss_temperature(args: Any) -> float | None:
    """Returns the sampler's temperature."""
    rollout = ReinforcementKeys.read_from(args).rollout
    return None if rollout is None else rollout["temperature"] or None


def _prompt_files(args: Any) -> tuple[str, ...]:
    rollout = ReinforcementKeys.read_from(args).rollout
    return () if rollout is None else tuple(rollout["prompts"])


def _order_keys(args: Any) -> dict[str, Any]:
    rollout = ReinforcementKeys.read_from(args).rollout
    return {} if rollout is None else {f"rollout.{key}": rollout[key] for key in ORDER_OF_PROMPTS}


def _eager_reason(args: Any) -> str | None:
    rollout = ReinforcementKeys.read_from(args).rollout
    if rollout is None or not rollout["exact"]:
        return None
    return "rollout.exact, as passes without gradients would be compiled otherwise"


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
    needs_reference=_needs_reference,
    loss_temperature=_loss_temperature,
    prompts_key="rollout.prompts",
    prompt_files=_prompt_files,
    order_keys=_order_keys,
    eager_reason=_eager_reason,
)  # fmt: skip
