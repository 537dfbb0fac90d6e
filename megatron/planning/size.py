"""The size of a model: parameters and FLOPs, counted from its layers."""

import math
from typing import NamedTuple

from megatron.data import rows_per_sample
from megatron.model import layer_params, trained_parameters
from megatron.neox_arguments import NeoXArgs
from megatron.training.metrics.flops import model_flops, neox_flops


class ModelSize(NamedTuple):
    """Counts of a model and of one of its steps.

    total, active, trained: parameters; active: those that compute a token (of experts, top-k of each block).
    flops, neox_flops: of matrix products in a step, by `model_flops` and by GPT-NeoX's formula.
    """

    total: int
    active: int
    trained: int
    flops: float
    neox_flops: float
    tokens: int


def model_size(args: NeoXArgs) -> ModelSize:
    """Returns the size of the model that a configuration describes. args: with batch sizes and vocabulary."""
    trained = trained_parameters(args)
    total = active = in_training = 0
    for layer, specs in layer_params(args).items():
        for spec in specs:
            size = math.prod(spec.shape)
            total += size
            active += size * args.moe_top_k // spec.experts if spec.experts is not None else size
            in_training += size if (layer, spec.name) in trained else 0
    tokens = args.train_batch_size * rows_per_sample(args) * args.seq_length
    factor = 4.0 if args.checkpoint_activations else 3.0
    return ModelSize(total, active, in_training, model_flops(args), neox_flops(args, factor), tokens)
