"""The self-attention of a block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megatron.model.attention.backends import Options
from megatron.model.attention.choice import Backends
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.cache import LayerCache
from megatron.model.norms import PerHeadRMSNorm, QKLayerNorm, QKRMSNorm, WideRMSNorm
from megatron.model.positions import apply_rope
from megatron.model.weight_map import norm_kind
from megatron.mpu import Linear, ParallelGroups
from megatron.neox_arguments import NeoXArgs


class SelfAttention(nn.Module):
    """Multi-head or grouped-query attention over this rank's heads; `[seq, batch, hidden]` in and out.

    Parameters `query_key_value` (rows [q|k|v] per head for MHA, [Q|K|V] per rank for GQA) and `dense`; of
    use_qk_layernorm `qk_layernorm`, or with use_separate_qk_norms `q_norm` and `k_norm`.
    """

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, backends: Backends) -> None:
        super().__init__()
        size = groups.size("tensor")
        self.heads, self.kv_heads = args.num_attention_heads // size, args.kv_heads // size
        self.head_dim = args.head_dim
        self.scale = None if args.query_pre_attn_scalar is None else args.query_pre_attn_scalar**-0.5
        self.dropout_p = args.attention_dropout
        self.tensor_rank = groups.rank("tensor")
        self.backends = backends
        query, kv = args.num_attention_heads * args.head_dim, args.kv_heads * args.head_dim
        self.qk_layernorm: nn.Module | None = None
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if args.use_qk_layernorm and args.use_separate_qk_norms and args.qk_norm_per_head:
            self.q_norm, self.k_norm = PerHeadRMSNorm(args, groups), PerHeadRMSNorm(args, groups)
        elif args.use_qk_layernorm and args.use_separate_qk_norms:
            self.q_norm = WideRMSNorm(args, groups, args.num_attention_heads)
            self.k_norm = WideRMSNorm(args, groups, args.kv_heads)
        elif args.use_qk_layernorm:
            self.qk_layernorm = (QKRMSNorm if norm_kind(args) == "rmsnorm" else QKLayerNorm)(args, groups)
        bias, sequence_parallel = args.use_bias_in_attn_linear, args.sequence_parallel
        self.query_key_value = Linear(
            args.hidden_size, query + 2 * kv, parallel="column", bias=bias, groups=groups,
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        self.dense = Linear(
            query, args.hidden_size, parallel="row", bias=bias, groups=groups, sequence_parallel=sequence_parallel
        )

    def _split(self, qkv: Tensor) -> Sequence[Tensor]:
        if self.kv_heads == self.heads:
            return qkv.unflatten(-1, (self.heads, 3 * self.head_dim)).chunk(3, dim=-1)
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = qkv.split([query, kv, kv], dim=-1)
        return [part.unflatten(-1, (-1, self.head_dim)) for part in parts]

    def core(self, x: Tensor, inputs: AttentionInputs, seed: int, cache: LayerCache | None = None) -> Tensor:
        """Everything before `dense`: `[seq, batch, local heads * head_dim]`."""
        q, k, v = self._split(self.query_key_value(x))
        if self.qk_layernorm is not None:
            q, k = self.qk_layernorm(q, k)
        elif self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if inputs.rope is not None:
            q, k = apply_rope(q, inputs.rope), apply_rope(k, inputs.rope)
        p = self.dropout_p if self.training else 0.0
        seed += self.tensor_rank
        return self.backends.attend(q, k, v, inputs, Options(cache, p, seed, self.scale)).flatten(2)
