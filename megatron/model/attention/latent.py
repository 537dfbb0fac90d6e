"""Multi-head latent attention, a mixer of a transformer block (MLA, arXiv 2405.04434; DeepSeek V2 and V3)."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron.model.attention.backend_choice import AttentionBackends
from megatron.model.attention.backends import AttentionOptions
from megatron.model.attention.head_attention import HeadAttention
from megatron.model.attention.inputs import AttentionInputs
from megatron.model.build_specs import latent_attention_spec
from megatron.model.cache import LayerCache
from megatron.model.norms import RMSNorm
from megatron.model.positions import apply_rope
from megatron.model.specs import LatentAttentionSpec, NormSpec
from megatron.mpu import (
    Linear,
    LinearSpec,
    ParallelGroups,
    ParamSpec,
    adapters_of,
    copy_to_tensor,
    gather_from_sequence,
    with_prefix,
)

# HuggingFace's names of the linear layers, and so those of their adapters
_ADAPTERS = {
    "query": "q_proj", "query_down": "q_a_proj", "query_up": "q_b_proj", "latent_down": "kv_a_proj_with_mqa",
    "latent_up": "kv_b_proj", "dense": "o_proj",
}  # fmt: skip


class LatentAttention(HeadAttention):
    """Attention whose keys and values are made from a narrow latent; input and output are `[seq, batch,
    hidden]`.

    A head of queries and keys is [nope_dim | rope_dim]. Keys get their last `rope_dim` dimensions, the rotary
    key, from hidden states; all heads share it. Training and prefill expand latents to keys and values. A
    cache holds a token's latent and rotary key. Tokens that continue a cache read it in the absorbed form:
    queries are projected to the width of the latent instead of keys to that of queries.

    Each tensor rank computes the latents of all tokens (of its part of the sequence under sequence
    parallelism), and its heads.

    Parameters:
    query: the projection of queries from hidden states, or with q_lora_rank query_down, query_norm, query_up.
    latent_down: the projection to [latent | rotary key]. latent_norm: the latent's norm.
    latent_up: the projection of latents; rows are [key | value] of each head.
    dense: the output projection.
    """

    Spec = LatentAttentionSpec
    spec = staticmethod(latent_attention_spec)
    module_name = "attention"
    query: Linear
    query_down: Linear | None
    query_norm: RMSNorm | None
    query_up: Linear
    latent_down: Linear
    latent_norm: RMSNorm
    latent_up: Linear
    dense: Linear

    def __init__(
        self,
        spec: LatentAttentionSpec,
        groups: ParallelGroups,
        sequence_parallel: bool = False,
        *,
        backends: AttentionBackends,
    ) -> None:
        super().__init__(spec, groups, backends)
        self.group, self.sequence_parallel = groups.group("tensor"), sequence_parallel
        self.latent, self.parts = spec.latent, (spec.nope_dim, spec.rope_dim)
        self.key_and_value = (spec.nope_dim, spec.v_head_dim)
        self.query_down = self.query_norm = self.sinks = None
        for name, linear in self._linears(spec).items():
            setattr(self, name, Linear(linear, groups, sequence_parallel))
        for name, norm in self._norms(spec).items():
            setattr(self, name, RMSNorm(norm, groups, sequence_parallel))

    @staticmethod
    def _linears(spec: LatentAttentionSpec) -> dict[str, LinearSpec]:
        queries, expanded = spec.heads * spec.head_dim, spec.heads * (spec.nope_dim + spec.v_head_dim)
        if spec.query_latent is None:
            linears = {"query": LinearSpec(spec.hidden, queries, "column", False, head_rows=(spec.head_dim,))}
        else:
            linears = {
                "query_down": LinearSpec(spec.hidden, spec.query_latent, "none", spec.bias),
                "query_up": LinearSpec(spec.query_latent, queries, "column", False, head_rows=(spec.head_dim,)),
            }
        linears |= {
            "latent_down": LinearSpec(spec.hidden, spec.latent + spec.rope_dim, "none", spec.bias),
            "latent_up": LinearSpec(
                spec.latent, expanded, "column", False, head_rows=(spec.nope_dim, spec.v_head_dim)
            ),
            "dense": LinearSpec(
                spec.heads * spec.v_head_dim, spec.hidden, "row", spec.output_bias,
                bias_sum_over_tensor=spec.parallel_residual,
            ),
        }  # fmt: skip
        return {
            name: replace(linear, adapters=adapters_of(spec.lora, linear.out_features, _ADAPTERS[name]))
            for name, linear in linears.items()
        }

    @staticmethod
    def _norms(spec: LatentAttentionSpec) -> dict[str, NormSpec]:
        widths = {"query_norm": spec.query_latent, "latent_norm": spec.latent}
        return {
            name: NormSpec("rmsnorm", width, spec.latent_eps, bias=False, zero_centered=False)
            for name, width in widths.items()
            if width is not None
        }

    @classmethod
    def params(cls, spec: LatentAttentionSpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates."""
        params = {name: linear.params() for name, linear in cls._linears(spec).items()}
        params |= {name: RMSNorm.params(norm) for name, norm in cls._norms(spec).items()}
        return tuple(param for name, specs in params.items() for param in with_prefix(name, specs))

    @staticmethod
    def cache_shapes(spec: LatentAttentionSpec, tensor_size: int) -> tuple[tuple[int, int], ...]:
        """Returns the shape of a token in the cache: its latent and rotary key, on every tensor rank."""
        return ((1, spec.cached.head_dim),)

    @property
    def output(self) -> Linear:
        return self.dense

    def core(
        self,
        x: Tensor,
        inputs: AttentionInputs,
        seed: Tensor | None,
        cache: LayerCache | None = None,
        adapter_seed: Tensor | None = None,
    ) -> Tensor:
        """Computes attention without the output projection: `[seq, batch, hidden]` to `[seq, batch, heads/T *
        v_head_dim]`.

        seed: for dropout of attention probabilities; None: no dropout.
        cache: the latents of earlier tokens in generation; None in training.
        adapter_seed: for dropout of the inputs of low-rank adapters; None: no dropout.
        """
        q = self._queries(x, adapter_seed).unflatten(-1, (self.heads, self.head_dim))
        nope, rope = q.split(self.parts, -1)
        latent, rotary_key = self.latent_down(x, adapter_seed).split([self.latent, self.parts[1]], -1)
        latent, rotary_key = self.latent_norm(latent), self._shared(rotary_key).unsqueeze(2)
        if inputs.rope is not None:
            rope, rotary_key = apply_rope(rope, inputs.rope), apply_rope(rotary_key, inputs.rope)
        if cache is not None:
            key = torch.cat([latent.unsqueeze(2), rotary_key], -1)
            if inputs.columns is not None:
                return self._absorbed(nope, rope, key, inputs, cache)
            cache.put(*[key.permute(1, 2, 0, 3)] * 2)
        expanded = self.latent_up(latent, adapter_seed).unflatten(-1, (self.heads, sum(self.key_and_value)))
        key, value = expanded.split(self.key_and_value, -1)
        key = torch.cat([key, rotary_key.expand(-1, -1, self.heads, -1)], -1)
        return self.attend_heads(torch.cat([nope, rope], -1), key, value, inputs, seed).flatten(2)

    def _queries(self, x: Tensor, adapter_seed: Tensor | None) -> Tensor:
        if self.query_down is None or self.query_norm is None:
            return self.query(x, adapter_seed)
        return self.query_up(self.query_norm(self.query_down(x, adapter_seed)), adapter_seed)

    def _shared(self, rotary_key: Tensor) -> Tensor:
        """Returns the rotary keys of the full sequence. All tensor ranks use them for their heads, so
        gradients are summed over ranks."""
        if self.sequence_parallel:
            return gather_from_sequence(rotary_key, self.group)
        return copy_to_tensor(rotary_key, self.group)

    def _absorbed(self, nope: Tensor, rope: Tensor, key: Tensor, inputs: AttentionInputs, cache: LayerCache) -> Tensor:
        """Returns attention `[seq, batch, heads/T * v_head_dim]` over the latents in a cache, without
        expanding them.

        nope, rope: the parts of queries, `[seq, batch, heads/T, ..]`. key: [latent | rotary key] of these
            tokens, `[seq, batch, 1, latent + rope_dim]`.
        """
        weight = self.latent_up.adapted_weight().unflatten(-2, (self.heads, sum(self.key_and_value)))
        to_keys, to_values = weight.split(self.key_and_value, -2)
        row = "b" if weight.dim() == 4 else ""  # rows of the batch may have adapters of their own
        q = torch.cat([torch.einsum(f"sbhn,{row}hnl->sbhl", nope, to_keys), rope], -1)
        out = self.backends.attend(q, key, key, inputs, AttentionOptions(cache, scale=self.scale, softcap=self.softcap))
        return torch.einsum(f"sbhl,{row}hvl->sbhv", out[..., : self.latent], to_values).flatten(2)
