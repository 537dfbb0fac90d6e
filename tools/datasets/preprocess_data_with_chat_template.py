"""Tokenises conversations and preference pairs for training, with labels that train only the model's
messages.

    python tools/datasets/preprocess_data_with_chat_template.py --input chats.jsonl --output-prefix data/chats \\
        --tokenizer-path DIR_OR_HUB --jsonl-keys messages --workers 8

A key of --jsonl-keys holds messages (role/content, or ShareGPT's from/value), or an answer to the row's
`prompt` (keys completion, chosen, rejected: messages or plain text). Columns `tools` and
`chat_template_kwargs` are passed to the chat template. Flags and file names are those of GPT-NeoX; where the
tokens differ from GPT-NeoX's, tests/data/preprocessing/test_chat_golden.py says why.
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
        help="build messages from columns, such as --map 'user=For {topic}, {question}' --map 'assistant={answer}'",
    )
    data.add_argument("--system-file", help="file with a system message, for conversations that have none")
    data.add_argument(
        "--reward-key",
        help="key of a number in each row, written to PREFIX_KEY_reward_document: the reward for KTO; for pairs and "
        "train_impl: rm, the margin by which the chosen answer should win (TRL's column `margin`)",
    )
    data.add_argument(
        "--binary-reward", action="store_true", help="the rewards are true or false; write them as 1 and -1"
    )
    tokens = parser.add_argument_group("tokenizer")
    site = site_defaults(parser)
    tokenizer = site.get("NEOX_TOKENIZER_DIR")
    tokens.add_argument(
        "--tokenizer-path", required=tokenizer is None, default=tokenizer,
        help="folder or Hub name of a transformers tokenizer (default: the site's NEOX_TOKENIZER_DIR)",
    )  # fmt: skip
    tokens.add_argument(
        "--chat-template", metavar="FILE",
        help="Jinja chat template instead of the tokenizer's: a path, or a name in the site's NEOX_CHAT_TEMPLATE_DIR",
    )  # fmt: skip
    parser.set_defaults(chat_templates=site.get("NEOX_CHAT_TEMPLATE_DIR"))
    tokens.add_argument(
        "--date",
        type=_day,
        default=date.today().isoformat(),
        help="the date that chat templates use as today (default: the current date)",
    )
    tokens.add_argument("--ftfy", action="store_true", help="repair broken encodings first, with the package ftfy")
    labels = parser.add_argument_group("labels")
    labels.add_argument("--no-mask", action="store_true", help="train every token; write no label file")
    labels.add_argument(
        "--for-rm",
        action="store_true",
        help="label only the last token, as reward models of GPT-NeoX need (those of this project do not)",
    )
    labels.add_argument(
        "--generation-role", default="assistant", help="role of the model's messages (default: assistant)"
    )
    labels.add_argument(
        "--loss-scope",
        choices=SCOPES,
        help="tokens to train: all after the prompt (default for completions and pairs), all messages of the model "
        "(default for conversations; for pairs as open-instruct), or the last message, if it is the model's",
    )
    labels.add_argument("--only-last", action="store_true", help="same as --loss-scope last_turn")
    labels.add_argument(
        "--untrained", choices=UNTRAINED, default="refuse",
        help="what to do with a row in which no token is trained (default: refuse)",
    )  # fmt: skip
    length = parser.add_argument_group("length")
    length.add_argument("--max-length", type=int, help="largest number of tokens of a row (default: no limit)")
    length.add_argument(
        "--overlong",
        choices=OVERLONG,
        default="refuse",
        help="what to do with a row longer than --max-length (default: refuse)",
    )
    add_work_flags(parser)
    return parser.parse_args(argv)


def job_of(options: argparse.Namespace) -> ChatJob:
    """Returns the preprocessing job that the command-line flags describe.

    Raises DataError for flags that exclude each other."""
    if options.only_last and options.loss_scope not in (None, "last_turn"):
        raise DataError(f"--only-last means --loss-scope last_turn, but {options.loss_scope} is given; remove one flag")
    maps = []
    for entry in options.map:
        role, separator, text = entry.partition("=")
        if not separator or not role:
            raise DataError(f"--map {entry!r}: write ROLE=TEXT, with columns in braces, such as 'user={{question}}'")
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
        raise argparse.ArgumentTypeError(f"{text!r} is not a date; write it like 2026-01-31") from None


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
