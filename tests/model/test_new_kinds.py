"""A new mixer and feed-forward are a class and an entry each. As files: tests/guide/test_recipes.py."""

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from megatron.model import layer_params
from megatron.model.block import FEED_FORWARDS, MIXERS
from megatron.mpu import Linear, LinearSpec, ParallelGroups, ParamSpec, with_prefix
from megatron.neox_arguments import NeoXArgs
from tests.model.stages import small
from tests.pool import run_ranks
from tests.training.runs import ADAMW, Part, bit_equal, config, curves, run_to_end


@dataclass(frozen=True)
class LinearOf:
    """Both kinds are a function before one row-parallel linear."""

    hidden: int
    bias: bool

    def linear(self) -> LinearSpec:
        return LinearSpec(self.hidden, self.hidden, "row", self.bias)


class MeanSpec(LinearOf):
    pass


class SquareSpec(LinearOf):
    pass


class Mean(nn.Module):
    """Averages all tokens up to each one. Only the second block has it."""

    module_name, Spec = "attention", MeanSpec

    def __init__(self, spec: LinearOf, groups: ParallelGroups, sequence_parallel: bool = False, **_: object) -> None:
        super().__init__()
        self.dense = Linear(spec.linear(), groups, sequence_parallel)

    @classmethod
    def spec(cls, args: NeoXArgs, block: int) -> LinearOf | None:
        return MeanSpec(args.hidden_size, False) if block == 1 else None

    @classmethod
    def params(cls, spec: LinearOf) -> tuple[ParamSpec, ...]:
        return with_prefix("dense", spec.linear().params())

    @property
    def output(self) -> Linear:
        return self.dense

    def core(self, x: Tensor, *_: object, **kwargs: object) -> Tensor:
        return x.cumsum(0) / torch.arange(1, len(x) + 1).view(-1, 1, 1)


class Square(Mean):
    """One linear, which reads its input's square; in the first block alone."""

    Spec = SquareSpec  # type: ignore[assignment]

    @classmethod
    def spec(cls, args: NeoXArgs, block: int) -> LinearOf | None:
        return SquareSpec(args.hidden_size, True) if block == 0 else None

    def core(self, x: Tensor, *_: object, **kwargs: object) -> tuple[Tensor, None]:  # type: ignore[override]
        return x.square(), None


def runs_of_new_kinds(rank: int, world_size: int, folder: str) -> tuple[list[list[str]], list[Part], list[dict]]:
    """For the pool: names of parameters, steps of two residual forms, weights of a run stopped and not."""
    tables = {"MIXERS": (Mean, *MIXERS), "FEED_FORWARDS": (Square, *FEED_FORWARDS)}
    with (
        mock.patch.multiple("megatron.model.block", **tables),
        mock.patch.multiple("megatron.model.weight_map", **tables),
        mock.patch("megatron.model.stage.MIXERS", tables["MIXERS"]),
    ):
        names = [[spec.name for spec in layer_params(small())[layer]] for layer in (2, 3)]
        forms = [config(ADAMW), config(ADAMW, gpt_j_residual=True, checkpoint_activations=True)]
        steps = curves(rank, world_size, forms, 3)
        common = config(ADAMW, train_iters=4, checkpoint_factor=2)
        weights = [run_to_end(rank, world_size, {**common, "save": f"{folder}/through"})[1]]
        stopped = {**common, "save": f"{folder}/stopped", "load": f"{folder}/stopped"}
        run_to_end(rank, world_size, {**stopped, "exit_interval": 2})
        assert Path(folder, "stopped", "latest").read_text() == "global_step2"
        return names, steps, [*weights, run_to_end(rank, world_size, stopped)[1]]


def test_they_train_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    ((block2, block3), steps, (expected, loaded)) = run_ranks(runs_of_new_kinds, 1, str(tmp_path))[0]
    assert "mlp.dense.bias" in block2 and "attention.query_key_value.weight" in block2, block2
    assert "mlp.linear1.weight" in block3 and "attention.query_key_value.weight" not in block3, block3
    for part in steps:
        assert part.losses[0] > part.losses[1] > part.losses[2], part.losses
    assert bit_equal(loaded, expected) and "mlp.dense.bias" in loaded[2], loaded[2].keys()
