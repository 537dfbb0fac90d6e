"""Recomputation gives the same bits, also of what is dropped; what is run again; `checkpoint_in_cpu`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.training import recompute as recompute_module
from tests.marks import with_more
from tests.model.runs import LLAMA, NEOX, sgd_steps
from tests.model.stages import gradients, make_stage, random_batch, small
from tests.pool import run_ranks
from tests.training import runs as training_runs

RECOMPUTE: list[dict[str, Any]] = [
    {},
    {"checkpoint_activations": True, "checkpoint_num_layers": 1},
    {"checkpoint_activations": True, "checkpoint_num_layers": 2},
    {"checkpoint_activations": True, "recompute_every": 2},
    {"checkpoint_activations": True, "recompute_granularity": "selective"},
]
TP2 = {"model_parallel_size": 2}
CELLS: dict[int, list[dict[str, Any]]] = {
    1: [NEOX, LLAMA],
    2: [NEOX | TP2, LLAMA | TP2 | {"sequence_parallel": True}, NEOX | {"pipe_parallel_size": 2}],
}


@pytest.mark.parametrize("world_size", CELLS)
def test_recomputation_is_bit_equal(world_size: int) -> None:
    """Also where activations are dropped: its masks are drawn again."""
    forms = [{"hidden_dropout": 0.1, "attention_dropout": 0.1, **form} for form in RECOMPUTE] + [{}]
    configs = [{**cell, **form} for cell in CELLS[world_size] for form in forms]
    for steps in run_ranks(sgd_steps, world_size, configs):
        for start in range(0, len(steps), len(forms)):
            reference_step, *recomputed, no_dropout = steps[start : start + len(forms)]
            for step in recomputed:
                assert torch.equal(step.loss, reference_step.loss)
                for layer, tensors in step.weights.items():
                    for name, value in tensors.items():
                        assert torch.equal(value, reference_step.weights[layer][name]), f"gradient of {layer} {name}"
            assert abs(no_dropout.loss - reference_step.loss) > 1e-4, "dropout does nothing"
            for actual, reference in zip(reference_step.logprobs, no_dropout.logprobs, strict=True):
                # Documents are attended without a mask where there is no dropout: equal but for rounding.
                torch.testing.assert_close(actual, reference, rtol=1e-5, atol=1e-5, msg="dropout in evaluation")


@pytest.mark.parametrize("blocks_per_piece, num_pieces", [(0, None), (1, 4), (3, 2), (9, 1)])
def test_blocks_are_run_again_in_the_backward_pass(
    blocks_per_piece: int, num_pieces: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, runs = [], []
    real = recompute_module.checkpoint

    def count(*args: Any, **kwargs: Any) -> Tensor:
        pieces.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(recompute_module, "checkpoint", count)
    args = small(num_layers=4, checkpoint_activations=blocks_per_piece > 0, checkpoint_num_layers=blocks_per_piece or 1)
    stage = make_stage(args).train()
    for index in range(2, 6):
        stage.layers[str(index)].register_forward_pre_hook(lambda module, inputs: runs.append(module))
    out = stage(None, random_batch(args))
    assert len(runs) == 4 and len(pieces) == (num_pieces or 0)
    out.sum().backward()
    assert len(runs) == (8 if num_pieces else 4)
    with torch.no_grad():
        stage(None, random_batch(args))
    assert len(pieces) == (num_pieces or 0), "nothing to recompute without gradients"


def trained(**changes: Any) -> dict[tuple[int, str], Tensor]:
    args = small(num_layers=4, checkpoint_activations=True, **changes)
    stage = make_stage(args).train()
    stage(None, random_batch(args)).logsumexp(-1).square().mean().backward()  # type: ignore[union-attr]
    return gradients(stage)


@pytest.mark.parametrize(
    "changes",
    [{}, {"checkpoint_num_layers": 3}, {"hidden_dropout": 0.2, "attention_dropout": 0.2}, {"gpt_j_residual": True}],
)
def test_gradients_are_the_same(changes: dict[str, Any]) -> None:
    on_host, on_device = trained(checkpoint_in_cpu=True, **changes), trained(**changes)
    assert on_host.keys() == on_device.keys() and all(torch.equal(on_host[key], on_device[key]) for key in on_host)


@pytest.mark.parametrize("name", with_more(["zero3", "pp2", "tp2"], product=["tp2", "pp2"]))
def test_inputs_kept_by_the_host_train_the_same(name: str) -> None:
    ranks, layout = training_runs.LAYOUTS[name]
    keys = {"checkpoint_activations": True, "train_micro_batch_size_per_gpu": 2, "hidden_dropout": 0.1}
    common = training_runs.config(training_runs.LLAMA, training_runs.ADAMW, layout, keys)
    for on_device, on_host in run_ranks(training_runs.curves, ranks, [common, common | {"checkpoint_in_cpu": True}], 3):
        assert on_device.losses == on_host.losses and training_runs.bit_equal(on_device.weights, on_host.weights)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_inputs_of_recomputed_blocks_move_and_nothing_else(
    num_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Tensor] = []

    def watched(pin_memory: bool) -> Any:
        assert not pin_memory, "only for GPUs"
        return torch.autograd.graph.saved_tensors_hooks(lambda x: moved.append(x) or x.clone(), lambda x: x)

    monkeypatch.setattr(recompute_module, "save_on_cpu", watched)
    trained(checkpoint_num_layers=num_layers)
    assert not moved
    trained(checkpoint_in_cpu=True, checkpoint_num_layers=num_layers)
    hidden = [x for x in moved if x.shape == (16, 2, 32)]
    assert len(hidden) == 4 // num_layers and sum(x.numel() for x in moved) == sum(x.numel() for x in hidden)
