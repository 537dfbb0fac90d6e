"""Scales down weights of heads whose attention logits grow too large (QK-Clip, Kimi K2: arXiv 2507.20534)."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.model import Stage
from megatron.model.attention.head_attention import HeadAttention
from megatron.model.attention.largest_logits import LogitWatch
from megatron.model.specs import AttentionSpec, LatentAttentionSpec
from megatron.mpu import ParallelGroups, shard
from megatron.training.native.shards import Shard


class QKClip:
    """Watches the largest attention logit S of each head in a step, and scales weights after the update.

    A head with S above the threshold t has its logits multiplied by t / S: its queries and keys by the root
    of that each. With latent attention, whose heads share the rotary part of keys, the rotary part of queries
    takes the whole factor. Of heads that share a key, each gets its factor: the key takes the root of the
    smallest, and queries the rest.
    """

    def __init__(self, stage: Stage, groups: ParallelGroups, threshold: float) -> None:
        self._groups, self._threshold = groups, threshold
        self._watches: dict[int, tuple[AttentionSpec, LogitWatch]] = {}
        for spec in stage.blocks:
            if isinstance(spec.mixer, AttentionSpec):
                attention = stage.layers[str(spec.index)].attention
                assert isinstance(attention, HeadAttention)
                attention.logit_watch = watch = LogitWatch(attention.scale or attention.head_dim**-0.5)
                self._watches[spec.index] = spec.mixer, watch
                if stage.compiled:
                    watch.forward = torch.compiler.disable(watch.forward)  # type: ignore[method-assign]
        self._factors: dict[int, Tensor] = {}
        self._layer_logits: dict[int, Tensor] = {}
        self._largest = torch.full((), -torch.inf, device=groups.device)

    def begin_step(self) -> None:
        """Forgets the logits of earlier steps."""
        for _, watch in self._watches.values():
            watch.largest = None

    def measure(self) -> None:
        """Computes the largest logits of this step over all ranks. Call it after the backward, also in a step
        that is skipped."""
        layer_logits = {
            index: watch.largest for index, (_, watch) in self._watches.items() if watch.largest is not None
        }
        self._layer_logits, self._largest = {}, torch.full_like(self._largest, -torch.inf)
        if layer_logits:
            largest = self._groups.max(torch.stack([*layer_logits.values()]), "data")
            if (group := self._groups.group("tensor")) is not None:
                parts = [torch.empty_like(largest) for _ in range(self._groups.size("tensor"))]
                dist.all_gather(parts, largest, group=group)
                largest = torch.cat(parts, 1)
            self._layer_logits, self._largest = dict(zip(layer_logits, largest.unbind(), strict=True)), largest.max()
        self._groups.max(self._largest, "pipe")

    def decide(self, skip: Tensor) -> None:
        """Computes the factors of the logits from `measure`; 1 if `skip` is true."""
        self._factors = {}
        for index, largest in self._layer_logits.items():
            # Of an infinite logit no factor can be told; the loss is then no number either.
            is_clipped = (largest > self._threshold) & largest.isfinite() & ~skip.to(largest.device)
            self._factors[index] = torch.where(is_clipped, self._threshold / largest, 1.0)

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The largest attention logit of the last step, over all heads, by the name of its metric.

        NaN if the step's rows were all padding."""
        return {"max_attention_logit": self._largest.masked_fill(self._largest.isneginf(), torch.nan)}

    @torch.no_grad()
    def apply(self, shards: Sequence[Shard]) -> None:
        """Multiplies the weights of these shards that make queries and keys."""
        size, rank = self._groups.size("tensor"), self._groups.rank("tensor")
        for held in shards:
            if held.layer not in self._factors:
                continue
            rows = row_factors(self._watches[held.layer][0], held.name, self._factors[held.layer])
            if rows is not None:
                full = rows if len(held.spec.shape) == 1 else rows.unsqueeze(1).expand(held.spec.shape)
                held.local.mul_(held.slice_of(shard(full, held.spec, rank, size)).to(held.local.device))


def row_factors(spec: AttentionSpec, name: str, factors: Tensor) -> Tensor | None:
    """Returns the factor of each row of a full attention weight or bias; None if it makes no queries or keys.

    factors: of the logits of each head, `[heads]`.
    """
    module, unchanged = name.removeprefix("attention.").rpartition(".")[0], torch.ones_like(factors)
    if isinstance(spec, LatentAttentionSpec):
        widths = {"query": (spec.nope_dim, spec.rope_dim), "latent_up": (spec.nope_dim, spec.v_head_dim)}
        root = factors.sqrt()
        pairs = {"query": (root, factors), "query_up": (root, factors), "latent_up": (root, unchanged)}
        if module not in pairs:
            return None
        parts = zip(pairs[module], widths["latent_up" if module == "latent_up" else "query"], strict=True)
        return torch.cat([part.unsqueeze(1).expand(-1, width) for part, width in parts], 1).flatten()
    if module != "query_key_value":
        return None
    key_factors = factors.view(spec.kv_heads, -1)
    keys = key_factors.amin(1).sqrt()
    queries, width = (key_factors / keys.unsqueeze(1)).flatten(), spec.head_dim
    query_parts = [queries, unchanged] if spec.output_gate else [queries]
    query_rows = torch.cat([part.unsqueeze(1).expand(-1, width) for part in query_parts], 1)
    key_rows = torch.stack([keys, torch.ones_like(keys)], 1).unsqueeze(2).expand(-1, -1, width)
    if spec.kv_heads == spec.heads:
        return torch.cat([query_rows, key_rows.flatten(1)], 1).flatten()
    return torch.cat([query_rows.flatten(), key_rows.transpose(0, 1).flatten()])
