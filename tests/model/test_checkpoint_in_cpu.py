"""`checkpoint_in_cpu`: what is kept for recomputation leaves the device, and gradients stay the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.training import recompute as recompute_module
from tests.marks import with_more
from tests.model.stages import gradients, random_batch, random_weights, small, stage_with
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LAYOUTS, LLAMA, bit_equal, config, curves

RECOMPUTE = {"num_layers": 4, "checkpoint_activations": True}


def trained(**changes: Any) -> dict[tuple[int, str], Tensor]:
    """Gradients of a step."""
    args = small(**RECOMPUTE, **changes)
    stage = stage_with(args, random_weights(args)).train()
    logits = stage(None, random_batch(args))
    assert isinstance(logits, Tensor)
    logits.logsumexp(-1).square().mean().backward()
    return gradients(stage)


@pytest.mark.parametrize(
    "changes",
    [{}, {"checkpoint_num_layers": 3}, {"hidden_dropout": 0.2, "attention_dropout": 0.2}, {"gpt_j_residual": True}],
)
def test_gradients_are_the_same(changes: dict[str, Any]) -> None:
    ours, theirs = trained(checkpoint_in_cpu=True, **changes), trained(**changes)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("name", with_more(["zero3", "pp2", "tp2"], "tp2", product=["pp2"]))
def test_layouts_train_the_same(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    common = config(LLAMA, ADAMW, layout, RECOMPUTE, train_micro_batch_size_per_gpu=2, hidden_dropout=0.1)
    for part in run_ranks(curves, ranks, [common, common | {"checkpoint_in_cpu": True}], 3):
        without, within = part
        assert without.losses == within.losses and bit_equal(without.weights, within.weights)


@pytest.mark.parametrize("together", [1, 2])
def test_the_inputs_of_recomputed_blocks_move_and_nothing_else(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Tensor] = []

    def watched(pin_memory: bool) -> Any:
        assert not pin_memory, "only for GPUs"
        return torch.autograd.graph.saved_tensors_hooks(lambda x: moved.append(x) or x.clone(), lambda x: x)

    monkeypatch.setattr(recompute_module, "save_on_cpu", watched)
    trained(checkpoint_num_layers=together)
    assert not moved
    trained(checkpoint_in_cpu=True, checkpoint_num_layers=together)
    hidden = [x for x in moved if x.shape == (16, 2, 32)]
    assert len(hidden) == 4 // together and sum(x.numel() for x in moved) == sum(x.numel() for x in hidden)
