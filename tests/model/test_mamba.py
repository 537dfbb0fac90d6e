"""Mamba's scans beside transformers' plain ones; documents that share a row know nothing of each other."""

from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn, mamba2_chunk_scan

from megatron.data import Batch
from megatron.model import layer_params
from megatron.model.mamba.chunk_scan import chunk_scan, chunk_step
from megatron.model.mamba.convolution import causal_convolution
from megatron.model.mamba.selective_scan import linear_recurrence, selective_scan, selective_step
from tests.model.stages import document_batch, documents, groups_of, make_stage, random_batch, random_weights, small
from tests.pool import run_ranks

_COMMON: dict[str, Any] = {"norm": "rmsnorm", "pos_emb": "none", "mamba_state_dim": 8, "no_weight_tying": True}
_HEADS = {"mamba_head_dim": 8, "mamba_num_groups": 2, "mamba_chunk_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {**_COMMON, "attention_config": ["mamba", "mamba"], "mamba_bcdt_norm_epsilon": 1e-5},
    "mamba2": {**_COMMON, **_HEADS, "attention_config": ["mamba2", "mamba2"]},
    "delta": {
        "norm": "rmsnorm", "pos_emb": "rotary", "no_weight_tying": True, "num_layers": 3,
        "attention_config": ["gated_delta_net", "global", "short_conv"], "use_bias_in_short_conv": True,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 7,
        "linear_chunk_size": 8, "attention_output_gate": True,
    },
    "kimi": {
        "norm": "rmsnorm", "pos_emb": "none", "no_weight_tying": True, "num_layers": 3, "kv_lora_rank": 10,
        "qk_nope_head_dim": 5, "qk_rope_head_dim": 3, "v_head_dim": 7, "linear_num_key_heads": 6,
        "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 5, "linear_chunk_size": 12,
        "attention_config": ["kimi_delta_attention", "global", "kimi_delta_attention"],
    },
    "hybrid": {
        **_COMMON, **_HEADS, "num_layers": 5, "pos_emb": "rotary", "seq_length": 40, "max_position_embeddings": 64,
        "attention_config": ["mamba2", "attention", "mlp", "mamba", "flash"],
    },
}  # fmt: skip


def scan_inputs(seq: int, heads: tuple[int, ...], groups: tuple[int, ...], state: int) -> list[Tensor]:
    """x, dt, a, b, c of a scan over two rows, with time steps and decays of all sizes, wanting gradients."""
    torch.manual_seed(seq)
    inner = heads[:1] if groups else heads
    x = torch.randn(seq, 2, *heads)
    dt = F.softplus(torch.randn(seq, 2, *inner) * 2 - 2)
    a = -8 * torch.rand(*inner) if groups else -8 * torch.rand(*inner, state)
    b, c = torch.randn(2, seq, 2, *groups, state)
    return [tensor.requires_grad_() for tensor in (x, dt, a, b, c)]


def run_steps(
    step: Callable[..., tuple[Tensor, Tensor]], scan_args: list[Tensor], state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and last state, token by token, as a cache has them."""
    x, dt, a, b, c = (tensor.detach() for tensor in scan_args)
    outputs = []
    for t in range(len(x)):
        y, state = step(x[t], dt[t], a, b[t], c[t], state)
        outputs.append(y)
    return torch.stack(outputs), state


@pytest.mark.parametrize("seq", [1, 15, 16, 700])
def test_the_selective_scan_is_that_of_transformers_and_of_its_steps(seq: int) -> None:
    inputs = scan_inputs(seq, (6,), (), 4)
    actual, last = selective_scan(*inputs)
    rows = [tensor if tensor is inputs[2] else tensor.permute(1, 2, 0) for tensor in inputs]
    hf_output, hf_last = mamba_selective_scan(*rows, return_last_state=True)
    stepped, grad = run_steps(selective_step, inputs, torch.zeros_like(last)), torch.randn_like(actual)
    torch.testing.assert_close(stepped, (actual, last), rtol=2e-6, atol=2e-6)
    assert torch.allclose(actual, hf_output.permute(2, 0, 1), atol=2e-6) and torch.allclose(last, hf_last, atol=2e-6)
    expected = torch.autograd.grad(hf_output, inputs, grad.permute(1, 2, 0))
    for gradient, hf_gradient in zip(torch.autograd.grad(actual, inputs, grad), expected, strict=True):
        assert torch.allclose(gradient, hf_gradient, atol=2e-6 * float(hf_gradient.abs().max()) + 1e-6)


def loop(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Mamba 2's recurrence as it is defined, token by token."""
    outputs, repeated = [], x.shape[2] // b.shape[2]
    b, c = (group.repeat_interleave(repeated, 2) for group in (b, c))
    for t in range(len(x)):
        added = (dt[t].unsqueeze(2) * x[t]).unsqueeze(3) * b[t].unsqueeze(2)
        state = torch.exp(dt[t] * a).view(*dt[t].shape, 1, 1) * state + added
        outputs.append((state * c[t].unsqueeze(2)).sum(3))
    return torch.stack(outputs), state


@pytest.mark.parametrize(("seq", "chunk"), [(1, 64), (64, 64), (300, 64), (300, 7), (70, 2)])  # 2: chunks of chunks
def test_the_chunk_scan_is_the_recurrence_and_that_of_transformers(seq: int, chunk: int) -> None:
    inputs, initial = scan_inputs(seq, (4, 6), (2,), 5), torch.randn(2, 4, 6, 5)
    actual, last = chunk_scan(*inputs, chunk, initial=initial)  # type: ignore[arg-type]
    exact, exact_last = loop(*(tensor.double() for tensor in inputs), initial.double())
    assert torch.allclose(actual.double(), exact, atol=5e-6) and torch.allclose(last.double(), exact_last, atol=2e-6)
    torch.testing.assert_close(run_steps(chunk_step, inputs, initial), (actual, last), rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(actual)
    expected = torch.autograd.grad(exact, inputs, grad.double())
    for gradient, exact_gradient in zip(torch.autograd.grad(actual, inputs, grad), expected, strict=True):
        # That of A is what is left of sums over pairs of tokens, in fp32.
        bound = 5e-5 if gradient.dim() == 1 else 2e-6
        assert torch.allclose(gradient, exact_gradient, atol=bound * float(exact_gradient.abs().max()) + 1e-6)
    rows = [tensor if tensor is inputs[2] else tensor.transpose(0, 1) for tensor in inputs]
    hf_output, _ = mamba2_chunk_scan(*rows, chunk_size=chunk, initial_states=initial, return_final_states=True)
    assert torch.allclose(actual, hf_output.transpose(0, 1), atol=1e-4)  # sums of fp32 that lose more


def test_the_convolution_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 2, 6), torch.randn(6, 1, 4), torch.randn(6)
    hf_output = causal_conv1d_fn(x.permute(1, 2, 0), weight.squeeze(1), bias)
    full = causal_convolution(x, weight, bias)
    assert torch.allclose(full, hf_output.permute(2, 0, 1), atol=1e-6)
    padded = torch.cat([torch.zeros(3, 2, 6), x])
    for cuts in ((0, 1, 9), (0, 2, 9), (0, 5, 9), tuple(range(10))):
        for offset in (bias, None):
            parts = [causal_convolution(x[i:j], weight, offset, history=padded[i : i + 3]) for i, j in pairwise(cuts)]
            expected = full if offset is not None else causal_convolution(x, weight, None)
            torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 16, 17, 256, 300])
def test_a_recurrence_is_that_of_a_loop(length: int) -> None:
    torch.manual_seed(length)
    decay, update = torch.rand(length, 3, dtype=torch.float64), torch.randn(length, 3, dtype=torch.float64)
    decay[length // 2] = 0.0
    states = [update[0]]
    for t in range(1, length):
        states.append(decay[t] * states[-1] + update[t])
    assert torch.allclose(linear_recurrence(decay, update), torch.stack(states), atol=1e-14)


def packing_differences(rank: int, world_size: int, model: str) -> tuple[float, float]:
    """For the pool: how far documents in shared rows are from themselves alone, and from leaking ones."""
    args = small(**MODELS[model], model_parallel_size=world_size).for_world(world_size)
    stage = make_stage(args, groups=groups_of(args, world_size))
    batch, worst = document_batch(args, rows=3), 0.0
    with torch.no_grad():
        packed_logits, leaking = stage(None, batch), stage(None, replace(batch, documents=None))
        for row, begin, end in documents(batch):
            span = (slice(row, row + 1), slice(begin, end))
            single = Batch(
                *(tensor[span] for tensor in (batch.tokens, batch.labels, batch.loss_weights, batch.positions))
            )
            single_logits = stage(None, single)
            worst = max(worst, float((packed_logits[begin:end, row] - single_logits[:, 0]).abs().max()))
    largest = float(packed_logits.abs().max())
    return worst / largest, float((packed_logits - leaking).abs().max()) / largest


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_packed_documents_equal_separate_ones(model: str, ranks: int) -> None:
    for difference, leak in run_ranks(packing_differences, ranks, model):
        assert difference < 4e-6 and leak > 1e-3, "a leak would show"


def long_logits(kind: str, precision: str, **keys: Any) -> Tensor:
    """Returns logits of the last 1,024 of 32,768 tokens. States decay slowly; all gradients are finite."""
    length = 32768
    args = small(
        **_COMMON, hidden_size=8, num_layers=1, attention_config=[kind], seq_length=length, **keys,
        max_position_embeddings=length, precision=precision, mamba_expand=1,
        **({"mamba_head_dim": 4, "mamba_num_groups": 1, "mamba_chunk_size": 16} if kind == "mamba2" else {}),
    )  # fmt: skip
    weights = random_weights(args)
    weights[2]["mixer.A_log"] = torch.full_like(weights[2]["mixer.A_log"], -9.0)  # a decay of 1 - 1e-4 dt
    stage = make_stage(args, weights).train()
    if precision == "bfloat16":
        stage, stage.dtype = stage.bfloat16(), torch.bfloat16
    logits = stage(None, random_batch(args, rows=1))
    logits.float().square().mean().backward()
    assert all(torch.isfinite(param.grad).all() for param in stage.parameters() if param.grad is not None)
    return logits.detach().float()[-1024:]


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_a_long_document_in_bf16_stays_finite(kind: str) -> None:
    """Logits equal those of fp32, up to the rounding of bf16 weights and activations."""
    exact = long_logits(kind, "fp32")
    error = float((long_logits(kind, "bfloat16") - exact).norm() / exact.norm())
    assert error < 0.03  # a NaN is not
    if kind == "mamba":
        narrow = long_logits(kind, "bfloat16", mamba_state_fp32=False)
        assert float((narrow - exact).norm() / exact.norm()) > 2 * error, "the state in bf16 must show"


def test_a_state_in_bf16_stops_to_change() -> None:
    """Why the state is fp32 from token to token: in bf16 a decay of 0.9985 is 1, and 256 + 1 is 256."""
    x, dt, a = torch.ones(1, 1, 1, dtype=torch.bfloat16), torch.ones(1, 1), torch.full((1,), -0.0015)
    wide, narrow = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    b = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    for _ in range(2000):
        wide, narrow = chunk_step(x, dt, a, b, b, wide)[1], chunk_step(x, dt, a, b, b, narrow)[1]
    assert float(wide) == pytest.approx((1 - 0.9985**2000) / 0.0015, rel=0.01) and float(narrow) == 256


def graphs_of_lengths(rank: int, world_size: int, kind: str) -> list[int]:
    """For the pool: graphs of a compiled block behind ten lengths of rows; its logits are the eager one's."""
    from torch._dynamo.utils import counters

    real = torch.nn.Module.compile
    torch.nn.Module.compile = partialmethod(real, backend="aot_eager")  # type: ignore[assignment]
    graphs = []
    args = small(**{**MODELS[kind], "num_layers": 1, "attention_config": [kind], "max_position_embeddings": 256})
    weights = random_weights(args)
    eager, compiled = make_stage(args, weights), make_stage(args.replace(compile="block"), weights)
    for length in (*range(16, 80, 8), 100, 101):
        batch = document_batch(args.replace(seq_length=length))
        out, expected = compiled(None, batch), eager(None, batch)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        out.square().sum().backward()
        assert not counters["graph_break"]
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


@pytest.mark.product
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_rows_of_many_lengths_share_compiled_graphs(kind: str) -> None:
    """As a curriculum has them: more lengths than dynamo would compile graphs for."""
    graphs = run_ranks(graphs_of_lengths, 1, kind, timeout=600)[0]
    assert graphs[-1] <= 3, graphs


def test_parameters_have_gpt_neoxs_names_and_order() -> None:
    """Compares with its `ParallelMambaResidualLayer` (megatron/model/mamba/mamba.py), both bias settings."""
    shapes = {"A_log": (64, 16), "D": (64,)}
    shapes |= {"in_proj.weight": (128, 32), "conv1d.weight": (64, 1, 4), "conv1d.bias": (64,)}
    shapes |= {"x_proj.weight": (34, 64), "dt_proj.weight": (64, 2), "dt_proj.bias": (64,), "out_proj.weight": (32, 64)}
    keys = {"norm": "rmsnorm", "attention_config": ["mamba", "mamba"]}
    specs = layer_params(small(**keys))[2]
    expected = {"norm.scale": (32,), **{f"mixer.{name}": shape for name, shape in shapes.items()}}
    assert {spec.name: spec.shape for spec in specs} == expected and [spec.name for spec in specs] == list(expected)
    biased = {spec.name for spec in layer_params(small(**keys, mamba_use_bias_in_linears=True))[2]}
    assert biased - expected.keys() == {"mixer.in_proj.bias", "mixer.x_proj.bias", "mixer.out_proj.bias"}
    decayed = {spec.name for spec in specs if spec.weight_decay}
    assert decayed == {f"mixer.{name}.weight" for name in ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj")}
