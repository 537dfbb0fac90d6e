"""AdamW in one pass over memory beside torch's of fp32 copies; the update under the next forward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.training.native.fused_update import FusedAdamW, adamw
from megatron.training.native.stochastic_rounding import stream_number
from tests.gpu.runs import run
from tests.training.batches import batches_of
from tests.training.runs import LLAMA, bit_equal, config

pytestmark = pytest.mark.gpu
SHAPES = ((1000, 33), (7,), (3, 1024), (1,))
NUMBERS: dict[str, float] = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def fp32_moments(device: torch.device) -> dict[str, Any]:
    """Arguments for moments in fp32."""
    return {"streams": torch.zeros(0, dtype=torch.int64, device=device), "firsts": []}


def states(device: torch.device) -> dict[str, list[Tensor]]:
    state = {"masters": [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(device)
                        for i, shape in enumerate(SHAPES)]}  # fmt: skip
    state |= {name: [torch.zeros_like(master) for master in state["masters"]] for name in ("exp_avgs", "exp_avg_sqs")}
    return state | {"steps": [torch.zeros((), device=device) for _ in SHAPES]}


def test_steps_are_those_of_torchs_kernel(device: torch.device) -> None:
    """Both do the same fp32 arithmetic in other orders."""
    actual, expected = states(device), states(device)
    out = [master.bfloat16() for master in actual["masters"]]
    scale, zero = torch.tensor(1.7, device=device), torch.zeros((), device=device)
    for step in range(4):
        random = torch.Generator().manual_seed(100 + step)
        gradients = [torch.randn(shape, generator=random).bfloat16().to(device) for shape in SHAPES]
        adamw(
            **actual, gradients=gradients, out=out, grad_scale=scale, found_inf=zero, **fp32_moments(device), **NUMBERS
        )
        torch._foreach_add_(expected["steps"], 1.0)
        torch._fused_adamw_(
            expected["masters"], [g.float() for g in gradients], expected["exp_avgs"], expected["exp_avg_sqs"], [],
            expected["steps"], amsgrad=False, maximize=False, grad_scale=scale, found_inf=zero, **NUMBERS,
        )  # fmt: skip
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-7)
    assert all(torch.equal(weight, master.bfloat16()) for weight, master in zip(out, actual["masters"], strict=True))


def half_moments(
    state: dict[str, list[Tensor]], gradients: list[Tensor], device: torch.device
) -> dict[str, list[Tensor]]:
    """The state after a step on this device, and `out`, weights where gradients have 16 bits."""
    state = {name: [tensor.to(device, copy=True) for tensor in tensors] for name, tensors in state.items()}
    halved = gradients[0].dtype == torch.bfloat16
    out = [torch.zeros_like(master, dtype=torch.bfloat16) for master in state["masters"]] if halved else []
    adamw(
        **state, gradients=[gradient.to(device) for gradient in gradients], out=out,
        grad_scale=torch.tensor(1.7, device=device), found_inf=torch.zeros((), device=device),
        streams=torch.tensor([stream_number(1234, f"{i}") for i in range(len(SHAPES))], device=device),
        firsts=[0, 1, 2**31 - 100, 2**32 - 1], **NUMBERS,
    )  # fmt: skip
    return {**state, "out": out}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["16-bit gradients", "fp32 gradients"])
def test_moments_in_bf16_are_those_of_a_cpu(dtype: torch.dtype, device: torch.device) -> None:
    """The random bits are the same; a moment whose last fp32 bit differs may be rounded to the other side."""
    state, equal = states(torch.device("cpu")), list[Tensor]()
    for name in ("exp_avgs", "exp_avg_sqs"):
        state[name] = [moment.bfloat16() for moment in state[name]]
    for step in range(3):
        random = torch.Generator().manual_seed(100 + step)
        gradients = [torch.randn(shape, generator=random).to(dtype) for shape in SHAPES]
        updated = half_moments(state, gradients, device)
        assert all(torch.equal(w, m.bfloat16()) for w, m in zip(updated.pop("out"), updated["masters"], strict=False))
        state = half_moments(state, gradients, torch.device("cpu"))
        del state["out"]
        for name, tensors in updated.items():
            actual = [tensor.cpu() for tensor in tensors]
            if name.startswith("exp_avg"):
                # Where both terms of a moment cancel, their own fp32 rounding is left: 6e-9 on an H200.
                torch.testing.assert_close(actual, state[name], rtol=2**-7, atol=1e-7)
                equal += [
                    (actual_moment == expected).view(-1)
                    for actual_moment, expected in zip(actual, state[name], strict=True)
                ]
            else:
                torch.testing.assert_close(actual, state[name], rtol=2e-6, atol=2e-7)
    assert torch.cat(equal).float().mean() > 0.999


def test_a_skipped_step_changes_nothing(device: torch.device) -> None:
    state = states(device)
    initial = {name: [tensor.clone() for tensor in tensors] for name, tensors in state.items()}
    out = [torch.full_like(master, 3.0, dtype=torch.bfloat16) for master in state["masters"]]
    gradients = [torch.full_like(weight, float("nan")) for weight in out]
    scalar_one = torch.ones((), device=device)
    adamw(
        **state,
        gradients=gradients,
        out=out,
        grad_scale=scalar_one,
        found_inf=scalar_one,
        **fp32_moments(device),
        **NUMBERS,
    )
    torch.testing.assert_close(state, initial, rtol=0, atol=0)
    if device.type == "cuda":  # on a CPU they are the masters, written again
        assert all((weight == 3.0).all() for weight in out)


@pytest.mark.only_gpu("on a CPU auto leaves it out")
def test_auto_takes_it_and_losses_are_the_same() -> None:
    losses: dict[Any, list[float]] = {}
    for fused in ("auto", False):
        values = config(LLAMA, {"precision": "bfloat16", "engine": "native"}, train_micro_batch_size_per_gpu=8)
        with run({**values, "fused_update": fused}) as training:
            assert isinstance(training.engine._update._parts[0].optimizer, FusedAdamW) == (fused == "auto")
            batches = batches_of(training)
            losses[fused] = [float(training.engine.train_step(next(batches), 1e-3).loss) for _ in range(12)]
    assert losses["auto"] == pytest.approx(losses[False], rel=2e-3) and losses["auto"][-1] < losses["auto"][0]


@pytest.mark.parametrize(("fused", "moments"), [(True, "fp32"), (False, "fp32"), (False, "bf16")])
def test_under_the_next_forward_the_bits_are_the_same(fused: bool, moments: str, device: torch.device) -> None:
    """The host waits for nothing in between; a layer's update takes about as long as its forward."""
    results: dict[bool, tuple[list[float], Any]] = {}
    width = 2048 if device.type == "cuda" else 64
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "train_micro_batch_size_per_gpu": 8}
    keys = {"precision": "bfloat16", "engine": "native", "deterministic_mode": True, "compile": False}
    for overlap in (False, True):
        values = {"fused_update": fused, "overlap_optimizer_with_forward": overlap, "optimizer_state_dtype": moments}
        with run(config(LLAMA, keys, sizes, values)) as training:
            batches = batches_of(training)
            losses = [training.engine.train_step(next(batches), 1e-3).loss for _ in range(12)]
            results[overlap] = [float(loss) for loss in losses], training.engine.weights(master=True)
    assert results[True][0] == results[False][0] and bit_equal(results[True][1], results[False][1])


@pytest.mark.parametrize("stage", [1, 3])
def test_states_in_host_memory_train_alike(stage: int, device: torch.device) -> None:
    """Page-locked, with copies that the host does not wait for; kernels of the CPU round otherwise."""
    keys = {"precision": "bfloat16", "engine": "native", "compile": False, "train_micro_batch_size_per_gpu": 4}
    results = {}
    for section in ({}, {"offload_optimizer": {"device": "cpu"}}):
        with run(config(LLAMA, keys, zero_optimization={"stage": stage, **section})) as training:
            batches = batches_of(training)
            steps = [training.engine.train_step(next(batches), 1e-3) for _ in range(8)]
            results[bool(section)] = [float(step.loss) for step in steps], float(steps[-1].grad_norm)
            states = training.engine.tensors()["optimizer states"]
            assert {tensor.device.type for tensor in states} == {"cpu" if section else device.type}
    assert results[True][0] == pytest.approx(results[False][0], rel=2e-3)
    assert results[True][1] == pytest.approx(results[False][1], rel=2e-2)
