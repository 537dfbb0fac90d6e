"""The search of layouts: which are tried, and that none is better than what it finds."""

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.planning.estimate import Layout
from megatron.planning.fake_cuda import shim
from megatron.planning.processes import Processes, StepError
from megatron.planning.search import _Searching, changes_for, layouts_of, search
from megatron.planning.settled import settled_args
from megatron.planning.step_model import build_models
from megatron.planning.ways import Way, changed_args, evaluated, way_of
from tests.fake.layouts import MODEL
from tests.planning.test_machines import MACHINE

# What these tests depend on and no import names: spawned processes run it.
DEPENDS_ON = ("megatron.planning.tracing",)
needs_compiler = pytest.mark.skipif(shim.lacking() is not None, reason=f"left out: {shim.lacking()}")
RUN: dict[str, Any] = {
    "num_layers": 4, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk"}
LONG: dict[str, Any] = {"seq_length": 16384, "max_position_embeddings": 16384}


def run_of(world: int, **keys: Any) -> NeoXArgs:
    return settled_args(NeoXArgs.from_dict({**MODEL, **RUN, **keys}), world, 8, lambda line: None)


def changes_of(layout: Layout) -> dict[str, Any]:
    return {key: value for key, value in layout.keys().items() if value is not None}


def allowed(args: NeoXArgs, layouts: Sequence[Layout]) -> dict[Layout, NeoXArgs]:
    """The configuration of each layout that the run can have."""
    result = {}
    for layout in layouts:
        try:
            result[layout] = changed_args(args, changes_of(layout), MACHINE)
        except ConfigError:
            continue
    return result


@pytest.mark.parametrize(("world", "keys"), [(4, {}), (8, EXPERTS), (4, LONG)])
def test_layouts_are_those_of_their_keys(world: int, keys: dict[str, Any]) -> None:
    args = run_of(world, **keys)
    layouts = list(layouts_of(args, 8))
    configurations = allowed(args, layouts)
    assert len(set(layouts)) == len(layouts) and len(configurations) > len(layouts) / 4
    for layout, changed in configurations.items():
        assert Layout.configured(changed) == layout and changed.train_batch_size == RUN["train_batch_size"]
    for place, values in enumerate(zip(*configurations, strict=True)):
        varies = {"context": "seq_length" in keys, "expert": bool(keys) and "seq_length" not in keys}
        assert (len(set(values)) > 1) == varies.get(Layout._fields[place], True)


@pytest.mark.parametrize(
    "keys",
    [{}, {"pipeline_schedule": "zero_bubble"}, {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2},
     {"model_parallel_size": 2, "checkpoint_activations": True, "recompute_granularity": "selective"}],
)  # fmt: skip
def test_changes_lead_to_their_layout(keys: dict[str, Any]) -> None:
    """Whatever the configuration says without effect, such as a schedule without a pipeline."""
    args, counts = run_of(4, **keys), [0, 0]
    for layout in layouts_of(args, 8):
        counts[0] += 1
        try:
            changed = changed_args(args, changes_for(args, layout), MACHINE)
        except ConfigError:
            continue
        counts[1] += 1
        assert Layout.configured(changed) == layout, changes_for(args, layout)
    assert counts[1] > counts[0] / 4 and changes_for(args, Layout.configured(args)) == {}


def test_a_layout_whose_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """This layout is refused with its problem, and the others are planned."""
    args, way = run_of(4), Way({}, 10**9, 10**8, 1.0, {"products": 1.0}, 1)

    def evaluated_once(args: NeoXArgs, changes: list[dict[str, Any]], *_: Any) -> list[Way]:
        if any(keys.get("model_parallel_size") == 2 for keys in changes):
            raise StepError("a planned step fails: on two tensor ranks")
        return [way] * len(changes)

    monkeypatch.setattr("megatron.planning.search.way_of", lambda changes, model: way)
    monkeypatch.setattr("megatron.planning.search.evaluated", evaluated_once)
    model: Any = SimpleNamespace(args=args, machine=MACHINE)
    state = _Searching(model, 10**12, Processes(1))
    layouts = list(layouts_of(args, 8))
    state.plan(layouts)
    assert {layout.tensor for layout in layouts} == {1, 2, 4} and {layout.tensor for layout in state.ways} == {1, 4}
    problems = [row.refusal for row in state.result().rejections if (row.key, row.value) == ("model_parallel_size", 2)]
    assert problems == ["a planned step fails: on two tensor ranks"]


@pytest.mark.more
@needs_compiler
def test_the_best_layout_planned_by_itself(processes: Processes, plan: Callable[..., tuple[int, str, str]]) -> None:
    report = json.loads(plan("--gpus", "2", "--gpu", "h100", "--json", **RUN)[1])
    memory = str(0.9 * report["stages"][0]["step"] / 2**30)
    flags = ("--gpus", "2", "--gpu", "h100", "--gpu-memory", memory, "--json")
    report = json.loads(plan(*flags, "--search", **RUN)[1])["search"]
    best = report["layouts"][0]
    assert best["changes"] and best["step_bytes"] <= float(memory) * 2**30
    words = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in best["changes"].items()]
    planned = json.loads(plan(*flags, "--set", *words, **RUN)[1])
    assert planned["fits"] is True and planned["time"]["seconds"] == pytest.approx(best["seconds"])
    assert {row["key"] for row in report["rejected"]} >= {"model_parallel_size", "pipe_parallel_size"}


@pytest.mark.product
@pytest.mark.timeout(900)
@needs_compiler
def test_no_layout_is_better(processes: Processes) -> None:
    """All layouts are planned too, with much memory, and with less than the run needs."""
    args = run_of(2)
    [model] = build_models([args], MACHINE, processes)
    configurations = allowed(args, list(layouts_of(args, 8)))
    ways = evaluated(args, [changes_of(layout) for layout in configurations], MACHINE, processes)
    for share in (10.0, 0.7):
        memory = int(share * way_of({}, model).step_bytes)
        result = search(model, memory, processes, lambda line: None)
        best = min(way.seconds for way in ways if way.step_bytes <= memory)
        print(f"{result.planned} of {len(ways)} layouts planned: {result.best[0].seconds / best - 1:+.1%}")
        assert result.best[0].seconds < 1.03 * best
