"""Keys of post-training: labels, preferences, rewards, unlearning."""

from dataclasses import dataclass
from typing import Literal

from megatron.neox_arguments.declare import key

_POST, _RL, _UNLEARN = "post-training", "training with rewards", "unlearning"
Paths = tuple[str, ...] | None


@dataclass(frozen=True)
class PostTrainingKeys:
    train_impl: Literal["normal", "dpo", "rm", "kto", "reinforce"] = key(
        "normal",
        "What is trained: language modelling, or an objective of post-training",
        later_values={"dpo": _POST, "rm": _POST, "kto": _POST, "reinforce": _RL},
    )
    train_label_data_paths: Paths = key(
        None, "Labels of train_data_paths, one for each: the tokens, -100 where they are not trained"
    )
    valid_label_data_paths: Paths = key(None, "Labels of valid_data_paths, as train_label_data_paths")
    test_label_data_paths: Paths = key(None, "Labels of test_data_paths, as train_label_data_paths")
    train_reward_data_paths: Paths = key(
        None, "Rewards of train_data_paths, one for each: a number a document; with pack_impl: unpacked"
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
    dpo_beta: float = key(0.1, "DPO: strength of the reference", later=_POST)
    dpo_fp32: bool = key(True, "DPO: losses in fp32", later=_POST)
    dpo_reference_free: bool = key(False, "DPO without a reference model", later=_POST)
    kto_beta: float = key(0.1, "KTO: strength of the reference", later=_POST)
    kto_fp32: bool = key(True, "KTO: losses in fp32", later=_POST)
    kto_desirable_weight: float = key(1.0, "KTO: weight of good answers", later=_POST)
    kto_undesirable_weight: float = key(1.0, "KTO: weight of bad answers", later=_POST)
    fp32_reinforce: bool = key(True, "REINFORCE: losses in fp32", later=_RL)
    kl_impl: Literal["abs", "mse", "kl", "full"] = key("mse", "REINFORCE: form of the KL term", later=_RL)
    kl_div_beta: float = key(0.1, "REINFORCE: strength of the KL term", later=_RL)
    reinforce_leave_one_out: bool = key(False, "REINFORCE: the other answers' mean as baseline", later=_RL)
    serve_model_weights: bool = key(False, "Hand weights to inference servers while training", later=_RL)
    weight_server_port: int | tuple[int, ...] = key(6000, "Ports of that server", later=_RL)
    online_dataserver_ips: str | tuple[str, ...] = key("localhost", "Servers of fresh samples", later=_RL)
    online_dataserver_ports: int | tuple[int, ...] = key(10000, "Their ports", later=_RL)
    precompute_model_name: str | None = key(
        None, "Pairs: `PATH_NAME` holds a reference model's log-probabilities, float32 for each token or document"
    )


@dataclass(frozen=True)
class UnlearningKeys:
    """Keys of the geodesic fork."""

    ga_dataset: str | None = key(None, "Data whose loss is to rise", later=_UNLEARN, source="fork")
    ga_dataset_impl: str = key("mmap", "Its storage", later=_UNLEARN, source="fork")
    ga_mode: Literal["interval", "interleaved"] = key(
        "interval", "When it is trained on", later=_UNLEARN, source="fork"
    )
    ga_interval: int | None = key(None, "interval: iterations between bursts", later=_UNLEARN, source="fork")
    ga_iters: int | None = key(None, "interval: iterations of a burst", later=_UNLEARN, source="fork")
    ga_interleave_ratio: int = key(1, "interleaved: ordinary iterations for each", later=_UNLEARN, source="fork")
    ga_lr_scale: float = key(1.0, "Multiplies the learning rate there", later=_UNLEARN, source="fork")
    ga_loss_threshold: float | None = key(None, "Stop raising the loss above this", later=_UNLEARN, source="fork")
    ga_threshold_check_mode: str = key("per_step", "How that loss is measured", later=_UNLEARN, source="fork")
    ga_threshold_skip_forward: bool = key(False, "Skip the forward pass too", later=_UNLEARN, source="fork")
    gd_mode: bool = key(False, "Raise that loss and keep another low at once", later=_UNLEARN, source="fork")
    gd_retain_dataset: str | None = key(None, "Data whose loss is kept low", later=_UNLEARN, source="fork")
    gd_retain_dataset_impl: str = key("mmap", "Its storage", later=_UNLEARN, source="fork")
    gd_retain_weight: float = key(40.0, "Its weight", later=_UNLEARN, source="fork")
    gd_log_separate_losses: bool = key(True, "Log both losses", later=_UNLEARN, source="fork")
