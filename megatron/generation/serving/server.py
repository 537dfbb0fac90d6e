"""Implements `tools/serve.py`: serves the model of a configuration through OpenAI's HTTP API."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron.distributed import Process, configure_logging, rendezvous_and_check, run_on_each_rank
from megatron.generation.batching.batcher import Batcher
from megatron.generation.model import Model, load_model, start_inference
from megatron.generation.multi_lora import with_adapters
from megatron.generation.prompts.chat import ChatTemplate, find_template
from megatron.generation.serving.loop import Dispatcher, RankChannel, Replica, run_serving_loop
from megatron.generation.serving.request_queue import Rejection, RequestQueue
from megatron.mpu import DTYPES
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.neox_arguments.values.lora_settings import served_adapters
from megatron.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron.generation.serving.http_server import ServerSocket

PACKAGES = ("pydantic", "starlette", "uvicorn")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class ServerSetup:
    """The objects that rank 0 prepares before the model is loaded, so that mistakes are found early.

    names, no_template_reason: as in `RequestParser`. chat: the chat template; None: there is none.
    """

    names: tuple[str, ...]
    server_socket: ServerSocket
    chat: ChatTemplate | None
    no_template_reason: str


def serve(args: NeoXArgs, process: Process) -> None:
    """Answers HTTP requests until SIGTERM or SIGINT arrives. All ranks call this function together.

    Raises ConfigError if an address, token, template or package is not available, and CheckpointError if the
    weights cannot be loaded.
    """
    logger = configure_logging(process.rank)
    name = model_name(args)  # before `load` becomes a local copy
    args = args.check_serving().for_inference(process.world_size)
    store = rendezvous_and_check(args, process, logger)
    args, groups, tokenizer = start_inference(args, process, logger, store)
    setup = run_on_each_rank(groups, lambda: _prepare_server(name, args, tokenizer) if groups.world_rank == 0 else None)
    adapters = served_adapters(args.adapter)
    if name in adapters:
        raise args.error(
            "adapter", f"{name} is also the name of the base model; rename the adapter, or set serve_model_name"
        )
    if adapters and len(adapters) < len(args.adapter):
        raise args.error(
            "adapter",
            "some adapters are named (NAME=PATH) and some are not; name all, to serve each under its name, or none, to "
            "merge all into the model",
        )
    model = load_model(args.replace(adapter=()) if adapters else args, groups, tokenizer, logger)
    if adapters:
        model = with_adapters(model, adapters, logger)
    replica, channel = Replica(Batcher(model, maximum_rows=args.serve_max_rows, log=logger.info)), RankChannel(groups)
    if setup is None:
        with _on_signals(signal.SIG_IGN):  # rank 0 ends the loop
            run_serving_loop(replica, channel, None)
    else:
        _serve_on_rank0(setup, model, replica, channel, logger)
    groups.barrier()
    dist.destroy_process_group()


def _prepare_server(name: str, args: NeoXArgs, tokenizer: Tokenizer) -> ServerSetup:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError([f"serving needs the packages {', '.join(missing)}: pip install 'neox[serve]'"])
    from megatron.generation.serving.http_server import open_server_socket

    try:
        chat, no_template_reason = find_template(args, tokenizer), ""
        chat.stop_token_ids  # noqa: B018 - imports modules, so that the first conversation is not slow
    except ConfigError as problem:
        if args.chat_template is not None:
            raise
        chat, no_template_reason = None, str(problem)
    return ServerSetup((name, *served_adapters(args.adapter)), open_server_socket(args), chat, no_template_reason)


def _serve_on_rank0(
    setup: ServerSetup, model: Model, replica: Replica, channel: RankChannel, logger: logging.Logger
) -> None:
    """Runs the server on rank 0: a new thread handles HTTP, and this thread runs the serving loop until a
    signal arrives."""
    from megatron.generation.serving.app import Service, build_app
    from megatron.generation.serving.auth import AccessControl
    from megatron.generation.serving.http_server import HTTPServerThread
    from megatron.generation.serving.request_parsing import RequestParser
    from megatron.generation.serving.responses import TokenTexts

    args, server_socket = model.args, setup.server_socket
    queue = RequestQueue(args.serve_max_requests)
    dtype = str(DTYPES[args.params_dtype]).removeprefix("torch.")
    parser = RequestParser(
        setup.names, model.tokenizer, model.positions, model.stop_token_ids, setup.chat, setup.no_template_reason, dtype
    )
    access = AccessControl(server_socket.token, args.serve_max_body_bytes, args.serve_body_timeout_s)
    texts, updates = TokenTexts(model.tokenizer), args.serve_weight_updates
    service = Service(queue, access, parser, texts, args.serve_request_timeout_s, updates)
    dispatcher = Dispatcher(channel.groups.size("data"), queue.take, args.serve_shutdown_timeout_s, logger.info)

    def stop(number: int = 0, frame: FrameType | None = None) -> None:
        queue.closing = True
        dispatcher.stop()
        queue.wake()

    try:
        http_server = HTTPServerThread(server_socket.socket, build_app(service), stop, args.serve_header_timeout_s)
    except OSError as cause:  # two programs can bind an address, but only one can listen at it
        raise args.error(
            "serve_port", f"cannot listen at {server_socket.address} ({cause.strerror}); set another"
        ) from cause
    dispatcher.on_outcomes = partial(http_server.call_soon, queue.deliver)
    rejection = Rejection("the server has shut down", 503)
    with _on_signals(stop):
        try:
            clients = "clients with the token" if server_socket.token is not None else "clients on this machine"
            names = ", ".join(parser.names)
            logger.info(f"{names} answer{'s' * (len(parser.names) == 1)} {clients} at {server_socket.address}/v1")
            logger.info(
                setup.no_template_reason if setup.chat is None else f"chat template: that of {setup.chat.source}"
            )
            queue.wake()  # after the first round /health knows the size of the KV cache
            run_serving_loop(replica, channel, dispatcher)
        except Exception:
            rejection = Rejection("the server has failed", 500)
            raise
        finally:
            http_server.call_soon(queue.close, rejection)
            http_server.close()
    logger.info("the server has shut down")


def model_name(args: NeoXArgs) -> str:
    """Returns the name by which clients name the model: `serve_model_name`, else its name on the Hub, else
    its folder's name."""
    source = str(args.load or args.save)
    path = Path(source).resolve()
    if source.startswith("hf://"):
        name = source.removeprefix("hf://")
    elif path.parent.name == "snapshots":  # in the Hub's cache
        name = path.parents[1].name.removeprefix("models--").replace("--", "/")
    else:
        name = path.name
    return args.serve_model_name or name


@contextmanager
def _on_signals(handler: signal.Handlers | object) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in SIGNALS}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)
