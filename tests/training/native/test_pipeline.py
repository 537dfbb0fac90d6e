"""Pipelines of the native engine: the order of passes and messages of each stage, from executed events."""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml

import deepy
from megatron.model.pipeline_partition import StagePlacement
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.compile_blocks import resolve_compile
from megatron.training.engine_choice import choose_engine
from megatron.training.native.engine import NativeEngine
from megatron.training.native.pipeline import Pipeline
from megatron.training.native.pipeline_schedule import Action, action_tables, schedule_problems
from megatron.training.native.schedule_report import draw_schedule, schedule_lines, timeline, units
from tests.pool import run_ranks
from tests.training.batches import batches_of
from tests.training.layout_runs import zero
from tests.training.runs import NEOX, RPE, begin_each, config

PASS_COST = {"forward": 1, "backward": 2}  # a backward has two products for each of a forward
COST = {**PASS_COST, "backward_input": 1, "backward_weight": 1}
INTERLEAVED: dict[str, Any] = {"pipeline_schedule": "interleaved", "num_layers": 8}
# Their idle share with 4 ranks and 8 micro-batches.
OTHER_SCHEDULES = {
    "interleaved": Fraction(3, 19), "zero_bubble": Fraction(1, 9), "zbv": Fraction(1, 17), "dualpipev": Fraction(1, 17),
}  # fmt: skip


class Executed(NamedTuple):
    """One step of a rank. messages: sends and receives by kind and the neighbour's stage."""

    actions: list[Action]
    messages: Counter[tuple[str, int]]
    highest: int  # most micro-batches whose activations are held at once
    left: int  # tensors that the pipeline still holds after the step


def executed(rank: int, world_size: int, configs: Sequence[Mapping[str, Any]]) -> list[Executed]:
    """For the pool: the second step of each run, one pipeline stage a rank."""
    runs = []
    for training in begin_each(configs):
        actions: list[Action] = []
        messages: Counter[tuple[str, int]] = Counter()
        highest = 0
        batches = batches_of(training)
        training.engine.train_step(next(batches), 1e-3)

        def noted(run: Any, self: Pipeline, action: Action, *args: Any, actions: Any = actions) -> Any:
            nonlocal highest
            actions.append(action)
            result = run(self, action, *args)
            highest = max(len(self._outputs), len(self._inputs), highest)
            return result

        def sent(send: Any, tensor: Any, dst: int, group: Any, messages: Any = messages) -> Any:
            messages["send", dst] += 1
            return send(tensor, dst=dst, group=group)

        def received(receive: Any, tensor: Any, src: int, group: Any, messages: Any = messages) -> Any:
            messages["receive", src] += 1
            return receive(tensor, src=src, group=group)

        step = next(batches)
        with (
            mock.patch.object(Pipeline, "_forward", _method(noted, Pipeline._forward)),
            mock.patch.object(Pipeline, "_backward", _method(noted, Pipeline._backward)),
            mock.patch.object(Pipeline, "_backward_weight", _method(noted, Pipeline._backward_weight)),
            mock.patch.object(dist, "isend", partial(sent, dist.isend)),
            mock.patch.object(dist, "irecv", partial(received, dist.irecv)),
        ):
            training.engine.train_step(step, 1e-3)
        pipeline = training.engine._pipeline  # type: ignore[attr-defined]
        coming = [action for actions in pipeline._coming.values() for action in actions]
        held = (pipeline._inputs, pipeline._outputs, pipeline._received, pipeline._deferred)
        parts = (*held, coming, pipeline._links._sends)
        runs.append(Executed(actions, messages, highest, sum(map(len, parts))))
    return runs


def _method(noted: Any, run: Any) -> Any:
    """A function, so that it is bound as a method."""
    return lambda self, *args: noted(run, self, *args)


def idle_share(actions_of_ranks: Sequence[Sequence[Action]], cost: Mapping[str, int] = COST) -> Fraction:
    """The idle share of all ranks' time. Each action begins when its rank and its input are ready."""
    last_stage = max(action.stage for actions in actions_of_ranks for action in actions)
    ends: dict[tuple[str, int, int], int] = {}  # of what goes down or up through the stages
    clocks, todo = [0] * len(actions_of_ranks), [list(actions) for actions in actions_of_ranks]
    while any(todo):
        progress = False
        for rank, actions in enumerate(todo):
            while actions:
                kind, stage, micro_batch = actions[0]
                way, neighbour = ("down", stage - 1) if kind == "forward" else ("up", stage + 1)
                source = (way, neighbour if kind != "backward_weight" else stage, micro_batch)
                if 0 <= source[1] <= last_stage and source not in ends:
                    break
                clocks[rank] = max(clocks[rank], ends.get(source, 0)) + cost[kind]
                if kind != "backward_weight":
                    ends[way, stage, micro_batch] = clocks[rank]
                actions.pop(0)
                progress = True
        assert progress, "the ranks wait for each other"
    busy = sum(cost[action.kind] for actions in actions_of_ranks for action in actions)
    return 1 - Fraction(busy, len(actions_of_ranks) * max(clocks))


def pipeline_config(stages: int, micro_batches: int, **overrides: Any) -> dict[str, Any]:
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches}
    keys = {"pipe_parallel_size": stages, "engine": "native", "num_layers": 4, "train_batch_size": micro_batches}
    return config(NEOX, keys, batch, overrides)


@pytest.fixture(scope="module")
def four_stages() -> list[list[Executed]]:
    """By rank: eight micro-batches; two; two with all but the last two blocks frozen; two with the embedding
    alone; eight under each other schedule."""
    frozen, no_blocks = {"trainable": {"last_layers": 2}}, {"pipeline_layers": [0, 2, 1, 1]}
    runs = [pipeline_config(4, 8), *(pipeline_config(4, 2, **keys) for keys in ({}, frozen, no_blocks))]
    runs += [pipeline_config(4, 8, num_layers=8, pipeline_schedule=name) for name in OTHER_SCHEDULES]
    return run_ranks(executed, 4, runs)


def test_a_pipeline_of_4_with_8_micro_batches_is_idle_for_27_percent(four_stages: list[list[Executed]]) -> None:
    actions = [rank[0].actions for rank in four_stages]
    assert idle_share(actions) == idle_share(actions, {"forward": 1, "backward": 1}) == Fraction(3, 11)
    print(f"1F1B, 4 stages, 8 micro-batches: idle {float(idle_share(actions)):.1%}")
    assert [rank[0].highest for rank in four_stages] == [4, 3, 2, 1], "a stage holds one micro-batch per later stage"
    for rank in four_stages:
        assert Counter((kind, i) for kind, _, i in rank[0].actions) == Counter(product(PASS_COST, range(8)))


@pytest.mark.parametrize(("schedule", "idle"), OTHER_SCHEDULES.items())
def test_other_schedules_are_idle_for_less(schedule: str, idle: Fraction, four_stages: list[list[Executed]]) -> None:
    runs = [rank[4 + list(OTHER_SCHEDULES).index(schedule)] for rank in four_stages]
    actions = [run.actions for run in runs]
    assert idle_share(actions) == idle
    print(f"{schedule}, 4 ranks, 8 micro-batches: idle {float(idle):.1%}")
    assert [run.left for run in runs] == [0, 0, 0, 0]
    stages = 4 if schedule == "zero_bubble" else 8
    done = Counter(a for table in actions for a in table)
    undivided = {(stage, i) for kind, stage, i in done if kind == "backward"}
    for stage, i in product(range(stages), range(8)):
        halves = [done[Action(kind, stage, i)] for kind in ("backward_input", "backward_weight")]  # type: ignore[arg-type]
        assert done[Action("forward", stage, i)] == 1 and halves == ([0, 0] if (stage, i) in undivided else [1, 1])


def test_interleaved_messages_go_round_all_ranks(four_stages: list[list[Executed]]) -> None:
    """Seven boundaries between eight stages: each neighbour is met twice, but the last rank meets the first
    once."""
    for rank, runs in enumerate(four_stages):
        boundaries = [(stage, stage + 1) for stage in range(7)]
        neighbours = Counter(
            (lower if upper % 4 == rank else upper) % 4 for lower, upper in boundaries if rank in (lower % 4, upper % 4)
        )
        assert sorted(neighbours.values()) == ([1, 2] if rank in (0, 3) else [2, 2])
        expected = {(kind, peer): 8 * times for kind in ("send", "receive") for peer, times in neighbours.items()}
        assert runs[4].messages == expected, rank


def test_each_boundary_carries_every_micro_batch_once_each_way(four_stages: list[list[Executed]]) -> None:
    for i, micro_batches in ((0, 8), (1, 2), (3, 2)):
        for stage, runs in enumerate(four_stages):
            neighbours = {stage - 1, stage + 1} & set(range(4))
            expected = {(kind, rank): micro_batches for kind in ("send", "receive") for rank in neighbours}
            assert runs[i].left == 0
            assert runs[i].messages == expected, (stage, micro_batches)


def test_no_gradient_goes_below_the_lowest_trained_layer(four_stages: list[list[Executed]]) -> None:
    for stage, rank in enumerate(four_stages):
        expected = {("send", stage + 1): 2, ("receive", stage - 1): 2}
        expected |= {("send", stage - 1): 2} if stage == 3 else {}
        expected |= {("receive", stage + 1): 2} if stage == 2 else {}
        assert rank[2].messages == {key: n for key, n in expected.items() if 0 <= key[1] < 4}, stage


def table_and_record(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[tuple[Any, int]]:
    """For the pool: after three steps, the table of relative biases, and the number of recorded forwards."""
    results = []
    for training in begin_each(configs):
        batches = batches_of(training)
        for _ in range(3):
            training.engine.train_step(next(batches), 1e-3)
        weights = training.engine.weights(master=True)
        table = next((w[name] for w in weights.values() for name in w if name.startswith("attention.rpe")), None)
        stage = training.engine.stage
        recorded = stage._get_fsdp_state()._comm_ctx.post_forward_order if training.engine.zero_stage else ()  # type: ignore[operator,union-attr]
        results.append((table, len(recorded)))
    return results


def test_copies_stay_equal_and_nothing_grows() -> None:
    """Moments are rounded alike on all stages; a stage without a backward forgets its forwards."""
    moments = {"precision": "bfloat16", "optimizer_state_dtype": "bf16", **RPE}
    frozen = {"trainable": {"last_layers": 2}, "zero_optimization": {"stage": 3}, "train_batch_size": 4}
    ranks = run_ranks(
        table_and_record, 4, [pipeline_config(2, 2, **keys) for keys in (moments | {"train_batch_size": 4}, frozen)]
    )
    tables = [rank[0][0] for rank in ranks]
    assert tables[0] is not None and all(table.equal(tables[0]) for table in tables)
    assert [rank[1][1] for rank in ranks] == [0, 0, 0, 0]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (3, 2), (4, 4), (5, 12)])
def test_the_order_of_1f1b(stages: int, micro_batches: int) -> None:
    args = NeoXArgs.from_dict(pipeline_config(stages, micro_batches, num_layers=5))
    actions = action_tables(args, placement := StagePlacement.configured(args, stages), micro_batches)
    assert idle_share(actions) == Fraction(stages - 1, micro_batches + stages - 1)
    assert timeline(actions, placement, units, lambda *_: 0).idle == pytest.approx(float(idle_share(actions)))
    assert [(kind, i) for kind, _, i in actions[-1]] == [(k, i) for i in range(micro_batches) for k in PASS_COST]


@pytest.mark.parametrize(("ranks", "chunks", "micro_batches"), [(2, 2, 1), (2, 3, 4), (4, 2, 8), (3, 4, 8), (4, 2, 10)])
def test_the_order_of_interleaved_1f1b(ranks: int, chunks: int, micro_batches: int) -> None:
    keys = {**INTERLEAVED, "virtual_pipeline_stages": chunks, "num_layers": 12}
    args = NeoXArgs.from_dict(pipeline_config(ranks, micro_batches, **keys))
    actions = action_tables(args, placement := StagePlacement.configured(args, ranks), micro_batches)
    if micro_batches % ranks == 0:
        assert idle_share(actions) == Fraction(ranks - 1, chunks * micro_batches + ranks - 1)
    assert timeline(actions, placement, units, lambda *_: 0).idle == pytest.approx(float(idle_share(actions)))
    done = Counter(action for table in actions for action in table)
    assert done == Counter(Action(*a) for a in product(PASS_COST, range(ranks * chunks), range(micro_batches)))  # type: ignore[arg-type]


def test_rounds_of_other_lengths_are_refused() -> None:
    args = NeoXArgs.from_dict(pipeline_config(4, 9, **INTERLEAVED))
    with pytest.raises(ConfigError, match=r"pipeline_schedule.* 9 .* 4 .*gradient_accumulation_steps to 8"):
        action_tables(args, StagePlacement.configured(args, 4), 9)
    with pytest.raises(ConfigError, match=r"pipeline_schedule.* 9 .*gradient_accumulation_steps to 8"):
        NativeEngine.check(args.for_world(4))


@pytest.mark.parametrize(("keys", "message"), [
    ({"pipe_parallel_size": 1, "pipeline_schedule": "zbv"}, r"pipeline_schedule: zbv .*pipe_parallel_size 1"),
    ({"pipeline_schedule": "zbv", "virtual_pipeline_stages": 4}, r"virtual_pipeline_stages: 4.*zbv.* 2 "),
    ({"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 1}, r"virtual_pipeline_stages: 1.*interleaved"),
    ({"virtual_pipeline_stages": 2}, r"virtual_pipeline_stages: 2.*1f1b.*interleaved"),
    ({"pipeline_schedule": "interleaved", "pipeline_layers": [4, 4]}, r"pipeline_layers: .* 2 stages.* 4 "),
    ({"pipeline_schedule": "zero_bubble", **zero(2)}, r"pipeline_schedule: zero_bubble.* 2; .*zero_optimization"),
    ({"pipeline_schedule": "dualpipev", "gradient_accumulation_steps": 3}, r"pipeline_schedule: dualpipev.* 3 .* 4 "),
    ({"pipeline_schedule": "zbv", "async_tensor_parallel": True}, r"async_tensor_parallel: .*zbv"),
    ({"pipeline_schedule": "zbv", "compile": "block"}, r"compile: .*zbv"),
    ({"pipeline_schedule": "interleaved", "engine": "deepspeed"}, r"pipeline_schedule interleaved.*native"),
])  # fmt: skip
def test_what_a_schedule_cannot_do_is_refused_before_the_first_step(keys: dict[str, Any], message: str) -> None:
    values = {**pipeline_config(2, 4, num_layers=8), **keys}
    values["train_batch_size"] = None
    with pytest.raises(ConfigError, match=message):
        ranks = 4 if "zero_optimization" in keys else values["pipe_parallel_size"]
        args = NeoXArgs.from_dict(values).for_world(ranks)
        args.check_training()
        engine = choose_engine(args)
        engine.load().check(args)
        resolve_compile(args, torch.device("cpu"), engine.name, lambda line: None)


def test_a_schedule_as_text_and_as_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yml").write_text(yaml.safe_dump(pipeline_config(2, 3)))
    command = ["deepy.py", "train.py", str(tmp_path / "a.yml"), "--schedule-picture", str(tmp_path / "step.svg")]
    with mock.patch.object(sys, "argv", command):
        assert deepy.main() == 0
    first_line, *rows = capsys.readouterr().out.splitlines()
    assert re.search("2 stages, 3 micro-batches.*25.0%", first_line), "1 of 4 units"
    cells = [row.split("holds")[0].split()[2:] for row in rows]
    assert cells[0] == "F0 F1 .. .. B0 -- F2 B1 -- .. B2 --".split()
    assert cells[1] == ".. F0 B0 -- F1 B1 -- F2 B2 -- .. ..".split()
    assert [row.split()[-2] for row in rows] == ["2", "1"]
    assert "<svg" in (tmp_path / "step.svg").read_text()


def test_an_interleaved_schedule_as_text_and_as_a_picture(tmp_path: Path) -> None:
    args = NeoXArgs.from_dict(pipeline_config(2, 2, **INTERLEAVED))
    first_line, *rows = schedule_lines(args)
    assert re.search("4 stages on 2 ranks, 2 micro-batches.*20.0%", first_line), "3 of 15 units"
    cells = [row.split("holds")[0].split()[2:] for row in rows]
    assert cells[1] == "... F0a F1a F0b B0b --- F1b B1b --- B0a --- B1a --- ... ...".split()
    assert [re.search(r"(\d+) forward", row)[1] for row in rows] == ["4", "3"]  # type: ignore[index]
    draw_schedule(args, tmp_path / "step.svg")
    assert "F" not in (picture := (tmp_path / "step.svg").read_text()) or "1b" in picture


def test_two_sets_a_step_are_twice_the_micro_batches() -> None:
    unlearning = {"ga_dataset": "d", "ga_interval": 2, "ga_iters": 1, "gd_mode": True, "gd_retain_dataset": "d"}
    keys = {**unlearning, "pipeline_schedule": "dualpipev", "num_layers": 8}
    args = NeoXArgs.from_dict(pipeline_config(2, 2, **keys)).for_world(2)
    assert schedule_problems(args) == []
    assert re.search("4 stages on 2 ranks, 4 micro-batches", schedule_lines(args)[0])
    args = NeoXArgs.from_dict(pipeline_config(4, 7, **{**keys, "pipeline_schedule": "interleaved"})).for_world(4)
    assert re.search("14 micro-batches.* gradient_accumulation_steps to [68]$", schedule_problems(args)[0])


def test_a_schedule_needs_the_number_of_micro_batches() -> None:
    args = NeoXArgs.from_dict(config(NEOX, pipe_parallel_size=2, train_micro_batch_size_per_gpu=1))
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        schedule_lines(args)


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    args = NeoXArgs.from_dict(pipeline_config(2, 2))
    for path in (tmp_path / "step.what", tmp_path / "no folder" / "step.png"):
        with pytest.raises(ConfigError, match=f"schedule-picture {path}: "):
            draw_schedule(args, path)
