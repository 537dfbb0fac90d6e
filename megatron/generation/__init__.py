"""Generates text from a checkpoint, in any parallel layout.

The model is built for inference only (no optimizer, no training engine) and samples with a KV cache. Prompts
come from a file or a terminal. generate.py calls `generate(args, process)`. `complete` continues a list of
prompts. A `Batcher` accepts requests while other requests run.
"""

from megatron.generation.batching.batcher import Batcher
from megatron.generation.batching.requests import Event, Request, RequestError
from megatron.generation.complete import Completion, complete
from megatron.generation.model import Model, for_inference, load_model
from megatron.generation.samples import generate
from megatron.generation.sampling import SamplingParams
