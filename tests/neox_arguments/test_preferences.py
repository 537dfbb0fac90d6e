"""Losses of preferences that do not go together are refused, with what to change."""

from typing import Any

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.losses import least_prefix_saving

PAIRS: dict[str, Any] = {
    "train_impl": "dpo", "dataset_impl": "pairwise", "pack_impl": "unpacked",
    "pos_train_data_paths": ["p"], "neg_train_data_paths": ["n"],
}  # fmt: skip
MAMBA: dict[str, Any] = {"attention_config": [[["mamba"], "all"]], "pos_emb": "none"}
KTO: dict[str, Any] = {"train_impl": "kto", "pack_impl": "unpacked"}


@pytest.mark.parametrize(
    ("bad", "good", "message"),
    [
        (
            {"dpo_loss_type": "hinge"},
            PAIRS | {"dpo_loss_type": "hinge"},
            "dpo_loss_type: only train_impl: dpo reads it, not normal",
        ),
        (
            PAIRS | {"kto_loss_type": "apo_zero_unpaired"},
            KTO | {"kto_loss_type": "apo_zero_unpaired"},
            "kto_loss_type: only train_impl: kto reads it, not dpo",
        ),
        (PAIRS | {"z_loss": 1e-4}, {"z_loss": 1e-4}, "z_loss: only train_impl: normal and rm read it, not dpo"),
        (
            PAIRS | {"dpo_loss_type": ["aot", "aot_unpaired"]},
            PAIRS | {"dpo_loss_type": ["aot", "sigmoid"]},
            "dpo_loss_type: aot and aot_unpaired match pairs differently",
        ),
        (
            PAIRS | {"dpo_loss_type": ["sigmoid", "sigmoid"]},
            PAIRS | {"dpo_loss_type": ["sigmoid"]},
            "dpo_loss_type: expected losses, each once",
        ),
        (
            PAIRS | {"dpo_loss_type": ["orpo", "sft"]},
            PAIRS | {"dpo_loss_type": ["orpo"]},
            "dpo_loss_type: orpo has the likelihood of the chosen answer already",
        ),
        (
            PAIRS | {"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0]},
            PAIRS | {"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.5]},
            "dpo_loss_weights: expected one for each of the 2 losses",
        ),
        (
            PAIRS | {"dpo_loss_type": "exo_pair"},
            PAIRS | {"dpo_loss_type": "exo_pair", "dpo_label_smoothing": 0.1},
            "dpo_label_smoothing: exo_pair takes its logarithm",
        ),
        (
            PAIRS | {"dpo_loss_type": "hinge", "dpo_label_smoothing": 0.1},
            PAIRS | {"dpo_loss_type": "sigmoid", "dpo_label_smoothing": 0.1},
            "dpo_label_smoothing: none of hinge reads it",
        ),
        (
            PAIRS | {"simpo_gamma": 0.3},
            PAIRS | {"simpo_gamma": 0.3, "dpo_loss_type": "simpo"},
            "simpo_gamma: only dpo_loss_type: simpo reads it",
        ),
        (
            KTO | {"compat_kto": True, "kto_loss_type": "apo_zero_unpaired"},
            KTO | {"compat_kto": True},
            "compat_kto: only kto_loss_type: kto reads it",
        ),
        (
            KTO | {"compat_kto": True, "pack_impl": "best_fit"},
            KTO | {"pack_impl": "best_fit"},
            "compat_kto: takes an answer for a row",
        ),
        (
            PAIRS | MAMBA | {"pack_impl": "best_fit", "prefix_sharing": True},
            PAIRS | MAMBA | {"pack_impl": "best_fit", "prefix_sharing": "auto"},
            "prefix_sharing: blocks of Mamba (attention_config",
        ),
        (PAIRS | {"dpo_loss_type": "sigmod"}, PAIRS, "dpo_loss_type"),
        (PAIRS | {"dpo_beta": 0}, PAIRS | {"dpo_beta": 5}, "dpo_beta"),
    ],
)
def test_refused(problems_of: Any, bad: dict[str, Any], good: dict[str, Any], message: str) -> None:
    (problem,) = problems_of(bad)
    assert problem.removeprefix("program: ").startswith(message)
    assert problems_of(good) == ()


def test_prompts_are_shared_but_in_models_with_states(model: dict[str, Any]) -> None:
    packed = PAIRS | {"pack_impl": "best_fit", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    shared, alone = (NeoXArgs.from_dict({**model, **packed, **changes}) for changes in ({}, MAMBA))
    assert least_prefix_saving(shared) is not None and least_prefix_saving(alone) is None
