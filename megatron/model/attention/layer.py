"""Self-attention, a mixer of a transformer block: projections, norms of queries and keys, rotary positions,
attention.

To add another kind of mixer, write a class with the members of `block.SubLayer`, and list it in
`block.MIXERS`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.model.attention.backend_choice import AttentionBackends
from megatron.model.attention.backends import AttentionOptions
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.attention.ring import ring_attention
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
    attend_in_parts,
    exchange_columns,
    exchange_heads,
    gather_from_sharers,
    share_out,
    with_prefix,
)

_MOST_PARTS = 4  # of keys that context ranks gather one after another


class SelfAttention(nn.Module):
    """Multi-head or grouped-query attention over this rank's heads; input and output are `[seq, batch,
    hidden]`.

    If there are more tensor ranks than key-value heads, each rank computes a slice of one key-value head and
    gathers the full head from the ranks that share it. Context ranks exchange heads for columns, gather keys
    and values, or hand them round.

    Parameters:
    query_key_value: the fused projection. Rows are [q|k|v] per head for multi-head, [Q|K|V] per rank for
        grouped-query.
    dense: the output projection.
    qk_layernorm (use_qk_layernorm), or q_norm and k_norm (use_separate_qk_norms): norms of queries and keys.
    sinks: `[heads]`, an additional logit of each head's softmax (attention_sinks).
    rpe: relative position biases, which all blocks share.

    keeps_keys: whether backward finds the keys gathered from context ranks, instead of gathering them again;
        True where recomputation gathers them.
    """

    keeps_keys = False

    Spec = AttentionSpec
    spec = staticmethod(attention_spec)
    module_name = "attention"
    rpe: RelativePositionBias
    sinks: nn.Parameter | None

    def __init__(
        self,
        spec: AttentionSpec,
        groups: ParallelGroups,
        sequence_parallel: bool = False,
        *,
        backends: AttentionBackends,
    ) -> None:
        super().__init__()
        size = groups.size("tensor")
        self.heads, self.head_dim, self.group = spec.heads // size, spec.head_dim, groups.group("tensor")
        self.heads_group, self.keys_group = groups.group("context_heads"), groups.group("context_keys")
        self.exchangers = groups.size("context_heads")
        start, number = groups.rank("context_heads"), self.heads // self.exchangers
        self.own_heads = slice(start * number, (start + 1) * number)  # after the exchange of heads
        self.kv_width, self.sharers = spec.kv_heads * spec.head_dim // size, share_out(spec.kv_heads, size)[1]
        self.alternating = spec.kv_heads == spec.heads
        self.scale, self.softcap, self.clip, self.dropout_p = spec.scale, spec.softcap, spec.clip, spec.dropout
        self.backends = backends
        allocate(self, self._own_params(spec), groups, "sinks")
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
        query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        # Rows of multi-head attention are [q|k|v] per head, so a rank's heads are contiguous rows. Rows of
        # grouped-query attention are [Q|K|V] per rank.
        alternating = spec.kv_heads == spec.heads
        blocks, head_blocks = ((3 * query,), (spec.head_dim,) * 3) if alternating else ((query, kv, kv), ())
        names, pattern, rows = ("q_proj", "k_proj", "v_proj"), head_blocks or blocks, query + 2 * kv
        split = adapters_of(spec.lora, rows, "query_key_value", names, pattern, pattern_sharded=not alternating)
        return (
            LinearSpec(spec.hidden, rows, "column", spec.bias, blocks, projections=head_blocks, adapters=split),
            LinearSpec(
                query, spec.hidden, "row", spec.output_bias, bias_sum_over_tensor=spec.parallel_residual,
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

    @property
    def output(self) -> Linear:
        return self.dense

    def _split(self, qkv: Tensor) -> Sequence[Tensor]:
        """Splits this rank's fused projection `[seq, batch, rows]` into queries, keys and values `[seq,
        batch, heads, head_dim]`."""
        if self.alternating:
            return qkv.unflatten(-1, (self.heads, 3 * self.head_dim)).chunk(3, dim=-1)
        q, k, v = qkv.split([self.heads * self.head_dim, self.kv_width, self.kv_width], dim=-1)
        if self.sharers > 1:
            k, v = gather_from_sharers(torch.stack([k, v]), self.group, self.sharers).unbind(0)
        return [part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v)]

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
        if self.qk_layernorm is not None:
            q, k = self.qk_layernorm(q, k)
        elif self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        if inputs.rope is not None:
            q, k = apply_rope(q, inputs.rope), apply_rope(k, inputs.rope)
            q = q if inputs.rope.query_scale is None else q * inputs.rope.query_scale.to(q.dtype)
        if inputs.heads is None or self.heads_group is None:
            return self._attend(q, k, v, self.sinks, inputs, seed, cache).flatten(2)
        q, k, v = self._with_columns_of_all(q, k, v, inputs.heads.order, self.heads_group)
        sinks = None if self.sinks is None else self.sinks[self.own_heads]
        out = self._attend(q, k, v, sinks, inputs, seed, cache)
        return exchange_columns(out, self.heads_group, inputs.heads.places).flatten(2)

    def _with_columns_of_all(
        self, q: Tensor, k: Tensor, v: Tensor, order: Tensor, group: dist.ProcessGroup
    ) -> Sequence[Tensor]:
        """Exchanges heads for columns with the context ranks of a group.

        Returns queries, keys and values of this rank's share of the heads, at the columns of all ranks.

        If there are more ranks than key-value heads, several ranks get the same one.
        """
        k, v = (x.repeat_interleave(max(1, self.exchangers // x.shape[2]), dim=2) for x in (k, v))
        parts = [x.unflatten(2, (self.exchangers, -1)).movedim(2, 0) for x in (q, k, v)]
        heads = [part.shape[3] for part in parts]
        return exchange_heads(torch.cat(parts, 3), group, order).split(heads, dim=2)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        inputs: AttentionInputs,
        seed: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        if inputs.ring and self.keys_group is not None:
            return ring_attention(q, k, v, inputs.ring, self.keys_group, self.scale)
        p = self.dropout_p if self.training and seed is not None else 0.0
        options = AttentionOptions(cache, p, seed, self.scale, self.softcap, sinks)
        if inputs.key_index is None or self.keys_group is None:
            return self.backends.attend(q, k, v, inputs, options)
        # A dropout mask is a function of the seed for all heads at once.
        parts = 1 if p > 0.0 or torch.compiler.is_compiling() else _num_parts(k.shape[2])

        def attend(number: int, k: Tensor, v: Tensor) -> Tensor:
            mask, part_sinks = inputs.mask, None if sinks is None else sinks.chunk(parts)[number]
            if mask is not None and mask.shape[1] > 1:
                mask = mask.chunk(parts, 1)[number]
            part_options = options._replace(sinks=part_sinks)
            return self.backends.attend(q.chunk(parts, 2)[number], k, v, inputs._replace(mask=mask), part_options)

        kv = torch.stack([k, v], 2)
        return attend_in_parts(attend, kv, self.keys_group, inputs.key_index, parts, self.keeps_keys)


def _num_parts(kv_heads: int) -> int:
    """Returns in how many parts keys are gathered. More parts leave less of the first gather exposed."""
    return next(parts for parts in range(_MOST_PARTS, 0, -1) if kv_heads % parts == 0)
