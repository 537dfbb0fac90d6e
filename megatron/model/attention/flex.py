"""FlexAttention (`torch.nn.attention.flex_attention`): one compiled kernel for every mask that a function of
positions can express."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron.model.attention.backends import AttentionBackend, AttentionCall, AttentionOptions
from megatron.model.attention.inputs import AttentionInputs
from megatron.mpu.gpu_kernels import Capability

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Flex(AttentionBackend):
    """Computes causal attention with FlexAttention, also with windows, documents and shared prompts.

    `AttentionInputs.blocks` says which keys are visible. In a compiled transformer block it is part of the
    block's graph; otherwise it is compiled by itself. torch has no backward pass of FlexAttention on CPUs.
    """

    needs_gpu, plans_shapes, mixes_widths, caps_logits, has_sinks, form = True, True, True, True, True, "blocks"

    def unasked(self, call: AttentionCall, capability: Capability | None) -> str | None:
        if not (call.documents or call.contexts or call.spec.sinks) and call.spec.softcap is None:
            return ""  # without a mask, other backends are faster
        slow = call.dtype == torch.float32 and not call.contexts
        return (
            "it is slow in fp32; auto chooses it only for 16-bit dtypes" if slow else super().unasked(call, capability)
        )

    def handles(self, call: AttentionCall) -> bool:
        return not call.masked

    def supports(self, call: AttentionCall) -> str | None:
        if call.spec.biased or call.dropping or (call.spec.dropout > 0.0 and (call.documents or call.contexts)):
            return "it supports neither position biases nor dropout"
        return super().supports(call)

    def run(self, q: Tensor, k: Tensor, v: Tensor, inputs: AttentionInputs, options: AttentionOptions) -> Tensor:
        assert inputs.blocks is not None
        attend = self._compiled if q.is_cuda and not torch.compiler.is_compiling() else _attend
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        arguments = (q, k, v, inputs.blocks, options.scale, options.softcap, options.sinks)
        if torch.compiler.is_compiling():
            out: Tensor = attend(*arguments)
        else:
            import torch._dynamo.config as dynamo

            # At a second value of softcap torch would compile for any float, and fail where the kernel reads
            # it.
            with dynamo.patch(specialize_float=True):
                out = attend(*arguments)
        return out.permute(2, 0, 1, 3)

    @cached_property
    def _compiled(self) -> "Callable[..., Tensor]":
        import torch._dynamo.config as dynamo

        # Each kind of mask, dtype and length that is tried or run compiles a graph, so the limit is raised.
        # Without fullgraph, torch would run unfused beyond the limit and run out of memory.
        dynamo.recompile_limit = max(dynamo.recompile_limit, 64)
        return torch.compile(_attend, fullgraph=True)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: "BlockMask",
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, flex_attention

    def capped(logit: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(logit / softcap)

    score_mod = None if softcap is None else capped
    shared = k.shape[1] != q.shape[1]
    if sinks is None:
        out = flex_attention(q, k, v, score_mod, blocks, scale=scale, enable_gqa=shared)
        assert isinstance(out, Tensor)
        return out
    aux = AuxRequest(lse=True)
    out, auxiliary = flex_attention(q, k, v, score_mod, blocks, scale=scale, enable_gqa=shared, return_aux=aux)
    assert isinstance(auxiliary, AuxOutput) and auxiliary.lse is not None
    # The share of the softmax that the keys keep besides the sink: e^lse / (e^lse + e^sink).
    share = torch.sigmoid(auxiliary.lse - sinks.float().view(-1, 1))
    return (out * share.unsqueeze(-1)).to(q.dtype)
