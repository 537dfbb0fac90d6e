"""Keys of tools/serve.py."""

from dataclasses import dataclass

from megatron.neox_arguments.keys.declaration import new_key


@dataclass(frozen=True)
class ServingKeys:
    """The server of tools/serve.py."""

    serve_host: str = new_key(
        "127.0.0.1", "Address that tools/serve.py listens at; one that other machines reach needs a token"
    )
    serve_port: int = new_key(8000, "Its port; 0: any that is free", ge=0, le=65535)
    serve_model_name: str | None = new_key(
        None, "What clients call the model; unset: the name of the folder it is loaded from"
    )
    serve_token_file: str | None = new_key(
        None, "File with the token that clients must show; unset: NEOX_SERVE_TOKEN, else none"
    )
    serve_max_rows: int = new_key(128, "Texts that are written at once; others wait", ge=1)
    serve_max_requests: int = new_key(
        1024, "Texts that may be written or wait at a time; more are refused with status 429", ge=1
    )
    serve_max_body_bytes: int = new_key(4 * 1024 * 1024, "Longest body of a request", ge=1024)
    serve_header_timeout_s: float = new_key(
        30.0, "Time in which a request's header must have come; the connection is closed after it", gt=0
    )
    serve_body_timeout_s: float = new_key(30.0, "Time in which a body must have come", gt=0)
    serve_request_timeout_s: float = new_key(600.0, "Time in which a request must be answered", gt=0)
    serve_weight_updates: bool = new_key(
        False,
        "Whoever may ask the server may give it other weights of its model (POST /v1/update_weights), as the servers "
        "of `rollout` need",
    )
    serve_shutdown_timeout_s: float = new_key(30.0, "Time that requests have to end after SIGTERM or Ctrl-C", ge=0)
