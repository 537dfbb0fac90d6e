"""Ranks of a dry run fit together; each mistake, put in alone, is named with its ranks."""

from typing import Any

import pytest

from megatron.neox_arguments import NeoXArgs
from megatron.planning import checks
from megatron.planning.checks import problems
from megatron.planning.ranks import ranks_of_axes
from megatron.planning.report import Collective, RankReport
from tests.fake.client import FakeCuda
from tests.fake.layouts import MODEL, PP2, SP2, TP2, Case
from tests.marks import with_more

CONTEXT = {"context_parallel_size": 2, "context_parallel_type": "allgather"}
EXPERTS = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "expert_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 pp2 dp2": (8, {**SP2, **PP2, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}),
    "cp2 dp2 zero3": (4, {**CONTEXT, "zero_optimization": {"stage": 3}}),
    "pp2 zbv": (2, {**PP2, "num_layers": 4, "pipeline_schedule": "zbv", "gradient_accumulation_steps": 4}),
    "cp4 ring of pairs": (4, {**CONTEXT, "context_parallel_size": 4, "context_parallel_type": "ring",
                              "context_parallel_ulysses_size": 2}),
    "muon": (4, {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}),
    "ep2 dp4": (4, {**EXPERTS, "zero_optimization": {"stage": 2}}),
}
# What each mistake is named by: the ranks, and what they do.
MISTAKES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "swapped groups": (TP2, 4, ("rank 0", "tensor group has ranks 0, 2, not 0, 1")),
    "odd stage split": (PP2, 2, ("layer 3 (block) is on 0 pipeline ranks",)),
    "missing receive": (PP2, 2, ("message 2 from rank 0 to rank 1 (pipe 1)", "is met by nothing")),
    "skipped collective": (TP2, 2, ("of the group of ranks 0, 1", "rank 0 starts all_reduce", "rank 1 (tensor 1)")),
    "no sum over data ranks": ({}, 2, ("of the group of ranks 0, 1", "rank 0 starts all_reduce", "nothing")),
    "swapped experts": (EXPERTS, 4, ("expert group has ranks 0, 2, not 0, 1",)),
    "one more group": (TP2, 2, ("rank 1 (tensor 1) creates", "process groups, rank 0")),
    "wrong dtype": (PP2, 2, ("message 2 from rank 0", "in float32 is met by receive", "in bfloat16")),
}


def reports_of(fake_cuda: FakeCuda, world: int, values: dict[str, Any], mistake: str = "") -> list[RankReport]:
    args = NeoXArgs.from_dict({**MODEL, **values}).for_world(world)
    reports = []
    for rank in ranks_of_axes(args):
        report = fake_cuda.run(Case(world, rank, values, planned=True, mistake=mistake))
        read: dict[str, Any] = {"layers": tuple(report["layers"])}
        for part in ("setup", "collectives"):
            read[part] = tuple(Collective(tuple(ranks), *fields) for ranks, *fields in report[part])
        read["groups"] = {axis: tuple(ranks) for axis, ranks in report["groups"].items()}
        reports.append(RankReport(**{**report, **read}))
    return reports


@pytest.mark.parametrize("name", with_more(LAYOUTS, "tp2 pp2 dp2"))
def test_layouts_have_no_problem(name: str, fake_cuda: FakeCuda) -> None:
    world, values = LAYOUTS[name]
    reports = reports_of(fake_cuda, world, values)
    assert problems(NeoXArgs.from_dict({**MODEL, **values}).for_world(world), reports) == []
    for report in reports:
        assert report.collectives and report.step_bytes > report.kept_bytes >= sum(report.parts.values())


@pytest.mark.parametrize("mistake", with_more(MISTAKES, "swapped experts", "one more group", "no sum over data ranks"))
def test_a_mistake_is_named(mistake: str, fake_cuda: FakeCuda) -> None:
    values, world, facts = MISTAKES[mistake]
    lines = problems(
        NeoXArgs.from_dict({**MODEL, **values}).for_world(world), reports_of(fake_cuda, world, values, mistake)
    )
    assert any(all(fact in line for fact in facts) for line in lines), lines


def test_messages_are_compared_from_both_ends() -> None:
    """Rank 1 awaits what rank 0 never sends; no rank has another message."""
    receive = Collective((0, 1), "receive", 8, "float32", peer=0)
    reports = [RankReport(0), RankReport(1, collectives=(receive,))]
    assert any("message 1 from rank 0 to rank 1: nothing is met by receive" in line
               for line in checks._message_problems(reports))  # fmt: skip
