"""Multi-token prediction: blocks after the last one, each of which predicts one more token of the future.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2). Block k computes, for position i,

    h_k[i] = final_layernorm(block(eh_proj [enorm(embedding(token i + k)) ; hnorm(h_{k - 1}[i])])),

from which the output layer predicts token i + k + 1. h_0 is the output of the model's final norm. Embedding
and output layer are the model's. The paper leaves the norms open; h_0 and h_k after a norm are Megatron-LM's
(`MultiTokenPredictionLayer`) and transformers' (`MtpLayer`).

Rotary positions, windows and masks are those of position i, as in Megatron-LM. transformers has those of
token i + k; a shift of all positions changes no rotary logit. Learned or sinusoidal positions are of token
i + k, because its embedding has them.
"""

import torch
from torch import Tensor

from megatron.model.attention import AttentionBackends, AttentionInputs
from megatron.model.block import Block, DropoutSeeds
from megatron.model.cache import LayerCache, StateCache
from megatron.model.mamba import ScanKernels, StateInputs
from megatron.model.moe import RoutingSums
from megatron.model.norms import NORMS, Norm, build_norm
from megatron.model.specs import BlockSpec, PredictionSpec
from megatron.mpu import Linear, LinearSpec, ParallelGroups, ParamSpec, with_prefix


class PredictionBlock(Block):
    """A block of multi-token prediction, with its norms and projection.

    Input is `[seq, batch, 2 hidden]`, [embedding | hidden states]; output is `[seq, batch, hidden]`; with
    `[seq/T, ..]` under sequence parallelism. The projection is replicated over tensor ranks.
    """

    enorm: Norm
    hnorm: Norm
    eh_proj: Linear
    final_layernorm: Norm

    def __init__(
        self,
        spec: PredictionSpec,
        groups: ParallelGroups,
        sequence_parallel: bool = False,
        *,
        backends: AttentionBackends | ScanKernels | None,
    ) -> None:
        super().__init__(spec, groups, sequence_parallel, backends=backends)
        self.final_multiplier = spec.final_multiplier
        self.enorm = build_norm(spec.input_norm, groups, sequence_parallel)
        self.hnorm = build_norm(spec.input_norm, groups, sequence_parallel)
        self.eh_proj = Linear(self._projection(spec), groups, sequence_parallel)
        self.final_layernorm = build_norm(spec.final_norm, groups, sequence_parallel)

    @staticmethod
    def _projection(spec: PredictionSpec) -> LinearSpec:
        return LinearSpec(2 * spec.input_norm.width, spec.input_norm.width, "none", bias=False)

    @classmethod
    def params(cls, spec: BlockSpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates: the block's, then those around
        it."""
        assert isinstance(spec, PredictionSpec)
        norm, final = NORMS[spec.input_norm.kind].params(spec.input_norm), NORMS[spec.final_norm.kind]
        return (
            *Block.params(spec),
            *with_prefix("enorm", norm),
            *with_prefix("hnorm", norm),
            *with_prefix("eh_proj", cls._projection(spec).params()),
            *with_prefix("final_layernorm", final.params(spec.final_norm)),
        )

    def forward(
        self,
        x: Tensor,
        inputs: AttentionInputs | StateInputs | None,
        seeds: DropoutSeeds,
        cache: LayerCache | StateCache | None = None,
        token_mask: Tensor | None = None,
    ) -> tuple[Tensor, RoutingSums | None]:
        embedded, hidden = x.chunk(2, -1)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        x, routed = super().forward(x, inputs, seeds, cache, token_mask)
        x = self.final_layernorm(x)
        return x if self.final_multiplier == 1.0 else x * self.final_multiplier, routed
