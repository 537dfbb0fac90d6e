"""Counts the multiplications of one token in the matrix products of each layer."""

import math
from collections.abc import Sequence

from megatron.model.specs import (
    AttentionSpec,
    BlockSpec,
    GatedDeltaNetSpec,
    HeadSpec,
    LayerSpec,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    PredictionSpec,
    ScoreSpec,
)
from megatron.mpu import ParamSpec
from megatron.neox_arguments import ModelArgs


def weight_products(spec: ParamSpec, args: ModelArgs) -> float:
    """Returns the number of elements of a block's weight that a token is multiplied with.

    Of experts it is the share that the token is routed to. Biases, norms and shared weights give 0.
    """
    if not spec.weight_decay or spec.shared:
        return 0.0
    share = args.moe_top_k / spec.experts if spec.experts is not None else 1.0
    return math.prod(spec.shape) * share


def mixing_products(mixer: MixerSpec | None, row_length: float) -> float:
    """Returns the multiplications of a block's mixer besides its products with weights.

    They are attention's scores and values, or products with a state. row_length: tokens in a row.
    """
    match mixer:
        case AttentionSpec():
            # Scores and values: two products of half a square
            return row_length / 2 * mixer.heads * (mixer.head_dim + mixer.value_dim)
        case MambaSpec():
            return 3.0 * mixer.inner * mixer.state  # of the decay, of what is added, of the output
        case Mamba2Spec():
            chunk_products = min(mixer.chunk, row_length) / 2 * (mixer.groups * mixer.state + mixer.inner)
            return chunk_products + 2.0 * mixer.inner * mixer.state  # into the state and out of it
        case GatedDeltaNetSpec():
            chunk = min(mixer.chunk, row_length)
            # Of pairs of tokens: keys with keys and with queries, the system's solution, scores with changes
            pairs = mixer.keys * 2.0 + mixer.heads * (mixer.key_dim + 2.0 * mixer.value_dim)
            return chunk / 2 * pairs + 3.0 * mixer.heads * mixer.key_dim * mixer.value_dim
    return 0.0


def head_products(args: ModelArgs) -> int:
    """Returns the multiplications of the output layer."""
    return args.hidden_size * (1 if args.score_head else args.padded_vocab_size)


def forward_products(spec: LayerSpec, params: Sequence[ParamSpec], args: ModelArgs) -> float:
    """Returns the multiplications of a layer in a forward pass of training. params: of the layer.

    A block of multi-token prediction has those of its output layer too.
    """
    match spec:
        case BlockSpec():
            head = head_products(args) if isinstance(spec, PredictionSpec) else 0
            return sum(weight_products(p, args) for p in params) + mixing_products(spec.mixer, args.seq_length) + head
        case HeadSpec() | ScoreSpec():
            return head_products(args)
    return 0.0
