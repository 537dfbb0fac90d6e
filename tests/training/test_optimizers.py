"""Optimizers by their formulas, parameter groups, the gradient norm."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron.model import build_stage
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training.optimizers import Lion, build_optimizer, clip_gradients, gradient_norm, parameter_groups
from tests.training.runs import LAYOUTS, LLAMA, NEOX, assert_alike, cells, config, curves_of


def test_lion_by_hand() -> None:
    """Algorithm 2 of arXiv 2302.06675 in numpy."""
    rng = np.random.default_rng(0)
    value, momentum = rng.normal(size=7), np.zeros(7)
    param = torch.nn.Parameter(torch.tensor(value))
    lion = Lion([param], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(5):
        grad = rng.normal(size=7)
        param.grad = torch.tensor(grad)
        lion.step()
        update = np.sign(0.9 * momentum + 0.1 * grad)
        value = value - 0.01 * (update + 0.1 * value)
        momentum = 0.99 * momentum + 0.01 * grad
        np.testing.assert_allclose(param.detach().numpy(), value, rtol=1e-12)


@pytest.mark.parametrize("name", cells(["zero2"], ["pp2"], ["tp2"]))
def test_lion_in_layouts(name: str) -> None:
    """Few steps: the sign of a value near zero may differ between summation orders."""
    ranks, layout = LAYOUTS[name]
    values = config(LLAMA, {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}, train_micro_batch_size_per_gpu=4)
    one_process, layout_curves = curves_of({"lion": values}, 4), curves_of({"lion": {**values, **layout}}, 4, ranks)
    assert_alike(layout_curves, one_process, norms=1e-4, weights=1e-3)


def _optimizer(**overrides: Any) -> torch.optim.Optimizer:
    args = NeoXArgs.from_dict(config(NEOX, padded_vocab_size=384, **overrides))
    return build_optimizer(parameter_groups(build_stage(args, ParallelGroups.single()), args), args)


def test_no_decay_for_norms_and_biases() -> None:
    decayed, undecayed = _optimizer().param_groups
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in undecayed["params"]} == {1}
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    assert (decayed["name"], undecayed["name"]) == ("weight_decay_params", "no_weight_decay_params")


def test_kinds() -> None:
    assert isinstance(_optimizer(optimizer={"type": "Lion", "params": {"lr": 1e-4}}), Lion)
    assert isinstance(_optimizer(optimizer={"type": "sgd", "params": {"lr": 1e-4}}), torch.optim.SGD)
    adam = _optimizer(optimizer={"type": "adam", "params": {"lr": 1e-4, "betas": [0.8, 0.9]}})
    assert isinstance(adam, torch.optim.AdamW) and adam.defaults["betas"] == (0.8, 0.9)


def test_8bit_needs_its_library_and_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"use_bnb_optimizer needs bitsandbytes: pip install 'neox\[bnb\]'"):
        _optimizer(use_bnb_optimizer=True)
    with pytest.raises(ConfigError, match="use_bnb_optimizer: .*AdamW.* Lion"):
        _optimizer(use_bnb_optimizer=True, optimizer={"type": "Lion", "params": {"lr": 1e-4}})


def test_norm_and_clip_equal_torch() -> None:
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
    for param in params:
        param.grad = torch.randn_like(param) * 10
    twins = [torch.nn.Parameter(torch.zeros_like(p)) for p in params]
    for twin, param in zip(twins, params, strict=True):
        twin.grad = param.grad.clone()  # type: ignore[union-attr]
    expected = torch.nn.utils.clip_grad_norm_(twins, 0.5)
    norm = gradient_norm(params[:1], params[1:], ParallelGroups.single())
    clip_gradients(params, norm, 0.5)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close([param.grad for param in params], [twin.grad for twin in twins])
