"""A model behind OpenAI's HTTP API. A thread of rank 0 speaks HTTP (`http_server`,
`app`, `auth`, `request_parsing`, `responses`); the main threads of all ranks run a batcher each (`loop`);
`request_queue` lies between the two. `serve(args, process)` does it all."""

from megatron.generation.serving.server import serve
