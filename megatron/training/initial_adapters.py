"""Sets the initial values of adapters (`lora`) that depend on the model's weights."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.model.init import parameters_with_specs
from megatron.model.lora import begun_names, begun_values
from megatron.training.engine import Engine


@torch.no_grad()
def begin_adapters(engine: Engine) -> None:
    """Set DoRA's magnitudes and the copies of `modules_to_save`, one layer after another. All ranks call it
    together."""
    groups, stage = engine.groups, engine.stage
    params = parameters_with_specs(stage, engine.args)
    names = {
        layer: begun_names(name for param_layer, name, *_ in params if param_layer == layer) for layer, *_ in params
    }
    names = {layer: layer_names for layer, layer_names in names.items() if layer_names}
    if not names:
        return
    initial_values: dict[int, dict[str, Tensor]] = {}
    for layer, weights in engine.gather_weights(dict.fromkeys(names, 0), lambda value: value.clone()):
        module = stage.layers[str(layer)] if str(layer) in stage.layers else None
        values = begun_values(
            module, {name: w.to(groups.device) for name, w in weights.items()}, groups.group("tensor")
        )
        initial_values[layer] = {name: value.float().contiguous() for name, value in values.items()}
    data = groups.group("data")
    if data is not None:
        for layer, name, _, spec in params:
            if name not in names.get(layer, ()):
                continue
            shape = spec.local_shape(groups.size("tensor"))
            value = initial_values.setdefault(layer, {}).setdefault(name, torch.empty(shape, device=groups.device))
            dist.broadcast(value, groups.members["data"][0], group=data)
    engine.set_weights(initial_values)
