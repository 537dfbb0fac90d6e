"""Attention against its formula, and what is handed to the kernel."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.attention import AttentionInputs, AttentionOptions, document_mask
from megatron.model.attention.backends import AttentionBackend
from megatron.model.positions import alibi_bias, alibi_slopes
from megatron.neox_arguments import ConfigError
from tests.model.stages import chosen, document_batch, documents, inputs_of, make_stage, random_batch, small

SEQ, BATCH, HEADS, DIM = 10, 2, 4, 8


def exact_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Softmax over `[batch, heads, query, key]` scores in float64."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / math.sqrt(q.shape[-1]) + bias
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", ["auto", "math", "flash"])
@pytest.mark.parametrize("kind", ["causal", "documents", "alibi", "alibi and documents"])
def test_attend_equals_its_formula(kv_heads: int, name: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(SEQ, BATCH, heads, DIM, generator=generator) for heads in (HEADS, kv_heads, kv_heads))
    bias = torch.full((SEQ, SEQ), float("-inf"), dtype=torch.float64).triu(1).expand(BATCH, HEADS, SEQ, SEQ)
    starts = torch.tensor([0, 3, 7, SEQ, SEQ + 1, 2 * SEQ], dtype=torch.int32)
    mask = None
    if "documents" in kind:
        mask = document_mask(starts, BATCH, SEQ)
        bias = bias.masked_fill(~mask, float("-inf"))
    if "alibi" in kind:
        slopes = alibi_bias(SEQ, torch.tensor(alibi_slopes(HEADS)))
        bias = bias + slopes.double()
        mask = slopes if mask is None else slopes.masked_fill(~mask, float("-inf"))
    out = chosen(small(attention_backend=name)).attend(q, k, v, AttentionInputs(mask=mask), AttentionOptions())
    torch.testing.assert_close(out.double(), exact_attention(q, k, v, bias), rtol=1e-5, atol=1e-6)


def test_bf16_stays_bf16_with_a_bias() -> None:
    q = torch.randn(SEQ, 1, HEADS, DIM, dtype=torch.bfloat16)
    inputs = AttentionInputs(mask=alibi_bias(SEQ, torch.tensor(alibi_slopes(HEADS))))
    assert chosen(small()).attend(q, q, q, inputs, AttentionOptions()).dtype == torch.bfloat16


def test_all_three_are_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    args = small(clip_qkv=0.1, pos_emb="none", num_layers=1)
    stage, clipped = make_stage(args), []
    backends = stage.layers["2"].attention.backends  # type: ignore[union-attr]
    attend = backends.attend  # type: ignore[union-attr]
    monkeypatch.setattr(type(backends), "attend", lambda self, *values: clipped.extend(values[:3]) or attend(*values))
    stage(None, random_batch(args))
    assert [float(tensor.detach().abs().max()) for tensor in clipped] == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("pos_emb", ["rotary", "learned", "none", "alibi"])
def test_plain_causal_attention_makes_no_mask(pos_emb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = F.scaled_dot_product_attention, []

    def watch(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return real(*args, **kwargs)

    args = small(pos_emb=pos_emb, attention_dropout=0.1)
    stage = make_stage(args).train()
    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    stage(None, random_batch(args))
    assert len(calls) == args.num_layers
    for mask, is_causal in calls:
        assert (mask is None) == is_causal == (pos_emb != "alibi")
    calls.clear()
    stage(None, document_batch(args))
    assert len({id(mask) for mask, _ in calls if mask is not None}) == 1, "one mask for all blocks"
    assert not any(is_causal for _, is_causal in calls)


def no_gpu_is_tried(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Let backends be chosen for a GPU where there is none: whatever would be tried works."""
    monkeypatch.setattr(AttentionBackend, "supports", lambda self, call: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


@pytest.mark.parametrize("changes, separate_calls", [
    ({}, True), ({"attention_backend": "math"}, True), ({"sliding_window_width": 8}, False),
    ({"compile": "block"}, False),
])  # fmt: skip
def test_documents_on_a_cpu_run_by_themselves(
    changes: dict[str, Any], separate_calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No query meets the keys of another document, not even to hide them."""
    args, lengths, real = small(**changes), [], F.scaled_dot_product_attention

    def watch(q: Tensor, *tensors: Tensor, **kwargs: Any) -> Tensor:
        lengths.append(q.shape[2])
        return real(q, *tensors, **kwargs)

    stage, batch = make_stage(args), document_batch(args)
    inputs = inputs_of(stage, batch, batch.positions)
    assert (inputs.cu_seqlens is not None, inputs.mask is None) == (separate_calls, separate_calls)
    if separate_calls:
        monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
        stage(None, batch)
        assert lengths == [end - begin for _, begin, end in documents(batch)] * args.num_layers


@pytest.mark.parametrize("name, keys, facts", [
    ("efficient", {}, "GPU"), ("cudnn", {}, "GPU"), ("flash", {"attention_sinks": True}, "attention_sinks"),
    ("flash", {"attention_dropout": 0.1}, "dropout.*attention_backend: auto"),
])  # fmt: skip
def test_a_kernel_that_cannot_do_this_run_is_refused_at_start(name: str, keys: dict[str, Any], facts: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend: {name} .*{facts}"):
        chosen(small(attention_backend=name, **keys))


def test_auto_is_one_kernel_and_draws_no_random_numbers() -> None:
    rng_state = torch.get_rng_state()
    assert chosen(small()).name == "flash"
    assert chosen(small(pos_emb="alibi", num_kv_heads=2)).name == "flash"
    dropping = chosen(small(attention_dropout=0.1))
    assert dropping.name == "flash, with dropout math, with a mask and dropout math"
    assert {kind: backend.name for kind, backend in dropping.backend_by_kind.items()} == {
        "plain": "flash", "with a mask": "flash", "with dropout": "math", "with a mask and dropout": "math",
        "from a cache": "flash",
    }  # fmt: skip
    assert torch.equal(torch.get_rng_state(), rng_state)
