"""The layout of a checkpoint on disk: finds and names directories and files as GPT-NeoX does.

    <save>/latest                              the name of the newest checkpoint, such as global_step100
    <save>/global_step100/
        layer_02-model_00-model_states.pt      weights of layer 2 of tensor rank 0
        optim_layer_02-model_00.pt             optimizer state of these weights
        mp_rank_00_model_states.pt             counters, schedule, random states of model-parallel rank 0
        manifest.json                          what the checkpoint is, and a checksum of each file
        configs/, tokenizer/, huggingface/     files of the run and of the model that was imported

Directories whose names begin with a dot are unfinished, or backups of replaced checkpoints. `manifest.json`
is named in `manifest.py`, `configs/` in `publish.py`, the files of `huggingface/` in
`huggingface/companion_files.py`.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from megatron.checkpointing.errors import CheckpointError
from megatron.neox_arguments.values.integers import parse_integer

LATEST = "latest"
LOGITS = "checkpoint_validation_logits"  # in mp_rank files
_TAG = re.compile(r"global_step(\d+)")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_OPTIMIZER = re.compile(r"optim_layer_(\d+)-model_(\d+)\.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")


def step_tag(iteration: int) -> str:
    """Returns the name of the checkpoint directory of an iteration: `global_step100`."""
    return f"global_step{iteration}"


def is_tag(name: str) -> bool:
    """Whether a directory of this name is a checkpoint: `global_step100`, or `100` of some converters."""
    return re.fullmatch(r"(global_step)?\d+", name) is not None


def backup_tag(tag: str) -> str:
    """Returns the name that a checkpoint's directory gets while a new one of the same step replaces it."""
    return f".old_{tag}"


def layer_file(layer: int, tensor_rank: int) -> str:
    """Returns the name of the file with one tensor rank's weights of a layer. layer: its NeoX index."""
    return f"layer_{layer:02d}-model_{tensor_rank:02d}-model_states.pt"


def optimizer_file(layer: int, tensor_rank: int) -> str:
    """Returns the name of the file with one tensor rank's optimizer state of a layer.

    Any layout can read these files. GPT-NeoX's optimizer state is in `zero_file`s, which only the layout that
    wrote them can read."""
    return f"optim_layer_{layer:02d}-model_{tensor_rank:02d}.pt"


def model_file(model_rank: int) -> str:
    """Returns the name of the file with a model-parallel rank's counters, schedule and random states.

    In runs without a pipeline this file also holds the weights. model_rank: pipe rank * tensor size + tensor
    rank."""
    return f"mp_rank_{model_rank:02d}_model_states.pt"


def zero_file(data_rank: int, model_rank: int, bf16: bool) -> str:
    """Returns the name of DeepSpeed's file with one data- and model-parallel rank's ZeRO optimizer state."""
    prefix = "bf16_" if bf16 else ""
    return f"{prefix}zero_pp_rank_{data_rank}_mp_rank_{model_rank:02d}_optim_states.pt"


def layer_files(path: str | Path, names: Iterable[str] | None = None) -> dict[tuple[int, int], Path]:
    """Returns all layer files (weights) in a checkpoint directory, by (NeoX layer index, tensor rank).

    names: of the checkpoint's files; None: of those that are there."""
    paths = Path(path).iterdir() if names is None else (Path(path) / name for name in names)
    matches = ((_LAYER.fullmatch(p.name), p) for p in paths)
    return {(int(m[1]), int(m[2])): p for m, p in matches if m}


def optimizer_files(path: str | Path, names: Iterable[str] | None = None) -> dict[tuple[int, int], Path]:
    """Returns all files of optimizer state in a checkpoint directory, by (NeoX layer index, tensor rank).

    Returns {} for a checkpoint that GPT-NeoX wrote, because its files have other names. names: of the
    checkpoint's files; None: of those that are there."""
    paths = Path(path).iterdir() if names is None else (Path(path) / name for name in names)
    matches = ((_OPTIMIZER.fullmatch(p.name), p) for p in paths)
    return {(int(m[1]), int(m[2])): p for m, p in matches if m}


def model_files(path: str | Path) -> dict[int, Path]:
    """Returns all mp_rank files of a checkpoint directory, by model-parallel rank."""
    matches = ((_MODEL.fullmatch(p.name), p) for p in Path(path).iterdir())
    return {int(m[1]): p for m, p in matches if m}


def layer_of(name: str) -> int | None:
    """Returns the layer whose weights or optimizer state a file of this name holds; None for other files."""
    match = _LAYER.fullmatch(name) or _OPTIMIZER.fullmatch(name)
    return None if match is None else int(match[1])


def is_optimizer_file(name: str) -> bool:
    """Whether a file of this name holds optimizer state and nothing else."""
    return re.match(r"optim_|(bf16_)?zero_", name) is not None


def list_checkpoints(save: str | Path) -> list[Path]:
    """Returns the directories of complete checkpoints in `save`, by step; [] if there is no `save`."""
    save = Path(save)
    if not save.is_dir():
        return []
    step_paths = [(int(m[1]), p) for p in save.iterdir() if (m := _TAG.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(step_paths)]


def step_of(path: str | Path) -> int:
    """Returns the step of a checkpoint directory, from its name.

    Raises CheckpointError if the name is not like global_step100."""
    match = re.fullmatch(r"(?:\.old_)?(?:global_step)?(\d+)", Path(path).name)
    if match is None:
        raise CheckpointError(f"{path}: not a checkpoint directory; its name should be like {step_tag(100)}")
    return int(match[1])


def read_latest(save: str | Path) -> str | None:
    """Returns the checkpoint name in the file `latest`, such as global_step100; None if there is no such
    file.

    Raises CheckpointError if the file does not hold the name of a checkpoint."""
    file = Path(save) / LATEST
    if not file.is_file():
        return None
    tag = file.read_text(encoding="utf-8", errors="replace").strip()
    if not tag or "/" in tag or tag in (".", ".."):
        raise CheckpointError(f"{file}: holds {tag!r}, not the name of a checkpoint; set `iteration` to choose one")
    return tag


def _directory(save: Path, tag: str) -> Path | None:
    """Returns the directory of checkpoint `tag` in `save`, or its backup; None if there is none.

    Some converters write "0" for "global_step0", so both names are tried."""
    step = parse_integer(tag)
    tags = [tag] if step is None else [tag, step_tag(step)]
    if match := _TAG.fullmatch(tag):
        tags.append(match[1])
    # After a crash between the two renames of `publish`, only the (complete) backup of this step exists.
    candidates = [*tags, *(backup_tag(t) for t in tags)]
    return next((save / t for t in candidates if (save / t).is_dir()), None)


def find_checkpoint(save: str | Path, iteration: int | None = None) -> Path:
    """Returns the directory of the checkpoint of `iteration` in `save`; None: the one that `latest` names.

    Raises CheckpointError that lists the existing checkpoints."""
    save = Path(save)
    if not save.is_dir():
        raise CheckpointError(f"{save}: no such directory; set `load` to a folder that holds checkpoints")
    steps = [str(step_of(p)) for p in list_checkpoints(save)]
    holdings = f"it holds steps {', '.join(steps)}" if steps else "it holds no checkpoint"
    if iteration is not None:
        directory = _directory(save, step_tag(iteration))
        if directory is None:
            raise CheckpointError(f"{save}: no checkpoint of iteration {iteration}; {holdings}")
        return directory
    tag = read_latest(save)
    if tag is None:
        if layer_files(save) or model_files(save):
            raise CheckpointError(
                f"{save}: is itself a checkpoint; set `load` to its parent folder, and `iteration` to its step"
            )
        raise CheckpointError(
            f"{save}: no file `latest`; {holdings}; set `iteration`" if steps else f"{save}: {holdings}"
        )
    directory = _directory(save, tag)
    if directory is None:
        raise CheckpointError(f"{save / LATEST}: names {tag}, which does not exist; {holdings}; set `iteration`")
    return directory
