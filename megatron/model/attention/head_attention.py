"""Attention over this rank's heads, in all forms of context parallelism: the end of every attention mixer."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.model.attention.backend_choice import AttentionBackends
from megatron.model.attention.backends import AttentionOptions, equal_widths
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.attention.largest_logits import LogitWatch
from megatron.model.attention.ring import ring_attention
from megatron.model.cache import LayerCache
from megatron.model.specs import AttentionSpec
from megatron.mpu import ParallelGroups, attend_in_parts, exchange_columns, exchange_heads

_MOST_PARTS = 4  # of keys that context ranks gather one after another


class HeadAttention(nn.Module):
    """The base of attention mixers: attention over this rank's heads of queries, keys and values.

    Context ranks exchange heads for columns, gather keys and values, or hand them round.

    sinks: `[heads]`, an additional logit of each head's softmax (attention_sinks); None: there are none.
    logit_watch: notes the largest logits of training (qk_clip_threshold); None: they are not needed.
    keeps_keys: whether backward finds the keys gathered from context ranks, instead of gathering them again;
        True where recomputation gathers them.
    """

    keeps_keys = False
    sinks: nn.Parameter | None

    def __init__(self, spec: AttentionSpec, groups: ParallelGroups, backends: AttentionBackends) -> None:
        super().__init__()
        self.heads, self.head_dim = spec.heads // groups.size("tensor"), spec.head_dim
        self.heads_group, self.keys_group = groups.group("context_heads"), groups.group("context_keys")
        self.exchangers = groups.size("context_heads")
        start, number = groups.rank("context_heads"), self.heads // self.exchangers
        self.own_heads = slice(start * number, (start + 1) * number)  # after the exchange of heads
        self.scale, self.softcap, self.dropout_p = spec.scale, spec.softcap, spec.dropout
        self.backends = backends
        self.logit_watch: LogitWatch | None = None

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        inputs: AttentionInputs,
        seed: Tensor | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Computes attention of this rank's heads at this rank's columns.

        q, k, v: `[seq, batch, heads or kv_heads, head_dim]`. Returns the shape of q; with narrower values,
            heads of their width.
        seed: for dropout of attention probabilities; None: no dropout.
        cache: the keys and values of earlier tokens in generation; None in training.
        """
        if self.logit_watch is not None and self.training and cache is None:
            self.logit_watch(q, k, inputs)
        width, in_parts = v.shape[-1], inputs.heads is not None or inputs.key_index is not None or bool(inputs.ring)
        if in_parts and width != k.shape[-1]:  # between ranks, keys and values are one tensor
            q, k, v = equal_widths(q, k, v)
        if inputs.heads is None or self.heads_group is None:
            return self._attend(q, k, v, self.sinks, inputs, seed, cache)[..., :width]
        q, k, v = self._with_columns_of_all(q, k, v, inputs.heads.order, self.heads_group)
        sinks = None if self.sinks is None else self.sinks[self.own_heads]
        out = self._attend(q, k, v, sinks, inputs, seed, cache)
        return exchange_columns(out, self.heads_group, inputs.heads.places)[..., :width]

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
