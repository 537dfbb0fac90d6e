"""Self-attention, a mixer of a transformer block: projections, norms of queries and keys, rotary positions,
attention.

To add another kind of mixer, write a class with the members of `block.SubLayer`, and list it in
`block.MIXERS`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.attention.backend_choice import AttentionBackends
from megatron.model.attention.head_attention import HeadAttention
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.build_specs import attention_spec
from megatron.model.cache import LayerCache
from megatron.model.norms import head_norms
from megatron.model.positions import RelativePositionBias, apply_rope
from megatron.model.specs import AttentionSpec
from megatron.mpu import (
    Linear,
    LinearSpec,
    ParallelGroups,
    ParamSpec,
    adapters_of,
    allocate,
    gather_from_sharers,
    share_out,
    with_prefix,
)


class SelfAttention(HeadAttention):
    """Multi-head or grouped-query attention over this rank's heads; input and output are `[seq, batch,
    hidden]`.

    If there are more tensor ranks than key-value heads, each rank computes a slice of one key-value head and
    gathers the full head from the ranks that share it.

    Parameters:
    query_key_value: the fused projection. Rows are [q|k|v] per head for multi-head, [Q|K|V] per rank for
        grouped-query. With attention_output_gate, the gate of each head follows its query. With
        attention_k_eq_v, layers without a window have no rows of values.
    dense: the output projection.
    qk_layernorm (use_qk_layernorm), or q_norm and k_norm (use_separate_qk_norms): norms of queries and keys.
    sinks: `[heads]`, an additional logit of each head's softmax (attention_sinks).
    rpe: relative position biases, which all blocks share.
    """

    Spec = AttentionSpec
    spec = staticmethod(attention_spec)
    module_name = "attention"
    rpe: RelativePositionBias

    def __init__(
        self,
        spec: AttentionSpec,
        groups: ParallelGroups,
        sequence_parallel: bool = False,
        *,
        backends: AttentionBackends,
    ) -> None:
        super().__init__(spec, groups, backends)
        size, self.group = groups.size("tensor"), groups.group("tensor")
        self.kv_width, self.sharers = spec.kv_heads * spec.head_dim // size, share_out(spec.kv_heads, size)[1]
        self.alternating, self.clip, self.gated = spec.kv_heads == spec.heads, spec.clip, spec.output_gate
        self.number_of_kv, self.value_norm_eps = len(spec.projections) - 1, spec.value_norm_eps
        allocate(self, self._own_params(spec), groups, "sinks")
        self.norms_follow_rotary = spec.norms is not None and spec.norms.after_rotary
        self.qk_layernorm = self.q_norm = self.k_norm = None
        for name, (norm, norm_spec, heads) in head_norms(spec).items():
            setattr(self, name, norm(norm_spec, heads, groups))
        qkv, dense = self._linears(spec)
        self.query_key_value = Linear(qkv, groups, sequence_parallel)
        self.dense = Linear(dense, groups, sequence_parallel)

    @staticmethod
    def _own_params(spec: AttentionSpec) -> tuple[ParamSpec, ...]:
        return (ParamSpec("sinks", (spec.heads,), 0, (spec.heads,)),) if spec.sinks else ()

    @staticmethod
    def _linears(spec: AttentionSpec) -> tuple[LinearSpec, LinearSpec]:
        query_dim = 2 * spec.head_dim if spec.output_gate else spec.head_dim
        query, kv = spec.heads * query_dim, spec.kv_heads * spec.head_dim
        # Rows of multi-head attention are [q|k|v] per head, so a rank's heads are contiguous rows. Rows of
        # grouped-query attention are [Q|K|V] per rank.
        alternating = spec.kv_heads == spec.heads
        names, number = spec.projections, len(spec.projections) - 1
        rows = query + number * kv
        head_blocks = (query_dim, *(spec.head_dim,) * number) if alternating else ()
        blocks = (rows,) if alternating else (query, *(kv,) * number)
        pattern = head_blocks or blocks
        split = adapters_of(spec.lora, rows, "query_key_value", names, pattern, pattern_sharded=not alternating)
        return (
            LinearSpec(
                spec.hidden, rows, "column", spec.bias, blocks, projections=head_blocks, head_rows=(spec.head_dim,),
                adapters=split,
            ),
            LinearSpec(
                spec.heads * spec.head_dim, spec.hidden, "row", spec.output_bias,
                bias_sum_over_tensor=spec.parallel_residual,
                adapters=adapters_of(spec.lora, spec.hidden, "o_proj"),
            ),
        )  # fmt: skip

    @classmethod
    def params(cls, spec: AttentionSpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates, in GPT-NeoX's registration
        order."""
        norms = [
            param
            for name, (norm, norm_spec, heads) in head_norms(spec).items()
            for param in with_prefix(name, norm.params(norm_spec, heads))
        ]
        qkv, dense = cls._linears(spec)
        rpe = () if spec.relative is None else with_prefix("rpe", RelativePositionBias.params(spec.relative))
        return (
            *cls._own_params(spec),
            *norms,
            *with_prefix("query_key_value", qkv.params()),
            *rpe,
            *with_prefix("dense", dense.params()),
        )

    @staticmethod
    def cache_shapes(spec: AttentionSpec, tensor_size: int) -> tuple[tuple[int, int], ...]:
        """Returns the shapes of a token's keys and of its values in the cache of one tensor rank."""
        shape = (share_out(spec.kv_heads, tensor_size)[0], spec.head_dim)
        return shape, shape

    @property
    def output(self) -> Linear:
        return self.dense

    def _split(self, qkv: Tensor) -> Sequence[Tensor]:
        """Splits this rank's fused projection `[seq, batch, rows]` into queries, keys and values `[seq,
        batch, heads, head_dim]`. Queries are [query | gate] with an output gate; values are keys if the
        projection has none."""
        query_dim, number = 2 * self.head_dim if self.gated else self.head_dim, self.number_of_kv
        if self.alternating:
            q, *kv = qkv.unflatten(-1, (self.heads, -1)).split([query_dim, *[self.head_dim] * number], dim=-1)
        else:
            q, *kv = qkv.split([self.heads * query_dim, *[self.kv_width] * number], dim=-1)
            if self.sharers > 1:
                kv = list(gather_from_sharers(torch.stack(kv), self.group, self.sharers).unbind(0))
            q, kv = q.unflatten(-1, (self.heads, -1)), [part.unflatten(-1, (-1, self.head_dim)) for part in kv]
        return q, kv[0], kv[-1]

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.qk_layernorm is not None:
            q, k = self.qk_layernorm(q, k)
        elif self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k

    def core(
        self,
        x: Tensor,
        inputs: AttentionInputs,
        seed: Tensor | None,
        cache: LayerCache | None = None,
        adapter_seed: Tensor | None = None,
    ) -> Tensor:
        """Computes attention without the output projection: `[seq, batch, hidden]` to `[seq, batch, heads/T *
        head_dim]`.

        seed: for dropout of attention probabilities; None: no dropout.
        cache: the keys and values of earlier tokens in generation; None in training.
        adapter_seed: for dropout of the inputs of low-rank adapters; None: no dropout.
        """
        qkv = self.query_key_value(x, adapter_seed)
        q, k, v = self._split(qkv)
        gate = None
        if self.gated:
            q, gate = q.chunk(2, dim=-1)
        if self.value_norm_eps is not None:
            v = F.rms_norm(v.float(), v.shape[-1:], None, self.value_norm_eps).to(v.dtype)
        if not self.norms_follow_rotary:
            q, k = self._normed(q, k)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        if inputs.rope is not None:
            q, k = apply_rope(q, inputs.rope), apply_rope(k, inputs.rope)
        if self.norms_follow_rotary:
            q, k = self._normed(q, k)
        if inputs.rope is not None and inputs.rope.query_scale is not None:
            q = q * inputs.rope.query_scale.to(q.dtype)
        out = self.attend_heads(q, k, v, inputs, seed, cache)
        return (out if gate is None else out * gate.sigmoid()).flatten(2)
