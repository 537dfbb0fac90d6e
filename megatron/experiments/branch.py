"""Makes the configuration of a branch: the parent's with new keys, and decides what goes on or restarts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron.checkpointing import Manifest, OpenCheckpoint, describe_changes, list_checkpoints
from megatron.checkpointing.manifest import check_model
from megatron.data import data_fingerprint, order_keys
from megatron.experiments.errors import RunError
from megatron.experiments.lineage import Parent, ancestors, read_parent, read_record, split_source
from megatron.experiments.mix import planned_mix
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.addresses import without_secrets_inside
from megatron.neox_arguments.frozen import FrozenDict, thaw
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.neox_args import load_assignments
from megatron.neox_arguments.values.local_paths import with_home
from megatron.neox_arguments.values.remote_paths import is_remote
from megatron.training.checkpoint.same_run import data_changes, moments_of
from megatron.training.schedules import Schedule, build_schedule, stored_schedule

CONFIG = "branch.yml"  # in the `save` of a branch
Assignments = Sequence[tuple[str, Any, str]]
# Keys of the parent that a branch does not take over: where it wrote, and how it began.
_NOT_INHERITED = (
    "save", "load", "iteration", "finetune", "load_ema", "restart", "init_only", "branched_from", "allow_changed_data",
    "no_load_optim", "no_load_rng", "override_lr_scheduler", "use_checkpoint_lr_scheduler", "log_dir",
    "tensorboard_dir", "local_save", "memory_profiling_path", "wandb_run_name", "comet_experiment_name",
    "push_to_hub", "hub_model_id", "remote_staging", "deepspeed_config_file", "plan_file",
)  # fmt: skip
_FIXED = ("load", "iteration", "branched_from")  # the command sets them
_BLEND = ("train_data_weights", "weight_by", "weight_by_num_documents", "train_data_weight_schedule")
_TEXTS = ("data_path", "train_data_paths", "train_label_data_paths", "train_reward_data_paths", *_BLEND)
_PAIRS = tuple(
    f"{side}_{name}{kind}_data_paths" for side in ("pos", "neg") for name in ("train", "valid", "test")
    for kind in ("", "_label")
)  # fmt: skip
# A new key of the left side replaces the parent's keys of the right side, which mean the same in another way.
_REPLACEMENTS = (
    (("train_iters", "train_epochs"), ("train_iters", "train_epochs")),
    (("warmup", "warmup_iters"), ("warmup", "warmup_iters")),
    (("lr_decay_iters", "lr_decay_fraction"), ("lr_decay_iters", "lr_decay_fraction")),
    (("lr_decay_style",), ("lr_wsd_decay_iters", "lr_wsd_decay_style")),
    (_BLEND, _BLEND),
    (("data_path", "train_data_paths"), (*_TEXTS, *_PAIRS)),
    (("pos_train_data_paths",), (*_TEXTS, *_PAIRS)),
)
_SCHEDULE = (
    "lr_decay_style", "lr_decay_iters", "lr_decay_fraction", "train_iters", "train_epochs", "warmup", "warmup_iters",
    "min_lr", "lr_scaling", "lr_wsd_decay_iters", "lr_wsd_decay_style", "lr",
)  # fmt: skip


@dataclass(frozen=True)
class Branch:
    """A branch that can be started.

    lines: what it is, for the terminal. record: the content of parent.json. config: the text of branch.yml;
    both are None if the files are there already.
    """

    args: NeoXArgs
    save: Path
    lines: Sequence[str]
    record: Mapping[str, Any] | None = None
    config: str | None = None


def plan_branch(source: str, assignments: Assignments) -> Branch:
    """Returns the branch that a command line describes. Nothing is written.

    source: RUN@STEP. assignments: the new keys, as (dotted path, value, origin). Raises UserError.
    """
    keys = keys_of(NeoXArgs)
    # On which machines it runs may change at each start.
    start = [item for item in assignments if item[0] in keys and keys[item[0]].owner == "RunnerKeys"]
    new = [item for item in assignments if item not in start]
    run, step = split_source(source)
    save = _save_of(new, run)
    record = read_record(save)
    settings = without_secrets_inside({path: thaw(value) for path, value, _ in new})
    if record is not None and _is_begun(save, record, run, step, settings):
        args = load_assignments([save / CONFIG], start)
        return Branch(args, save, [*_family_lines(record), *_resume_lines(save)])
    if record is None and list_checkpoints(save):
        raise RunError(f"{save}: holds checkpoints of a run that is no branch; name another save")
    branch = _new_branch(read_parent(run, step), save, new, start, settings)
    if record is None:
        return branch
    replaced = f"replaces the branch from step {record['iteration']} of {record['run']} in {save}, which has not begun"
    return replace(branch, lines=[*branch.lines, replaced])


def _save_of(new: Assignments, run: Path) -> Path:
    """Returns the folder of a branch. Raises RunError unless it is another one than its parent's."""
    problems = [f"{origin}: {path}: the checkpoint is named by RUN@STEP; remove it" for path, _, origin in new
                if path in _FIXED]  # fmt: skip
    if problems:
        raise RunError("; ".join(problems))
    saves = [(value, origin) for path, value, origin in new if path == "save"]
    if not saves or saves[-1][0] is None:
        raise RunError("a branch has a folder of its own: write save: FOLDER into its file, or --set save=FOLDER")
    value, origin = saves[-1]
    if not isinstance(value, str) or is_remote(value):
        raise RunError(f"{origin}: save: {value}: expected a folder of this machine")
    save = with_home(value)
    if save.resolve().is_relative_to(run):
        raise RunError(f"{origin}: save: {value} is the folder of the parent, {run}, or lies in it; name another one")
    return save


def _is_begun(save: Path, record: Mapping[str, Any], run: Path, step: int | None, settings: Mapping[str, Any]) -> bool:
    """Returns whether `save` holds this branch. Raises RunError if it holds another one that has begun."""
    old = f"step {record['iteration']} of {record['run']}"
    if Path(record["run"]) != run or step not in (None, record["iteration"]):
        difference = f"holds a branch from {old}; name another save"
    else:
        changed = [
            key for key in {**record["settings"], **settings} if record["settings"].get(key) != settings.get(key)
        ]
        if not changed and (save / CONFIG).is_file():
            return True
        difference = f"its branch was begun with another {', '.join(changed) or CONFIG}; type the command as then, "
        difference += f"edit {save / CONFIG} and start it with train.py, or name another save"
    if list_checkpoints(save):
        raise RunError(f"{save}: {difference}")
    return False


def _new_branch(
    parent: Parent, save: Path, new: Assignments, start: Assignments, settings: Mapping[str, Any]
) -> Branch:
    origin, config = _origin(parent), parent.manifest.user_config
    old_args = load_assignments([], [(key, value, origin) for key, value in config.items()])
    # `lr_decay_style:` alone is another style too, the default.
    set_keys = {path.partition(".")[0] for path, value, _ in new if value is not None or path == "lr_decay_style"}
    replaced = {key for names, alternatives in _REPLACEMENTS if set_keys & set(names) for key in alternatives}
    inherited = {key: value for key, value in config.items() if key not in {*_NOT_INHERITED, *replaced}}
    base = [(key, value, origin) for key, value in inherited.items()]
    base += [
        *new,
        ("load", str(parent.run), "deepy.py branch"),
        ("iteration", parent.manifest.iteration, "deepy.py branch"),
    ]
    args = load_assignments([], base)
    model = {key: value for key, value in parent.manifest.model.items() if key != "padded_vocab_size"}
    check_model(model, args, str(parent.checkpoint), new_head=args.finetune)  # the padding is known at the start
    choice = _Choice(parent, old_args, args)
    steps = args.train_iters
    if not choice.keys.get("finetune") and steps is not None and steps <= parent.manifest.iteration:
        raise args.error(
            "train_iters", f"{steps}: the branch begins at step {parent.manifest.iteration}; set more steps"
        )
    base += [(key, value, "deepy.py branch") for key, value in choice.keys.items()]
    changed = _differing(old_args, args)
    family = {
        "run": str(parent.run), "iteration": parent.manifest.iteration, "digest": parent.digest, "data": choice.data,
        "changed": changed, **({} if parent.family is None else {"parent": thaw(parent.family)}),
    }  # fmt: skip
    base.append(("branched_from", family, "deepy.py branch"))
    args = load_assignments([], base)
    text = _config_text(args, save)
    args = load_assignments([], [*base, *start])
    args = replace(args, config_files=FrozenDict({CONFIG: text}))
    left_out = [
        key
        for key in _NOT_INHERITED[_NOT_INHERITED.index("log_dir") :]
        if old_args.user_values.get(key) and key not in set_keys
    ]
    lines = [*_family_lines(family), *choice.lines, *_batch_lines(old_args, args, parent.manifest)]
    if left_out:
        lines.append(f"not taken over from the parent: {', '.join(left_out)}")
    lines.append(f"configuration: {save / CONFIG}; the same command goes on, and so does train.py {save / CONFIG}")
    return Branch(args, save, lines, {**family, "settings": settings}, text)


def _batch_lines(old: NeoXArgs, new: NeoXArgs, manifest: Manifest) -> Iterator[str]:
    """Yields the parent's batch size, if the branch's depends on the number of ranks."""
    if new.user_values.get("train_batch_size") is None:
        ranks = manifest.layout.world_size
        batch = old.for_world(ranks).train_batch_size
        yield f"batch: {batch} samples a step on the parent's {ranks} ranks; train_batch_size sets it for any number"


def _config_text(args: NeoXArgs, save: Path) -> str:
    """Returns the text of a branch's configuration file."""
    body = yaml.safe_dump(thaw(args.user_values), sort_keys=True, width=110, allow_unicode=True)
    return f"# Written by deepy.py branch; it is run by: python deepy.py train.py {save / CONFIG}\n{body}"


def _family_lines(family: Mapping[str, Any]) -> Iterator[str]:
    yield f"step {family['iteration']} of {family['run']} (manifest.json: sha256 {family['digest']})"
    for elder in ancestors(family.get("parent")):
        yield f"which is a branch from step {elder['iteration']} of {elder['run']} (manifest {elder['digest'][:12]})"


def _resume_lines(save: Path) -> Iterator[str]:
    checkpoints = list_checkpoints(save)
    place = f"its own checkpoint {checkpoints[-1].name}" if checkpoints else "its beginning: it has no checkpoint yet"
    yield f"goes on from {place}, with {save / CONFIG}"


def _differing(old: NeoXArgs, new: NeoXArgs) -> dict[str, list[Any]]:
    """Returns {dotted key: [old value, new value]} of the keys that differ. A key that is not set has its
    default."""
    old_values, new_values = (dict(_leaves(args.public_values)) for args in (old, new))
    differing = {}
    for path in sorted({*old_values, *new_values}):
        default = keys_of(NeoXArgs)[path].default if path in keys_of(NeoXArgs) else None
        values = [side.get(path, thaw(default) if default.__class__ in (bool, int, float, str, tuple) else None)
                  for side in (old_values, new_values)]  # fmt: skip
        if path.partition(".")[0] not in _NOT_INHERITED and values[0] != values[1]:
            differing[path] = values
    return differing


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class _Choice:
    """Decides what a branch takes over besides the weights: data position, schedule, optimizer.

    keys: further keys of its configuration. data: as in `branched_from`. lines: the decisions, with reasons.
    """

    def __init__(self, parent: Parent, old: NeoXArgs, new: NeoXArgs) -> None:
        self.parent, self.old, self.new = parent, old, new
        self.keys: dict[str, Any] = {}
        self.data = "restarted"
        self.lines: list[str] = []
        reason = self._reason_to_begin()
        if reason is not None:
            self.keys["finetune"] = True
            self.lines.append(f"weights alone, from iteration 0: {reason}")
            self.lines.append("data: from sample 0")
            self.lines.append(f"schedule: restarted: {self._describe(new)}")
            self.lines.append("optimizer: fresh")
            return
        self.lines.append(f"data: {self._data()}")
        self.lines.append(f"schedule: {self._schedule()}")
        self.lines.append(f"optimizer: {self._optimizer()}")

    def _reason_to_begin(self) -> str | None:
        """Returns why the branch begins at iteration 0 with weights alone; None if the run goes on."""
        old, new = self.old, self.new
        if "finetune" in new.user_values:
            return f"finetune: true ({new.origin('finetune')})" if new.finetune else None
        if not self.parent.manifest.data:
            return "the checkpoint has no position in data, as imported weights"
        if old.train_impl != new.train_impl:
            return f"another objective, train_impl {old.train_impl} -> {new.train_impl}"
        if new.train_label_data_paths is not None and old.train_label_data_paths is None:
            return "another objective, labelled data (train_label_data_paths)"
        return "adapters on its weights (lora)" if old.lora is None and new.lora is not None else None

    def _data(self) -> str:
        """Decides where the data go on, and returns it in words."""
        manifest, new = self.parent.manifest, self.new
        inherited = _origin(self.parent)
        if manifest.data["order"].get("train_epochs") and new.train_epochs is None and new.train_iters is not None:
            if new.origin("train_iters") == inherited:
                raise RunError(
                    "the parent counted passes over its data: set train_epochs to those of the branch, the parent's "
                    "included, or train_iters to read data from sample 0"
                )
        position = f"sample {manifest.consumed_samples}"
        if new.allow_changed_data:
            self.data = "continued"
            return f"go on at {position} of the present data: allow_changed_data ({new.origin('allow_changed_data')})"
        files, order = data_fingerprint(new), order_keys(new, new.train_epochs)
        changes, same_seed = data_changes(new, manifest, files, order, False), manifest.seed == new.seed
        if not changes and same_seed:
            self.data = "continued"
            return f"go on at {position}, in the parent's order: data and order are the parent's"
        set_keys = {key for key in new.user_values if new.origin(key) != inherited}
        if same_seed and not set_keys & {change.key.partition(".")[0] for change in changes}:
            text = describe_changes(changes, new, str(self.parent.checkpoint))
            raise RunError(f"{text}; restore the files, or give the branch other paths for data from sample 0")
        mix = planned_mix(self.old, new, manifest)
        if mix is not None:
            self.data, self.keys = "replanned", {**self.keys, **mix.keys}
            return f"go on at {position} with {mix.words}"
        if new.train_data_weight_schedule is not None:
            raise new.error(
                "train_data_weight_schedule", "counts the steps of a run that reads its data from their sample 0, but "
                "this branch reads other data from its first step on; set train_data_weights"
            )  # fmt: skip
        keys = ", ".join(dict.fromkeys(change.key for change in changes)) or "seed"
        return f"from sample 0 of their order, which is another one than the parent's ({keys}); iterations go on"

    def _schedule(self) -> str:
        step, old, new = self.parent.manifest.iteration, self.old, self.new
        saved = OpenCheckpoint(self.parent.checkpoint).model_state().get("lr_scheduler")
        if new.use_checkpoint_lr_scheduler or new.lr_scaling != "none" or new.train_iters is None or not saved:
            differs = any(getattr(old, key) != getattr(new, key) for key in _SCHEDULE)
            if differs and not new.use_checkpoint_lr_scheduler:
                self.keys["override_lr_scheduler"] = True
            owner = "its own" if differs and not new.use_checkpoint_lr_scheduler else "the parent's"
            return f"goes on at step {step} of {owner}: {self._describe(new)}"
        parent_schedule, schedule = stored_schedule(saved), build_schedule(new)
        if _have_equal_rates(parent_schedule, schedule):
            return f"goes on at step {step} of the parent's: {schedule.describe()}"
        self.keys["override_lr_scheduler"] = True
        rates = f"the rate of step {step + 1} is {schedule(step):g}, with the parent's {parent_schedule(step):g}"
        return f"goes on at step {step} of its own: {schedule.describe()}; {rates} ({parent_schedule.describe()})"

    def _describe(self, args: NeoXArgs) -> str:
        """Returns a schedule in words, as far as it is known before the run starts."""
        if args.use_checkpoint_lr_scheduler:
            return "use_checkpoint_lr_scheduler"
        if args.train_iters is None or args.lr_scaling != "none":
            return f"{args.lr_decay_style}, settled at the start (train_epochs, lr_scaling)"
        return build_schedule(args).describe()

    def _optimizer(self) -> str:
        old_type, new_type = self.old.optimizer["type"], self.new.optimizer["type"]
        if self.new.no_load_optim:
            return f"fresh: no_load_optim ({self.new.origin('no_load_optim')})"
        if moments_of(old_type) != moments_of(new_type):
            self.keys["no_load_optim"] = True
            return f"fresh: {new_type} cannot use the state of {old_type}"
        if not self.parent.manifest.optimizer:
            raise RunError(
                f"{self.parent.checkpoint}: holds no optimizer state; set no_load_optim: true for a fresh optimizer, "
                "or finetune: true to begin at iteration 0"
            )
        return f"{new_type}, its state goes on"


def _origin(parent: Parent) -> str:
    """Returns the place of inherited keys, for messages."""
    return f"the run of {parent.checkpoint}"


def _have_equal_rates(a: Schedule, b: Schedule) -> bool:
    """Returns whether two schedules give the same rates: a constant one has no end, and only wsd a decay."""

    def relevant(schedule: Schedule) -> Schedule:
        if schedule.style == "constant":
            schedule = replace(schedule, end=0, min_lr=0.0)
        return schedule if schedule.style == "wsd" else replace(schedule, decay=0, decay_style="linear")

    return relevant(a) == relevant(b)
