"""`compile: block` computes what the eager blocks compute, once compiled for all of them."""

import os
import shutil
from functools import partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.model import build_stage
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError
from megatron.objectives import LANGUAGE_MODELLING
from megatron.training.compile_blocks import compile_blocks
from tests.marks import with_more
from tests.model.runs import LATENT
from tests.model.stages import document_batch, gradients, groups_of, make_stage, random_batch, small
from tests.objectives.steps import as_head
from tests.pool import run_ranks

ENV = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else every rank starts a pool of compiling processes
pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile on a CPU needs g++ (or $CXX)"
)
Result = tuple[Tensor, dict[tuple[int, str], Tensor], int]


def prepare(backend: str) -> None:
    """Compile with `backend`: aot_eager traces as inductor does, without 20 s of g++."""
    real = nn.Module.compile
    nn.Module.compile = partialmethod(real, backend=backend)  # type: ignore[assignment]


def losses(rank: int, world_size: int, backend: str, values: dict[str, Any], steps: int) -> list[Result]:
    """Eager and compiled: the last step's loss and gradients, and graphs made after the second step."""
    from torch._dynamo.utils import counters

    prepare(backend)
    results = []
    for compile_ in (False, "block"):
        args = small(**values, compile=compile_)
        groups = groups_of(args, world_size) if world_size > 1 else ParallelGroups.single()
        stage = make_stage(args, groups=groups).train()
        early_graphs = 0
        for step in range(steps):
            batch = random_batch(args, seed=step + 1)
            stage.zero_grad()
            loss = LANGUAGE_MODELLING.loss_sum(as_head(stage(None, batch)), batch, groups.group("tensor"))[0]
            loss.backward()
            assert not counters["graph_break"], counters["graph_break"]
            early_graphs = counters["stats"]["unique_graphs"] if step < 2 else early_graphs
        results.append((loss.detach(), gradients(stage), counters["stats"]["unique_graphs"] - early_graphs))
    assert early_graphs > 0, "nothing was compiled"
    return results


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "attention_backend": "math"}
TP2 = {"num_layers": 2, "model_parallel_size": 2}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    # More blocks than dynamo would compile anew.
    "one process": (1, "aot_eager", {"num_layers": 12, "gpt_j_residual": True, **DROPOUT}),
    # In full: inductor's own random numbers would be others.
    "dropout": (1, "inductor", {**DROPOUT, "checkpoint_activations": True, "recompute_granularity": "selective"}),
    "tp2+sp": (2, "aot_eager", TP2 | {"sequence_parallel": True, "checkpoint_activations": True}),
    "latent attention": (1, "aot_eager", {**LATENT, "num_layers": 2}),
    "tp2": (2, "aot_eager", TP2 | {"norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 48}),
}


@pytest.mark.parametrize("case", with_more(CASES, product=["dropout"]))  # 20 s of g++
def test_equals_eager(case: str) -> None:
    world_size, backend, values = CASES[case]
    for eager, compiled in run_ranks(losses, world_size, backend, values, 6, env=ENV, timeout=600):
        torch.testing.assert_close(compiled[0], eager[0], rtol=1e-5, atol=0)
        for key, gradient in eager[1].items():
            assert (compiled[1][key] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, key
        assert compiled[2] == 0, "compiled again for a later step"


def other_shapes(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    prepare("aot_eager")
    stages = []
    for compile_ in (False, "block"):
        args = small(compile=compile_)
        stages.append(make_stage(args))
    batches = [random_batch(args), document_batch(args), random_batch(args, seq=8), random_batch(args, rows=1, seq=11)]
    with torch.no_grad():
        return [(stages[0](None, batch), stages[1](None, batch)) for batch in batches]


@pytest.mark.product
def test_documents_and_other_lengths() -> None:
    for eager, compiled in run_ranks(other_shapes, 1, env=ENV, timeout=600)[0]:
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


def test_without_a_compiler_it_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    stage = build_stage(small(), ParallelGroups.single())
    with pytest.raises(ConfigError, match=r"compile: block .*g\+\+.*PATH.*compile: false"):
        compile_blocks(stage, small(compile="block"))
    compile_blocks(stage, small())
