"""DeepSpeed behind `megatron.training.engine`: all that knows its objects, configuration and versions."""
