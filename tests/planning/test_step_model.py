"""Steps composed of a few blocks: their memory and bytes beside a dry run of all, their time by hand."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from megatron.model.pipeline_partition import partition_layers
from megatron.neox_arguments import NeoXArgs
from megatron.planning.fake_cuda import shim
from megatron.planning.fake_cuda.devices import _Chunks
from megatron.planning.operations import Operation, Segment, Trace
from megatron.planning.processes import Processes
from megatron.planning.ranks import dry_run_args, ranks_of_stages, traced_args
from megatron.planning.report import RankReport
from megatron.planning.step_model import StepModel, build_models, traced_ranks
from megatron.planning.traffic import sent_bytes
from tests.fake.layouts import DPO, MODEL, PACKED_DPO
from tests.marks import with_more
from tests.planning.test_machines import MACHINE

# What these tests depend on and no import names: spawned processes run it.
DEPENDS_ON = ("megatron.planning.dry_run", "megatron.planning.tracing")
needs_compiler = pytest.mark.skipif(shim.lacking() is not None, reason=f"left out: {shim.lacking()}")
PP2: dict[str, Any] = {"pipe_parallel_size": 2}
EXPERTS: dict[str, Any] = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "expert_parallel_size": 2}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "zero_optimization": {"stage": 1},
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "zero 1": (4, {"zero_optimization": {"stage": 1}}),
    "zero 2": (4, {"zero_optimization": {"stage": 2}}),
    "zero 3, recomputed": (4, {"zero_optimization": {"stage": 3}, "checkpoint_activations": True}),
    "tp2 sequence parallel": (4, {"model_parallel_size": 2, "sequence_parallel": True}),
    "selective": (2, {"checkpoint_activations": True, "recompute_granularity": "selective"}),
    "cp2 zero 2": (4, {"context_parallel_size": 2, "context_parallel_type": "ring", "zero_optimization": {"stage": 2}}),
    "pp2 zero 1": (4, {**PP2, "zero_optimization": {"stage": 1}}),
    "pp4": (4, {"pipe_parallel_size": 4}),
    "pp2 zero 3": (4, {**PP2, "zero_optimization": {"stage": 3}, "checkpoint_activations": True}),
    "pp2 interleaved": (2, {**PP2, "pipeline_schedule": "interleaved"}),
    "pp2 zero bubble": (2, {**PP2, "pipeline_schedule": "zero_bubble"}),
    "pp2 zero bubble zero 1": (
        4, {**PP2, "pipeline_schedule": "zero_bubble", "zero_optimization": {"stage": 1}, "num_layers": 24},
    ),
    "pp2 zbv": (2, {**PP2, "pipeline_schedule": "zbv", "num_layers": 24}),
    "pp4 hybrid": (4, {"pipe_parallel_size": 4, "attention_config": [[["global"], 6], [["mamba2"], 6]]}),
    "delta rules, zero 1": (
        2, {**DELTA, "attention_config": [[["gated_delta_net"], 3], [["kimi_delta_attention"], 3]]},
    ),
    "delta rules, recomputed": (
        2, {"attention_config": [[["gated_delta_net", "global"], 3]], **DELTA, "checkpoint_activations": True},
    ),
    "ep2": (2, EXPERTS),
    "two depths": (1, {"mtp_num_layers": 2}),
    "two depths, pp2 zero 1": (4, {**PP2, "mtp_num_layers": 2, "zero_optimization": {"stage": 1}}),
    "pp2 tied": (2, {**PP2, "no_weight_tying": False}),
    "pairs, pp2 zero 1": (4, {**DPO, **PP2, "zero_optimization": {"stage": 1}}),
    "packed pairs, cp2": (2, {**PACKED_DPO, "context_parallel_size": 2}),
    "pairs, head in five chunks": (1, {**DPO, "padded_vocab_size": 2**20}),
    "rewards": (2, {**DPO, "train_impl": "rm"}),
}  # fmt: skip


# Collectives whose ranks are those of several axes.
AXES = {
    "cp2 zero 2": {("context_keys", "send"), ("data_context", "reduce_scatter")},
    "ep2": {("expert", "all_to_all"), ("data", "all_reduce")},
    "pp2 zero 1": {("pipe", "send"), ("data", "reduce_scatter")},
}
LONGER = ("pairs, pp2 zero 1", "two depths, pp2 zero 1", "pp2 zero bubble", "ep2", "pairs, head in five chunks")
PRODUCT = {*LAYOUTS} - {"zero 3, recomputed", "pp2 zero 1", *LONGER}


def args_of(name: str) -> NeoXArgs:
    world, values = LAYOUTS[name]
    layers = {"num_layers": 12 if values.get("pipe_parallel_size", 1) > 1 else 6, "gradient_accumulation_steps": 4}
    return NeoXArgs.from_dict({**MODEL, **layers, **values}).for_world(world)


def recorded(place: tuple[str, str, int]) -> Trace | RankReport:
    """Runs in a process with fake CUDA."""
    from megatron.planning.dry_run import run_rank
    from megatron.planning.tracing import trace_step

    kind, args_json, rank = place
    args = NeoXArgs.from_json(args_json)
    if kind == "run":
        return run_rank(args, rank)
    if kind == "trace":
        return trace_step(args, rank)
    with mock.patch("megatron.planning.tracing._chosen", lambda kinds, stage: {spec.index for spec in stage}):
        return trace_step(args, rank)


@needs_compiler
@pytest.mark.parametrize("name", with_more(LAYOUTS, *LONGER, product=PRODUCT))
def test_a_few_blocks_tell_memory_and_bytes_of_all(name: str, processes: Processes) -> None:
    args, traced = dry_run_args(args_of(name)), traced_args(args_of(name))
    traced_places, stages = traced_ranks(traced), ranks_of_stages(args)
    places = [("trace", traced.to_json(), rank) for rank in traced_places]
    places += [("all blocks", traced.to_json(), rank) for rank in traced_places]
    places += [("run", args.to_json(), rank) for rank in stages]
    answers: list[Any] = list(processes.map(recorded, places))
    number = len(traced_places)
    model = StepModel(args, answers[:number], MACHINE, is_fused=True)
    full_model = StepModel(args, answers[number : 2 * number], MACHINE, is_fused=True)
    assert model.step().seconds == pytest.approx(full_model.step().seconds, rel=0.02)
    assert {(row.axis, row.kind) for row in model.traffic(0)} >= AXES.get(name, set())
    for rank, report in enumerate(answers[2 * number :]):
        memory = model.memory(rank)
        assert report.error is None and [spec.index for spec in model.layers_of(rank)] == list(report.layers)
        parts = {part: size for part, size in memory.parts.items() if size}
        assert parts == pytest.approx({part: size for part, size in report.parts.items() if size}, rel=1e-3)
        assert memory.step == pytest.approx(report.step_bytes, rel=0.03)
        assert memory.kept_bytes == pytest.approx(report.kept_bytes, rel=0.01)
        sent = [collective for collective in report.collectives if collective.kind != "receive"]
        assert sum(row.size for row in model.traffic(rank)) == pytest.approx(sum(map(sent_bytes, sent)), rel=0.02)
        assert sum(row.calls for row in model.traffic(rank)) == len(sent)


@pytest.mark.more
@needs_compiler
@pytest.mark.parametrize("name", ["pp2 zero 1", "pp2 interleaved", "pp2 zero bubble"])
def test_one_stage_that_stands_for_all(name: str, processes: Processes) -> None:
    """A search records no more of a pipeline; its time and memory are near those of a full plan."""
    args = args_of(name)
    [model], [full_model] = (build_models([args], MACHINE, processes, has_stages) for has_stages in (False, True))
    assert len(model.traces) == 1 < len(full_model.traces)
    assert model.step().seconds == pytest.approx(full_model.step().seconds, rel=0.1)
    largest, expected = (max(x.memory(rank).step for rank in range(2)) for x in (model, full_model))
    assert largest == pytest.approx(expected, rel=0.15)


@needs_compiler
def test_chunks_of_a_weight() -> None:
    """Every rank has the chunk that `fully_shard` gives it, also if rows are fewer than ranks."""
    for rows, ranks in ((8, 4), (7, 4), (5, 4), (3, 8)):
        weight = torch.arange(2 * rows).view(rows, 2)
        for rank, chunk in enumerate(_chunk_with_empty(weight, ranks, dim=0)):
            assert torch.equal(_Chunks(weight, ranks, 0)[rank], chunk)


# -- times of made-up traces ---------------------------------------------------------------------------------

WORK = Operation("memory", "", 0.0, 3352e9 * 0.5)  # a second


def made_up(layers: int, world: int, micro_batches: int, keys: dict[str, Any], *extra: Operation) -> StepModel:
    """A model whose blocks take 1 s forward and 2 s backward; `extra` runs in each pass of a block."""
    values = {"num_layers": layers, "gradient_accumulation_steps": micro_batches, **keys}
    args = NeoXArgs.from_dict({**MODEL, **values}).for_world(world)
    chunk = tuple(spec.index for spec in partition_layers(args, 1)[0])
    kinds = dict.fromkeys((spec.index for spec in partition_layers(args, 1)[0] if spec.kind == "block"), 0)
    segments = []
    for micro_batch in (0, 1):
        for layer in chunk:
            for phase, seconds in (("forward", 1), ("backward", 2)):
                operations = (WORK._replace(times=seconds), *extra) if layer in kinds else ()
                segments.append(Segment(layer, phase, micro_batch, operations, 0, 0, 0))
    trace = Trace((chunk,), kinds, tuple(segments), {}, 0, ())
    return StepModel(args, [trace], MACHINE, is_fused=False)


def test_the_bubble_of_equal_stages() -> None:
    """(p - 1) / (m + p - 1) of a step: 1F1B with 4 stages and 8 micro-batches."""
    step = made_up(8, 4, 8, {"pipe_parallel_size": 4}).step()
    assert step.seconds == pytest.approx(8 * 6 + 3 * 6, rel=1e-3)
    assert step.parts["pipeline"] == pytest.approx(3 * 6, rel=1e-2)
    assert step.parts["memory-bound"] == pytest.approx(48)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)


def test_what_work_hides() -> None:
    """Gradients are summed beside work; tensor ranks wait. Of data collectives the rest is waited for."""
    eight = {"model_parallel_size": 2}
    assert made_up(4, 8, 1, eight).step().seconds == pytest.approx(12)
    tensor = Operation("all_reduce", "", 0.0, 400e9, ranks=(0, 1), axis="tensor")  # a second
    assert made_up(4, 8, 1, eight, tensor).step().seconds == pytest.approx(12 + 8)
    data = Operation("all_gather", "", 0.0, 400e9 * 4 / 3, ranks=(0, 2, 4, 6), axis="data")
    assert made_up(4, 8, 1, eight, data).step().seconds == pytest.approx(12)
    slow = data._replace(size=4 * data.size)  # 4 s beside 1 s forward, and beside 2 s backward
    assert made_up(4, 8, 1, eight, slow).step().seconds == pytest.approx(4 * (4 + 4))
    hidden = replace(MACHINE, reached=MACHINE.reached._replace(tensor=0.25))
    assert made_up(4, 8, 1, eight, tensor).on(hidden).step().seconds == pytest.approx(12 + 8 / 4)


def test_a_host_that_is_slower_than_the_device() -> None:
    slow = replace(MACHINE, reached=MACHINE.reached._replace(host=1.5))
    step = made_up(4, 1, 1, {}).on(slow).step()
    assert step.seconds == pytest.approx(4 * (1.5 + 3.0)) and step.parts["host"] == pytest.approx(6)
    looped = Operation("grouped", "", 0.0, 0.0, (128, 128, 128, 8), "bfloat16", launches=8)
    step = made_up(4, 1, 1, {}, looped).on(slow).step()
    assert step.seconds == pytest.approx(4 * (9 + 2 + 8) * 1.5, rel=1e-3), "8 more in each pass of a block"


def test_a_stage_does_not_wait_for_sums_of_another() -> None:
    """A pass hands its result on at once; what a rank waits for gradients may pass while it is idle."""
    data = Operation("all_gather", "", 0.0, 400e9 * 2 * 3, ranks=(0, 1), axis="data")  # 3 s in each pass of a block
    step = made_up(8, 8, 8, {"pipe_parallel_size": 4}, data).step()
    exposed = 8 * ((6 - 2) + (6 - 4))  # of two blocks on a stage, forward and backward
    idle = 3 * 6
    assert step.seconds == pytest.approx(8 * 6 + idle + exposed - idle / 2, rel=1e-3)
