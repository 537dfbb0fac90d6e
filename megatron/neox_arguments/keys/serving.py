"""Declares the keys of tools/serve.py."""

from dataclasses import dataclass

from megatron.neox_arguments.keys.declaration import new_key


@dataclass(frozen=True)
class ServingKeys:
    """Configuration keys of the server of tools/serve.py."""

    serve_host: str = new_key("127.0.0.1", "Address of tools/serve.py; one reachable from other machines needs a token")
    serve_port: int = new_key(8000, "Port of tools/serve.py; 0: any free one", ge=0, le=65535)
    serve_model_name: str | None = new_key(None, "The model's name for clients; unset: the name of its folder")
    serve_token_file: str | None = new_key(
        None, "File with the token clients must send; unset: NEOX_SERVE_TOKEN, else none"
    )
    serve_max_rows: int = new_key(128, "Most texts generated at once; further requests wait", ge=1)
    serve_max_requests: int = new_key(1024, "Most texts generated or waiting; more are refused with status 429", ge=1)
    serve_max_body_bytes: int = new_key(4 * 1024 * 1024, "Most bytes of a request's body", ge=1024)
    serve_header_timeout_s: float = new_key(
        30.0, "Seconds to receive a request's header before the connection is closed", gt=0
    )
    serve_body_timeout_s: float = new_key(30.0, "Seconds to receive a request's body", gt=0)
    serve_request_timeout_s: float = new_key(600.0, "Seconds to answer a request", gt=0)
    serve_weight_updates: bool = new_key(
        False,
        "Let clients replace the model's weights (POST /v1/update_weights), as needed for the servers of `rollout`",
    )
    serve_shutdown_timeout_s: float = new_key(30.0, "Seconds for requests to end after SIGTERM or Ctrl-C", ge=0)
