"""The axes of parallelism are DeepSpeed's topology, and the groups hold the ranks they say."""

import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.distributed import StartError
from megatron.mpu import ParallelGroups, build_groups
from megatron.mpu.groups import AXES, FOLDED
from megatron.mpu.initialize import allow_tf32, check_experts, connect, settle_context
from megatron.neox_arguments import ConfigError
from tests.model.stages import small
from tests.pool import run_ranks


def group_facts(rank: int, world_size: int, pipe: int, data: int, tensor: int) -> dict[str, object]:
    groups = build_groups(pipe=pipe, data=data, tensor=tensor, device=torch.device("cpu"))
    sums = {axis: int(groups.sum(torch.tensor([float(2**rank)]), axis)) for axis in AXES}
    embedding = torch.tensor([float(2**rank)])
    if groups.embedding is not None:
        dist.all_reduce(embedding, group=groups.embedding)
    return {
        "ranks": {axis: groups.rank(axis) for axis in AXES}, "members": dict(groups.members), "sums": sums,
        "embedding": int(embedding),
        "place": (groups.world_rank, groups.world_size, groups.is_first_stage, groups.is_last_stage),
        "none": [axis for axis in AXES if groups.group(axis) is None],
    }  # fmt: skip


@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2), (2, 2, 1), (4, 1, 1), (2, 2, 2), (3, 1, 2)])
def test_ranks_stand_where_deepspeed_puts_them(sizes: tuple[int, int, int]) -> None:
    pipe, data, tensor = sizes
    topology = PipeModelDataParallelTopology(num_pp=pipe, num_dp=data, num_mp=tensor)
    ranks = run_ranks(group_facts, pipe * data * tensor, *sizes)
    for rank, facts in enumerate(ranks):
        coordinate = topology.get_coord(rank)
        coordinates = {"pipe": coordinate.pipe, "data": coordinate.data, "tensor": coordinate.model, "context": 0}
        assert facts["ranks"] == coordinates
        assert facts["place"] == (rank, len(ranks), coordinate.pipe == 0, coordinate.pipe == pipe - 1)
        for axis_name, deepspeed_axis in (("pipe", "pipe"), ("data", "data"), ("tensor", "model")):
            peers = next((p for p in topology.get_axis_comm_lists(deepspeed_axis) if rank in p), [rank])
            assert facts["members"][axis_name] == tuple(peers)
            assert facts["sums"][axis_name] == sum(2**peer for peer in peers), "the group talks to other ranks"
        ends = [p for p in topology.get_axis_comm_lists("pipe") if rank in p]
        ends_of_own = {ends[0][0], ends[0][-1]} if ends else {rank}
        assert facts["embedding"] == (sum(2**end for end in ends_of_own) if rank in ends_of_own else 2**rank)
        assert facts["none"] == [axis for axis, size in zip(AXES, (pipe, data, 1, tensor), strict=True) if size == 1]


def folded_groups(
    rank: int, world_size: int, expert: int, tensor: int, context: int = 1, ulysses: int = 1
) -> dict[str, tuple[int, ...]]:
    groups = build_groups(
        pipe=1, data=world_size // tensor // context, context=context, tensor=tensor, device=torch.device("cpu"),
        expert=expert, ulysses=ulysses,
    )  # fmt: skip
    for axis in FOLDED:
        summed = groups.sum(torch.tensor([float(2**rank)]), axis)
        assert int(summed) == sum(2**member for member in groups.members[axis])
        assert groups.members[axis][groups.rank(axis)] == rank and groups.size(axis) == len(groups.members[axis])
    return {axis: groups.members[axis] for axis in (*FOLDED, "data", "context")}


def test_experts_are_shared_out_by_neighbours_on_the_data_axis() -> None:
    def expert_members(rank: int, *sizes: int) -> list[tuple[int, ...]]:
        members = run_ranks(folded_groups, *sizes)[rank]
        return [members[axis] for axis in ("expert", "expert_data", "data")]

    assert expert_members(0, 8, 2, 2) == [(0, 2), (0, 4), (0, 2, 4, 6)]
    assert expert_members(7, 8, 2, 2) == [(5, 7), (3, 7), (1, 3, 5, 7)]
    assert expert_members(2, 4, 4, 1) == [(0, 1, 2, 3), (2,), (0, 1, 2, 3)]
    assert expert_members(2, 4, 1, 1) == [(2,), (0, 1, 2, 3), (0, 1, 2, 3)]


def test_context_ranks_are_neighbours_and_share_weights_with_data_ranks() -> None:
    """As in Megatron-LM, tensor ranks come first, then context, then data ranks; experts are spread over
    both."""
    members = run_ranks(folded_groups, 8, 4, 1, 4, 2)
    assert members[5] == {
        "context": (4, 5, 6, 7), "data": (1, 5), "data_context": tuple(range(8)), "expert": (4, 5, 6, 7),
        "expert_data": (1, 5), "context_heads": (4, 5), "context_keys": (5, 7),
    }  # fmt: skip
    assert run_ranks(folded_groups, 8, 2, 2, 2)[3] == {
        "context": (1, 3), "data": (3, 7), "data_context": (1, 3, 5, 7), "expert": (1, 3), "expert_data": (3, 7),
        "context_heads": (3,), "context_keys": (1, 3),
    }  # fmt: skip


def wrong_world(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as caught:
        build_groups(pipe=2, data=2, tensor=1, device=torch.device("cpu"))
    return str(caught.value)


def test_axes_that_are_not_the_world_are_refused() -> None:
    assert all(re.search("4 ranks.* 2", message) for message in run_ranks(wrong_world, 2))


def test_one_process_needs_no_torch_distributed() -> None:
    groups = ParallelGroups.single()
    assert all(groups.size(axis) == 1 and groups.rank(axis) == 0 and groups.group(axis) is None for axis in AXES)
    assert groups.is_first_stage and groups.is_last_stage and groups.embedding is None
    groups.barrier()
    with pytest.raises(TypeError):
        groups.sizes["pipe"] = 2  # type: ignore[index]


def test_a_rank_makes_its_own_groups_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 777 of 1,024 makes four groups; every rank makes equally many, for torch numbers their names."""
    calls: dict[int, list[list[int]]] = {}
    for rank in (0, 300, 777, 1023):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
        new_group, calls[rank] = dist.new_group, []
        monkeypatch.setattr(dist, "new_group", lambda ranks, **options: calls[rank].append(ranks) or new_group(ranks))  # noqa: B023
        groups = build_groups(pipe=4, data=32, tensor=8, device=torch.device("cpu"))
        monkeypatch.undo()
        dist.destroy_process_group()
        assert all(rank in ranks for ranks in calls[rank]), "a group this rank is not in"
        assert groups.members["pipe"] == tuple(range(rank % 256, 1024, 256))
    assert [len(calls[rank]) for rank in calls] == [4, 4, 4, 4]
    data = list(range(768 + 777 % 8, 1024, 8))
    assert calls[777] == [[9, 265, 521, 777], data, list(range(776, 784)), [9, 777]] and calls[0][3] == [
        0,
        768,
    ]
    assert calls[300][3] == [300], "a middle stage is in no embedding group, but counts"


def unconnected(rank: int, world_size: int) -> str:
    groups = build_groups(pipe=1, data=1, tensor=2, device=torch.device("cpu"))
    connect(groups)

    def fail(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        if group is groups.group("tensor"):
            raise RuntimeError("Connection closed by peer")
        tensor.fill_(2.0)

    dist.all_reduce, all_reduce = fail, dist.all_reduce
    try:
        connect(groups)
    except StartError as problem:
        return str(problem)
    finally:
        dist.all_reduce = all_reduce
    return ""


def test_a_group_that_cannot_be_connected_is_named() -> None:
    for problem in run_ranks(unconnected, 2):
        assert re.search(r"tensor group.*\[0, 1\].*Connection closed by peer", problem)


def test_tf32_is_as_asked_in_every_name_torch_has_for_it() -> None:
    assert not torch.backends.cuda.matmul.allow_tf32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            allow_tf32(True)
            assert torch.backends.cuda.matmul.fp32_precision == "tf32"
            assert torch.get_float32_matmul_precision() == "high"  # Inductor asks for it
        finally:
            allow_tf32(False)
    assert torch.get_float32_matmul_precision() == "highest"


def test_experts_are_shared_out_within_a_machine() -> None:
    """Eight ranks on machines of four, unless it is allowed."""
    moe: dict[str, Any] = {"moe_num_experts": 8, "model_parallel_size": 2, "num_kv_heads": 2}
    process: Any = SimpleNamespace(world_size=8, local_world_size=4)
    check_experts(small(**moe, expert_parallel_size=2), process)
    with pytest.raises(ConfigError, match="between machines.*expert_parallel_across_nodes: true"):
        check_experts(small(**moe, expert_parallel_size=4), process)
    check_experts(small(**moe, expert_parallel_size=4, expert_parallel_across_nodes=True), process)
    check_experts(small(**moe, expert_parallel_size=4), SimpleNamespace(world_size=8, local_world_size=8))  # type: ignore[arg-type]


@pytest.mark.parametrize(("machine", "keys", "choice", "reasons"), [
    (8, {}, "ulysses", []),
    (8, {"num_attention_heads": 6, "hidden_size": 48}, "allgather", ["6 heads .* 4 ranks"]),
    (4, {"model_parallel_size": 2}, "allgather", ["4 x model_parallel_size 2 = 8 .*machine of 4", "several machines"]),
    (2, {"context_parallel_type": "ring"}, "ring", ["machine of 2"]),
    (2, {"context_parallel_size": 1}, "auto", []),
])  # fmt: skip
def test_the_choice_of_context_parallelism_has_a_line(
    machine: int, keys: dict[str, Any], choice: str, reasons: list[str]
) -> None:
    lines: list[str] = []
    process: Any = SimpleNamespace(world_size=8, local_world_size=machine)
    args = small(**{"context_parallel_size": 4, **keys}).for_world(8)
    assert settle_context(args, process, lines.append).context_parallel_type == choice
    assert all(any(re.search(reason, line) for line in lines) for reason in reasons)
    assert any("auto" in line for line in lines) == (choice in ("ulysses", "allgather"))


def test_context_ranks_divide_the_world() -> None:
    moe = {"moe_num_experts": 4, "moe_router_type": "topk", "expert_parallel_size": 4}
    args = small(context_parallel_size=2, train_micro_batch_size_per_gpu=1, **moe)
    assert args.for_world(8).data_parallel_size == 4 and args.for_world(8).train_batch_size == 4
    with pytest.raises(ConfigError, match="context_parallel_size: 3 ranks .*context_parallel_size 2 = 2"):
        args.for_world(3)
    with pytest.raises(ConfigError, match="expert_parallel_size: 4 .*2 data- and context-parallel"):
        args.for_world(2)
    pairs = small(context_parallel_size=4, context_parallel_type="ring", context_parallel_ulysses_size=2)
    assert pairs.ulysses_size == 2 and pairs.for_inference(3).ulysses_size == 1
