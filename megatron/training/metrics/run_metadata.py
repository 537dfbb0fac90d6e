"""The metadata that a run logs at its start: the commit of its code and the size of the model."""

import subprocess
from pathlib import Path

import torch

from megatron.distributed import on_rank_zero
from megatron.model import Stage, named_params
from megatron.model.init import parameters_with_specs
from megatron.model.quantized import quantized_linears
from megatron.mpu import ParallelGroups, ParamSpec
from megatron.neox_arguments import ModelArgs, NeoXArgs
from megatron.training.metrics.metric_probes import sum_over_ranks

PACKAGE = Path(__file__).resolve().parents[2]


def git_hash(args: NeoXArgs, package: Path = PACKAGE) -> str | None:
    """Returns `git_hash`, else the commit of the package's checkout; None without a checkout or git."""
    if args.git_hash is not None:
        return args.git_hash
    try:
        command = ["git", "-C", str(package), "rev-parse"]
        top, commit = (
            subprocess.run([*command, *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in (["--show-toplevel"], ["--short", "HEAD"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # Installed into an environment that lies within another project's checkout, the commit would be that
    # project's.
    return commit if Path(top).resolve() == package.parent else None


def parameter_counts(args: ModelArgs, groups: ParallelGroups, stage: Stage) -> tuple[int, int]:
    """Returns (all, trainable) parameters of the model, shared ones once; all ranks call it together, each
    with its stage."""
    counts = torch.zeros(2, dtype=torch.int64, device=groups.device)
    if groups.rank("tensor") == 0 and groups.rank("data") == 0:
        for spec, trained in _specs(args, stage):
            if spec.is_first_copy(groups):
                size = torch.Size(spec.shape).numel()
                counts += torch.tensor([size, size * trained], device=groups.device)
    total, trainable = sum_over_ranks(counts, groups).tolist()
    return total, trainable


def local_sizes(args: ModelArgs, groups: ParallelGroups, stage: Stage) -> tuple[int, int]:
    """Returns (all, trainable) elements of this rank's part of its stage, before ZeRO."""
    tensor, expert = groups.size("tensor"), groups.size("expert")
    sizes = [
        (torch.Size(spec.local_shape(tensor)).numel() // (1 if spec.experts is None else expert), trained)
        for spec, trained in _specs(args, stage)
    ]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _specs(args: ModelArgs, stage: Stage) -> list[tuple[ParamSpec, bool]]:
    """Returns the weights of a stage, packed ones too, and whether they are trained."""
    specs = named_params(args)
    packed = [(specs[layer, name], False) for layer, name, *_ in quantized_linears(stage)]
    return [*((spec, param.requires_grad) for _, _, param, spec in parameters_with_specs(stage, args)), *packed]


def run_metadata(args: NeoXArgs, groups: ParallelGroups, stage: Stage) -> dict[str, str | int | float | None]:
    """Returns commit and number of parameters, for the log, the summary and the trackers' configuration; all
    ranks call it together."""
    total, trainable = parameter_counts(args, groups, stage)
    return {
        "git_hash": on_rank_zero(groups, lambda: git_hash(args)),
        "total_params": total,
        "trainable_params": trainable,
        "trainable_share": trainable / total,
    }


def metadata_line(metadata: dict[str, str | int | float | None]) -> str:
    """Returns one line of the start log, which begins as upstream's."""
    line = f" > total params: {metadata['total_params']:,} | trainable: {metadata['trainable_params']:,}"
    return f"{line} ({metadata['trainable_share']:.2%}) | git hash: {metadata['git_hash'] or 'unknown'}"
