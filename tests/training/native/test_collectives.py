"""Collectives of data ranks in a step, derived by hand, and their order: gradients leave during backward."""

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.runs import LLAMA, begin_each, config

HIDDEN, FFN, VOCAB, HEADS, KV_HEADS, SEQ, BLOCKS = 32, 48, 384, 4, 2, 32, 4
FIRST_BLOCK, LAST_BLOCK = 2, 1 + BLOCKS  # NeoX's index of the first block and of the last
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "c10d::allreduce_", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_"
TENSOR, DATA, WORLD = "tensor", "data", "world"


class Event(NamedTuple):
    """A collective over an axis (size: bytes of its whole tensor), or a pass at a block (size: its index)."""

    kind: str
    size: int
    axis: str = ""


class Recorder(TorchDispatchMode):
    """Notes collectives while it is entered."""

    def __init__(self, axes: dict[tuple[int, ...], str]) -> None:
        super().__init__()
        self.axes, self.events = axes, list[Event]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name
        if name.startswith("c10d::"):
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            size = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.events.append(Event(name, size, self.axes[tuple(dist.get_process_group_ranks(group))]))
        return func(*args, **(kwargs or {}))

    def block_hook(self, index: int, module: Any, inputs: Any, output: tuple[torch.Tensor, Any]) -> None:
        self.events.append(Event("forward", index))
        output[0].register_hook(lambda gradient: self.events.append(Event("backward", index)))


def recorded(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[list[Event]]:
    """For the pool: the second step of each run."""
    events_by_run = []
    for training in begin_each(configs):
        engine, groups = training.engine, training.groups
        axes = {tuple(range(world_size)): WORLD} | {groups.members[axis]: axis for axis in (DATA, TENSOR)}
        recorder, batches = Recorder(axes), batches_of(training)
        engine.train_step(next(batches), 1e-3)
        for index in range(FIRST_BLOCK, LAST_BLOCK + 1):
            engine.stage.layers[str(index)].register_forward_hook(partial(recorder.block_hook, index))
        step = next(batches)
        with recorder:
            engine.train_step(step, 1e-3)
        events_by_run.append(recorder.events)
    return events_by_run


# -- by hand -------------------------------------------------------------------------------------------------
def elements(tensor: int) -> dict[str, int]:
    head = HIDDEN // HEADS
    matrices = [(HEADS + 2 * KV_HEADS) * head * HIDDEN, HIDDEN * HIDDEN, 2 * FFN * HIDDEN, HIDDEN * FFN]
    block = sum(matrices) // tensor + 2 * HIDDEN  # both norms are whole
    return {"embedding": VOCAB * HIDDEN // tensor, "block": block, "norm": HIDDEN, "head": VOCAB * HIDDEN // tensor}


def expected_collectives(stage: int, micro_batches: int, tensor: int = 1) -> list[Event]:
    """Collectives of a data rank, in order, over data and world; bf16 weights, fp32 gradients."""
    size, scalar = elements(tensor), 4
    root = size["embedding"] + size["norm"] + size["head"]
    step = [Event(ALL_REDUCE, scalar, DATA)]  # the weight of the step
    if stage == 0:  # backward's order, in the last micro-batch
        layers = [size["head"], size["norm"], *[size["block"]] * BLOCKS, size["embedding"]]
        step += [Event(ALL_REDUCE, 4 * layer, DATA) for layer in layers]
    for i in range(micro_batches if stage > 0 else 0):
        gather = [Event(ALL_GATHER, 2 * num_elements, DATA) for num_elements in (root, *[size["block"]] * BLOCKS)]
        scatter = [Event(REDUCE_SCATTER, 4 * num_elements, DATA) for num_elements in (*[size["block"]] * BLOCKS, root)]
        if stage == 3:
            # Forward, the root's and the last block's again for backward; from there on each block's weights
            # are asked for when the one above begins, before its gradients leave.
            step += [*gather, *gather[:3]]
            for block in range(BLOCKS):
                step += [scatter[block], *gather[1 : 2 if block < BLOCKS - 2 else 1]]
            step.append(scatter[-1])
        else:
            step += gather if i == 0 else []
            step += scatter if stage == 2 or i == micro_batches - 1 else []
    # The norm's square and the verdict, over all ranks; the loss.
    return [*step, Event(ALL_REDUCE, 2 * scalar, WORLD if tensor > 1 else DATA), Event(ALL_REDUCE, scalar, DATA)]


def tensor_by_hand(micro_batches: int, rows: int, tensor: int) -> Counter[Event]:
    """Collectives of a tensor rank over its group.

    Sums forwards after the attention, the MLP and the embedding, backwards before the first two and the head
    (arXiv 1909.08053); every rank's largest logit, sum and label of each token for the cross-entropy."""
    hidden, token = 2 * SEQ * rows * HIDDEN, 4 * SEQ * rows
    sums, gathered = Event(ALL_REDUCE, hidden, TENSOR), Event(ALL_GATHER, tensor * 3 * token, TENSOR)
    return Counter({sums: micro_batches * (4 * BLOCKS + 2), gathered: micro_batches})


# -- tests ---------------------------------------------------------------------------------------------------
def case(stage: int, micro_batches: int, **overrides: Any) -> dict[str, Any]:
    """On two data ranks."""
    untied = {"precision": "bfloat16", "no_weight_tying": True, "train_micro_batch_size_per_gpu": 4 // micro_batches}
    return config(LLAMA, untied, overrides, engine="native", zero_optimization={"stage": stage})


CASES = [(stage, micro_batches) for stage in range(4) for micro_batches in (1, 2)]


@pytest.fixture(scope="module")
def recorded_events() -> dict[tuple[int, int], list[Event]]:
    return dict(zip(CASES, run_ranks(recorded, 2, [case(*cell) for cell in CASES])[0], strict=True))


def sent(events: list[Event]) -> list[Event]:
    return [event for event in events if event.axis in (DATA, WORLD)]


def assert_gradients_leave_early(events: list[Event], stage: int) -> None:
    """A block's gradients leave before the last micro-batch's backward comes to the second block below."""
    kind, size = (ALL_REDUCE if stage == 0 else REDUCE_SCATTER), 4 * elements(1)["block"]
    last = events[len(events) - 1 - events[::-1].index(Event("forward", LAST_BLOCK)) :]
    reached = [last.index(Event("backward", block)) for block in range(LAST_BLOCK, FIRST_BLOCK - 1, -1)]
    left = [i for i, event in enumerate(last) if event[:2] == (kind, size)]
    assert len(left) == BLOCKS
    for block in range(BLOCKS - 2):
        assert reached[block] < left[block] < reached[block + 2]


@pytest.mark.parametrize(("stage", "micro_batches"), CASES)
def test_collectives(stage: int, micro_batches: int, recorded_events: dict[tuple[int, int], list[Event]]) -> None:
    events = recorded_events[stage, micro_batches]
    assert sent(events) == expected_collectives(stage, micro_batches)
    assert_gradients_leave_early(events, stage)
    if stage < 2:  # until the last micro-batch begins, all that is sent are weights and the step's weight
        last = max(i for i, event in enumerate(events) if event == Event("forward", FIRST_BLOCK))
        assert {event.kind for event in sent(events[:last]) if event.size > 8} <= {ALL_GATHER}


@pytest.mark.more
def test_with_tensor_ranks() -> None:
    tensor, configs = 2, [case(2, count, model_parallel_size=2) for count in (1, 2)]
    for events_by_run in run_ranks(recorded, 4, configs):
        for count, events in enumerate(events_by_run, 1):
            assert sent(events) == expected_collectives(2, count, tensor)
            over_tensor = Counter(event for event in events if event.axis == TENSOR)
            assert over_tensor == tensor_by_hand(count, 4 // count, tensor)
