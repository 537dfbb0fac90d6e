"""The table of losses: what each asks of a configuration and of its batches.

One with `needs_step_baselines` also has an entry of `MATCHINGS`, one with a likelihood part of `NLL_WEIGHTS`,
both in `objectives/dpo.py`.

The values of `train_impl` and of the keys that name losses, their checks and the objectives are made from it.
A new loss is an entry here and a function in megatron/objectives: of a token
(`language_modelling.TokenLoss`), a pair of responses (`pair_losses.PairLoss`), a judged response
(`kto.ResponseLoss`) or an answer with a reward (`reinforcement.PolicyLoss`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Loss:
    """function: where it is, FILE.NAME of megatron/objectives. options: keys that are refused unless a loss
    of the run reads them. needs_reference: whether answers are compared with a reference model's
    log-probabilities of them. needs_step_baselines: whether examples are compared with values of all examples
    of the optimizer step."""

    function: str
    options: tuple[str, ...] = ()
    needs_reference: bool = False
    needs_step_baselines: bool = False


@dataclass(frozen=True)
class TrainImpl:
    """A value of `train_impl`. reads: what a sample is. key: the one that names its losses, "" without any;
    options: further keys that all of them read, refused where no other entry of the table has them. online:
    those that they read besides where the model writes the samples itself (`dataset_impl: online`); without
    any it cannot."""

    reads: Literal["texts", "pairs", "answers", "rollouts"]
    key: str = ""
    losses: Mapping[str, Loss] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    online: tuple[str, ...] = ()


FORGET_LOSSES: Mapping[str, Loss] = {
    "nll": Loss("unlearning.ascent"),
    "npo": Loss("unlearning.npo", ("npo_beta",), needs_reference=True),
    "simnpo": Loss("unlearning.simnpo", ("simnpo_beta", "simnpo_gamma")),
}
"""The values of `ga_loss_type`: what is minimised on `ga_dataset`."""

_SMOOTHED = ("dpo_label_smoothing",)
_CLIPPED = ("rl_epsilon", "rl_epsilon_high")
_JUDGED = (
    "rollout", "reward_functions", "reward_model", "reward_weights", "reward_timeout_s", "reward_workers",
    "reward_variables",
)  # fmt: skip

TRAIN_IMPLS: Mapping[str, TrainImpl] = {
    "normal": TrainImpl(
        "texts",
        "sft_loss_type",
        {"nll": Loss("language_modelling.nll", ("z_loss",)), "dft": Loss("language_modelling.dft")},
    ),
    "dpo": TrainImpl(
        "pairs",
        "dpo_loss_type",
        {
            "sigmoid": Loss("pair_losses.sigmoid", _SMOOTHED, needs_reference=True),
            "hinge": Loss("pair_losses.hinge", needs_reference=True),
            "ipo": Loss("pair_losses.ipo", needs_reference=True),
            "exo_pair": Loss("pair_losses.exo_pair", _SMOOTHED, needs_reference=True),
            "nca_pair": Loss("pair_losses.nca_pair", needs_reference=True),
            "robust": Loss("pair_losses.robust", _SMOOTHED, needs_reference=True),
            "bco_pair": Loss("pair_losses.bco_pair", needs_reference=True),
            "sppo_hard": Loss("pair_losses.sppo_hard", needs_reference=True),
            "aot": Loss("pair_losses.aot", _SMOOTHED, needs_reference=True, needs_step_baselines=True),
            "aot_unpaired": Loss(
                "pair_losses.aot_unpaired", _SMOOTHED, needs_reference=True, needs_step_baselines=True
            ),
            "apo_zero": Loss("pair_losses.apo_zero", needs_reference=True),
            "apo_down": Loss("pair_losses.apo_down", needs_reference=True),
            "discopop": Loss("pair_losses.discopop", ("discopop_tau",), needs_reference=True),
            "sft": Loss("pair_losses.sft"),
            "sigmoid_norm": Loss("pair_losses.sigmoid_norm", _SMOOTHED, needs_reference=True),
            "simpo": Loss("pair_losses.simpo", (*_SMOOTHED, "simpo_gamma")),
            "orpo": Loss("pair_losses.orpo"),
        },
        ("dpo_loss_weights", "dpo_reference_free", "prefix_sharing"),
        online=_JUDGED,
    ),
    "rm": TrainImpl("pairs", options=("center_rewards_coefficient", "z_loss", "prefix_sharing")),
    "kto": TrainImpl(
        "answers",
        "kto_loss_type",
        {
            "kto": Loss("kto.prospect", ("compat_kto", "kto_kl"), needs_reference=True, needs_step_baselines=True),
            "apo_zero_unpaired": Loss("kto.prospect", needs_reference=True),
        },
    ),
    "reinforce": TrainImpl(
        "rollouts",
        "rl_loss_type",
        {
            "reinforce": Loss("reinforcement.policy_gradient", ("reinforce_leave_one_out",)),
            "rloo": Loss("reinforcement.clipped_sequences", _CLIPPED),
            "grpo": Loss("reinforcement.clipped", (*_CLIPPED, "rl_scale_rewards")),
            "dapo": Loss("reinforcement.clipped", (*_CLIPPED, "rl_scale_rewards")),
            "dr_grpo": Loss("reinforcement.clipped", (*_CLIPPED, "rl_scale_rewards")),
            "gspo": Loss("reinforcement.clipped_means", (*_CLIPPED, "rl_scale_rewards")),
            "cispo": Loss("reinforcement.truncated_weights", (*_CLIPPED, "rl_scale_rewards")),
        },
        (
            *_JUDGED,
            "kl_impl",
            "kl_div_beta",
            "rl_kl_in_reward",
            "rl_kl_by_ratio",
            "rl_importance_cap",
            "rl_mask_truncated",
            "rl_overlong_buffer",
        ),
    ),
}
