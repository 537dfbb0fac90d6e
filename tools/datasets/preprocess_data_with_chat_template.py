"""Tokenise conversations and preference pairs for training, with labels for what the model writes.

    python tools/datasets/preprocess_data_with_chat_template.py --input chats.jsonl --output-prefix data/chats \\
        --tokenizer-path DIR_OR_HUB --jsonl-keys messages --workers 8

A key holds messages (role/content, or ShareGPT's from/value), or the rest of a `prompt` beside it
(completion, chosen, rejected: messages or plain text). Columns `tools` and `chat_template_kwargs` go to the
template. Flags and file names are GPT-NeoX's; where the tokens differ from its,
tests/data/preprocessing/test_chat_golden.py says why.
"""  # noqa: W505 (lines to copy)

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import DataError  # noqa: E402
from megatron.data.preprocessing.chat_job import ChatJob  # noqa: E402
from megatron.data.preprocessing.chat_options import OVERLONG, SCOPES, UNTRAINED, ChatOptions  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.datasets.run_job import add_input_flags, add_work_flags, run  # noqa: E402
from tools.site import site_defaults  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    data = parser.add_argument_group("input data")
    add_input_flags(data, "conversation")
    data.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="ROLE=TEXT",
        help="make a message out of columns: --map 'user=For {topic}, {question}' --map 'assistant={answer}'",
    )
    data.add_argument("--system-file", help="text of a system message, for conversations that have none")
    data.add_argument(
        "--reward-key",
        help="key of a number for each row, written to PREFIX_KEY_reward_document: KTO's rewards, or of pairs the "
        "margin by which the chosen answer should win (TRL's column `margin`), for train_impl: rm",
    )
    data.add_argument("--binary-reward", action="store_true", help="the reward is true or false, written as 1 or -1")
    tokens = parser.add_argument_group("tokenizer")
    site = site_defaults(parser)
    tokenizer = site.get("NEOX_TOKENIZER_DIR")
    tokens.add_argument(
        "--tokenizer-path", required=tokenizer is None, default=tokenizer,
        help="folder of a transformers tokenizer, or its hub name (the site's)",
    )  # fmt: skip
    tokens.add_argument(
        "--chat-template", metavar="FILE",
        help="a Jinja template in place of the tokenizer's; here, or in the site's folder of them",
    )  # fmt: skip
    parser.set_defaults(chat_templates=site.get("NEOX_CHAT_TEMPLATE_DIR"))
    tokens.add_argument("--date", type=_day, default=date.today().isoformat(), help="what templates take for today")
    tokens.add_argument("--ftfy", action="store_true", help="repair broken encodings first, with the ftfy package")
    labels = parser.add_argument_group("labels")
    labels.add_argument("--no-mask", action="store_true", help="train every token: no label file is written")
    labels.add_argument(
        "--for-rm", action="store_true", help="label only the last token, which GPT-NeoX's reward models need, not ours"
    )
    labels.add_argument("--generation-role", default="assistant", help="role that the model has (assistant)")
    labels.add_argument(
        "--loss-scope",
        choices=SCOPES,
        help="what is trained: what follows the prompt (for a completion or a pair), all messages of the model (for a "
        "conversation; open-instruct's for pairs), or the last message, if it is the model's",
    )
    labels.add_argument("--only-last", action="store_true", help="--loss-scope last_turn")
    labels.add_argument(
        "--untrained", choices=UNTRAINED, default="refuse",
        help="what becomes of a row in which nothing is trained (refuse)",
    )  # fmt: skip
    length = parser.add_argument_group("length")
    length.add_argument("--max-length", type=int, help="tokens of the longest row (none)")
    length.add_argument("--overlong", choices=OVERLONG, default="refuse", help="what becomes of a longer one (refuse)")
    add_work_flags(parser)
    return parser.parse_args(argv)


def job_of(options: argparse.Namespace) -> ChatJob:
    """Returns the preprocessing job that the flags describe. Raises DataError for flags that exclude each
    other."""
    if options.only_last and options.loss_scope not in (None, "last_turn"):
        raise DataError(f"--only-last means --loss-scope last_turn, but {options.loss_scope} is given; remove one flag")
    maps = []
    for entry in options.map:
        role, separator, text = entry.partition("=")
        if not separator or not role:
            raise DataError(f"--map {entry!r}: write ROLE=TEXT, with columns in braces")
        maps.append((role, text))
    chat = ChatOptions(
        keys=tuple(options.jsonl_keys),
        role=options.generation_role,
        scope="last_turn" if options.only_last else options.loss_scope,
        mask=not options.no_mask,
        for_rm=options.for_rm,
        reward_key=options.reward_key,
        binary_reward=options.binary_reward,
        system=_read(options.system_file) if options.system_file else None,
        maps=tuple(maps),
        ftfy=options.ftfy,
        max_length=options.max_length,
        overlong=options.overlong,
        untrained=options.untrained,
    )
    chat.check()
    template = options.chat_template
    if template and options.chat_templates and not Path(template).exists():
        template = str(Path(options.chat_templates) / template)
    return ChatJob(options.tokenizer_path, chat, options.date, template)


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date such as 2026-01-31") from None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"--system-file {path}: cannot be read ({problem})") from None


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)

    def make() -> tuple[ChatJob, list[str]]:
        job = job_of(options)
        return job, [f"{options.output_prefix}_{name}" for name in job.names()]

    run("preprocess_data_with_chat_template.py", options, make)


if __name__ == "__main__":
    run_command(main)
