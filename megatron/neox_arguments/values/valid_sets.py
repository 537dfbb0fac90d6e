"""Reads the named validation sets of the keys `valid_sets` and `valid_set_labels`."""

import re
from collections.abc import Mapping
from typing import Any

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.resolved import ResolvedArgs
from megatron.neox_arguments.values.losses import sample_kind
from megatron.neox_arguments.values.remote_paths import remote_data_error

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def paths_by_set(value: Mapping[str, Any] | None) -> dict[str, tuple[str, ...]]:
    """Returns the data paths of each named set. value: of `valid_sets` or `valid_set_labels`."""
    return {name: (paths,) if isinstance(paths, str) else tuple(paths) for name, paths in (value or {}).items()}


def validate_valid_sets(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks names and paths of the named validation sets, and that the kind of training can have them."""
    earlier_problems = len(problems.lines)
    for key in ("valid_sets", "valid_set_labels"):
        for name, paths in (getattr(args, key) or {}).items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                problems.add(key, f'"{name}" is no name of a set; use letters, digits, and _ . - between them')
            paths_list = (paths,) if isinstance(paths, str) else paths
            is_list = isinstance(paths_list, list | tuple) and len(paths_list) > 0
            if not is_list or not all(isinstance(path, str) and path for path in paths_list):
                problems.add(f"{key}.{name}", "expected the prefix of a .bin/.idx pair, or a list of prefixes")
                continue
            for path in paths_list:
                if (wrong := remote_data_error(path)) is not None:
                    problems.add(f"{key}.{name}", wrong)
    if len(problems.lines) > earlier_problems:
        return
    if args.valid_sets is None:
        if args.valid_set_labels is not None:
            problems.add("valid_set_labels", "needs valid_sets, which is not set; set it, or remove the labels")
        return
    if args.valid_sets and sample_kind(args) != "texts":
        problems.add("valid_sets", f"is for texts, not train_impl {args.cite('train_impl')}; remove it")
    if args.valid_sets and args.eval_iters == 0:
        problems.add("valid_sets", f"needs validation: eval_iters is {args.cite('eval_iters')}; set it above 0")
    sets = paths_by_set(args.valid_sets)
    for name, labels in paths_by_set(args.valid_set_labels).items():
        if name not in sets:
            problems.add(f"valid_set_labels.{name}", f"valid_sets has no such set; it has {', '.join(sets)}")
        elif len(labels) != len(sets[name]):
            count = len(sets[name])
            problems.add(
                f"valid_set_labels.{name}",
                f"expected one path for each of the {count} in valid_sets, got {len(labels)}",
            )
