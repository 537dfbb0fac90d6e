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
    """Returns the key `git_hash` if set, else the short commit hash of the checkout that holds the package.

    None if the package is not in a git checkout, or git is not installed.
    """
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
    # If the package is installed in an environment inside another project's checkout, this is not its commit.
    return commit if Path(top).resolve() == package.parent else None


def parameter_counts(args: ModelArgs, groups: ParallelGroups, stage: Stage) -> tuple[int, int]:
    """Returns (number of all, number of trainable) parameters of the full model. Shared ones count once.

    All ranks call it together, each with its own stage.
    """
    counts = torch.zeros(2, dtype=torch.int64, device=groups.device)
    if groups.rank("tensor") == 0 and groups.rank("data_context") == 0:
        for spec, trained in _specs(args, stage):
            if spec.is_first_copy(groups):
                size = torch.Size(spec.shape).numel()
                counts += torch.tensor([size, size * trained], device=groups.device)
    total, trainable = sum_over_ranks(counts, groups).tolist()
    return total, trainable


def local_sizes(args: ModelArgs, groups: ParallelGroups, stage: Stage) -> tuple[int, int]:
    """Returns (number of all, number of trainable) weight elements of this rank's part of the stage.

    Tensor and expert parallelism are taken into account, ZeRO is not.
    """
    tensor, expert = groups.size("tensor"), groups.size("expert")
    sizes = [
        (torch.Size(spec.local_shape(tensor)).numel() // (1 if spec.experts is None else expert), trained)
        for spec, trained in _specs(args, stage)
    ]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _specs(args: ModelArgs, stage: Stage) -> list[tuple[ParamSpec, bool]]:
    """Returns (spec, whether it is trained) for each weight of a stage, 4-bit quantized weights included."""
    specs = named_params(args)
    packed = [(specs[layer, name], False) for layer, name, *_ in quantized_linears(stage)]
    return [*((spec, param.requires_grad) for _, _, param, spec in parameters_with_specs(stage, args)), *packed]


def run_metadata(args: NeoXArgs, groups: ParallelGroups, stage: Stage) -> dict[str, str | int | float | None]:
    """Returns git commit and parameter counts by name (`git_hash`, `total_params`, ...), for log, summary and
    trackers. All ranks call it together."""
    total, trainable = parameter_counts(args, groups, stage)
    return {
        "git_hash": on_rank_zero(groups, lambda: git_hash(args)),
        "total_params": total,
        "trainable_params": trainable,
        "trainable_share": trainable / total,
    }


def metadata_line(metadata: dict[str, str | int | float | None]) -> str:
    """Returns the log line with parameter counts and git hash, ` > total params: 1,234 | ...`, as
    GPT-NeoX's."""
    line = f" > total params: {metadata['total_params']:,} | trainable: {metadata['trainable_params']:,}"
    return f"{line} ({metadata['trainable_share']:.2%}) | git hash: {metadata['git_hash'] or 'unknown'}"
