"""Serves a model through OpenAI's HTTP API.

A thread of rank 0 handles HTTP (`http_server`, `app`, `auth`, `request_parsing`, `responses`). The main
thread of every rank runs a batcher (`loop`). `request_queue` connects the HTTP thread to rank 0's main
thread. `serve(args, process)` starts all of them.
"""

from megatron.generation.serving.server import serve
