"""One transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.model.attention import AttentionInputs, Backends, SelfAttention
from megatron.model.cache import LayerCache
from megatron.model.mlp import MLP
from megatron.model.norms import build_norm
from megatron.model.weight_map import is_tied
from megatron.mpu import ParallelGroups, dropout
from megatron.neox_arguments import NeoXArgs


class Block(nn.Module):
    """One block, `[seq, batch, hidden]` (`[seq/T]` under sequence parallelism).

    Sequential: h = x + attn(ln1 x); h + mlp(ln2 h). gpt_j_residual: x + attn(ln1 x) + mlp(ln2 x), where both
    row-parallel sums travel in one all-reduce; with gpt_j_tied the MLP reads ln1 x too.
    norm_placement: olmo3: h = x + ln1(attn x); h + ln2(mlp h). sandwich: h = x + ln2(attn(ln1 x)); h + ln4(mlp(ln3 h)).
    """

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, backends: Backends) -> None:
        super().__init__()
        self.parallel_residual = args.gpt_j_residual
        self.hidden_dropout = args.hidden_dropout
        # Activations are whole on every tensor rank, except under sequence parallelism, where masks must differ.
        self.seed_offset = groups.rank("tensor") if args.sequence_parallel else 0
        placement = args.norm_placement
        self.input_layernorm = None if placement == "olmo3" else build_norm(args, groups)
        self.attention = SelfAttention(args, groups, backends)
        in_te_mlp = args.te_layernorm_mlp
        self.post_attention_layernorm = None if is_tied(args) else build_norm(args, groups, in_te_mlp=in_te_mlp)
        self.pre_feedforward_layernorm = build_norm(args, groups) if placement == "sandwich" else None
        after = placement in ("olmo3", "sandwich")
        self.post_feedforward_layernorm = build_norm(args, groups) if after else None
        self.mlp = MLP(args, groups)

    def _drop(self, x: Tensor, seed: int) -> Tensor:
        return dropout(x, self.hidden_dropout, seed + self.seed_offset, self.training)

    def forward(
        self, x: Tensor, inputs: AttentionInputs, seeds: tuple[int, int, int], cache: LayerCache | None = None
    ) -> Tensor:
        """seeds: of attention probabilities, attention output and MLP output. cache: in generation."""
        dense, linear2 = self.attention.dense, self.mlp.linear2
        norm1, norm2, norm3 = self.input_layernorm, self.post_attention_layernorm, self.post_feedforward_layernorm
        normed = x if norm1 is None else norm1(x)
        attention = self.attention.core(normed, inputs, seeds[0], cache)
        if norm3 is not None:
            assert norm2 is not None
            x = x + self._drop(norm2(dense(attention)), seeds[1])
            inner = x if self.pre_feedforward_layernorm is None else self.pre_feedforward_layernorm(x)
            return x + self._drop(norm3(linear2(self.mlp.core(inner))), seeds[2])
        if not self.parallel_residual:
            assert norm2 is not None
            x = x + self._drop(dense(attention), seeds[1])
            return x + self._drop(linear2(self.mlp.core(norm2(x))), seeds[2])
        mlp = self.mlp.core(normed if norm2 is None else norm2(x))
        if self.training and self.hidden_dropout > 0.0:
            return x + self._drop(dense(attention), seeds[1]) + self._drop(linear2(mlp), seeds[2])
        both = dense.sum_over_ranks(dense.partial(attention) + linear2.partial(mlp))
        return x + linear2.add_bias(dense.add_bias(both))
