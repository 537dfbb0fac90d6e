"""A model behind OpenAI's HTTP API. A thread of rank 0 speaks HTTP (`app`, `access`, `reading`, `replies`); the main
threads of all ranks run a batcher each (`loop`); `queue` is where the two meet. `serve(args, process)` does it all."""

from megatron.generation.serving.server import serve

__all__ = ["serve"]
