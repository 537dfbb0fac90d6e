"""`ParamSpec` describes a parameter (name, full shape, sharding, initialisation); `allocate` creates a rank's
part of it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.mpu.groups import ParallelGroups

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})
"""torch's dtypes, by the values of `args.params_dtype`."""


@dataclass(frozen=True)
class ParamSpec:
    """Describes one parameter of one layer.

    shape: of the full parameter, over all tensor ranks.
    axis: the dimension sharded over tensor ranks; None if every rank holds a copy.
    blocks: sizes along `axis`, each sharded over the ranks separately ([q, k, v] of GQA, [up, gate] of gated
        MLPs).
    init: how values are initialised: a number (the value of all elements) or a name:
        "embedding" and "input": by the key `init_method`; "output": by `output_layer_init_method`;
        "ones", "zeros", "normal" (deviation `init_method_std`), "xavier_normal";
        "kaiming_uniform": uniform within 1 / sqrt(columns); "gaussian_over_rank": normal, deviation 1 / rows;
        for Mamba "log_of_column": log of the column's number, from 1; "log_of_uniform": log of uniform
        numbers
        from 1 to 16; "time_step": its softplus is log-uniform from 0.001 to 0.1.
    sum_over_tensor: each tensor rank's file holds one summand; the effective value is the sum over ranks.
    weight_decay: whether weight decay applies; False for norms, biases, attention sinks, and Mamba's A_log, D
        and dt_bias.
    shared: all blocks use the same parameter; each block's file holds a copy.
    tied: the last pipeline stage uses this parameter too, in the output layer or in multi-token prediction.
    projections: rows of each fused projection, in order; the pattern repeats along the rows. Empty: not
        fused.
    head_rows: rows of each matrix of an attention head, in order; the pattern repeats along the rows. Empty:
        they are not of heads.
    experts: number of experts stacked along the rows, with equally many rows each; expert parallelism shards
        them.
    transposed: its matrices are stored as `[in, out]` instead of `[out, in]`.
    trained: False if gradients never change it; it is then fp32 in any precision.
    precise: trained in fp32 although other weights are 16-bit, if the engine supports it.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    blocks: tuple[int, ...] = ()
    init: str | float = "zeros"
    sum_over_tensor: bool = False
    weight_decay: bool = False
    shared: bool = False
    tied: bool = False
    projections: tuple[int, ...] = ()
    head_rows: tuple[int, ...] = ()
    experts: int | None = None
    transposed: bool = False
    trained: bool = True
    precise: bool = False

    def local_shape(self, tensor_size: int) -> tuple[int, ...]:
        """Returns the shape of one tensor rank's part. tensor_size: number of tensor ranks."""
        if self.axis is None:
            return self.shape
        return tuple(n // tensor_size if i == self.axis else n for i, n in enumerate(self.shape))

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of the parameter, or of one expert's part if experts are stacked in it."""
        return (self.shape[0] // (self.experts or 1), *self.shape[1:])

    def expert_rows(self, groups: ParallelGroups) -> tuple[int, int]:
        """Returns (first row, number of rows) of this rank's experts within its tensor shard.

        Without experts or expert parallelism these are all rows.
        """
        rows = self.local_shape(groups.size("tensor"))[0]
        if self.experts is None:
            return 0, rows
        rows //= groups.size("expert")
        return groups.rank("expert") * rows, rows

    def stages(self, groups: ParallelGroups) -> dist.ProcessGroup | None:
        """Returns the group of pipeline stages that each hold a copy of this parameter and sum its gradients.

        Returns None if only one stage holds it.
        """
        return groups.embedding if self.tied else groups.group("pipe") if self.shared else None

    def is_first_copy(self, groups: ParallelGroups) -> bool:
        """Whether this pipeline stage holds the first copy of a parameter that stages share, or its only
        copy."""
        return groups.is_first_stage or self.stages(groups) is None


def share_out(number: int, ranks: int) -> tuple[int, int]:
    """Distributes `number` key-value heads (or groups of Mamba 2) over tensor ranks.

    Returns (heads per tensor rank, ranks that share each head); one of the two is 1. Example: 8 heads on 4
    ranks give (2, 1), 2 heads on 4 ranks give (1, 2). Ranks that share a head hold equal slices of its
    parameters and gather the full head for each token (`gather_from_sharers`), so no parameter is stored
    twice.
    """
    return max(1, number // ranks), max(1, ranks // number)


def with_prefix(name: str, specs: Iterable[ParamSpec]) -> tuple[ParamSpec, ...]:
    """Returns the specs with `name.` before their names, as parameters of a submodule `name`."""
    return tuple(replace(spec, name=f"{name}.{spec.name}") for spec in specs)


def allocate(module: nn.Module, specs: Iterable[ParamSpec], groups: ParallelGroups, *optional: str) -> None:
    """Registers this rank's part of each parameter on a module, in fp32. Example: `qkv.weight` becomes
    `module.weight`.

    It only allocates memory, on the device of `groups` (none on the meta device). Values come from
    `model.init` or a checkpoint, and are the same for any layout.

    optional: names of attributes that are set to None if no parameter has that name.
    """
    for spec in specs:
        shape = (spec.expert_rows(groups)[1], *spec.local_shape(groups.size("tensor"))[1:])
        local = torch.empty(shape, device=groups.device, dtype=torch.float32)
        param = nn.Parameter(local, spec.trained)
        mark(param, not spec.trained, spec.precise)
        module.register_parameter(spec.name.rpartition(".")[2], param)
    for name in optional:
        setattr(module, name, module._parameters.get(name))


def mark(param: Tensor, never_trained: bool, precise: bool) -> None:
    """Records on a parameter whether it is never trained, and whether it is kept in fp32
    (`ParamSpec.trained`, `precise`)."""
    param.never_trained, param.precise = never_trained, precise  # type: ignore[attr-defined]


def is_never_trained(param: Tensor) -> bool:
    """Whether gradients never change this parameter (`ParamSpec.trained` is False)."""
    return getattr(param, "never_trained", False)


def is_precise(param: Tensor) -> bool:
    """Whether this parameter is trained in fp32 beside 16-bit weights (`ParamSpec.precise`)."""
    return getattr(param, "precise", False)


def shard(full: Tensor, spec: ParamSpec, rank: int, size: int) -> Tensor:
    """Returns the part of a full parameter that tensor rank `rank` of `size` holds (a view where
    possible)."""
    if spec.axis is None or size == 1:
        return full
    parts = [block.chunk(size, spec.axis)[rank] for block in full.split(spec.blocks, spec.axis)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, spec.axis)


def shard_rows(rows: Tensor, first_row: int, spec: ParamSpec, rank: int, size: int) -> Iterator[tuple[int, Tensor]]:
    """Yields those rows of a slice of a full parameter that tensor rank `rank` of `size` holds.

    rows: the full parameter's rows from `first_row` on.
    Yields pairs: an index in the rank's part, and the consecutive rows that belong there (a view where
    possible).
    """
    if spec.axis != 0 or size == 1:
        yield first_row, shard(rows, spec, rank, size)
        return
    block_start, local_start = 0, 0
    for block in spec.blocks:
        count = block // size
        start = block_start + rank * count
        low, high = max(start, first_row), min(start + count, first_row + len(rows))
        if low < high:
            yield local_start + low - start, rows[low - first_row : high - first_row]
        block_start, local_start = block_start + block, local_start + count


def unshard(shards: Sequence[Tensor], spec: ParamSpec) -> Tensor:
    """Returns the full parameter. shards: the parts of all tensor ranks, in rank order."""
    if spec.axis is None or len(shards) == 1:
        return shards[0]
    sizes = [n // len(shards) for n in spec.blocks]
    blocks = zip(*(part.split(sizes, spec.axis) for part in shards), strict=True)
    return torch.cat([piece for block in blocks for piece in block], spec.axis)
