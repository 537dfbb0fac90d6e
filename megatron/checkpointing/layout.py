"""Names inside a checkpoint directory, as GPT-NeoX writes them, and finding a checkpoint in it.

<save>/latest holds a tag; <save>/<tag>/ holds the files. Names that begin with a dot are unfinished or set aside.
"""

import re
from pathlib import Path

from megatron.checkpointing.errors import CheckpointError

LATEST = "latest"
LOGITS = "checkpoint_validation_logits"  # in mp_rank files
_TAG = re.compile(r"global_step(\d+)")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_OPTIMIZER = re.compile(r"optim_layer_(\d+)-model_(\d+)\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")


def step_tag(iteration: int) -> str:
    return f"global_step{iteration}"


def is_tag(name: str) -> bool:
    """Whether a folder of this name is a checkpoint; some converters write the number alone."""
    return re.fullmatch(r"(global_step)?\d+", name) is not None


def aside_tag(tag: str) -> str:
    """Where a checkpoint stands while another of the same step takes its place."""
    return f".old_{tag}"


def layer_file(layer: int, tensor_rank: int) -> str:
    return f"layer_{layer:02d}-model_{tensor_rank:02d}-model_states.pt"


def optimizer_file(layer: int, tensor_rank: int) -> str:
    """Ours; GPT-NeoX has `zero_file`s, which only the layout that wrote them can read."""
    return f"optim_layer_{layer:02d}-model_{tensor_rank:02d}.pt"


def model_file(model_rank: int) -> str:
    """model_rank: tensor rank without a pipeline, pipe rank x tensor size + tensor rank with one."""
    return f"mp_rank_{model_rank:02d}_model_states.pt"


def zero_file(data_rank: int, model_rank: int, bf16: bool) -> str:
    prefix = "bf16_" if bf16 else ""
    return f"{prefix}zero_pp_rank_{data_rank}_mp_rank_{model_rank:02d}_optim_states.pt"


def layer_files(path: str | Path) -> dict[tuple[int, int], Path]:
    """(layer, tensor rank) -> file, of all per-layer files."""
    found = ((_LAYER.fullmatch(p.name), p) for p in Path(path).iterdir())
    return {(int(m[1]), int(m[2])): p for m, p in found if m}


def optimizer_files(path: str | Path) -> dict[tuple[int, int], Path]:
    """(layer, tensor rank) -> file of optimizer state; {} for GPT-NeoX's checkpoints."""
    found = ((_OPTIMIZER.fullmatch(p.name), p) for p in Path(path).iterdir())
    return {(int(m[1]), int(m[2])): p for m, p in found if m}


def model_files(path: str | Path) -> dict[int, Path]:
    """model rank -> mp_rank file."""
    found = ((_MODEL.fullmatch(p.name), p) for p in Path(path).iterdir())
    return {int(m[1]): p for m, p in found if m}


def is_optimizer_file(name: str) -> bool:
    """Whether a file holds the optimizer's state alone."""
    return re.match(r"optim_|(bf16_)?zero_", name) is not None


def list_checkpoints(save: str | Path) -> list[Path]:
    """Finished checkpoints, by step (2 before 10); empty when `save` does not exist."""
    save = Path(save)
    if not save.is_dir():
        return []
    found = [(int(m[1]), p) for p in save.iterdir() if (m := _TAG.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found)]


def step_of(path: str | Path) -> int:
    """The step of a checkpoint directory, from its name."""
    match = re.fullmatch(r"(?:\.old_)?(?:global_step)?(\d+)", Path(path).name)
    if match is None:
        raise CheckpointError(f"{path}: not a checkpoint directory; its name should be like {step_tag(100)}")
    return int(match[1])


def read_latest(save: str | Path) -> str | None:
    """The tag in `latest`; None when there is no such file."""
    file = Path(save) / LATEST
    if not file.is_file():
        return None
    tag = file.read_text(encoding="utf-8", errors="replace").strip()
    if not tag or "/" in tag or tag in (".", ".."):
        raise CheckpointError(f"{file}: holds {tag!r}, not the name of a checkpoint; set `iteration`")
    return tag


def _directory(save: Path, tag: str) -> Path | None:
    """The directory of a tag; converters write tags such as "0" beside "global_step0"."""
    tags = [tag, step_tag(int(tag))] if tag.isdigit() else [tag]
    if match := _TAG.fullmatch(tag):
        tags.append(match[1])
    # A crash between the two renames of `publish` leaves the earlier checkpoint of this step set aside, still whole.
    candidates = [*tags, *(aside_tag(t) for t in tags)]
    return next((save / t for t in candidates if (save / t).is_dir()), None)


def find_checkpoint(save: str | Path, iteration: int | None = None) -> Path:
    """The directory of `iteration`, or of the one that `latest` names.

    Raises CheckpointError that says what is there instead.
    """
    save = Path(save)
    if not save.is_dir():
        raise CheckpointError(f"{save}: no such directory; set `load` to a folder that holds checkpoints")
    steps = [str(step_of(p)) for p in list_checkpoints(save)]
    there = f"it holds steps {', '.join(steps)}" if steps else "it holds no checkpoint"
    if iteration is not None:
        found = _directory(save, step_tag(iteration))
        if found is None:
            raise CheckpointError(f"{save}: no checkpoint of iteration {iteration}; {there}")
        return found
    tag = read_latest(save)
    if tag is None:
        if layer_files(save) or model_files(save):
            raise CheckpointError(f"{save}: is one checkpoint; set `load` to the folder around it, and `iteration`")
        raise CheckpointError(f"{save}: no file `latest`; {there}; set `iteration`" if steps else f"{save}: {there}")
    found = _directory(save, tag)
    if found is None:
        raise CheckpointError(f"{save / LATEST}: names {tag}, which is not there; {there}; set `iteration`")
    return found
