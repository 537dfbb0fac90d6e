"""The table of losses, with the requirements of each on the configuration and on batches.

A loss with `needs_step_baselines` also has an entry of `MATCHINGS`, a loss with a likelihood part one of
`NLL_WEIGHTS`, both in `objectives/dpo.py`.

The values of `train_impl` and of the keys that name losses, their checks and the objectives are made from it.
A new loss is an entry here and a function in megatron/objectives or the folder of its kind: of a token
(`language_modelling.TokenLoss`), a pair of responses (`pair_losses.PairLoss`), a judged response
(`kto.ResponseLoss`) or an answer with a reward (`reinforcement.PolicyLoss`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Loss:
    """A loss of the table.

    function: where it is defined, MODULE.NAME below the package `megatron`.
    options: keys that this loss reads. A run may set them only if one of its losses reads them.
    needs_reference: whether the loss needs a reference model's log-probabilities of the answers.
    needs_step_baselines: whether examples are compared with values of all examples of the optimizer step.
    """

    function: str
    options: tuple[str, ...] = ()
    needs_reference: bool = False
    needs_step_baselines: bool = False


@dataclass(frozen=True)
class TrainImpl:
    """A value of `train_impl`.

    reads: the kind of its samples.
    key: the key that names its losses; "" if it has none.
    options: further keys that all its losses read. A run may set them only if its `train_impl` or one of its
        losses lists them.
    online: keys that its losses also read if the model writes the samples itself (`dataset_impl: online`).
        Empty: the model cannot write them.
    """

    reads: Literal["texts", "pairs", "answers", "generated"]
    key: str = ""
    losses: Mapping[str, Loss] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    online: tuple[str, ...] = ()


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
        {
            "nll": Loss("objectives.language_modelling.nll", ("z_loss",)),
            "dft": Loss("objectives.language_modelling.dft"),
        },
    ),
    "dpo": TrainImpl(
        "pairs",
        "dpo_loss_type",
        {
            "sigmoid": Loss("objectives.pair_losses.sigmoid", _SMOOTHED, needs_reference=True),
            "hinge": Loss("objectives.pair_losses.hinge", needs_reference=True),
            "ipo": Loss("objectives.pair_losses.ipo", needs_reference=True),
            "exo_pair": Loss("objectives.pair_losses.exo_pair", _SMOOTHED, needs_reference=True),
            "nca_pair": Loss("objectives.pair_losses.nca_pair", needs_reference=True),
            "robust": Loss("objectives.pair_losses.robust", _SMOOTHED, needs_reference=True),
            "bco_pair": Loss("objectives.pair_losses.bco_pair", needs_reference=True),
            "sppo_hard": Loss("objectives.pair_losses.sppo_hard", needs_reference=True),
            "aot": Loss("objectives.pair_losses.aot", _SMOOTHED, needs_reference=True, needs_step_baselines=True),
            "aot_unpaired": Loss(
                "objectives.pair_losses.aot_unpaired",
                _SMOOTHED,
                needs_reference=True,
                needs_step_baselines=True,
            ),
            "apo_zero": Loss("objectives.pair_losses.apo_zero", needs_reference=True),
            "apo_down": Loss("objectives.pair_losses.apo_down", needs_reference=True),
            "discopop": Loss("objectives.pair_losses.discopop", ("discopop_tau",), needs_reference=True),
            "sft": Loss("objectives.pair_losses.sft"),
            "sigmoid_norm": Loss("objectives.pair_losses.sigmoid_norm", _SMOOTHED, needs_reference=True),
            "simpo": Loss("objectives.pair_losses.simpo", (*_SMOOTHED, "simpo_gamma")),
            "orpo": Loss("objectives.pair_losses.orpo"),
        },
        ("dpo_loss_weights", "dpo_reference_free", "prefix_sharing"),
        online=_JUDGED,
    ),
    "rm": TrainImpl("pairs", options=("center_rewards_coefficient", "z_loss", "prefix_sharing")),
    "kto": TrainImpl(
        "answers",
        "kto_loss_type",
        {
            "kto": Loss(
                "objectives.kto.prospect",
                ("compat_kto", "kto_kl"),
                needs_reference=True,
                needs_step_baselines=True,
            ),
            "apo_zero_unpaired": Loss("objectives.kto.prospect", needs_reference=True),
        },
    ),
    "reinforce": TrainImpl(
        "generated",
        "rl_loss_type",
        {
            "reinforce": Loss("methods.reinforcement.objective.policy_gradient", ("reinforce_leave_one_out",)),
            "rloo": Loss("methods.reinforcement.objective.clipped_sequences", _CLIPPED),
            "grpo": Loss("methods.reinforcement.objective.clipped", (*_CLIPPED, "rl_scale_rewards")),
            "dapo": Loss("methods.reinforcement.objective.clipped", (*_CLIPPED, "rl_scale_rewards")),
            "dr_grpo": Loss("methods.reinforcement.objective.clipped", (*_CLIPPED, "rl_scale_rewards")),
            "gspo": Loss("methods.reinforcement.objective.clipped_means", (*_CLIPPED, "rl_scale_rewards")),
            "cispo": Loss("methods.reinforcement.objective.truncated_weights", (*_CLIPPED, "rl_scale_rewards")),
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
