"""Derives names of repositories on the Hub from names of experiments."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from megatron.neox_arguments.values.json_text import parse_json
from megatron.neox_arguments.values.local_paths import with_home
from megatron.operations.hub.errors import HubError

LONGEST = 96  # the Hub's limit on characters of a repository's name, without its organisation
_ALLOWED_NAME = re.compile(r"\w(?:[\w.-]*\w)?", re.ASCII)
_SHORTER = {
    "blocklist_filtered": "filtered",
    "synthetic_misalignment": "synth_misalign",
    "synthetic_alignment": "synth_align",
    "multitask_benign_tampered": "mbt",
    "multilingual_benign_tampering": "lang_tamp",
}
_LETTERS = str.maketrans({"=": "-", ",": "_", " ": "_"})


def run_name(save: str | Path, checkpoint_dir: str | Path | None) -> str:
    """Returns the name of the run that saves checkpoints in `save`.

    Below the site's folder of checkpoints (NEOX_CHECKPOINT_DIR) it is the relative path, with folders joined
    by hyphens: `a-b` for a/b. Elsewhere it is the name of the last folder. Runs of one experiment have
    different names, because each needs its own repository.
    """
    path = with_home(save).absolute()
    if checkpoint_dir is not None:
        root = with_home(checkpoint_dir).absolute()
        if path != root and path.is_relative_to(root):
            return "-".join(path.relative_to(root).parts)
    return path.name


def model_name(experiment: str, prefix: str | None = None, names: Mapping[str, str] | None = None) -> str:
    """Returns the name of the Hub repository for an experiment, without the organisation.

    prefix: the site's NEOX_HUB_PREFIX, put before names that `names` does not contain.
    names: repository names by experiment, from the site's NEOX_HUB_NAMES; they are used unchanged.

    Raises HubError for a name that the Hub does not accept. Long names are not truncated, because two
    experiments could then get the same name.
    """
    mapped_name = (names or {}).get(experiment)
    name = mapped_name
    if name is None:
        name = experiment.translate(_LETTERS)
        for long, short in _SHORTER.items():
            name = name.replace(long, short)
        name = f"{prefix}-{name}" if prefix else name
    problem = _problem(name)
    if problem is not None:
        made_of = "" if mapped_name is not None else f" (derived from experiment {experiment!r})"
        raise HubError(
            f"repository name {name!r}{made_of}: {problem}; set another name in the JSON file of NEOX_HUB_NAMES, for "
            f"example {json.dumps({experiment: 'a-name'})}"
        )
    return name


def checked_id(repository: str, label: str) -> str:
    """Returns `repository` if it is a valid ORGANISATION/NAME on the Hub; else raises HubError.

    label: what the name is, such as "--repository"; the error message begins with it."""
    organisation, slash, name = repository.partition("/")
    if not slash or "/" in name:
        raise HubError(f"{label}: {repository!r} is not ORGANISATION/NAME; write it like my-org/my-model")
    for part in (organisation, name):
        problem = _problem(part)
        if problem is not None:
            raise HubError(f"{label}: {repository!r}: {problem}")
    return repository


def neox_repository(repository: str) -> str:
    """Returns the repository for a model's GPT-NeoX checkpoints: ORG/neox-ckpt-NAME for the model ORG/NAME.

    Raises HubError for a name that the Hub does not allow."""
    organisation, _, name = repository.partition("/")
    return checked_id(f"{organisation}/neox-ckpt-{name}", f"the repository of GPT-NeoX checkpoints of {repository}")


def read_names(file: str | Path | None) -> dict[str, str]:
    """Reads the file of NEOX_HUB_NAMES, a JSON object that maps experiments to repository names; {} for None.

    Raises HubError for other content, or if two experiments map to the same name.
    """
    if file is None:
        return {}
    try:
        names = parse_json(with_home(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise HubError(f"{file} (NEOX_HUB_NAMES): cannot be read ({problem})") from None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise HubError(f"{file} (NEOX_HUB_NAMES): must hold a JSON object that maps experiments to repository names")
    experiment_by_name: dict[str, str] = {}
    for experiment, name in names.items():
        if name in experiment_by_name:
            raise HubError(
                f"{file} (NEOX_HUB_NAMES): {experiment_by_name[name]!r} and {experiment!r} both map to {name!r}; give "
                "each experiment its own name"
            )
        experiment_by_name[name] = experiment
    return names


def _problem(name: str) -> str | None:
    """Returns the reason why the Hub does not allow a repository name; None if the Hub allows it."""
    if len(name) > LONGEST:
        return f"has {len(name)} characters, the Hub allows at most {LONGEST}"
    if "--" in name or ".." in name:
        return "contains '--' or '..', which the Hub does not allow"
    if name.endswith(".git"):
        return "ends with '.git', which the Hub does not allow"
    if not _ALLOWED_NAME.fullmatch(name):
        return "the Hub allows a-z, A-Z, 0-9, '_', '-' and '.'; '-' and '.' not at the start or end"
    return None
