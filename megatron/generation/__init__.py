"""Generates text from a checkpoint, in any parallel layout.

The model is built for inference only (no optimizer, no engine) and samples with a KV cache. Prompts come from
a file or a terminal. `generate(args, process)` runs generate.py; `complete` continues prompts; a `Batcher`
accepts requests while others run.
"""

from megatron.generation.batching.batcher import Batcher
from megatron.generation.batching.requests import Event, Request, RequestError
from megatron.generation.complete import Completion, complete
from megatron.generation.model import Model, for_inference, load_model
from megatron.generation.samples import generate
from megatron.generation.sampling import SamplingParams
