"""The model: one decoder, built from a flat list of layer specs.

`specs.py` describes the layers as data (indices are GPT-NeoX's), `block.py` is a transformer block,
`attention/` its attention and the backends that compute it, `mlp.py` its feed-forward, `stage.py` the part of
the model that one pipeline rank holds, `weight_map.py` names and shapes every parameter. Which dimension of a
linear is split over tensor-parallel ranks stands in `megatron.mpu.layers`. Layers take their spec and
`ParallelGroups`; nothing is global.
"""

from megatron.model.cache import KVCache
from megatron.model.inference import Model, build_filled_stage, eager_blocks, for_inference, inference_mode
from megatron.model.init import init_stage, materialize
from megatron.model.pipeline_forward import forward_only
from megatron.model.stage import HiddenStates, InferenceContext, Stage, build_stage
from megatron.model.trainable import freeze, lowest_trained, trained_parameters
from megatron.model.weight_map import block_specs, layer_params, named_params, shared_params
