"""Declares the keys that several kinds of post-training read: labels, pairs, the reference model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from megatron.neox_arguments.keys.declaration import key, new_key
from megatron.neox_arguments.methods import train_impls

Paths = tuple[str, ...] | None
Impl: TypeAlias = Literal[tuple(train_impls())]  # type: ignore[valid-type]
TextLoss: TypeAlias = Literal[tuple(train_impls()["normal"].losses)]  # type: ignore[valid-type]


@dataclass(frozen=True)
class PostTrainingKeys:
    """Configuration keys of fine-tuning and preference training: the kind of training, its data, the
    reference model."""

    train_impl: Impl = key(
        "normal",
        "Objective: language modelling, or one of post-training; reinforce: reinforcement learning by rl_loss_type",
    )
    sft_loss_type: TextLoss = new_key(
        "nll",
        "train_impl normal. nll: negative log-likelihood of the tokens; dft: each times the token's own "
        "probability (dynamic fine-tuning); validation is nll",
    )
    train_label_data_paths: Paths = key(
        None, "Labels of train_data_paths, one each: the tokens, or -100 if not trained"
    )
    valid_label_data_paths: Paths = key(None, "Labels of valid_data_paths, as train_label_data_paths")
    valid_set_labels: Mapping[str, Any] | None = new_key(
        None, "Labels of valid_sets by the same names, one prefix for each of theirs, as train_label_data_paths"
    )
    test_label_data_paths: Paths = key(None, "Labels of test_data_paths, as train_label_data_paths")
    train_reward_data_paths: Paths = key(
        None,
        "Rewards of train_data_paths, one each: a number per document, with pack_impl: unpacked. train_impl rm: "
        "margins of pos_train_data_paths, a number per pair, for the chosen answer to win by",
    )
    valid_reward_data_paths: Paths = key(None, "Rewards of valid_data_paths, as train_reward_data_paths")
    test_reward_data_paths: Paths = key(None, "Rewards of test_data_paths, as train_reward_data_paths")
    pos_train_data_paths: Paths = key(None, "Prompts with chosen answers, the train set of dataset_impl: pairwise")
    neg_train_data_paths: Paths = key(None, "Prompts with rejected answers, the train set of dataset_impl: pairwise")
    pos_train_label_data_paths: Paths = key(
        None, "Labels of pos_train_data_paths; unset: the common beginning of both answers is the prompt"
    )
    neg_train_label_data_paths: Paths = key(
        None, "Labels of neg_train_data_paths; unset: the common beginning of both answers is the prompt"
    )
    pos_valid_data_paths: Paths = key(None, "Prompts with chosen answers, the valid set of dataset_impl: pairwise")
    neg_valid_data_paths: Paths = key(None, "Prompts with rejected answers, the valid set of dataset_impl: pairwise")
    pos_valid_label_data_paths: Paths = key(
        None, "Labels of pos_valid_data_paths; unset: the common beginning of both answers is the prompt"
    )
    neg_valid_label_data_paths: Paths = key(
        None, "Labels of neg_valid_data_paths; unset: the common beginning of both answers is the prompt"
    )
    pos_test_data_paths: Paths = key(None, "Prompts with chosen answers, the test set of dataset_impl: pairwise")
    neg_test_data_paths: Paths = key(None, "Prompts with rejected answers, the test set of dataset_impl: pairwise")
    pos_test_label_data_paths: Paths = key(
        None, "Labels of pos_test_data_paths; unset: the common beginning of both answers is the prompt"
    )
    neg_test_label_data_paths: Paths = key(
        None, "Labels of neg_test_data_paths; unset: the common beginning of both answers is the prompt"
    )
    max_length: int | None = new_key(
        None,
        "Preferences: most tokens of prompt and answer; longer ones lose their end, or are left out with "
        "allow_chopped: false",
        ge=2,
    )
    max_prompt_length: int | None = new_key(
        None,
        "Preferences: most tokens before the first trained one; a longer prompt loses its beginning",
        ge=1,
    )
    prefix_sharing: Literal["auto", True, False] = new_key(
        "auto",
        "Pairs, pack_impl: best_fit: compute the common beginning of chosen and rejected once. Losses and "
        "gradients are equal; more pairs fit in a row. auto: without dropout and Mamba blocks, if it saves 2 % "
        "of the tokens",
    )
    dpo_reference: Literal["auto", "cache", "on_the_fly"] = new_key(
        "auto",
        "Source of the reference's log-probabilities, in DPO and KTO. The reference is the model at the start of "
        "the run (load). cache: compute all before the first step and keep them. on_the_fly: compute them in each "
        "step. A frozen full copy on every data-parallel rank does this, or with lora the model without "
        "adapters. auto: on_the_fly with lora, else cache",
    )
    reference_cache_dir: str | None = new_key(
        None,
        "dpo_reference: cache: folder of log-probabilities, by model and content, for all runs; unset: "
        "reference_cache beside the index maps",
    )
    precompute_model_name: str | None = key(
        None,
        "Pairs: `PATH_NAME` holds a reference model's log-probabilities, one float32 per token or document, "
        "written by text_gen_type: precompute",
    )
