"""The layout of a checkpoint on disk: names of directories and files, as GPT-NeoX writes them, and finding
them.

    <save>/latest                              the name of the newest checkpoint, such as global_step100
    <save>/global_step100/
        layer_02-model_00-model_states.pt      weights of layer 2 of tensor rank 0
        optim_layer_02-model_00.pt             optimizer state of these weights
        mp_rank_00_model_states.pt             counters, schedule, random states of model-parallel rank 0
        manifest.json                          what the checkpoint is, and a checksum of each file
        configs/, tokenizer/, huggingface/     files of the run and of the model that was imported

Directories whose names begin with a dot are unfinished or set aside. `manifest.json` is named in
`manifest.py`, `configs/` in `publish.py`, what lies in `huggingface/` in `huggingface/companion_files.py`.
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
    """The name of the checkpoint directory of an iteration: `global_step100`."""
    return f"global_step{iteration}"


def is_tag(name: str) -> bool:
    """Whether a directory of this name is a checkpoint; some converters write the number alone."""
    return re.fullmatch(r"(global_step)?\d+", name) is not None


def aside_tag(tag: str) -> str:
    """The name of a checkpoint's directory while another one of the same step takes its place."""
    return f".old_{tag}"


def layer_file(layer: int, tensor_rank: int) -> str:
    """The file of the weights of one layer (by its NeoX index) of one tensor rank."""
    return f"layer_{layer:02d}-model_{tensor_rank:02d}-model_states.pt"


def optimizer_file(layer: int, tensor_rank: int) -> str:
    """The file of the optimizer state of one layer of one tensor rank, which any parallel layout can read.

    GPT-NeoX's optimizer state is in `zero_file`s, which only the layout that wrote them can read.
    """
    return f"optim_layer_{layer:02d}-model_{tensor_rank:02d}.pt"


def model_file(model_rank: int) -> str:
    """The file of one model-parallel rank: counters, schedule, random states, and without a pipeline the
    weights.

    model_rank: pipe rank * tensor size + tensor rank.
    """
    return f"mp_rank_{model_rank:02d}_model_states.pt"


def zero_file(data_rank: int, model_rank: int, bf16: bool) -> str:
    """The file of DeepSpeed's ZeRO optimizer state of one data-parallel and model-parallel rank."""
    prefix = "bf16_" if bf16 else ""
    return f"{prefix}zero_pp_rank_{data_rank}_mp_rank_{model_rank:02d}_optim_states.pt"


def layer_files(path: str | Path) -> dict[tuple[int, int], Path]:
    """All files of weights in a checkpoint directory, by (layer, tensor rank)."""
    matches = ((_LAYER.fullmatch(p.name), p) for p in Path(path).iterdir())
    return {(int(m[1]), int(m[2])): p for m, p in matches if m}


def optimizer_files(path: str | Path) -> dict[tuple[int, int], Path]:
    """All files of optimizer state in a checkpoint directory, by (layer, tensor rank); {} for GPT-NeoX's."""
    matches = ((_OPTIMIZER.fullmatch(p.name), p) for p in Path(path).iterdir())
    return {(int(m[1]), int(m[2])): p for m, p in matches if m}


def model_files(path: str | Path) -> dict[int, Path]:
    """All mp_rank files of a checkpoint directory, by model-parallel rank."""
    matches = ((_MODEL.fullmatch(p.name), p) for p in Path(path).iterdir())
    return {int(m[1]): p for m, p in matches if m}


def is_optimizer_file(name: str) -> bool:
    """Whether a file of this name holds optimizer state and nothing else."""
    return re.match(r"optim_|(bf16_)?zero_", name) is not None


def list_checkpoints(save: str | Path) -> list[Path]:
    """The directories of finished checkpoints in `save`, in the order of their steps; [] when it does not
    exist."""
    save = Path(save)
    if not save.is_dir():
        return []
    by_step = [(int(m[1]), p) for p in save.iterdir() if (m := _TAG.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(by_step)]


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
    """The checkpoint directory of a tag; converters write tags such as "0" for "global_step0"."""
    tags = [tag, step_tag(int(tag))] if tag.isdigit() else [tag]
    if match := _TAG.fullmatch(tag):
        tags.append(match[1])
    # A crash between the two renames of `publish` leaves the earlier checkpoint of this step set aside, still
    # whole.
    candidates = [*tags, *(aside_tag(t) for t in tags)]
    return next((save / t for t in candidates if (save / t).is_dir()), None)


def find_checkpoint(save: str | Path, iteration: int | None = None) -> Path:
    """The checkpoint directory of `iteration` in `save`; None: of the one that `latest` names.

    Raises CheckpointError that says which checkpoints there are instead.
    """
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
            raise CheckpointError(f"{save}: is one checkpoint; set `load` to the folder around it, and `iteration`")
        raise CheckpointError(
            f"{save}: no file `latest`; {holdings}; set `iteration`" if steps else f"{save}: {holdings}"
        )
    directory = _directory(save, tag)
    if directory is None:
        raise CheckpointError(f"{save / LATEST}: names {tag}, which is not there; {holdings}; set `iteration`")
    return directory
