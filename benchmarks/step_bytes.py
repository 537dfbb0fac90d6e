"""Memory traffic of an optimizer step in bytes per parameter: a bare loop, both engines at each ZeRO stage.

Every operation of a step is seen at dispatch and counted by its schema: the tensors it reads and those it
writes; views and allocations move nothing. What the same model's forward and backward read and write alone
is taken off, so that matrix products drop out. It is what a GPU would move if each operation were one kernel
that meets its operands in memory once. Of a collective what it sends is counted, not what it does with
memory. Counted on the CPU with gloo, in bf16; nothing is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.neox_arguments import NeoXArgs
from megatron.process import run_command
from megatron.process.command_parser import CommandParser

if TYPE_CHECKING:
    from megatron.data import Batch
    from megatron.mpu import ParallelGroups
    from megatron.objectives import Objective

ALLOCATE = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::set_", "aten::resize_")
# They do not read what they write to.
OVERWRITE = ("aten::copy_", "aten::_foreach_copy_", "aten::zero_", "aten::_foreach_zero_", "aten::fill_")
# The share of a collective's whole tensor that each of n ranks sends in a ring, times n / (n - 1).
SENT = {
    "c10d::allreduce_": 2,
    "c10d::allreduce_coalesced_": 2,
    "c10d::_allgather_base_": 1,
    "c10d::allgather_": 1,
    "c10d::allgather_into_tensor_coalesced_": 1,
    "c10d::_reduce_scatter_base_": 1,
    "c10d::reduce_scatter_": 1,
    "c10d::reduce_scatter_tensor_coalesced_": 1,
    "c10d::broadcast_": 1,
    "c10d::reduce_": 1,
}


class Traffic(TorchDispatchMode):
    """A context that counts the bytes that operations move and collectives send.

    moved: bytes read and written, by operation. sent: bytes that this rank sends, by collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._waiting = False

    def __enter__(self) -> Traffic:
        wait = dist.Work.wait

        def unseen(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
            # gloo copies what a reduce-scatter leaves out of its own buffers only here.
            self._waiting = True
            try:
                return wait(work, *args, **kwargs)
            finally:
                self._waiting = False

        self._patch = mock.patch.object(dist.Work, "wait", unseen)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        self._patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the tensors it is made of
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = func._schema.name
        if name in SENT:
            size = max(sum(map(_bytes, _tensors(leaf))) for leaf in (*args, output))
            ranks = next(dist.ProcessGroup.unbox(a).size() for a in args if isinstance(a, torch.ScriptObject))
            self.sent[name] += SENT[name] * size * (ranks - 1) // ranks
        elif not (name.startswith("c10d::") or self._waiting):
            self.moved[name] += moved_bytes(func._schema, args, kwargs, output)
        return output


def moved_bytes(schema: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Returns the bytes that one operation reads and writes; 0 for a view."""
    if schema.name.startswith(ALLOCATE):
        return 0
    if schema.name == "fsdp::all_gather_copy_in":  # (parts, whole, ..): copies them to their place in it
        return 2 * sum(map(_bytes, args[0]))
    if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
        return 0  # a view
    argument_values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    read: dict[int, int] = {}
    written = 0
    for argument in schema.arguments:
        tensors = _tensors(argument_values.get(argument.name))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if schema.name.startswith("aten::_fused_") and argument.name == "grads":
            is_written = argument_values.get("grad_scale") is not None  # they are kept divided
        if is_written:
            written += sum(map(_bytes, tensors))
        if not is_written or not (argument.name == "out" or schema.name in OVERWRITE):
            read |= {id(tensor): _bytes(tensor) for tensor in tensors}
    fresh = [value for value, r in zip(_results(schema, output), schema.returns, strict=True) if r.alias_info is None]
    return sum(read.values()) + written + sum(map(_bytes, _tensors(fresh)))


def _results(schema: Any, output: Any) -> list[Any]:
    return [] if not schema.returns else [output] if len(schema.returns) == 1 else list(output)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements in memory; an expanded dimension counts once."""
    return tensor.element_size() * torch.Size(
        size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ).numel()  # fmt: skip


# -- contestants ---------------------------------------------------------------------------------------------

BARE = "bare loop, fp32 master"
Step = Callable[[], Any]


class Row(NamedTuple):
    """The traffic of one rank, in bytes per parameter of the model.

    moved: read and written by a step of one micro-batch, without forward and backward. sent: sent by its
    collectives. *_more: added by a second micro-batch. most: bytes of the operations that move most.
    """

    name: str
    ranks: int
    moved: float
    moved_more: float | None
    sent: float
    sent_more: float | None
    most: dict[str, float]


def settings(options: argparse.Namespace, ranks: int, stage: int) -> NeoXArgs:
    """Returns the configuration of a small GPT-NeoX that trains in bf16. stage: ZeRO stage."""
    values: dict[str, Any] = {
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "num_attention_heads": 4,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "padded_vocab_size": 256,
        "pos_emb": "rotary",
        "no_weight_tying": True,
        "train_micro_batch_size_per_gpu": 1,
        "precision": "bfloat16",
        "zero_optimization": {"stage": stage},
        "distributed_backend": "gloo",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
    }
    return NeoXArgs.from_dict(values).for_world(ranks)


def with_micro_batches(args: NeoXArgs, ranks: int, count: int) -> NeoXArgs:
    """Returns the configuration with `count` micro-batches per step."""
    return args.replace(gradient_accumulation_steps=count, train_batch_size=count * ranks)


def contestants(options: argparse.Namespace, groups: ParallelGroups, batch: Batch) -> Iterator[tuple[str, int, Step]]:
    """Yields (name, micro-batches per step, training step) of each contestant, built one after another.

    DeepSpeed's ZeRO 3 is the last, because it replaces torch's linear layer for the whole process."""
    from benchmarks.train_throughput import bare_step
    from megatron.training.deepspeed.engine import DeepSpeedEngine
    from megatron.training.native.engine import NativeEngine
    from megatron.training.setup import build_engine

    ranks = groups.size("data")
    if ranks == 1:
        yield BARE, 1, bare_step(settings(options, 1, 0), groups, batch, torch.bfloat16)
    for name, kind in (("native", NativeEngine), ("DeepSpeed", DeepSpeedEngine)):
        single_rank = kind is NativeEngine and ranks == 1
        if single_rank:  # as `auto` has it on a GPU
            for dtype, suffix in (("fp32", ""), ("bf16", ", optimizer_state_dtype: bf16")):
                args = settings(options, 1, 0).replace(fused_update=True, optimizer_state_dtype=dtype)
                engine = build_engine(args, groups, engine=kind)
                yield f"native, one data rank, fused_update{suffix}", 1, partial(engine.train_step, [batch], args.lr)
                engine.close()
        for stage in (0,) if single_rank else (0, 1, 2, 3):
            for count in (1, 2):
                args = with_micro_batches(settings(options, ranks, stage), ranks, count)
                engine = build_engine(args, groups, engine=kind)
                step = partial(engine.train_step, [batch] * count, args.lr)
                yield f"{name}, one data rank" if single_rank else f"{name}, ZeRO {stage}", count, step
                engine.close()
                gc.collect()


def forward_backward_bytes(
    args: NeoXArgs, groups: ParallelGroups, batch: Batch, objective: Objective
) -> tuple[int, int]:
    """Returns (bytes moved by forward and backward of one micro-batch, number of parameters).

    The backward pass allocates new gradients."""
    from megatron.model import build_stage, init_stage

    stage = build_stage(args, groups)
    init_stage(stage, args, groups, torch.bfloat16)

    def passes() -> None:
        stage(None, batch, lambda head: objective.loss_sum(head, batch, None)[0].sum()).backward()
        stage.zero_grad(set_to_none=True)

    return step_traffic(passes).moved.total(), sum(param.numel() for param in stage.parameters())


def step_traffic(step: Callable[[], Any]) -> Traffic:
    """Returns the traffic of a third step; the first two create optimizer states and warm up."""
    for _ in range(2):
        step()
    with Traffic() as traffic:
        step()
    return traffic


def rows_of_rank(rank: int, ranks: int, port: int, options: argparse.Namespace) -> list[Row]:
    """Runs as one of `ranks` data ranks, and returns the traffic of this rank for each contestant.

    All ranks must call it at once."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of names of torch that DeepSpeed uses
    from benchmarks.train_throughput import random_batch
    from megatron.launch import process_info
    from megatron.mpu import init_model_parallel
    from megatron.objectives import LANGUAGE_MODELLING

    env = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in env.items()} | {"MASTER_ADDR": "127.0.0.1"}
    args = settings(options, ranks, 0)
    groups = init_model_parallel(args, process_info(), logging.getLogger("benchmark"))
    batch = random_batch(args, groups.device, None)
    passes, params = forward_backward_bytes(args, groups, batch, LANGUAGE_MODELLING)
    traffic_by_name: dict[str, dict[int, Traffic]] = {}
    for name, count, step in contestants(options, groups, batch):
        traffic_by_name.setdefault(name, {})[count] = step_traffic(step)
    dist.destroy_process_group()
    rows = []
    for name, traffic_by_count in traffic_by_name.items():
        traffic, traffic_of_two = traffic_by_count[1], traffic_by_count.get(2)
        largest = {key: value / params for key, value in traffic.moved.most_common(options.operations)}
        rows.append(
            Row(
                name,
                ranks,
                (traffic.moved.total() - passes) / params,
                (traffic_of_two.moved.total() - traffic.moved.total() - passes) / params if traffic_of_two else None,
                traffic.sent.total() / params,
                (traffic_of_two.sent.total() - traffic.sent.total()) / params if traffic_of_two else None,
                largest,
            )
        )
    return rows


def count_rows(ranks: int, options: argparse.Namespace) -> list[Row]:
    """Runs `ranks` data ranks, each in a process, and returns the rows of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ProcessPoolExecutor(ranks, get_context("spawn")) as pool:
        return [pool.submit(rows_of_rank, rank, ranks, port, options) for rank in range(ranks)][0].result()


def table(rows: list[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| | data ranks | moved | each further micro-batch | sent | each further micro-batch |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        further = ["-" if value is None else f"{value:.1f}" for value in (row.moved_more, row.sent_more)]
        lines.append(f"| {row.name} | {row.ranks} | {row.moved:.1f} | {further[0]} | {row.sent:.1f} | {further[1]} |")
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of data ranks (1 2)")
    parser.add_argument("--operations", type=int, default=0, metavar="N", help="and the N that move most, of each row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    rows = [row for ranks in options.ranks for row in count_rows(ranks, options)]
    print(f"torch {torch.__version__}, bf16: {options.layers} layers, hidden {options.hidden}; bytes per parameter\n")
    print(table(rows))
    for row in rows if options.operations else []:
        print(f"\n{row.name}, {row.ranks}: " + ", ".join(f"{key} {value:.1f}" for key, value in row.most.items()))
    if options.json is not None:
        report = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "layers": options.layers,
                  "hidden": options.hidden, "rows": [row._asdict() for row in rows]}  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run_command(main)
