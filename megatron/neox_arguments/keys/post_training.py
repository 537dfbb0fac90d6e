"""Keys of post-training: labels, preferences, rewards, unlearning."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from megatron.neox_arguments.keys.declaration import key, new_key
from megatron.neox_arguments.keys.losses import FORGET_LOSSES, TRAIN_IMPLS
from megatron.neox_arguments.keys.sections import Distillation, Lora, Rollout

Paths = tuple[str, ...] | None
Impl: TypeAlias = Literal[tuple(TRAIN_IMPLS)]  # type: ignore[valid-type]
TextLoss: TypeAlias = Literal[tuple(TRAIN_IMPLS["normal"].losses)]  # type: ignore[valid-type]
PairLoss: TypeAlias = Literal[tuple(TRAIN_IMPLS["dpo"].losses)]  # type: ignore[valid-type]
AnswerLoss: TypeAlias = Literal[tuple(TRAIN_IMPLS["kto"].losses)]  # type: ignore[valid-type]
PolicyLoss: TypeAlias = Literal[tuple(TRAIN_IMPLS["reinforce"].losses)]  # type: ignore[valid-type]
ForgetLoss: TypeAlias = Literal[tuple(FORGET_LOSSES)]  # type: ignore[valid-type]
_SIXTEEN_BIT = "log-probabilities and losses are always computed in fp32"


@dataclass(frozen=True)
class PostTrainingKeys:
    """Fine-tuning and preference training: losses, pairs, the reference model."""

    train_impl: Impl = key(
        "normal",
        "What is trained: language modelling, or an objective of post-training; reinforce: reinforcement learning, by "
        "rl_loss_type",
    )
    lora: Mapping[str, Any] | None = new_key(
        None,
        "Low-rank adapters are trained and everything else stays as it is; the reference of preferences is the model "
        "without them",
        section=Lora,
    )
    sft_loss_type: TextLoss = new_key(
        "nll",
        "train_impl normal: the tokens' negative log-likelihood; dft: each times the token's own probability (dynamic "
        "fine-tuning); validation is nll",
    )
    neftune_noise_alpha: float | None = new_key(
        None,
        "train_impl normal: uniform noise on the embeddings, in training alone, of this over the root of (tokens of "
        "the document x hidden_size), as NEFTune; 5 to 15 are common",
        ge=0,
    )
    distillation: Mapping[str, Any] | None = new_key(
        None, "train_impl normal: learn the distributions that another model gives", section=Distillation
    )
    disable_dropout: bool | None = new_key(
        None,
        "Train without hidden_dropout, attention_dropout and lora.dropout; unset: in preferences, where the policy "
        "would be compared with a reference that has none",
    )
    train_label_data_paths: Paths = key(
        None, "Labels of train_data_paths, one for each: the tokens, -100 where they are not trained"
    )
    valid_label_data_paths: Paths = key(None, "Labels of valid_data_paths, as train_label_data_paths")
    test_label_data_paths: Paths = key(None, "Labels of test_data_paths, as train_label_data_paths")
    train_reward_data_paths: Paths = key(
        None,
        "Rewards of train_data_paths, one for each: a number a document; with pack_impl: unpacked. train_impl rm: "
        "margins of pos_train_data_paths, a number a pair, by which the chosen answer should win",
    )
    valid_reward_data_paths: Paths = key(None, "Rewards of valid_data_paths, as train_reward_data_paths")
    test_reward_data_paths: Paths = key(None, "Rewards of test_data_paths, as train_reward_data_paths")
    pos_train_data_paths: Paths = key(None, "Prompts with chosen answers, the train set of dataset_impl: pairwise")
    neg_train_data_paths: Paths = key(None, "Prompts with rejected answers, the train set of dataset_impl: pairwise")
    pos_train_label_data_paths: Paths = key(None, "Their labels; unset: what both answers begin with is the prompt")
    neg_train_label_data_paths: Paths = key(None, "Their labels; unset: what both answers begin with is the prompt")
    pos_valid_data_paths: Paths = key(None, "Prompts with chosen answers, the valid set of dataset_impl: pairwise")
    neg_valid_data_paths: Paths = key(None, "Prompts with rejected answers, the valid set of dataset_impl: pairwise")
    pos_valid_label_data_paths: Paths = key(None, "Their labels; unset: what both answers begin with is the prompt")
    neg_valid_label_data_paths: Paths = key(None, "Their labels; unset: what both answers begin with is the prompt")
    pos_test_data_paths: Paths = key(None, "Prompts with chosen answers, the test set of dataset_impl: pairwise")
    neg_test_data_paths: Paths = key(None, "Prompts with rejected answers, the test set of dataset_impl: pairwise")
    pos_test_label_data_paths: Paths = key(None, "Their labels; unset: what both answers begin with is the prompt")
    neg_test_label_data_paths: Paths = key(None, "Their labels; unset: what both answers begin with is the prompt")
    max_length: int | None = new_key(
        None,
        "Preferences: tokens that are used of an answer with its prompt; what is longer loses its end, or with "
        "allow_chopped: false is left out",
        ge=2,
    )
    max_prompt_length: int | None = new_key(
        None,
        "Preferences: tokens that are used of what comes before the first trained one; a longer prompt loses its "
        "beginning",
        ge=1,
    )
    prefix_sharing: Literal["auto", True, False] = new_key(
        "auto",
        "Pairs, pack_impl: best_fit: tokens that chosen and rejected begin with are computed once, with equal losses "
        "and gradients; more pairs fit in a row. auto: without dropout and blocks of Mamba, and where it saves 2 % of "
        "the tokens",
    )
    dpo_loss_type: PairLoss | tuple[PairLoss, ...] = new_key(
        "sigmoid",
        "Loss of a pair, or a list of losses, as TRL spells them; sigmoid_norm: on averages over tokens (OLMo 3, "
        "Tulu 3); sft: likelihood of the chosen answer; [sigmoid, sft] with dpo_reference_free is CPO; simpo and orpo "
        "need no reference. aot and aot_unpaired compare all pairs of a step, TRL those of a micro-batch",
    )
    dpo_loss_weights: tuple[float, ...] | None = new_key(None, "Weight of each loss of dpo_loss_type; unset: 1")
    dpo_label_smoothing: float = new_key(
        0.0,
        "Share of pairs taken for mislabelled, in sigmoid (conservative DPO; TRL ignores it there), sigmoid_norm, "
        "robust, exo_pair (needs it), aot, aot_unpaired and simpo",
        ge=0,
        lt=0.5,
    )
    discopop_tau: float = new_key(0.05, "dpo_loss_type: discopop: width of its switch", gt=0)
    simpo_gamma: float = new_key(0.5, "dpo_loss_type: simpo: margin of the rewards", ge=0)
    dpo_beta: float = key(
        0.1,
        "DPO: strength of the reference: 0.1 for summed log-probabilities, 5 for sigmoid_norm, 2 for simpo are common",
        gt=0,
    )
    dpo_fp32: bool = key(True, "DPO: losses in fp32", no_effect=_SIXTEEN_BIT)
    dpo_reference_free: bool = key(False, "DPO without a reference model: as if it gave every answer the same")
    dpo_reference: Literal["auto", "cache", "on_the_fly"] = new_key(
        "auto",
        "Where the reference's log-probabilities come from, in DPO and KTO; it is the model as the run began (load). "
        "cache: all are made before the first step and kept; on_the_fly: a frozen copy, whole on every data-parallel "
        "rank, makes them in each step, with lora the model without its adapters; auto: on_the_fly with lora, else "
        "cache",
    )
    reference_cache_dir: str | None = new_key(
        None,
        "dpo_reference: cache: folder of the log-probabilities, by model and content, for all runs; unset: "
        "reference_cache beside the index maps",
    )
    center_rewards_coefficient: float | None = new_key(
        None,
        "train_impl rm: weight of the square of a pair's two scores together, which keeps scores around 0, as TRL's; "
        "0.01 is common",
        gt=0,
    )
    kto_loss_type: AnswerLoss = new_key("kto", "Loss of a judged answer, as TRL spells it; apo_zero_unpaired has no KL")
    kto_kl: Literal["drawn", "rotated"] = new_key(
        "drawn",
        "Answers to other prompts, for the KL: drawn: of the whole set; rotated: of the example before in the "
        "micro-batch (TRL), with pack_impl: unpacked",
    )
    kto_beta: float = key(
        0.1,
        "KTO: strength of the reference",
        gt=0,
        differs="GPT-NeoX takes the KL from the other half of the micro-batch, averages class weights over a half and "
        "multiplies rewards by the share of the row that is no padding: compat_kto",
    )
    compat_kto: bool = new_key(False, "KTO with GPT-NeoX's KL and averages, one answer a row (pack_impl: unpacked)")
    kto_fp32: bool = key(True, "KTO: losses in fp32", no_effect=_SIXTEEN_BIT)
    kto_desirable_weight: float = key(1.0, "KTO: weight of good answers", gt=0)
    kto_undesirable_weight: float = key(1.0, "KTO: weight of bad answers", gt=0)
    rollout: Mapping[str, Any] | None = new_key(
        None, "dataset_impl online: the prompts, and how the model answers them while it is trained", section=Rollout
    )
    rl_loss_type: PolicyLoss = new_key(
        "reinforce",
        "Loss of answers with rewards. reinforce: GPT-NeoX's, log-probability times advantage, a mean over tokens; "
        "rloo: clipped ratios of whole answers, beside the other answers' mean (TRL's RLOO); of answers beside the "
        "mean of their prompt's, with clipped ratios of tokens: grpo (mean over answers of their means), dapo (mean "
        "over all tokens), dr_grpo (sum over max_completion_length); gspo: grpo with an answer's mean ratio; cispo: "
        "dapo with truncated ratios as weights",
    )
    rl_epsilon: float = new_key(
        0.2, "A ratio below 1 minus this gives no gradient to an answer that is to be rarer", gt=0
    )
    rl_epsilon_high: float | None = new_key(
        None,
        "A ratio above 1 plus this gives no gradient to an answer that is to be likelier; unset: rl_epsilon; 0.28 is "
        "DAPO's. cispo: the largest ratio itself, which it needs",
        gt=0,
    )
    rl_scale_rewards: Literal["group", "batch", "none"] = new_key(
        "group",
        "What advantages are divided by: the standard deviation of the prompt's rewards, of all rewards of the batch, "
        "or nothing (Dr. GRPO)",
    )
    rl_importance_cap: float | None = new_key(
        None,
        "Weigh tokens by the trainer's probability over the sampler's, at most this (truncated importance sampling); 2 "
        "is common. Unset: no weights",
        gt=0,
    )
    rl_kl_in_reward: bool = new_key(
        False,
        "Subtract kl_div_beta times an answer's summed KL from its reward, as TRL's RLOO; false: add it to the loss",
    )
    rl_kl_by_ratio: bool = new_key(
        False,
        "Multiply the KL of a token by its ratio, so that k3 has the gradient of KL(model || reference), as "
        "DeepSeek-V3.2 and, unless told otherwise, TRL's GRPO (use_bias_correction_kl)",
    )
    rl_mask_truncated: bool = new_key(
        False, "Answers that did not end are not trained, though their rewards count in the means of advantages"
    )
    rl_overlong_buffer: int | None = new_key(
        None,
        "Over so many of the last tokens of max_completion_length an answer's reward falls by up to 1 (DAPO's soft "
        "overlong punishment); unset: length costs nothing",
        ge=1,
    )
    reward_functions: tuple[str, ...] | None = new_key(
        None,
        "dataset_impl online: what judges answers, in processes of their own: FILE.py:NAME of a function as TRL calls "
        "it, or exact_match, arithmetic, expression, json, code",
    )
    reward_model: str | None = new_key(
        None,
        "dataset_impl online: a reward model of the same tokenizer that judges answers too, loaded beside the model; "
        "a checkpoint of train_impl: rm, or a folder of HuggingFace",
    )
    reward_weights: tuple[float, ...] | None = new_key(
        None, "Weight of each of reward_functions, and of reward_model and rollout.environment after them; unset: 1"
    )
    reward_timeout_s: float = new_key(
        60.0,
        "Seconds that a function of reward_functions, or rollout.judge, may take for all answers of a step, ours for "
        "one, and rollout.environment for a call; those that take longer have no reward",
        gt=0,
    )
    reward_workers: int = new_key(1, "Processes that reward_functions are shared out to", ge=1)
    reward_variables: tuple[str, ...] | None = new_key(
        None,
        "Environment variables that reward_functions, rollout.judge and rollout.environment are given, as "
        "OPENAI_API_KEY, beside PATH, HOME and others that hold no secret",
    )
    fp32_reinforce: bool = key(True, "REINFORCE: losses in fp32", no_effect=_SIXTEEN_BIT)
    kl_impl: Literal["abs", "mse", "kl", "full", "k3"] = key(
        "mse",
        "train_impl reinforce: KL from the reference, of d = log p - log p_reference of a token: kl: d (k1); mse: d^2 "
        "/ 2 (k2); abs: |d|; k3: exp(-d) + d - 1 (GRPO's); full: KL(model || reference) of whole distributions",
    )
    kl_div_beta: float = key(
        0.1,
        "train_impl reinforce: weight of that KL; 0: no reference is needed",
        ge=0,
        differs="GPT-NeoX divides losses by the rows of a micro-batch once more",
    )
    reinforce_leave_one_out: bool = key(
        False,
        "rl_loss_type reinforce: advantages beside the mean of the prompt's other answers; false: beside the mean of "
        "the last 100 rewards",
    )
    serve_model_weights: bool = key(
        False,
        "rollout.servers fetch the weights from rank 0 over HTTP, checked by SHA-256, and need not see rollout.sync",
        differs="GPT-NeoX sends pickles over a socket to whoever connects",
    )
    weight_server_port: int | tuple[int, ...] = key(
        6000,
        "serve_model_weights: the port of rank 0; 0: any",
        unread="whoever fetches weights needs a change here in any case",
    )
    online_dataserver_ips: str | tuple[str, ...] = key(
        "localhost",
        "dataset_impl online: hosts of rollout.servers, where that is unset and this or online_dataserver_ports is set",
        differs="GPT-NeoX reads samples from them, made in whatever way",
    )
    online_dataserver_ports: int | tuple[int, ...] = key(10000, "Their ports: one of all hosts, or one for each")
    precompute_model_name: str | None = key(
        None,
        "Pairs: `PATH_NAME` holds a reference model's log-probabilities, float32 for each token or document; "
        "text_gen_type: precompute writes it",
    )


@dataclass(frozen=True)
class UnlearningKeys:
    """Unlearning, by the keys of the geodesic fork."""

    ga_dataset: str | None = key(
        None,
        "Data to forget (prefix of a `.bin/.idx` pair): steps of gradient ascent on it come between those of training",
        source="fork",
    )
    ga_dataset_impl: Literal["infer", "mmap", "cached"] = key(
        "mmap", "How ga_dataset is read, as data_impl", source="fork"
    )
    ga_label_dataset: str | None = new_key(
        None, "Labels of ga_dataset, as train_label_data_paths: the tokens, -100 where they are not to be forgotten"
    )
    ga_mode: Literal["interval", "interleaved"] = key(
        "interval",
        "When ga_dataset is stepped on. interleaved: every (ga_interleave_ratio + 1)-th iteration; interval: bursts of "
        "ga_iters steps in the place of every ga_interval-th iteration. The first iteration is always ordinary",
        source="fork",
    )
    ga_interval: int | None = key(
        None,
        "interval: iterations from one burst to the next; train_iters counts a burst as one, the log and checkpoints "
        "count each of its steps",
        ge=2,
        source="fork",
    )
    ga_iters: int | None = key(None, "interval: steps of a burst", ge=1, source="fork")
    ga_interleave_ratio: int = key(1, "interleaved: ordinary iterations for each of ascent", ge=1, source="fork")
    ga_lr_scale: float = key(
        1.0,
        "Multiplies the learning rate in steps on ga_dataset",
        gt=0,
        source="fork",
        differs="each step of a burst is scaled, where the fork scales the first alone; the step after one takes the "
        "schedule's rate, where the fork's takes that of before the burst",
    )
    ga_loss_threshold: float | None = key(
        None,
        "A step on ga_dataset whose loss has come above this is left out; an ordinary one is taken instead",
        gt=0,
        source="fork",
        differs="the fork checks after the step, so that nothing is left out, or takes no step at all from then on",
    )
    ga_threshold_check_mode: Literal["per_step", "per_burst", "ema"] = key(
        "per_step",
        "What ga_loss_threshold is compared with: per_step: the loss of the step's own batch; per_burst: of the first "
        "of a burst, for all of it; ema: an exponential moving average (0.9) of these",
        source="fork",
    )
    ga_threshold_skip_forward: bool = key(
        False,
        "Do without the forward pass that measures the loss before a step: the last step's is compared. After one "
        "that was left out the next is measured",
        source="fork",
    )
    ga_loss_type: ForgetLoss = new_key(
        "nll",
        "What is minimised on ga_dataset. nll: minus the tokens' negative log-likelihood (gradient ascent); npo, "
        "simnpo: negative preference optimization of whole sequences, npo beside a reference (dpo_reference). A "
        "sequence is a document with reset_attention_mask, else a row",
    )
    npo_beta: float = new_key(0.1, "ga_loss_type: npo: strength of the reference", gt=0)
    simnpo_beta: float = new_key(2.5, "ga_loss_type: simnpo: factor of a token's mean log-probability", gt=0)
    simnpo_gamma: float = new_key(0.0, "ga_loss_type: simnpo: margin", ge=0)
    gd_mode: bool = key(
        False,
        "Steps on ga_dataset are of gradient difference: gd_retain_weight x loss of gd_retain_dataset - loss of "
        "ga_dataset, a batch of each",
        source="fork",
        differs="the fork calls a method that no public DeeperSpeed has, and runs pure gradient ascent without it",
    )
    gd_retain_dataset: str | None = key(None, "gd_mode: data to keep (prefix of a `.bin/.idx` pair)", source="fork")
    gd_retain_dataset_impl: Literal["infer", "mmap", "cached"] = key(
        "mmap", "How gd_retain_dataset is read, as data_impl", source="fork"
    )
    gd_retain_label_dataset: str | None = new_key(
        None, "Labels of gd_retain_dataset, as train_label_data_paths: the tokens, -100 where they do not count"
    )
    gd_retain_weight: float = key(40.0, "gd_mode: weight of the loss of gd_retain_dataset", ge=0, source="fork")
    gd_retain_loss_type: Literal["nll", "kl"] = new_key(
        "nll",
        "gd_mode: loss of gd_retain_dataset: nll: of its tokens; kl: divergence of the model's distribution of each "
        "token from the reference's (dpo_reference: on_the_fly)",
    )
    gd_log_separate_losses: bool = key(
        True, "gd_mode: log gd_forget_loss and gd_retain_loss beside gd_combined_loss", source="fork"
    )
