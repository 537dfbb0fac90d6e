"""Text from a checkpoint, in any layout: a model built for inference alone (no optimizer, no engine),
sampling with a cache of keys and values, and what `generate.py` does with prompts, from a file or from a
terminal. `generate(args, process)` does it all; `complete` continues prompts; a `Batcher` takes requests
while others run."""

from megatron.generation.batching.batcher import Batcher
from megatron.generation.batching.requests import Event, Request, RequestError
from megatron.generation.complete import Completion, complete
from megatron.generation.model import Model, for_inference, load_model
from megatron.generation.samples import generate
from megatron.generation.sampling import SamplingParams

__all__ = [
    "Batcher",
    "Completion",
    "Event",
    "Model",
    "Request",
    "RequestError",
    "SamplingParams",
    "complete",
    "for_inference",
    "generate",
    "load_model",
]
