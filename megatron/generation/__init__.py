"""Text from a checkpoint, in any layout: a model built for inference alone (no optimizer, no engine), sampling with a
cache of keys and values, and what `generate.py` does with prompts, from a file or from a terminal.
`generate(args, process)` does it all; `complete` is the loop over tokens."""

from megatron.generation.complete import Completion, Step, complete
from megatron.generation.interactive import converse
from megatron.generation.model import Model, for_inference, load_model
from megatron.generation.samples import generate
from megatron.generation.sampling import Sampling, filter_logits, next_tokens

__all__ = [
    "Completion",
    "Model",
    "Sampling",
    "Step",
    "complete",
    "converse",
    "filter_logits",
    "for_inference",
    "generate",
    "load_model",
    "next_tokens",
]
