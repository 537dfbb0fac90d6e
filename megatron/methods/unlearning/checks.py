"""Checks of the keys of unlearning."""

from megatron.methods.unlearning.keys import FORGET_LOSSES, UnlearningKeys
from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import reference_mode

_DIFFERENCE_KEYS = (
    "gd_retain_dataset", "gd_retain_dataset_impl", "gd_retain_label_dataset", "gd_retain_weight",
    "gd_retain_loss_type", "gd_log_separate_losses",
)  # fmt: skip
_ASCENT_KEYS = (
    "ga_dataset_impl", "ga_label_dataset", "ga_mode", "ga_interval", "ga_iters", "ga_interleave_ratio", "ga_lr_scale",
    "ga_loss_type", "ga_loss_threshold", "ga_threshold_check_mode", "ga_threshold_skip_forward", "gd_mode",
)  # fmt: skip
_KEY_MODES = {"ga_interval": "interval", "ga_iters": "interval", "ga_interleave_ratio": "interleaved"}
_CONFLICTS = {
    "train_epochs": "counts passes over the training data, and steps on ga_dataset read none of it; set train_iters",
    "seq_curriculum": "does not apply to ga_dataset; remove it",
    "curriculum_learning": "does not apply to ga_dataset; remove it",
    "skip_step_above_sigma": "would compare losses that are to rise with losses that are to fall; remove it",
    "train_data_weight_schedule": "counts steps, and those on ga_dataset read no training data; remove it",
}


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks that keys of unlearning are complete and are not combined with unsupported keys."""
    keys = UnlearningKeys.read_from(args)
    chosen = keys.ga_loss_type if keys.ga_dataset is not None else ""
    for name, loss in FORGET_LOSSES.items():
        for option in loss.options:
            if _is_set(args, option) and name != chosen:
                problems.add(option, f"only ga_loss_type: {name} reads it; set that, or remove it")
    if keys.ga_dataset is None:
        for key in (*_ASCENT_KEYS, *_DIFFERENCE_KEYS):
            if _is_set(args, key):
                problems.add(key, "is for unlearning; set ga_dataset to the data to forget, or remove it")
        return
    if args.train_impl != "normal":
        problems.add("ga_dataset", f"unlearning needs language modelling, not train_impl {args.cite('train_impl')}")
    for key, mode in _KEY_MODES.items():
        if keys.ga_mode != mode and _is_set(args, key):
            problems.add(key, f"only ga_mode: {mode} reads it, not {args.cite('ga_mode')}; remove it")
    if keys.ga_mode == "interval":
        for key in ("ga_interval", "ga_iters"):
            if getattr(args, key) is None:
                problems.add(key, f"is required by ga_mode {args.cite('ga_mode')}; set it, or ga_mode: interleaved")
    for key in ("ga_threshold_check_mode", "ga_threshold_skip_forward"):
        if keys.ga_loss_threshold is None and _is_set(args, key):
            problems.add(key, "says how ga_loss_threshold is checked; set that, or remove it")
    if keys.gd_mode and keys.gd_retain_dataset is None:
        problems.add("gd_retain_dataset", "is required by gd_mode: the data to keep")
    for key in _DIFFERENCE_KEYS:
        if not keys.gd_mode and "gd_mode" not in args.user_values and _is_set(args, key):
            problems.add(key, "only gd_mode: true reads it; set that, or remove it")
    if keys.gd_mode and keys.gd_retain_loss_type == "kl" and reference_mode(args) != "on_the_fly":
        reason = "kl compares whole distributions, and dpo_reference: cache keeps the sum of a sequence"
        problems.add("gd_retain_loss_type", f"{reason}; set dpo_reference: on_the_fly")
    for key, reason in _CONFLICTS.items():
        value = getattr(args, key)
        if value and (key != "curriculum_learning" or value["enabled"]):
            problems.add(key, f"{reason}, or ga_dataset ({args.origin('ga_dataset')})")


def _is_set(args: ResolvedArgs, key: str) -> bool:
    return getattr(args, key) != keys_of(type(args))[key].default
