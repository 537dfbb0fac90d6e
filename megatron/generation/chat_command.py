"""Runs `python deepy.py chat MODEL`: a conversation with a model in the terminal."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.distributed import Process
from megatron.neox_arguments import UserError
from megatron.process.command_parser import CommandParser

_BEST = "best_model"  # of a run with save_best
_COMMAND = "deepy.py chat"
_EXAMPLES = """\
examples:
  python deepy.py chat checkpoints/SmolLM2-135M-Instruct-chats          (a result of deepy.py finetune)
  python deepy.py chat HuggingFaceTB/SmolLM2-135M-Instruct --temperature 0.7
  echo "What is a lantern for?" | python deepy.py chat checkpoints/mine

An empty line, the line `stop`, or the end of input ends the conversation. `tools/ask.py` asks many questions, or two
models at once; `tools/serve.py` serves a model to others.
"""


def main(argv: Sequence[str], make_process: Callable[[], Process]) -> int:
    """Talks as the command line says, and returns the exit code.

    make_process: returns this process as the only one.
    """
    parser = _parser()
    options = parser.parse_intermixed_args(argv)
    if options.maximum_tokens < 1 or options.temperature < 0 or not 0 <= options.top_p <= 1:
        parser.error("--maximum-tokens must be at least 1, --temperature at least 0, --top-p between 0 and 1")
    try:
        _chat(options, make_process())
    except UserError as problem:
        sys.stderr.write(problem.error_lines(_COMMAND))
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=_COMMAND, epilog=_EXAMPLES,
        description="Talk to a model in the terminal, through its chat template. Earlier turns are part of the "
        "conversation. It runs in one process, on a GPU if there is one.",
    )  # fmt: skip
    add = parser.add_argument
    add("model", metavar="MODEL", help="HuggingFace folder, name on the Hub, folder of a run or of adapters")
    add("--iteration", type=int, metavar="N", help="checkpoint of a run; default: its best model, else the latest")
    add("--adapter", action="append", default=[], metavar="PATH[=WEIGHT]", help="LoRA adapters to add; may be repeated")
    add("--system-file", metavar="FILE", help="file with the system message")
    add("--chat-template", metavar="FILE", help="Jinja chat template instead of the model's own")
    add("--maximum-tokens", type=int, default=512, metavar="N", help="longest answer in tokens; default: 512")
    add("--temperature", type=float, default=0.0, help="of sampling; 0, the default: always the most likely token")
    add("--top-p", type=float, default=0.0, help="sample among the most likely tokens with this total probability")
    add("--seed", type=int, default=0, help="seed of sampling; default: 0")
    add("--precision", choices=("fp32", "bfloat16", "fp16"), help="dtype of the weights; default: as stored")
    return parser


def _chat(options: argparse.Namespace, process: Process) -> None:
    """Raises UserError if the model, or a file that the options name, cannot be used."""
    from torch.distributed import destroy_process_group

    from megatron.generation.chat_model import load_chat_model
    from megatron.generation.interactive import converse

    logger = logging.getLogger("megatron")
    logger.setLevel(logging.WARNING)
    name = options.model
    if options.iteration is None and (Path(name) / _BEST).is_dir():
        name = str(Path(name) / _BEST)
        print(f"chat: {name}", file=sys.stderr)
    keys = {
        "text_gen_type": "interactive", "chat": True, "maximum_tokens": options.maximum_tokens, "seed": options.seed,
        "temperature": options.temperature, "top_p": options.top_p, "system_prompt_file": options.system_file,
    }  # fmt: skip
    chat = load_chat_model(
        name, process, logger, iteration=options.iteration, chat_template=options.chat_template,
        precision=options.precision, adapter=options.adapter, keys=keys,
    )  # fmt: skip
    if sys.stdin is not None and sys.stdin.isatty():
        print("chat: an empty line ends the conversation", file=sys.stderr)
    converse(chat.model)
    destroy_process_group()
