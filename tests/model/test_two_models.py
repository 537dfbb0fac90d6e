"""Nothing is global: models and engines of different configurations live in one process."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron
from tests.model.runs import ALIBI, LLAMA, LR, NEOX, engine_for
from tests.model.stages import document_batch, make_stage, random_batch, small
from tests.pool import run_ranks
from tests.training.runs import cells


@torch.no_grad()
def test_two_models_do_not_disturb_each_other() -> None:
    configs = [small(**model) for model in (NEOX, LLAMA | {"hidden_size": 64}, ALIBI)]
    expected_logits = []
    for args in configs:
        stage = make_stage(args)
        expected_logits.append(stage(None, random_batch(args)))
    stages = [make_stage(args) for args in configs]
    for args, stage, expected in reversed(list(zip(configs, stages, expected_logits, strict=True))):
        assert torch.equal(stage(None, random_batch(args)), expected)


DROPOUT_MODEL: dict[str, Any] = {**NEOX, "hidden_dropout": 0.1}
RECOMPUTED_MODEL: dict[str, Any] = {
    **LLAMA,
    "checkpoint_activations": True,
    "hidden_size": 64,
    "zero_optimization": {"stage": 1},
}
STEPS = 4


def alternate(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[list[float]]:
    """The losses of engines that step in turn, with a look at the logits in between."""
    engines = [engine_for(values, world_size) for values in configs]
    losses: list[list[float]] = [[] for _ in engines]
    for step in range(STEPS):
        for engine, curve in zip(engines, losses, strict=True):
            first_seed = 100 * step + 10 * engine.groups.rank("data")
            batches = [document_batch(engine.args, seed=first_seed + i) for i in range(2)]
            curve.append(float(engine.train_step(batches, LR / 10).loss))
            engine.token_logprobs(batches)
    for engine in engines:
        engine.close()
    return losses


@pytest.mark.parametrize(
    "world_size, layout",
    cells([(1, {})], [(2, {"model_parallel_size": 2})], [(2, {}), (2, {"pipe_parallel_size": 2})]),
)
def test_two_engines_in_turn_train_as_separately(world_size: int, layout: dict[str, Any]) -> None:
    configs = [DROPOUT_MODEL | layout, RECOMPUTED_MODEL | layout]
    separate_runs = [run_ranks(alternate, world_size, [values]) for values in configs]
    interleaved = run_ranks(alternate, world_size, configs)
    for rank in range(world_size):
        assert interleaved[rank] == [separate_runs[0][rank][0], separate_runs[1][rank][0]]
    assert interleaved[0][0] == interleaved[-1][0], "every rank reports the same loss"
    assert interleaved[0][0] != interleaved[0][1] and len(set(interleaved[0][0])) == STEPS


@pytest.mark.parametrize("room", ["distributed", "mpu", "model", "objectives"])
def test_no_mutable_state_at_module_level(room: str) -> None:
    for path in sorted((Path(megatron.__file__).parent / room).glob("*.py")):
        tree = ast.parse(path.read_text())
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)], path
        constants = set()
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = {target.id for target in targets if isinstance(target, ast.Name)} - {"__all__"}
                assert not (names and isinstance(node.value, ast.List | ast.Set | ast.ListComp)), f"{path}: {names}"
                constants |= names
        for part in ast.walk(tree):
            if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store | ast.Del):
                assert getattr(part.value, "id", None) not in constants, f"{path}:{part.lineno} writes to a constant"
