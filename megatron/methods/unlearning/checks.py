"""Checks the configuration keys of unlearning."""

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
    "train_epochs": "counts passes over the training data, but steps on ga_dataset read none; set train_iters instead",
    "seq_curriculum": "a curriculum does not apply to steps on ga_dataset; remove this key",
    "curriculum_learning": "a curriculum does not apply to steps on ga_dataset; remove this key",
    "skip_step_above_sigma": "compares losses of steps, but on ga_dataset they should rise, not fall; remove this key",
    "train_data_weight_schedule": "counts all steps, but steps on ga_dataset read no training data; remove this key",
}


def check(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Notes problems with the keys of unlearning: missing keys, keys without effect, and unsupported
    combinations."""
    keys = UnlearningKeys.read_from(args)
    chosen = keys.ga_loss_type if keys.ga_dataset is not None else ""
    for name, loss in FORGET_LOSSES.items():
        for option in loss.options:
            if _is_set(args, option) and name != chosen:
                problems.add(option, f"has an effect only with ga_loss_type: {name}; set that loss, or remove this key")
    if keys.ga_dataset is None:
        for key in (*_ASCENT_KEYS, *_DIFFERENCE_KEYS):
            if _is_set(args, key):
                problems.add(
                    key, "has no effect without ga_dataset; set ga_dataset to the data to unlearn, or remove this key"
                )
        return
    if args.train_impl != "normal":
        problems.add(
            "ga_dataset",
            f"unlearning needs train_impl: normal (language modelling), not {args.cite('train_impl')}; change "
            "train_impl, or remove ga_dataset",
        )
    for key, mode in _KEY_MODES.items():
        if keys.ga_mode != mode and _is_set(args, key):
            problems.add(
                key,
                f"has an effect only with ga_mode: {mode}, not {args.cite('ga_mode')}; remove it, or change ga_mode",
            )
    if keys.ga_mode == "interval":
        for key in ("ga_interval", "ga_iters"):
            if getattr(args, key) is None:
                problems.add(
                    key, f"is required with ga_mode {args.cite('ga_mode')}; set it, or use ga_mode: interleaved"
                )
    for key in ("ga_threshold_check_mode", "ga_threshold_skip_forward"):
        if keys.ga_loss_threshold is None and _is_set(args, key):
            problems.add(key, "has no effect without ga_loss_threshold; set ga_loss_threshold, or remove this key")
    if keys.gd_mode and keys.gd_retain_dataset is None:
        problems.add(
            "gd_retain_dataset",
            "is required with gd_mode: true; set it to the data whose knowledge the model should keep",
        )
    for key in _DIFFERENCE_KEYS:
        if not keys.gd_mode and "gd_mode" not in args.user_values and _is_set(args, key):
            problems.add(key, "has no effect while gd_mode is false; set gd_mode: true, or remove this key")
    if keys.gd_mode and keys.gd_retain_loss_type == "kl" and reference_mode(args) != "on_the_fly":
        reason = (
            "kl compares full next-token distributions with the reference model's, but dpo_reference: cache stores "
            "only one number per sequence"
        )
        problems.add("gd_retain_loss_type", f"{reason}; set dpo_reference: on_the_fly")
    for key, reason in _CONFLICTS.items():
        value = getattr(args, key)
        if value and (key != "curriculum_learning" or value["enabled"]):
            problems.add(key, f"{reason}, or remove ga_dataset ({args.origin('ga_dataset')})")


def _is_set(args: ResolvedArgs, key: str) -> bool:
    return getattr(args, key) != keys_of(type(args))[key].default
