"""A new mixer and a new feed-forward are each a file and an entry of a table, and train."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What comes before a token, averaged; in the second block alone.
MIXER = """
from dataclasses import dataclass

import torch
from torch import nn

from megatron.mpu import Linear, LinearSpec, under


@dataclass(frozen=True)
class MeanSpec:
    hidden: int


class Mean(nn.Module):
    Spec = MeanSpec

    def __init__(self, spec, groups, sequence_parallel=False, *, backends):
        super().__init__()
        self.dense = Linear(self._linear(spec), groups, sequence_parallel)

    @classmethod
    def spec(cls, args, block):
        return MeanSpec(args.hidden_size) if block == 1 else None

    @staticmethod
    def _linear(spec):
        return LinearSpec(spec.hidden, spec.hidden, "row", bias=False)

    @classmethod
    def params(cls, spec):
        return under("dense", cls._linear(spec).params())

    @property
    def output(self):
        return self.dense

    def core(self, x, inputs, seed, cache=None):
        return x.cumsum(0) / torch.arange(1, len(x) + 1).view(-1, 1, 1)
"""
# One linear, which reads its input's square; in the first block alone.
FEED_FORWARD = """
from dataclasses import dataclass

from torch import nn

from megatron.mpu import Linear, LinearSpec, under


@dataclass(frozen=True)
class SquareSpec:
    hidden: int


class Square(nn.Module):
    Spec = SquareSpec

    def __init__(self, spec, groups, sequence_parallel=False):
        super().__init__()
        self.out = Linear(self._linear(spec), groups, sequence_parallel)

    @classmethod
    def spec(cls, args, block):
        return SquareSpec(args.hidden_size) if block == 0 else None

    @staticmethod
    def _linear(spec):
        return LinearSpec(spec.hidden, spec.hidden, "row", bias=True)

    @classmethod
    def params(cls, spec):
        return under("out", cls._linear(spec).params())

    @property
    def output(self):
        return self.out

    def core(self, x):
        return x.square()
"""
TRAIN = """
import torch
from torch.nn.functional import cross_entropy

from megatron.model import build_stage, init_stage, layer_params
from megatron.mpu import ParallelGroups
from tests.model.stages import random_batch, small

for changes in ({}, {"gpt_j_residual": True, "checkpoint_activations": True}):
    args, groups = small(**changes), ParallelGroups.single()
    stage = build_stage(args, groups)
    init_stage(stage, args, groups)
    names = [[spec.name for spec in layer_params(args)[layer]] for layer in (2, 3)]
    assert "mlp.out.bias" in names[0] and "attention.query_key_value.weight" in names[0], names
    assert "mlp.linear1.weight" in names[1] and "attention.query_key_value.weight" not in names[1], names
    optimizer, batch, losses = torch.optim.SGD(stage.parameters(), lr=0.1), random_batch(args), []
    for _ in range(3):
        loss = cross_entropy(stage(None, batch).flatten(0, 1), batch.labels.t().flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(param.grad is not None for param in stage.parameters())
    assert losses[0] > losses[1] > losses[2], losses
"""


def test_each_is_a_file_and_an_entry(tmp_path: Path) -> None:
    for room in ("megatron", "tests/model", "tests/pool"):
        shutil.copytree(ROOT / room, tmp_path / room)
    model = tmp_path / "megatron" / "model"
    (model / "mean.py").write_text(MIXER)
    (model / "square.py").write_text(FEED_FORWARD)
    block = (model / "block.py").read_text()
    for module, name, known in (("mean", "Mean", "(SelfAttention,)"), ("square", "Square", "(MLP,)")):
        assert block.count(known) == 1
        block = block.replace(known, f"({name}, {known[1:]}")
        block = block.replace("from torch import", f"from megatron.model.{module} import {name}\nfrom torch import", 1)
    (model / "block.py").write_text(block)
    done = subprocess.run([sys.executable, "-c", TRAIN], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
