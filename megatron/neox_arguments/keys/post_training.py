"""Keys of post-training: labels, preferences, rewards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from megatron.neox_arguments.keys.declaration import key, new_key
from megatron.neox_arguments.keys.losses import TRAIN_IMPLS
from megatron.neox_arguments.keys.sections import Lora

Paths = tuple[str, ...] | None
Impl: TypeAlias = Literal[tuple(TRAIN_IMPLS)]  # type: ignore[valid-type]
TextLoss: TypeAlias = Literal[tuple(TRAIN_IMPLS["normal"].losses)]  # type: ignore[valid-type]
PairLoss: TypeAlias = Literal[tuple(TRAIN_IMPLS["dpo"].losses)]  # type: ignore[valid-type]
AnswerLoss: TypeAlias = Literal[tuple(TRAIN_IMPLS["kto"].losses)]  # type: ignore[valid-type]
_SIXTEEN_BIT = "log-probabilities and losses are always computed in fp32"


@dataclass(frozen=True)
class PostTrainingKeys:
    """Fine-tuning and preference training: losses, pairs, the reference model."""

    train_impl: Impl = key(
        "normal",
        "Objective: language modelling, or one of post-training; reinforce: reinforcement learning by rl_loss_type",
    )
    lora: Mapping[str, Any] | None = new_key(
        None,
        "Train low-rank adapters and nothing else; the reference of preferences is the model without them",
        section=Lora,
    )
    sft_loss_type: TextLoss = new_key(
        "nll",
        "train_impl normal. nll: negative log-likelihood of the tokens; dft: each times the token's own "
        "probability (dynamic fine-tuning); validation is nll",
    )
    neftune_noise_alpha: float | None = new_key(
        None,
        "train_impl normal: add uniform noise to the embeddings in training, up to this / sqrt(tokens of the "
        "document x hidden_size), as NEFTune; 5 to 15 are common",
        ge=0,
    )
    disable_dropout: bool | None = new_key(
        None,
        "Train without hidden_dropout, attention_dropout and lora.dropout; unset: true except with train_impl normal",
    )
    train_label_data_paths: Paths = key(
        None, "Labels of train_data_paths, one each: the tokens, or -100 if not trained"
    )
    valid_label_data_paths: Paths = key(None, "Labels of valid_data_paths, as train_label_data_paths")
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
        None, "Labels of these; unset: the common beginning of both answers is the prompt"
    )
    neg_train_label_data_paths: Paths = key(
        None, "Labels of these; unset: the common beginning of both answers is the prompt"
    )
    pos_valid_data_paths: Paths = key(None, "Prompts with chosen answers, the valid set of dataset_impl: pairwise")
    neg_valid_data_paths: Paths = key(None, "Prompts with rejected answers, the valid set of dataset_impl: pairwise")
    pos_valid_label_data_paths: Paths = key(
        None, "Labels of these; unset: the common beginning of both answers is the prompt"
    )
    neg_valid_label_data_paths: Paths = key(
        None, "Labels of these; unset: the common beginning of both answers is the prompt"
    )
    pos_test_data_paths: Paths = key(None, "Prompts with chosen answers, the test set of dataset_impl: pairwise")
    neg_test_data_paths: Paths = key(None, "Prompts with rejected answers, the test set of dataset_impl: pairwise")
    pos_test_label_data_paths: Paths = key(
        None, "Labels of these; unset: the common beginning of both answers is the prompt"
    )
    neg_test_label_data_paths: Paths = key(
        None, "Labels of these; unset: the common beginning of both answers is the prompt"
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
    dpo_loss_type: PairLoss | tuple[PairLoss, ...] = new_key(
        "sigmoid",
        "Loss of a pair, or a list of losses, in TRL's spelling. sigmoid_norm: on averages over tokens (OLMo 3, "
        "Tulu 3); sft: likelihood of the chosen answer; [sigmoid, sft] with dpo_reference_free: CPO. simpo and "
        "orpo need no reference. aot and aot_unpaired compare all pairs of a step, TRL's those of a micro-batch",
    )
    dpo_loss_weights: tuple[float, ...] | None = new_key(None, "Weight of each loss of dpo_loss_type; unset: 1")
    dpo_label_smoothing: float = new_key(
        0.0,
        "Assumed share of mislabelled pairs, in sigmoid (conservative DPO; TRL ignores it there), sigmoid_norm, "
        "robust, exo_pair (needs it), aot, aot_unpaired and simpo",
        ge=0,
        lt=0.5,
    )
    discopop_tau: float = new_key(0.05, "dpo_loss_type: discopop: width of its switch", gt=0)
    simpo_gamma: float = new_key(0.5, "dpo_loss_type: simpo: margin of the rewards", ge=0)
    dpo_beta: float = key(
        0.1,
        "DPO: strength of the reference. Common: 0.1 for summed log-probabilities, 5 for sigmoid_norm, 2 for simpo",
        gt=0,
    )
    dpo_fp32: bool = key(True, "DPO: losses in fp32", no_effect=_SIXTEEN_BIT)
    dpo_reference_free: bool = key(
        False, "DPO without a reference model, as if it gave all answers the same probability"
    )
    dpo_reference: Literal["auto", "cache", "on_the_fly"] = new_key(
        "auto",
        "Source of the reference's log-probabilities, in DPO and KTO. The reference is the model at the start of "
        "the run (load). cache: compute all before the first step and keep them. on_the_fly: in each step, by a "
        "frozen full copy on every data-parallel rank, or with lora by the model without adapters. auto: "
        "on_the_fly with lora, else cache",
    )
    reference_cache_dir: str | None = new_key(
        None,
        "dpo_reference: cache: folder of log-probabilities, by model and content, for all runs; unset: "
        "reference_cache beside the index maps",
    )
    center_rewards_coefficient: float | None = new_key(
        None,
        "train_impl rm: weight of the squared sum of a pair's scores, to keep scores around 0, as TRL's; 0.01 is "
        "common",
        gt=0,
    )
    kto_loss_type: AnswerLoss = new_key(
        "kto", "Loss of a judged answer, in TRL's spelling; apo_zero_unpaired has no KL"
    )
    kto_kl: Literal["drawn", "rotated"] = new_key(
        "drawn",
        "Answers to other prompts, for the KL. drawn: from the whole set; rotated: the example before in the "
        "micro-batch (TRL), with pack_impl: unpacked",
    )
    kto_beta: float = key(
        0.1,
        "KTO: strength of the reference",
        gt=0,
        differs="GPT-NeoX takes the KL from the other half of the micro-batch, averages class weights over a half, and "
        "multiplies rewards by the unpadded share of the row: compat_kto",
    )
    compat_kto: bool = new_key(False, "KTO with GPT-NeoX's KL and averages, one answer per row (pack_impl: unpacked)")
    kto_fp32: bool = key(True, "KTO: losses in fp32", no_effect=_SIXTEEN_BIT)
    kto_desirable_weight: float = key(1.0, "KTO: weight of good answers", gt=0)
    kto_undesirable_weight: float = key(1.0, "KTO: weight of bad answers", gt=0)
    precompute_model_name: str | None = key(
        None,
        "Pairs: `PATH_NAME` holds a reference model's log-probabilities, one float32 per token or document, "
        "written by text_gen_type: precompute",
    )
