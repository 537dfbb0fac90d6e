"""The model: one decoder, built from a flat list of layer specs.

specs.py describes the layers as data, and build_specs.py makes these from the configuration. block.py is a
transformer block, attention/ and mamba/ are its mixers, mlp.py and moe/ its feed-forwards. prediction.py is a
block of multi-token prediction.
stage.py is the part of the model that one pipeline rank holds. weight_map.py names every parameter, with its
shape.
`megatron.mpu.layers` shards linear layers over tensor-parallel ranks. Layers take their spec and
`ParallelGroups` as arguments; nothing is global.
"""

from megatron.model.cache import KVCache
from megatron.model.inference import Model, build_filled_stage, eager_blocks, for_inference, inference_mode
from megatron.model.init import init_stage, materialize
from megatron.model.pipeline_forward import forward_only, with_context
from megatron.model.stage import HiddenStates, InferenceContext, Stage, build_stage
from megatron.model.trainable import freeze, lowest_trained, trained_parameters
from megatron.model.weight_map import block_specs, layer_params, named_params, prediction_specs, shared_params
