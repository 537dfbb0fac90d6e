"""One transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.model.attention import AttentionInputs, Backend, SelfAttention
from megatron.model.cache import LayerCache
from megatron.model.mlp import MLP
from megatron.model.norms import build_norm
from megatron.mpu import ParallelGroups, dropout
from megatron.neox_arguments import NeoXArgs


class Block(nn.Module):
    """Pre-norm block, `[seq, batch, hidden]` (`[seq/T]` under sequence parallelism).

    Sequential: h = x + attn(ln1 x); h + mlp(ln2 h). gpt_j_residual: x + attn(ln1 x) + mlp(ln2 x), where both
    row-parallel sums travel in one all-reduce.
    """

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, backend: Backend) -> None:
        super().__init__()
        self.parallel_residual = args.gpt_j_residual
        self.hidden_dropout = args.hidden_dropout
        # Activations are whole on every tensor rank, except under sequence parallelism, where masks must differ.
        self.seed_offset = groups.rank("tensor") if args.sequence_parallel else 0
        self.input_layernorm = build_norm(args, groups)
        self.attention = SelfAttention(args, groups, backend)
        self.post_attention_layernorm = build_norm(args, groups)
        self.mlp = MLP(args, groups)

    def _drop(self, x: Tensor, seed: int) -> Tensor:
        return dropout(x, self.hidden_dropout, seed + self.seed_offset, self.training)

    def forward(
        self, x: Tensor, inputs: AttentionInputs, seeds: tuple[int, int, int], cache: LayerCache | None = None
    ) -> Tensor:
        """seeds: of attention probabilities, attention output and MLP output. cache: in generation."""
        dense, linear2 = self.attention.dense, self.mlp.linear2
        attention = self.attention.core(self.input_layernorm(x), inputs, seeds[0], cache)
        if not self.parallel_residual:
            x = x + self._drop(dense(attention), seeds[1])
            return x + self._drop(linear2(self.mlp.core(self.post_attention_layernorm(x))), seeds[2])
        mlp = self.mlp.core(self.post_attention_layernorm(x))
        if self.training and self.hidden_dropout > 0.0:
            return x + self._drop(dense(attention), seeds[1]) + self._drop(linear2(mlp), seeds[2])
        both = dense.sum_over_ranks(dense.partial(attention) + linear2.partial(mlp))
        return x + linear2.add_bias(dense.add_bias(both))
