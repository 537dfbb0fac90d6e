"""Attention sinks: a trained logit of each head in the softmax of every query, as transformers' gpt-oss."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from megatron.checkpointing import CheckpointError, model_keys
from megatron.checkpointing.families.canonical_config import canonical_config, describe_differences
from megatron.checkpointing.families.convert import hf_config
from megatron.model.attention import AttentionBackends, AttentionInputs, AttentionOptions, document_mask, window_mask
from megatron.model.attention.backend_choice import _backends
from megatron.model.attention.backends import AttentionCall
from megatron.model.attention.flex import Flex
from megatron.model.attention.masks import block_mask, document_ids
from megatron.model.attention.registered import _Registered
from megatron.model.build_specs import attention_spec
from megatron.model.positions import alibi_bias, alibi_slopes
from megatron.model.weight_map import named_params
from tests.model.runs import LLAMA, MODELS
from tests.model.stages import chosen, document_batch, small
from tests.model.test_trees import flex_runs_on_a_cpu

SEQ, ROWS, HEADS, DIM = 12, 2, 4, 8
STARTS = torch.tensor([0, 3, 8, 12, 13, 24], dtype=torch.int32)
SINKS = torch.tensor([-1.0, 0.3, 2.0, 5.0])
CPU = torch.device("cpu")


def gpt_oss_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    """By transformers, from and to `[seq, batch, heads, head_dim]`; mask: additive."""
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=q.shape[2] // k.shape[2], training=False)
    rows = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    out, _ = eager_attention_forward(module, *rows, mask, DIM**-0.5)  # type: ignore[arg-type]
    return out.transpose(0, 1)


def leaves(kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(SEQ, ROWS, heads, DIM, generator=generator) for heads in (HEADS, kv_heads, kv_heads)]
    return [x.requires_grad_() for x in (*qkv, SINKS.clone())]


def hidden(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ["math", "flex"])
def test_attention_is_that_of_gpt_oss(name: str, window: int | None, packed: bool, kv_heads: int) -> None:
    """Output, and gradients of all that goes in, the sinks too; the last sink takes most of what is given."""
    mask = window_mask(SEQ, window, CPU)
    if packed:
        mask = mask & document_mask(STARTS, ROWS, SEQ)
    tensors = leaves(kv_heads)
    if name == "math":
        causal_only = not packed and window is None
        inputs = AttentionInputs(mask=None if causal_only else mask)
        backends = chosen(small(attention_sinks=True))
    else:
        ids = document_ids(STARTS, ROWS, SEQ) if packed else None
        inputs = AttentionInputs(blocks=block_mask(SEQ, CPU, window, branch_ids=ids))
        backends = AttentionBackends({"plain": Flex("flex")})
    factors = torch.randn(SEQ, ROWS, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    with flex_runs_on_a_cpu():
        out = backends.attend(*tensors[:3], inputs, AttentionOptions(sinks=tensors[3]))
        outcomes = [(out, torch.autograd.grad((out * factors).sum(), tensors))]
    expected = gpt_oss_attention(*tensors, hidden(mask))
    outcomes.append((expected, torch.autograd.grad((expected * factors).sum(), tensors)))
    torch.testing.assert_close(*outcomes, rtol=1e-5, atol=1e-6)
    assert outcomes[0][1][3].abs().min() > 1e-3, "every sink is trained"


def test_biases_of_positions_and_documents_one_after_another() -> None:
    """ALiBi's are added before the sink joins; `math` by name runs documents by themselves on a CPU."""
    tensors, bias = leaves(4), alibi_bias(SEQ, torch.tensor(alibi_slopes(HEADS)))
    q, k, v, sinks = tensors
    options = AttentionOptions(sinks=sinks)
    out = chosen(small(attention_sinks=True, pos_emb="alibi")).attend(q, k, v, AttentionInputs(mask=bias), options)
    torch.testing.assert_close(out, gpt_oss_attention(*tensors, bias), rtol=1e-5, atol=1e-6)
    math_backends = chosen(small(attention_sinks=True, attention_backend="math"))
    assert math_backends.form(document_batch(small()), None) == "cu_seqlens"
    out = math_backends.attend(q, k, v, AttentionInputs(cu_seqlens=STARTS), options)
    torch.testing.assert_close(
        out, gpt_oss_attention(*tensors, hidden(document_mask(STARTS, ROWS, SEQ))), rtol=1e-5, atol=1e-6
    )


def test_bf16_stays_bf16() -> None:
    q, sinks = torch.randn(SEQ, 1, HEADS, DIM, dtype=torch.bfloat16), SINKS.bfloat16()
    out = chosen(small(attention_sinks=True)).attend(q, q, q, AttentionInputs(), AttentionOptions(sinks=sinks))
    assert out.dtype == torch.bfloat16
    exact = gpt_oss_attention(q.float(), q.float(), q.float(), sinks.float(), hidden(window_mask(SEQ, None, CPU)))
    torch.testing.assert_close(out.float(), exact, rtol=0.02, atol=0.02)


def test_the_parameter() -> None:
    """Cut with the heads, without weight decay, zero at first, in every block."""
    args = small(**MODELS["sinks"])
    sinks = {layer: spec for (layer, name), spec in named_params(args).items() if name == "attention.sinks"}
    assert sorted(sinks) == [2, 3, 4, 5]
    for spec in sinks.values():
        assert (spec.shape, spec.axis, spec.local_shape(2), spec.init) == ((4,), 0, (2,), "zeros")
        assert not spec.weight_decay
    assert not any("sinks" in name for _, name in named_params(small()))


def test_no_other_backend_has_them() -> None:
    spec = attention_spec(small(attention_sinks=True), 0)
    calls = [AttentionCall(spec, CPU, torch.bfloat16, 8, 8, documents=documents) for documents in (False, True)]
    able = set()
    for backend in _backends():
        if isinstance(backend, _Registered):  # it would be put in the place of torch's; as that one
            assert not backend.has_sinks
            continue
        problems = [backend.supports(call) for call in calls if backend.handles(call)]
        able |= {backend.name} if not any("attention_sinks" in (problem or "") for problem in problems) else set()
    assert able == {"flex", "math"}


def test_a_model_without_them_is_another() -> None:
    with_sinks, without_sinks = small(**MODELS["sinks"]), small(**{**MODELS["sinks"], "attention_sinks": False})
    assert model_keys(with_sinks) != model_keys(without_sinks)
    (difference,) = describe_differences(canonical_config(with_sinks), canonical_config(without_sinks))
    assert re.search("attention_sinks.* no .* yes", difference)
    yarn = {"rope_type": "yarn", "factor": 2.0}
    unset, truncated, fractional = (
        canonical_config(small(rope_scaling={**yarn, **options}))
        for options in ({}, {"truncate": True}, {"truncate": False})
    )
    assert unset == truncated != fractional
    with pytest.raises(CheckpointError, match="sinks"):
        hf_config(small(**LLAMA, attention_sinks=True), family="llama")
