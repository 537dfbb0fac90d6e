"""Context ranks send the bytes derived by hand, and hold no tensor of all pairs of tokens."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.training.setup import build_engine
from tests.model.stages import groups_of, random_batch
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.layout_runs import args_of
from tests.training.native.test_context_parallel import CP4, GATHER, PAIRS, RING, ULYSSES
from tests.training.runs import ADAMW, LLAMA, begin_each, config

HIDDEN, KV_WIDTH, SEQ, BLOCKS, ROWS, MICRO_BATCHES, RANKS = 32, 16, 32, 4, 2, 4, 4
FP32 = 4
SENDS = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::alltoall_base_", "c10d::send")
TYPES: dict[str, dict[str, Any]] = {
    "allgather": CP4 | GATHER, "ring": CP4 | RING, "ulysses": CP4 | ULYSSES, "ring of pairs": CP4 | RING | PAIRS,
}  # fmt: skip


class Sent(TorchDispatchMode):
    """Counts the bytes that collectives of context ranks send, while it is entered, and the largest
    tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func._schema.name, func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *(tensor.numel() for tensor in tensors)])
        if name in SENDS:
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            size = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.bytes += size if name == "c10d::send" else size * (group.size() - 1) // group.size()
        return result


def sent_in_a_step(rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[int]:
    """For the pool: of each run's second step."""
    counts = []
    for training in begin_each(runs):
        batches = batches_of(training)
        training.engine.train_step(next(batches), 1e-3)
        step, sent = next(batches), Sent()
        with sent:
            training.engine.train_step(step, 1e-3)
        counts.append(sent.bytes)
    return counts


def derived_bytes(name: str) -> int:
    """Bytes of a rank in a step: forward and backward of each block and micro-batch."""
    tokens = ROWS * SEQ // RANKS
    keys, queries = 2 * tokens * KV_WIDTH * FP32, tokens * HIDDEN * FP32
    if name == "allgather":  # each part goes to all others, again in backward, and its gradients come back
        per_block = 3 * (RANKS - 1) * keys
    elif name == "ring":  # keys go past all ranks twice, and their fp32 gradients come home
        per_block = 2 * (RANKS - 1) * keys + RANKS * keys
    elif name == "ulysses":  # queries, keys (two ranks have the same head) and results, all but the own part
        per_block = 2 * (2 * queries + 2 * keys) * (RANKS - 1) // RANKS
    else:  # each pair of ranks exchanges heads; then each has twice the columns of one head of keys
        per_block = 2 * (2 * queries + keys) // 2 + 2 * keys + 2 * keys
    return BLOCKS * MICRO_BATCHES * per_block


def test_bytes_are_those_derived() -> None:
    keys = {"train_micro_batch_size_per_gpu": ROWS, "no_weight_tying": True}
    runs = [config(LLAMA, ADAMW, keys, layout) for layout in TYPES.values()]
    for counts in run_ranks(sent_in_a_step, RANKS, runs):
        for name, count in zip(TYPES, counts, strict=True):
            print(f"{name}: {count} bytes sent by a rank in a step, {derived_bytes(name)} by hand")
        assert counts == [derived_bytes(name) for name in TYPES]


LONG = 32768
SMALL = {"num_layers": 1, "hidden_size": 16, "intermediate_size": 16, "seq_length": LONG, "num_kv_heads": 4,
         "max_position_embeddings": LONG, "train_micro_batch_size_per_gpu": 1,
         "gradient_accumulation_steps": 1}  # fmt: skip


def largest_tensors(rank: int, world_size: int, layouts: list[dict[str, Any]]) -> list[int]:
    """For the pool: elements of each run's largest tensor in a step."""
    sizes = []
    for layout in layouts:
        args = args_of({**LLAMA, **ADAMW, **SMALL}, layout, world_size)
        engine, sent = build_engine(args, groups_of(args, world_size)), Sent()
        with sent:
            engine.train_step([random_batch(args, rows=1)], 1e-3)
        sizes.append(sent.largest)
        engine.close()
    return sizes


@pytest.mark.product
@pytest.mark.timeout(1600)
def test_no_tensor_of_all_pairs_at_32k() -> None:
    """On CPUs a block of queries has a mask; the rest is linear in the tokens of a row."""
    for sizes in run_ranks(largest_tensors, RANKS, list(TYPES.values()), timeout=1500):
        print({name: f"{size / LONG:.0f} x {LONG}" for name, size in zip(TYPES, sizes, strict=True)})
        assert max(sizes) < LONG * LONG / 8
