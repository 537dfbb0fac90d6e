"""Another mix of data from a step on, written as the weight schedule of a run that had planned it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron.checkpointing import Manifest, describe_changes
from megatron.data import data_fingerprint, order_keys
from megatron.data.blending import normalized
from megatron.data.open_dataset import open_dataset
from megatron.data.set_config import blend_weights
from megatron.experiments.errors import RunError
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.values.losses import sample_kind
from megatron.training.checkpoint.same_run import data_changes

_KEY = "train_data_weight_schedule"


class Mix(NamedTuple):
    """A planned mix. keys: of the branch's configuration. words: what it is."""

    keys: dict[str, Any]
    words: str


def planned_mix(old: NeoXArgs, new: NeoXArgs, manifest: Manifest) -> Mix | None:
    """Returns the mix of a branch as a run would have planned it; None if no configuration could plan it.

    old, new: the configurations of parent and branch. Raises ConfigError if the branch has a schedule of
    weights that is not the parent's up to its step, RunError if files of the parent have changed.
    """
    if not _is_blend_of_texts(old, new, manifest):
        return None
    changed_files = data_changes(old, manifest, data_fingerprint(old), {}, validation=False)
    if changed_files:
        raise RunError(f"{describe_changes(changed_files, old, 'the parent')}; restore the files that it has read")
    step = manifest.iteration
    past = list(old.train_data_paths or ())
    phases = _phases(old)
    until = [end for end in phases[0] if end < step]
    weights = phases[1][: len(until) + 1]
    schedule = new.train_data_weight_schedule
    if schedule is not None:
        _check_schedule(new, step, past, until, weights)
        return Mix({}, f"the mix of {_KEY}: each set after the samples it gave")
    paths = list(new.train_data_paths or ())
    merged = past + [path for path in paths if path not in past]
    now = dict(zip(paths, _weights(new), strict=True))
    all_weights = [[*phase, *(0.0 for _ in merged[len(past) :])] for phase in weights]
    all_weights.append([float(now.get(path, 0.0)) for path in merged])
    keys: dict[str, Any] = {
        "train_data_paths": merged, "train_data_weights": None, "weight_by": None, "weight_by_num_documents": None,
        "compat_weight_by_num_documents": None, "weighted_sampler_alpha": None,
        _KEY: {"until": [*until, step], "weights": all_weights},
    }  # fmt: skip
    shares = zip(paths, normalized([now[path] for path in paths]).tolist(), strict=True)
    described = ", ".join(f"{share:.4g} {path}" for path, share in shares)
    return Mix(keys, f"another mix ({described}); each set after the samples it gave, as a run with {_KEY} would have")


def _is_blend_of_texts(old: NeoXArgs, new: NeoXArgs, manifest: Manifest) -> bool:
    lists = [args.train_data_paths for args in (old, new)]
    companions = [args.train_label_data_paths or args.train_reward_data_paths for args in (old, new)]
    if None in lists or any(companions) or any(sample_kind(args) != "texts" for args in (old, new)):
        return False
    if any(len(set(paths or ())) != len(paths or ()) for paths in lists):
        return False
    saved_order, order = manifest.data["order"], order_keys(new, new.train_epochs)
    batch = old.for_world(manifest.layout.world_size).train_batch_size
    if batch is None or batch * manifest.iteration != manifest.consumed_samples:
        return False  # phases of a schedule end at steps, all of one batch
    same_order = all(saved_order.get(key) == order[key] for key in order if key != "train_batch_size")
    return same_order and manifest.seed == new.seed and not order["train_epochs"] and manifest.iteration > 0


def _phases(args: NeoXArgs) -> tuple[list[int], list[list[float]]]:
    """Returns (last steps of all phases but the last, weights of the phases)."""
    schedule = args.train_data_weight_schedule
    if schedule is not None:
        return list(schedule["until"]), [list(map(float, phase)) for phase in schedule["weights"]]
    return [], [list(map(float, _weights(args)))]


def _weights(args: NeoXArgs) -> Sequence[float]:
    members = [open_dataset(path, args.data_impl) for path in args.train_data_paths or ()]
    return blend_weights(args, "train", members)


def _check_schedule(new: NeoXArgs, step: int, past: list[str], until: list[int], weights: list[list[float]]) -> None:
    """Raise ConfigError unless a typed schedule of weights is that of the parent up to its step."""
    schedule, paths = thaw(new.train_data_weight_schedule), list(new.train_data_paths or ())
    padding = [0.0] * (len(paths) - len(past))
    expected = [normalized([*phase, *padding]).tolist() for phase in weights]
    first_phases = [normalized(phase).tolist() for phase in schedule["weights"][: len(weights)]]
    ends = schedule["until"]
    reached = ends[len(until)] if len(ends) > len(until) else step
    if paths[: len(past)] != past or first_phases != expected or ends[: len(until)] != until or reached < step:
        padded_weights = [[*phase, *padding] for phase in weights]
        raise new.error(_KEY, f"the run has read {step} steps of train_data_paths {past}: begin with them, and with "
                              f"until: {[*until, step]}, weights: {padded_weights}, and the new weights")  # fmt: skip
