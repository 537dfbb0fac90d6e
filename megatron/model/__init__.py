"""The model: one decoder, built from a flat list of layer specs.

`specs.py` describes the layers as data (indices are GPT-NeoX's), `block.py` is a transformer block,
`attention/` its attention and the backends that compute it, `mlp.py` its feed-forward, `stage.py` the part of
the model that one pipeline rank holds, `weight_map.py` names and shapes every parameter. Which dimension of a
linear is split over tensor-parallel ranks stands in `megatron.mpu.layers`. Layers take their spec and
`ParallelGroups`; nothing is global.
"""

from megatron.model.cache import KVCache
from megatron.model.filled_stage import build_filled_stage
from megatron.model.inference import Model, eager_blocks, for_inference, inference_mode
from megatron.model.init import init_stage, materialize
from megatron.model.pipeline_forward import forward_only
from megatron.model.pipeline_partition import partition_layers
from megatron.model.stage import HiddenStates, InferenceContext, Stage, build_stage
from megatron.model.trainable import freeze, lowest_trained, trained_parameters
from megatron.model.weight_map import block_specs, layer_params, layer_specs, named_params, shared_params

__all__ = [
    "HiddenStates",
    "KVCache",
    "Model",
    "InferenceContext",
    "Stage",
    "block_specs",
    "build_filled_stage",
    "build_stage",
    "eager_blocks",
    "for_inference",
    "forward_only",
    "freeze",
    "init_stage",
    "layer_params",
    "named_params",
    "layer_specs",
    "lowest_trained",
    "materialize",
    "partition_layers",
    "inference_mode",
    "shared_params",
    "trained_parameters",
]
