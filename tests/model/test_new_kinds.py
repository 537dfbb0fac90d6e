"""A new mixer and a new feed-forward are each a file and an entry of a table, and train."""

import os
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

from megatron.mpu import Linear, LinearSpec, with_prefix


@dataclass(frozen=True)
class MeanSpec:
    hidden: int


class Mean(nn.Module):
    module_name = "attention"
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
        return with_prefix("dense", cls._linear(spec).params())

    @property
    def output(self):
        return self.dense

    def core(self, x, inputs, seed, cache=None, adapter_seed=None):
        return x.cumsum(0) / torch.arange(1, len(x) + 1).view(-1, 1, 1)
"""
# One linear, which reads its input's square; in the first block alone.
FEED_FORWARD = """
from dataclasses import dataclass

from torch import nn

from megatron.mpu import Linear, LinearSpec, with_prefix


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
        return with_prefix("out", cls._linear(spec).params())

    @property
    def output(self):
        return self.out

    def core(self, x, adapter_seed=None, counted=None):
        return x.square(), None
"""
RUN = """
from pathlib import Path

from megatron.model import layer_params
from tests.model.stages import small
from tests.training.runs import ADAMW, bit_equal, config, curves, run_to_end

names = [[spec.name for spec in layer_params(small())[layer]] for layer in (2, 3)]
assert "mlp.out.bias" in names[0] and "attention.query_key_value.weight" in names[0], names
assert "mlp.linear1.weight" in names[1] and "attention.query_key_value.weight" not in names[1], names
for part in curves(0, 1, [config(ADAMW), config(ADAMW, gpt_j_residual=True, checkpoint_activations=True)], 3):
    assert part.losses[0] > part.losses[1] > part.losses[2], part.losses
common = config(ADAMW, train_iters=4, checkpoint_factor=2)
_, expected = run_to_end(0, 1, {**common, "save": "through"})
stopped = {**common, "save": "stopped", "load": "stopped"}
run_to_end(0, 1, {**stopped, "exit_interval": 2})
assert Path("stopped/latest").read_text() == "global_step2"
_, found = run_to_end(0, 1, stopped)
assert bit_equal(found, expected) and "mlp.out.bias" in found[2], found[2].keys()
"""


def test_each_is_a_file_and_an_entry(tmp_path: Path) -> None:
    """They train, and go on from a checkpoint to the last bit."""
    shutil.copytree(ROOT / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    model = tmp_path / "megatron" / "model"
    (model / "mean.py").write_text(MIXER)
    (model / "square.py").write_text(FEED_FORWARD)
    block = (model / "block.py").read_text()
    for module, name, known in (("mean", "Mean", "(SelfAttention, Mamba, Mamba2)"), ("square", "Square", "(MoE, MLP)")):
        assert block.count(known) == 1
        block = block.replace(known, f"({name}, {known[1:]}")
        block = block.replace("from torch import", f"from megatron.model.{module} import {name}\nfrom torch import", 1)
    (model / "block.py").write_text(block)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
