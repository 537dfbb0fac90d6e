"""Declares the configuration keys of unlearning, and its losses on the forget set by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron.neox_arguments.keys.declaration import key, new_key
from megatron.neox_arguments.keys.losses import Loss
from megatron.neox_arguments.methods import MethodKeys

FORGET_LOSSES: Mapping[str, Loss] = {
    "nll": Loss("methods.unlearning.objective.ascent"),
    "npo": Loss("methods.unlearning.objective.npo", ("npo_beta",), needs_reference=True),
    "simnpo": Loss("methods.unlearning.objective.simnpo", ("simnpo_beta", "simnpo_gamma")),
}
"""The values of `ga_loss_type`: losses that are minimised on `ga_dataset`, the data to forget."""

ForgetLoss: TypeAlias = Literal[tuple(FORGET_LOSSES)]  # type: ignore[valid-type]


@dataclass(frozen=True)
class UnlearningKeys(MethodKeys):
    """Unlearning, by the keys of the geodesic fork."""

    ga_dataset: str | None = key(
        None,
        "Data that the model should forget (prefix of a `.bin/.idx` pair). Setting it turns unlearning on: steps of "
        "gradient ascent on this data between ordinary training steps",
        source="fork",
    )
    ga_dataset_impl: Literal["infer", "mmap", "cached"] = key(
        "mmap", "How ga_dataset is read from disk; the same values as data_impl", source="fork"
    )
    ga_label_dataset: str | None = new_key(
        None,
        "Labels of ga_dataset (prefix of a `.bin/.idx` pair, like train_label_data_paths): the token ids, and -100 for "
        "tokens that need not be forgotten",
    )
    ga_mode: Literal["interval", "interleaved"] = key(
        "interval",
        "Which steps train on ga_dataset. interleaved: every (ga_interleave_ratio + 1)-th iteration; interval: "
        "ga_iters steps in a row, a burst, in place of every ga_interval-th iteration. The first iteration is always "
        "ordinary",
        source="fork",
    )
    ga_interval: int | None = key(
        None,
        "For ga_mode: interval, the number of iterations from one burst of steps on ga_dataset to the next. "
        "train_iters counts a burst as one iteration; the log and checkpoints count each of its steps",
        ge=2,
        source="fork",
    )
    ga_iters: int | None = key(
        None, "For ga_mode: interval, the number of steps on ga_dataset in a burst", ge=1, source="fork"
    )
    ga_interleave_ratio: int = key(
        1, "For ga_mode: interleaved, the number of ordinary steps per step on ga_dataset", ge=1, source="fork"
    )
    ga_lr_scale: float = key(
        1.0,
        "Multiplies the learning rate in steps on ga_dataset",
        gt=0,
        source="fork",
        differs="the fork scales only the first step of a burst, and the next ordinary step repeats an older rate. "
        "Here every step of a burst is scaled, and the next ordinary step has the schedule's rate",
    )
    ga_loss_threshold: float | None = key(
        None,
        "Skip a step on ga_dataset, and take an ordinary step in its place, if the model's loss on that data is above "
        "this: enough is forgotten",
        gt=0,
        source="fork",
        differs="the fork checks only after the step, and then either skips nothing, or skips every later step, "
        "ordinary ones too",
    )
    ga_threshold_check_mode: Literal["per_step", "per_burst", "ema"] = key(
        "per_step",
        "Which loss is compared with ga_loss_threshold. per_step: the loss of the step's own batch; per_burst: the "
        "loss of a burst's first batch, which decides for the whole burst; ema: an exponential moving average (0.9)",
        source="fork",
    )
    ga_threshold_skip_forward: bool = key(
        False,
        "For ga_loss_threshold, compare the loss of the previous step on ga_dataset, which saves the forward pass that "
        "measures the loss before each step. After a skipped step the next one is measured by a forward pass",
        source="fork",
    )
    ga_loss_type: ForgetLoss = new_key(
        "nll",
        "Loss to minimise on ga_dataset. nll: the log-likelihood of the tokens, so ordinary training reversed "
        "(gradient ascent). npo, simnpo: negative preference optimization of full sequences; npo needs a reference "
        "model (dpo_reference). A sequence is a document with reset_attention_mask, else a row",
    )
    npo_beta: float = new_key(
        0.1,
        "For ga_loss_type: npo, beta, the factor of the log-ratio of model to reference; larger values keep the model "
        "closer to the reference",
        gt=0,
    )
    simnpo_beta: float = new_key(
        2.5, "For ga_loss_type: simnpo, beta, the factor of a sequence's mean log-probability per token", gt=0
    )
    simnpo_gamma: float = new_key(
        0.0, "For ga_loss_type: simnpo, the margin gamma in -(2 / beta) log sigmoid(-beta x mean log p - gamma)", ge=0
    )
    gd_mode: bool = key(
        False,
        "Turn steps on ga_dataset into gradient-difference steps, which read a batch of both sets and minimise "
        "gd_retain_weight x (loss of gd_retain_dataset) - (loss of ga_dataset); with other values of ga_loss_type, "
        "plus that loss",
        source="fork",
        differs="the fork calls a method missing from every public DeeperSpeed, and then runs pure gradient ascent",
    )
    gd_retain_dataset: str | None = key(
        None,
        "For gd_mode, data that the model should still know after unlearning (prefix of a `.bin/.idx` pair)",
        source="fork",
    )
    gd_retain_dataset_impl: Literal["infer", "mmap", "cached"] = key(
        "mmap", "How gd_retain_dataset is read from disk; the same values as data_impl", source="fork"
    )
    gd_retain_label_dataset: str | None = new_key(
        None,
        "Labels of gd_retain_dataset (prefix of a `.bin/.idx` pair, like train_label_data_paths): the token ids, and "
        "-100 for tokens that do not count in the loss",
    )
    gd_retain_weight: float = key(40.0, "For gd_mode, the weight of the loss on gd_retain_dataset", ge=0, source="fork")
    gd_retain_loss_type: Literal["nll", "kl"] = new_key(
        "nll",
        "For gd_mode, the loss on gd_retain_dataset. nll: negative log-likelihood of the tokens; kl: KL(reference || "
        "model) of the next-token distributions, needs dpo_reference: on_the_fly",
    )
    gd_log_separate_losses: bool = key(
        True,
        "For gd_mode, log the losses on both sets, gd_forget_loss and gd_retain_loss, besides gd_combined_loss",
        source="fork",
    )
