"""Sliding windows: against the formula, and on the varlen kernel's arguments."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from megatron.model.attention import AttentionBackends, AttentionOptions, document_mask, window_mask
from megatron.model.attention.backends import EfficientVarlen, Varlen
from megatron.model.attention.seeded_attention import VARLEN, efficient_varlen
from megatron.model.attention.seeded_attention import _backward as seeded_backward
from megatron.model.build_specs import attention_spec
from megatron.model.cache import CacheRows, LayerCache
from tests.model.stages import chosen, document_batch, documents, inputs_of, make_stage, random_batch, small
from tests.model.test_attention import exact_attention, no_gpu_is_tried

CPU = torch.device("cpu")


def test_a_window_over_everything_is_none() -> None:
    assert attention_spec(small(sliding_window_width=31), 0).window is None  # of 32 positions
    assert attention_spec(small(sliding_window_width=30), 0).window == 30
    assert chosen(small(sliding_window_width=30)).backend_by_kind.keys() == {"with a mask", "from a cache"}
    assert chosen(small(sliding_window_width=31)) == chosen(small())


@pytest.mark.parametrize("pos_emb", ["rotary", "alibi", "rpe"])
@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_a_stage(pos_emb: str, packed: bool) -> None:
    """Every combination shows exactly the keys that are near, not later and of the same document."""
    args = small(pos_emb=pos_emb, sliding_window_width=3)
    batch = document_batch(args) if packed else random_batch(args)
    positions = torch.arange(16).expand_as(batch.tokens)
    with torch.no_grad():
        inputs = inputs_of(make_stage(args), batch, positions)
    assert inputs.mask is not None and inputs.cu_seqlens is None
    visible = inputs.mask if inputs.mask.dtype == torch.bool else inputs.mask > float("-inf")
    for row in range(2):
        starts = {begin for document_row, begin, _ in documents(batch) if document_row == row} if packed else {0}
        for query in range(16):
            document_start = max(start for start in starts if start <= query)
            expected = [max(document_start, query - 3) <= key <= query for key in range(16)]
            for head in visible[row % len(visible), :, query]:
                assert head.tolist() == expected


def fake_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, starts_k: Tensor, *longest: int, **kwargs: Any
) -> Tensor:
    """Computes what torch documents of `varlen_attn`, one sequence after another, in float64."""
    (left, right), out = kwargs["window_size"], torch.empty_like(q)
    assert right == 0 and torch.equal(starts, starts_k) and starts.dtype == torch.int32
    assert longest == (int(starts.diff().max()),) * 2 and (kwargs.get("enable_gqa") or k.shape == q.shape)
    for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        distance = torch.arange(end - begin) - torch.arange(end - begin).unsqueeze(1)
        hidden = (distance > 0) | ((distance < -left) if left >= 0 else torch.zeros_like(distance, dtype=torch.bool))
        bias = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))
        queries, keys, values = (x[begin:end].unsqueeze(1) for x in (q, k, v))
        out[begin:end] = exact_attention(queries, keys, values, bias)[:, 0].to(q.dtype)
    return out


def fake_efficient(q: Tensor, k: Tensor, v: Tensor, bias: None, *lengths: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The kernel of torch's memory-efficient attention: a window is a number of keys, the query's own too."""
    (starts, starts_k, longest, longest_k, p, causal, _), width = lengths, kwargs.get("window_size")
    assert bias is None and p == 0.0 and causal == 1 and q.shape == k.shape
    window = (-1 if width is None else width - 1, 0)
    out = fake_varlen(q[0], k[0], v[0], starts, starts_k, longest, longest_k, window_size=window).unsqueeze(0)
    return out, *(torch.zeros(2) for _ in range(3)), longest, longest_k


def fake_efficient_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, *lengths: Any, **kwargs: Any
) -> list[Tensor]:
    """Returns the gradients of q, k and v for a window, and an empty one of the bias."""
    starts, starts_k, longest, longest_k, _, p, _, _, causal, _ = lengths

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fake_efficient(q, k, v, bias, starts, starts_k, longest, longest_k, p, causal, True, **kwargs)[0]

    recomputed, pull_back = torch.func.vjp(attend, q, k, v)
    assert torch.equal(recomputed, out)
    return [*pull_back(gradient), torch.empty(0)]


@pytest.mark.parametrize("precision", ["bfloat16", "fp32"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [None, 1, 5])
@torch.no_grad()
def test_varlen_is_given_the_same_windows(
    width: int | None, packed: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = small(precision=precision, sliding_window_width=width)
    batch = document_batch(args, rows=3) if packed else random_batch(args, rows=3)
    positions, stage = torch.arange(16).expand_as(batch.tokens), make_stage(args)
    stage.backends = {"auto": AttentionBackends({})}
    masked = inputs_of(stage, batch, positions)
    no_gpu_is_tried(monkeypatch)
    kind_of = Varlen if precision == "bfloat16" else EfficientVarlen
    on_gpu = {
        kind: backend for kind, backend in chosen(args, "cuda").backend_by_kind.items() if isinstance(backend, kind_of)
    }
    stage.backends = {"auto": AttentionBackends({**chosen(args).backend_by_kind, **on_gpu})}
    monkeypatch.setattr(varlen, "varlen_attn", fake_varlen)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", fake_efficient)
    inputs = inputs_of(stage, batch, positions)
    assert (inputs.cu_seqlens is not None) == (packed or width is not None) == (masked.mask is not None)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(16, 3, heads, 8, generator=generator) for heads in (4, 2, 2))
    slots = (20 * torch.arange(3).unsqueeze(1) + torch.arange(16)).flatten()  # a block of 20 tokens each
    rows = CacheRows(slots, torch.arange(3).unsqueeze(1), [(0, 3, 1)], {})
    cache = LayerCache(torch.zeros(3, 20, 2, 8), torch.zeros(3, 20, 2, 8), rows)
    actual = stage.backends["auto"].attend(q, k, v, inputs, AttentionOptions(cache))
    torch.testing.assert_close(actual, chosen(args).attend(q, k, v, masked, AttentionOptions()), rtol=1e-5, atol=1e-5)
    assert torch.equal(cache.keys[:, :16], k.transpose(0, 1)) and not cache.keys[:, 16:].any()
    assert torch.equal(cache.values[:, :16], v.transpose(0, 1))


def test_the_gradient_of_a_window_is_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own is of all keys; compiled code's runs the attention again in a transform of torch.func."""
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", fake_efficient)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", fake_efficient_backward)
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (torch.randn(1, 12, 2, 8, generator=generator, dtype=torch.float64) for _ in range(4))
    starts, seed = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor(3)
    operator_grads = seeded_backward(gradient, q, k, v, None, seed, 0.0, None, VARLEN, starts, 7, 2, False)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = efficient_varlen(*leaves, starts, 7, 2, 0.0, None)
    actual = torch.autograd.grad(out, leaves, gradient)
    mask = document_mask(starts, 1, 12) & window_mask(12, 2, CPU)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), mask).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    torch_grads = torch.autograd.grad(expected, leaves, gradient)
    torch.testing.assert_close((actual, tuple(operator_grads)), (torch_grads, torch_grads))


def test_window_mask_equals_its_definition() -> None:
    queries = torch.tensor([[5, 2], [0, 7]])
    mask = window_mask(8, 2, CPU, queries)
    assert mask.shape == (2, 1, 2, 8)
    for row in range(2):
        for i, query in enumerate(queries[row].tolist()):
            assert mask[row, 0, i].nonzero().flatten().tolist() == list(range(max(0, query - 2), query + 1))
