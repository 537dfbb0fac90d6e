"""Writes weights in HuggingFace's format: one safetensors file, or several with an index.

One tensor is in memory at a time.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpointing.huggingface.folder import DTYPE_NAMES, INDEX, WEIGHTS, cast_to
from megatron.checkpointing.tensor_files import BackgroundCalls, write_bytes
from megatron.data.files import sync

SHARD_BYTES = 5 * 10**9


def weight_bytes(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype) -> int:
    return sum(map(math.prod, shapes)) * dtype.itemsize


Dtypes = torch.dtype | Mapping[str, torch.dtype]
"""One dtype for all tensors, or a dtype for each tensor, by name."""


def _dtype_of(dtypes: Dtypes, name: str) -> torch.dtype:
    return dtypes if isinstance(dtypes, torch.dtype) else dtypes[name]


@dataclass(frozen=True)
class _PlannedFile:
    """A safetensors file that is yet to be written.

    header: the first bytes of the file. begins: byte offset of each tensor in the file, by name. size: of the
        file, in bytes.
    """

    name: str
    header: bytes
    begins: Mapping[str, int]
    size: int


def _plan(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Dtypes, limit: int, single_name: str = WEIGHTS
) -> list[_PlannedFile]:
    """Distributes tensors, in the order of `shapes`, over files of at most `limit` bytes."""
    files: list[dict[str, tuple[int, int]]] = [{}]
    position = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * _dtype_of(dtypes, name).itemsize
        if files[-1] and position + size > limit:
            files.append({})
            position = 0
        files[-1][name] = (position, position + size)
        position += size
    planned = []
    for i, tensors in enumerate(files):
        fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, offsets in tensors.items():
            dtype = DTYPE_NAMES[_dtype_of(dtypes, name)]
            fields[name] = {"dtype": dtype, "shape": list(shapes[name]), "data_offsets": list(offsets)}
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        file = single_name if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        begins = {name: len(header) + begin for name, (begin, _) in tensors.items()}
        size = len(header) + max((end for _, end in tensors.values()), default=0)
        planned.append(_PlannedFile(file, header, begins, size))
    return planned


def _index(plan: Sequence[_PlannedFile]) -> bytes:
    """Returns the content of model.safetensors.index.json, which says in which file each tensor is."""
    index = {
        "metadata": {"total_size": sum(file.size - len(file.header) for file in plan)},
        "weight_map": {name: file.name for file in plan for name in file.begins},
    }
    return (json.dumps(index, indent=2) + "\n").encode()


def planned_sizes(shapes: Mapping[str, tuple[int, ...]], dtypes: Dtypes, limit: int = SHARD_BYTES) -> dict[str, int]:
    """Returns {file name: size in bytes} of all files that `write_weights` would write."""
    plan = _plan(shapes, dtypes, limit)
    index = {INDEX: len(_index(plan))} if len(plan) > 1 else {}
    return {file.name: file.size for file in plan} | index


def write_weights(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Dtypes,
    tensors: Iterable[tuple[str, Tensor]],
    limit: int = SHARD_BYTES,
    single_name: str = WEIGHTS,
    to_disk: Callable[[Path], None] = sync,
) -> None:
    """Write model.safetensors into folder `path`, or several files of at most `limit` bytes and their index.

    A tensor larger than `limit` has its own file.
    shapes, dtypes: of all tensors, by name.
    tensors: yields (name, tensor), in any order; one is written while the next is computed.
    single_name: the file's name if there is only one.
    to_disk: called with the path of each complete file, to sync it now or later (`BackgroundSync`).
    Raises CheckpointError."""
    plan = _plan(shapes, dtypes, limit, single_name)
    file_of = {name: file for file in plan for name in file.begins}

    def write(file: _PlannedFile, name: str, data: memoryview) -> None:
        opened[file.name].seek(file.begins[name])
        opened[file.name].write(data)
        missing[file.name].remove(name)
        if not missing[file.name]:
            opened[file.name].close()
            to_disk(path / file.name)

    with ExitStack() as stack:
        opened = {file.name: stack.enter_context((path / file.name).open("wb")) for file in plan}
        for planned in plan:
            opened[planned.name].write(planned.header)
        missing = {file.name: set(file.begins) for file in plan}
        with BackgroundCalls() as writer:
            for name, tensor in tensors:
                assert tuple(tensor.shape) == tuple(shapes[name]), name
                value = cast_to(tensor, _dtype_of(dtypes, name), name).contiguous().view(-1)
                data = value.view(torch.uint8).numpy().data
                writer(partial(write, file_of[name], name, data))
                del tensor, value, data
        assert not any(missing.values()), f"not given: {missing}"
    if len(plan) > 1:
        write_bytes(_index(plan), path / INDEX)
