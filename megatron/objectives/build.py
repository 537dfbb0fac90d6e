"""From a configuration to its objective (`train_impl`)."""

from collections.abc import Callable, Mapping

from megatron.mpu import Divergence
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import loss_temperature, losses_of, retains_by_divergence, writes_pairs
from megatron.objectives.distillation import distillation
from megatron.objectives.dpo import dpo
from megatron.objectives.kto import KtoSettings, kto
from megatron.objectives.language_modelling import language_modelling
from megatron.objectives.objective import Objective, loss_function
from megatron.objectives.pair_losses import PairSettings
from megatron.objectives.reinforcement import PolicySettings, reinforcement
from megatron.objectives.reward import reward
from megatron.objectives.unlearning import ForgetSettings, unlearning


def _language_modelling(args: NeoXArgs) -> Objective:
    learned = args.distillation
    if learned is not None:
        divergence = Divergence(learned["beta"], learned["temperature"])
        return distillation(divergence, learned["weight"], args.softmax_rows)
    labelled = args.train_label_data_paths is not None
    loss = loss_function("normal", args.sft_loss_type)
    objective = language_modelling(args.z_loss, loss=loss, statistics=labelled, columns=args.softmax_rows)
    if args.ga_dataset is None:
        return objective
    return unlearning(
        objective,
        forget_loss=args.ga_loss_type,
        settings=ForgetSettings(args.npo_beta, args.simnpo_beta, args.simnpo_gamma),
        retain_weight=args.gd_retain_weight,
        retain_divergence=retains_by_divergence(args),
        separate_losses=args.gd_mode and args.gd_log_separate_losses,
        columns=args.softmax_rows,
    )


def _dpo(args: NeoXArgs) -> Objective:
    losses = losses_of(args)
    weights: dict[str, float] = dict(zip(losses, args.dpo_loss_weights or [1.0] * len(losses), strict=True))
    settings = PairSettings(args.dpo_beta, args.dpo_label_smoothing, args.discopop_tau, args.simpo_gamma)
    return dpo(
        weights, settings, reference_free=args.dpo_reference_free, columns=args.softmax_rows, sampled=writes_pairs(args)
    )


def _kto(args: NeoXArgs) -> Objective:
    weights = args.kto_desirable_weight, args.kto_undesirable_weight
    return kto(KtoSettings(args.kto_beta, *weights, args.kto_loss_type, neox=args.compat_kto), args.softmax_rows)


def _reward(args: NeoXArgs) -> Objective:
    return reward(args.center_rewards_coefficient or 0.0, args.z_loss)


def _reinforcement(args: NeoXArgs) -> Objective:
    assert args.rollout is not None
    settings = PolicySettings(
        args.rl_epsilon, args.rl_epsilon if args.rl_epsilon_high is None else args.rl_epsilon_high,
        args.rl_importance_cap, args.kl_div_beta, args.kl_impl, args.rl_kl_in_reward,
        args.rl_kl_by_ratio, args.rollout["max_completion_length"],
    )  # fmt: skip
    return reinforcement(args.rl_loss_type, settings, loss_temperature(args), args.softmax_rows)


OBJECTIVES: Mapping[str, Callable[[NeoXArgs], Objective]] = {
    "normal": _language_modelling,
    "dpo": _dpo,
    "kto": _kto,
    "rm": _reward,
    "reinforce": _reinforcement,
}


def build_objective(args: NeoXArgs) -> Objective:
    """The objective of a run, by `train_impl` and the keys that name its losses."""
    return OBJECTIVES[args.train_impl](args)
