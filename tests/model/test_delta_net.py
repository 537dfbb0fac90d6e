"""Gated DeltaNet as a mixer: its parameters, compiled blocks, bf16 weights, and what a cache holds."""

from functools import partialmethod

import pytest
import torch
from torch import Tensor

from megatron.model import layer_params
from megatron.model.specs import GatedDeltaNetSpec
from megatron.model.weight_map import mixer_of
from tests.model.stages import document_batch, make_stage, random_weights, small
from tests.model.test_mamba import MODELS

DELTA = MODELS["delta"]


def test_parameters_are_sharded_in_blocks_of_heads() -> None:
    """in_proj joins two of HuggingFace's tensors; A_log stays fp32 beside 16-bit weights."""
    args = small(**DELTA)
    net, specs = mixer_of(args, 2), layer_params(args)[2]
    assert isinstance(net, GatedDeltaNetSpec) and (net.keys, net.values) == (10, 42)
    shapes = {spec.name.removeprefix("mixer."): spec.shape for spec in specs if spec.name.startswith("mixer.")}
    assert shapes == {
        "dt_bias": (6,), "A_log": (6,), "in_proj.weight": (2 * 10 + 2 * 42 + 2 * 6, 32), "conv1d.weight": (62, 1, 4),
        "norm.weight": (7,), "out_proj.weight": (32, 42),
    }  # fmt: skip
    blocks = {spec.name: spec.blocks for spec in specs}
    assert blocks["mixer.in_proj.weight"] == (10, 10, 42, 42, 6, 6) and blocks["mixer.conv1d.weight"] == (10, 10, 42)
    assert [spec.name for spec in specs if spec.precise] == ["mixer.A_log"]


def test_compiled_blocks_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On documents, over several chunks; the scan itself is not compiled."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="aot_eager"))
    weights = random_weights(small(**DELTA))
    results: list[dict[str, Tensor]] = []
    for compile_key in (False, "block"):
        args = small(**DELTA, compile=compile_key)
        stage = make_stage(args, weights)
        logits = stage(None, document_batch(args))
        logits.square().sum().backward()
        gradients = {name: param.grad for name, param in stage.named_parameters() if param.grad is not None}
        results.append({"logits": logits.detach(), **gradients})
    expected, actual = results
    assert len(expected) == len(actual) > 30
    for name, value in zip(expected, actual.values(), strict=True):
        bound = 1e-5 * float(expected[name].abs().max())
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=bound)


def test_states_are_fp32_with_bf16_weights() -> None:
    args = small(**DELTA, precision="bfloat16")
    stage = make_stage(args, random_weights(args)).bfloat16()
    stage.dtype = torch.bfloat16
    exact = make_stage(small(**DELTA), random_weights(args))
    with torch.no_grad():
        rounded, expected = (model(None, document_batch(args)).float() for model in (stage, exact))
    assert 1e-4 < float((rounded - expected).norm() / expected.norm()) < 0.03
    cache = stage.empty_cache(2, 4, texts=3).layers[2]
    assert cache[1].dtype == torch.float32 and cache[0].dtype == torch.bfloat16
    assert tuple(cache[1].shape) == (3, 6, 5, 7) and tuple(cache[0].shape) == (3, 3, 62)
