"""Text from a checkpoint, in any layout: a model built for inference alone (no optimizer, no engine), sampling, and the
prompts and JSON lines of `generate.py`. `generate(args, process)` does it all; `complete` is the loop over tokens."""

from megatron.generation.complete import Completion, complete
from megatron.generation.model import Model, load_model
from megatron.generation.samples import generate
from megatron.generation.sampling import Sampling, filter_logits, next_tokens

__all__ = ["Completion", "Model", "Sampling", "complete", "filter_logits", "generate", "load_model", "next_tokens"]
