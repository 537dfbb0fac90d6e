"""The model: one decoder built from a flat list of layer specs (NeoX's layer indices), its attention, norms and MLPs,
the weight map that names and shapes every parameter, and forward-only execution over pipeline stages.
Layers take `NeoXArgs` and `ParallelGroups`; nothing is global."""

from megatron.model.cache import KVCache
from megatron.model.decoder import Hidden, Stage, build_stage, layer_specs, partition_layers
from megatron.model.forward import forward_only
from megatron.model.init import init_stage
from megatron.model.weight_map import ParamSpec, layer_params, shard, unshard

__all__ = [
    "Hidden",
    "KVCache",
    "ParamSpec",
    "Stage",
    "build_stage",
    "forward_only",
    "init_stage",
    "layer_params",
    "layer_specs",
    "partition_layers",
    "shard",
    "unshard",
]
