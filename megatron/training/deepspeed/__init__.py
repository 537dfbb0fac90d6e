"""DeepSpeed behind `megatron.training.engine`: the only user of its objects, configuration and versions."""
