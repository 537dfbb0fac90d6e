"""`tools/serve.py`: the model of a configuration behind OpenAI's API."""

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

from megatron.checkpointing.staging import with_local_model
from megatron.distributed import Process, configure_logging, rendezvous_and_check, run_on_each_rank
from megatron.generation.batching.batcher import Batcher
from megatron.generation.model import Model, load_model
from megatron.generation.prompts.chat import ChatTemplate, find_template
from megatron.generation.serving.loop import Channel, Leader, Replica, run
from megatron.generation.serving.request_queue import Desk, Refusal
from megatron.mpu import init_model_parallel
from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.tokenizer import Tokenizer, build_tokenizer

if TYPE_CHECKING:
    from megatron.generation.serving.listening import Entrance

PACKAGES = ("pydantic", "starlette", "uvicorn")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Front:
    """What rank 0 finds out before a model is loaded. name: of the model; why: there is no template."""

    name: str
    entrance: Entrance
    chat: ChatTemplate | None
    why: str


def serve(args: NeoXArgs, process: Process) -> None:
    """Answer requests until SIGTERM or SIGINT; on every rank."""
    logger = configure_logging(process.rank)
    name = model_name(args)  # not that of a local copy
    args = args.check_serving().for_reading(process.world_size)
    store = rendezvous_and_check(args, process, logger)
    args = with_local_model(args)
    groups = init_model_parallel(args, process, logger, store)
    for note in args.notes():
        logger.info(note)
    tokenizer = build_tokenizer(args)
    front = run_on_each_rank(groups, lambda: _front(name, args, tokenizer) if groups.world_rank == 0 else None)
    model = load_model(args, groups, tokenizer, logger)
    replica, channel = Replica(Batcher(model, maximum_rows=args.serve_max_rows, log=logger.info)), Channel(groups)
    if front is None:
        with _on_signals(signal.SIG_IGN):  # rank 0 says when it is over
            run(replica, channel, None)
    else:
        _lead(front, model, replica, channel, logger)
    groups.barrier()
    dist.destroy_process_group()


def _front(name: str, args: NeoXArgs, tokenizer: Tokenizer) -> Front:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError([f"serving needs the packages {', '.join(missing)}: pip install 'neox[serve]'"])
    from megatron.generation.serving.listening import find_entrance

    try:
        chat, why = find_template(args, tokenizer), ""
        chat.ends  # noqa: B018 - imports what the first conversation would wait for
    except ConfigError as problem:
        if args.chat_template is not None:
            raise
        chat, why = None, str(problem)
    return Front(name, find_entrance(args), chat, why)


def _lead(front: Front, model: Model, replica: Replica, channel: Channel, logger: logging.Logger) -> None:
    """Rank 0's part: requests are taken in by a thread, and written here."""
    from megatron.generation.serving.app import Service, build_app
    from megatron.generation.serving.auth import Gate
    from megatron.generation.serving.listening import Listener
    from megatron.generation.serving.reading import Reader
    from megatron.generation.serving.replies import TokenTexts

    args, entrance = model.args, front.entrance
    desk = Desk(args.serve_max_requests)
    reader = Reader(front.name, model.tokenizer, model.positions, model.ends, front.chat, front.why)
    gate = Gate(entrance.token, args.serve_max_body_bytes, args.serve_body_timeout_s)
    service = Service(desk, gate, reader, TokenTexts(model.tokenizer), args.serve_request_timeout_s)
    leader = Leader(channel.groups.size("data"), desk.take, args.serve_shutdown_timeout_s, logger.info)

    def stop(number: int = 0, frame: FrameType | None = None) -> None:
        desk.closing = True
        leader.stop()
        desk.ring()

    try:
        listener = Listener(entrance.socket, build_app(service), stop, args.serve_header_timeout_s)
    except OSError as cause:  # two may bind what only one can listen at
        raise args.problem("serve_port", f"{entrance.address}: {cause.strerror}") from cause
    leader.on_done = partial(listener.call, desk.deliver)
    end = Refusal("the server has shut down", 503)
    with _on_signals(stop):
        try:
            who = "whoever shows the token" if entrance.token is not None else "this machine"
            logger.info(f"{reader.name} answers {who} at {entrance.address}/v1")
            logger.info(front.why if front.chat is None else f"chat template of {front.chat.source}")
            desk.ring()  # the first round tells how large the cache is
            run(replica, channel, leader)
        except Exception:
            end = Refusal("the server has failed", 500)
            raise
        finally:
            listener.call(desk.end, end)
            listener.close()
    logger.info("the server has shut down")


def model_name(args: NeoXArgs) -> str:
    """`serve_model_name`, else the model's name on the Hub, else that of the folder it is loaded from."""
    source = str(args.load or args.save)
    path = Path(source).resolve()
    if source.startswith("hf://"):
        found = source.removeprefix("hf://")
    elif path.parent.name == "snapshots":  # in the Hub's cache
        found = path.parents[1].name.removeprefix("models--").replace("--", "/")
    else:
        found = path.name
    return args.serve_model_name or found


@contextmanager
def _on_signals(handler: signal.Handlers | object) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in SIGNALS}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
