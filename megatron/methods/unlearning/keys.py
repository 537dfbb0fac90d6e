"""The keys of unlearning, and the losses that they name."""

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
"""The values of `ga_loss_type`: what is minimised on `ga_dataset`."""

ForgetLoss: TypeAlias = Literal[tuple(FORGET_LOSSES)]  # type: ignore[valid-type]


@dataclass(frozen=True)
class UnlearningKeys(MethodKeys):
    """Unlearning, by the keys of the geodesic fork."""

    ga_dataset: str | None = key(
        None,
        "Data to forget (prefix of a `.bin/.idx` pair): gradient ascent on it alternates with training steps",
        source="fork",
    )
    ga_dataset_impl: Literal["infer", "mmap", "cached"] = key(
        "mmap", "How ga_dataset is read, as data_impl", source="fork"
    )
    ga_label_dataset: str | None = new_key(
        None, "Labels of ga_dataset, as train_label_data_paths: the tokens, or -100 if not to forget"
    )
    ga_mode: Literal["interval", "interleaved"] = key(
        "interval",
        "When to step on ga_dataset. interleaved: every (ga_interleave_ratio + 1)-th iteration; interval: bursts "
        "of ga_iters steps in place of every ga_interval-th iteration. The first iteration is always ordinary",
        source="fork",
    )
    ga_interval: int | None = key(
        None,
        "interval: iterations from one burst to the next. train_iters counts a burst as one; the log and "
        "checkpoints count each of its steps",
        ge=2,
        source="fork",
    )
    ga_iters: int | None = key(None, "interval: steps of a burst", ge=1, source="fork")
    ga_interleave_ratio: int = key(1, "interleaved: ordinary iterations per ascent", ge=1, source="fork")
    ga_lr_scale: float = key(
        1.0,
        "Multiplies the learning rate in steps on ga_dataset",
        gt=0,
        source="fork",
        differs="the fork scales only the first step of a burst, and the step after a burst keeps the rate of before; "
        "here all steps are scaled, and the step after takes the schedule's rate",
    )
    ga_loss_threshold: float | None = key(
        None,
        "Replace a step on ga_dataset by an ordinary one if its loss has risen above this",
        gt=0,
        source="fork",
        differs="the fork checks after the step and skips nothing, or takes no step at all from then on",
    )
    ga_threshold_check_mode: Literal["per_step", "per_burst", "ema"] = key(
        "per_step",
        "Loss to compare with ga_loss_threshold. per_step: of the step's own batch; per_burst: of the first "
        "batch, for the whole burst; ema: an exponential moving average (0.9)",
        source="fork",
    )
    ga_threshold_skip_forward: bool = key(
        False,
        "Skip the forward pass to measure the loss before a step: use the last step's loss. After a skipped step "
        "a forward pass measures the next step on ga_dataset",
        source="fork",
    )
    ga_loss_type: ForgetLoss = new_key(
        "nll",
        "Loss to minimise on ga_dataset. nll: minus the tokens' negative log-likelihood (gradient ascent). npo, "
        "simnpo: negative preference optimization of whole sequences; npo needs a reference (dpo_reference). A "
        "sequence is a document with reset_attention_mask, else a row",
    )
    npo_beta: float = new_key(0.1, "ga_loss_type: npo: strength of the reference", gt=0)
    simnpo_beta: float = new_key(2.5, "ga_loss_type: simnpo: factor of a token's mean log-probability", gt=0)
    simnpo_gamma: float = new_key(0.0, "ga_loss_type: simnpo: margin", ge=0)
    gd_mode: bool = key(
        False,
        "Take gradient-difference steps on ga_dataset: gd_retain_weight x loss of gd_retain_dataset - loss of "
        "ga_dataset, a batch of each",
        source="fork",
        differs="the fork calls a method missing from every public DeeperSpeed, and then runs pure gradient ascent",
    )
    gd_retain_dataset: str | None = key(None, "gd_mode: data to keep (prefix of a `.bin/.idx` pair)", source="fork")
    gd_retain_dataset_impl: Literal["infer", "mmap", "cached"] = key(
        "mmap", "How gd_retain_dataset is read, as data_impl", source="fork"
    )
    gd_retain_label_dataset: str | None = new_key(
        None, "Labels of gd_retain_dataset, as train_label_data_paths: the tokens, or -100 if not counted"
    )
    gd_retain_weight: float = key(40.0, "gd_mode: weight of the loss of gd_retain_dataset", ge=0, source="fork")
    gd_retain_loss_type: Literal["nll", "kl"] = new_key(
        "nll",
        "gd_mode: loss of gd_retain_dataset. nll: of its tokens; kl: divergence of the model's distribution of "
        "each token from the reference's (dpo_reference: on_the_fly)",
    )
    gd_log_separate_losses: bool = key(
        True, "gd_mode: log gd_forget_loss and gd_retain_loss beside gd_combined_loss", source="fork"
    )
