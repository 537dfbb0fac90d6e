"""The model: one decoder built from a flat list of layer specs (NeoX's layer indices), its attention, norms and MLPs,
the weight map that names and shapes every parameter, and forward-only execution over pipeline stages.
Layers take their spec and `ParallelGroups`; nothing is global."""

from megatron.model.cache import KVCache
from megatron.model.forward import forward_only
from megatron.model.inference import Model, for_inference, inference_mode
from megatron.model.init import init_stage
from megatron.model.partitioning import partition_layers
from megatron.model.stage import Hidden, InferenceContext, Stage, build_stage
from megatron.model.trainable import freeze, lowest_trained, trained_parameters
from megatron.model.weight_map import block_specs, layer_params, layer_specs, named_params, shared_params

__all__ = [
    "Hidden",
    "KVCache",
    "Model",
    "InferenceContext",
    "Stage",
    "block_specs",
    "build_stage",
    "for_inference",
    "forward_only",
    "freeze",
    "init_stage",
    "layer_params",
    "named_params",
    "layer_specs",
    "lowest_trained",
    "partition_layers",
    "inference_mode",
    "shared_params",
    "trained_parameters",
]
