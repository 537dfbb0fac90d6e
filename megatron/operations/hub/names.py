"""The names of repositories on the Hub, made of the names of experiments."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from megatron.operations.hub.errors import HubError

LONGEST = 96  # characters of a repository's name without its organisation, as the Hub has it
_PLAIN = re.compile(r"\w(?:[\w.-]*\w)?", re.ASCII)
_SHORTER = {
    "blocklist_filtered": "filtered",
    "synthetic_misalignment": "synth_misalign",
    "synthetic_alignment": "synth_align",
    "multitask_benign_tampered": "mbt",
    "multilingual_benign_tampering": "lang_tamp",
}
_LETTERS = str.maketrans({"=": "-", ",": "_", " ": "_"})


def run_name(save: str | Path, checkpoint_dir: str | Path | None) -> str:
    """What a run that saves in `save` is called: its path below the site's folder of checkpoints
    (NEOX_CHECKPOINT_DIR), parts joined by a hyphen; else its last folder. Two runs of one experiment
    (`run_folder.experiment_of`) must not share a repository."""
    path = Path(save).expanduser().absolute()
    if checkpoint_dir is not None:
        root = Path(checkpoint_dir).expanduser().absolute()
        if path != root and path.is_relative_to(root):
            return "-".join(path.relative_to(root).parts)
    return path.name


def model_name(experiment: str, prefix: str | None = None, names: Mapping[str, str] | None = None) -> str:
    """The name of an experiment's repository, without its organisation.

    prefix: the site's NEOX_HUB_PREFIX. names: names by experiment, of the site's NEOX_HUB_NAMES, which are
    taken as they are. Raises HubError for a name that the Hub does not take; nothing is cut off, for two
    experiments could then have one name.
    """
    known = (names or {}).get(experiment)
    name = known
    if name is None:
        name = experiment.translate(_LETTERS)
        for long, short in _SHORTER.items():
            name = name.replace(long, short)
        name = f"{prefix}-{name}" if prefix else name
    problem = _problem(name)
    if problem is not None:
        made_of = "" if known is not None else f" (made of experiment {experiment!r})"
        raise HubError(
            f"{name!r}{made_of}: {problem}; give the experiment another name in the mapping file of NEOX_HUB_NAMES, "
            f"as {json.dumps({experiment: 'a-name'})}"
        )
    return name


def repository_id(organisation: str, name: str) -> str:
    """ORGANISATION/NAME. Raises HubError for what the Hub does not take."""
    return checked_id(f"{organisation}/{name}", "the repository")


def checked_id(repository: str, what: str) -> str:
    """`repository`, if it is ORGANISATION/NAME as the Hub takes it; what: what an error calls it. Raises
    HubError."""
    organisation, slash, name = repository.partition("/")
    if not slash or "/" in name:
        raise HubError(f"{what}: {repository!r} is not ORGANISATION/NAME")
    for part in (organisation, name):
        problem = _problem(part)
        if problem is not None:
            raise HubError(f"{what}: {repository!r}: {problem}")
    return repository


def neox_repository(repository: str) -> str:
    """The repository of the checkpoints in GPT-NeoX's format beside that of a model. Raises HubError where
    its name is too long."""
    organisation, _, name = repository.partition("/")
    return checked_id(f"{organisation}/neox-ckpt-{name}", f"the repository of checkpoints beside {repository}")


def read_names(file: str | Path | None) -> dict[str, str]:
    """The mapping file of NEOX_HUB_NAMES: a JSON object, the repository's name by experiment; {} for None.

    Raises HubError for another content.
    """
    if file is None:
        return {}
    try:
        names = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise HubError(f"{file} (NEOX_HUB_NAMES): cannot be read ({problem})") from None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise HubError(f"{file} (NEOX_HUB_NAMES): holds no object of names by experiment")
    by_name: dict[str, str] = {}
    for experiment, name in names.items():
        if name in by_name:
            raise HubError(f"{file} (NEOX_HUB_NAMES): {by_name[name]!r} and {experiment!r} are both {name!r}")
        by_name[name] = experiment
    return names


def _problem(name: str) -> str | None:
    """Why the Hub does not take a name; None if it does."""
    if len(name) > LONGEST:
        return f"has {len(name)} characters, the Hub takes {LONGEST}"
    if "--" in name or ".." in name:
        return "holds '--' or '..', which the Hub does not take"
    if name.endswith(".git"):
        return "ends with '.git', which the Hub does not take"
    if not _PLAIN.fullmatch(name):
        return "the Hub takes a-z, A-Z, 0-9, '_', '-' and '.', the last two not at an end"
    return None
