"""AdamW in one pass over memory beside torch's of fp32 copies; the update under the next forward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.training.loop import batches_of
from megatron.training.native.fused_update import FusedAdamW, adamw
from tests.gpu.runs import run
from tests.training.runs import LLAMA, bit_equal, config

pytestmark = pytest.mark.gpu
SHAPES = ((1000, 33), (7,), (3, 1024), (1,))
NUMBERS: dict[str, float] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def states(device: torch.device) -> dict[str, list[Tensor]]:
    made = {"masters": [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device)
                        for i, shape in enumerate(SHAPES)]}  # fmt: skip
    made |= {name: [torch.zeros_like(master) for master in made["masters"]] for name in ("exp_avgs", "exp_avg_sqs")}
    return made | {"steps": [torch.zeros((), device=device) for _ in SHAPES]}


def test_steps_are_those_of_torchs_kernel(device: torch.device) -> None:
    """Of other orders of the same fp32 arithmetic."""
    ours, theirs = states(device), states(device)
    out = [master.bfloat16() for master in ours["masters"]]
    scale, no = torch.tensor(1.7, device=device), torch.zeros((), device=device)
    for step in range(4):
        random = torch.Generator().manual_seed(100 + step)
        gradients = [torch.randn(shape, generator=random).bfloat16().to(device) for shape in SHAPES]
        adamw(**ours, gradients=gradients, out=out, grad_scale=scale, found_inf=no, **NUMBERS)
        torch._foreach_add_(theirs["steps"], 1.0)
        torch._fused_adamw_(
            theirs["masters"], [g.float() for g in gradients], theirs["exp_avgs"], theirs["exp_avg_sqs"], [],
            theirs["steps"], amsgrad=False, maximize=False, grad_scale=scale, found_inf=no, **NUMBERS,
        )  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-7)
    assert all(torch.equal(weight, master.bfloat16()) for weight, master in zip(out, ours["masters"], strict=True))


def test_a_skipped_step_changes_nothing(device: torch.device) -> None:
    given = states(device)
    before = {name: [tensor.clone() for tensor in tensors] for name, tensors in given.items()}
    out = [torch.full_like(master, 3.0, dtype=torch.bfloat16) for master in given["masters"]]
    gradients = [torch.full_like(weight, float("nan")) for weight in out]
    one = torch.ones((), device=device)
    adamw(**given, gradients=gradients, out=out, grad_scale=one, found_inf=one, **NUMBERS)
    torch.testing.assert_close(given, before, rtol=0, atol=0)
    if device.type == "cuda":  # on a CPU they are the masters, written again
        assert all((weight == 3.0).all() for weight in out)


@pytest.mark.only_gpu("on a CPU auto leaves it out")
def test_auto_takes_it_and_losses_are_the_same() -> None:
    losses: dict[Any, list[float]] = {}
    for fused in ("auto", False):
        values = config(LLAMA, {"precision": "bfloat16", "engine": "native"}, train_micro_batch_size_per_gpu=8)
        with run({**values, "fused_update": fused}) as training:
            assert isinstance(training.engine._update.optimizers[0], FusedAdamW) == (fused == "auto")
            batches = batches_of(training)
            losses[fused] = [float(training.engine.train_step(next(batches), 1e-3).loss) for _ in range(12)]
    assert losses["auto"] == pytest.approx(losses[False], rel=2e-3) and losses["auto"][-1] < losses["auto"][0]


@pytest.mark.parametrize("fused", [True, False])
def test_under_the_next_forward_the_bits_are_the_same(fused: bool, device: torch.device) -> None:
    """The host waits for nothing in between; a layer's update takes about as long as its forward."""
    found: dict[bool, tuple[list[float], Any]] = {}
    width = 2048 if device.type == "cuda" else 64
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "train_micro_batch_size_per_gpu": 8}
    keys = {"precision": "bfloat16", "engine": "native", "deterministic_mode": True, "compile": False}
    for overlap in (False, True):
        values = {"fused_update": fused, "overlap_optimizer_with_forward": overlap}
        with run(config(LLAMA, keys, sizes, values)) as training:
            batches = batches_of(training)
            losses = [training.engine.train_step(next(batches), 1e-3).loss for _ in range(12)]
            found[overlap] = [float(loss) for loss in losses], training.engine.weights(master=True)
    assert found[True][0] == found[False][0] and bit_equal(found[True][1], found[False][1])
