#!/usr/bin/env python
"""Asks a model questions through its chat template; with --compare, asks a second model too.

    python tools/ask.py --model checkpoints/chat/best_model "What is a lantern for?"
    python tools/ask.py --model checkpoints/chat --compare HuggingFaceTB/SmolLM3-3B --system-file system.txt
    python tools/ask.py --model checkpoints/chat/best_model --file questions.jsonl --json

A model is a HuggingFace folder, a name on the Hub, a folder of checkpoints (the one that `latest` names, or
--iteration), one global_stepN, or an adapter in peft's format. Without questions on the command line, type or
pipe them, one per line; an empty line ends.
Each question is a conversation of its own. Each token of the answer is the most likely one, unless
--temperature is set. The command runs in one process, on a GPU if there is one; for models that need several
GPUs use `deepy.py tools/serve.py`.
"""

import argparse
import json
import logging
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

if TYPE_CHECKING:
    from megatron.generation import Completion
    from megatron.generation.chat_model import ChatModel
    from megatron.generation.prompts.questions import Question


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("question", nargs="*", help="questions, each asked in a new conversation")
    parser.add_argument("--model", required=True, metavar="MODEL", help="the model to ask, usually the trained one")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="PATH[=WEIGHT]",
        help="LoRA adapters to add to --model, with a factor (default: 1); repeat to add several",
    )
    parser.add_argument(
        "--compare", metavar="MODEL", help="a second model, usually the original; both answers are shown side by side"
    )
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="checkpoint to use if --model is a folder of them (default: latest)"
    )
    parser.add_argument(
        "--file", metavar="FILE", help="file of questions, one per line; .jsonl: objects with `prompt` or `messages`"
    )
    parser.add_argument("--system-file", metavar="FILE", help="file with the system message of every conversation")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja chat template for both models, instead of their own"
    )
    parser.add_argument(
        "--maximum-tokens", type=int, default=256, metavar="N", help="longest answer, in tokens (default: 256)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0: always the most likely token (default)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.0,
        help="sample only from the most likely tokens with this total probability; 0: from all (default)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (default: 0)")
    parser.add_argument(
        "--precision", choices=("fp32", "bfloat16", "fp16"), help="dtype of the models (default: as they are stored)"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON per question")
    options = parser.parse_args(argv)
    if options.question and options.file is not None:
        parser.error("give questions or --file, not both")
    if options.maximum_tokens < 1 or options.temperature < 0 or not 0 <= options.top_p <= 1:
        parser.error("--maximum-tokens must be at least 1, --temperature at least 0, --top-p between 0 and 1")
    return options


def questions_from_stdin() -> Iterator[str]:
    """Yields the lines of standard input as questions, up to the first empty line.

    On a terminal, prints a prompt for each."""
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("question >>> ")
            sys.stderr.flush()
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def side_by_side(left: str, right: str, width: int) -> str:
    """Returns two texts as two columns of one text, for a terminal that is `width` characters wide."""
    column = max(20, (width - 3) // 2)
    columns = [
        [part for line in text.splitlines() or [""] for part in textwrap.wrap(line, column) or [""]]
        for text in (left, right)
    ]
    rows = zip_longest(*columns, fillvalue="")
    return "\n".join(f"{left_line:<{column}} | {right_line}".rstrip() for left_line, right_line in rows)


def render_answers(question: str, names: Sequence[str], answers: Sequence[str], width: int) -> str:
    """Returns a question and one or two models' answers as text, for a terminal of `width` characters.

    names: names of the models, in the order of `answers`. Two answers are shown side by side."""
    if len(answers) == 1:
        return f"> {question}\n{answers[0]}\n"
    head, texts = (side_by_side(left, right, width) for left, right in (names, answers))
    rule = "-" * max(20, (width - 3) // 2)
    return f"> {question}\n{head}\n{rule}-+-{rule}\n{texts}\n"


def as_json(question: "Question", models: "Sequence[ChatModel]", answers: "Sequence[Completion]") -> str:
    """Returns a question and each model's answer as one line of JSON."""
    replies = [
        {"model": model.name, "answer": answer.text, "tokens": len(answer.tokens), "finished": answer.finished}
        for model, answer in zip(models, answers, strict=True)
    ]
    return json.dumps({"question": question.text, "messages": list(question.messages), "answers": replies})


def run(options: argparse.Namespace) -> None:
    """Answers the questions on the command line or in --file; without any, those on standard input."""
    from torch.distributed import destroy_process_group

    from megatron.generation import SamplingParams
    from megatron.generation.chat_model import load_chat_model
    from megatron.generation.prompts.questions import ask, read_questions, read_text
    from megatron.launch import process_info

    system = read_text(options.system_file).strip() if options.system_file is not None else None
    questions_from_options = [ask(text, system) for text in options.question]
    if options.file is not None:
        questions_from_options = read_questions(options.file, True, system)
    logger = logging.getLogger("megatron")
    logger.setLevel(logging.WARNING)
    names = [(options.model, options.iteration, options.adapter), (options.compare, None, [])]
    models = [
        load_chat_model(name, process_info({}), logger, iteration=iteration, chat_template=options.chat_template,
                   precision=options.precision, adapter=adapter)
        for name, iteration, adapter in names if name is not None
    ]  # fmt: skip
    sampling = SamplingParams(options.temperature, top_p=options.top_p)
    width = shutil.get_terminal_size((120, 40)).columns

    def tell(questions: "Sequence[Question]") -> None:
        replies = [model.answer(questions, sampling, options.maximum_tokens, options.seed) for model in models]
        for question, *answers in zip(questions, *replies, strict=True):
            if options.json:
                print(as_json(question, models, answers), flush=True)
            else:
                texts = [answer.text.strip() for answer in answers]
                print(render_answers(question.text, [model.name for model in models], texts, width), flush=True)

    if questions_from_options:
        tell(questions_from_options)
    for text in () if questions_from_options else questions_from_stdin():
        tell([ask(text, system)])
    destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line of tools/ask.py. Returns 0; 1 after an error, 130 after Ctrl-C."""
    options = parse(argv)
    from megatron.neox_arguments import UserError

    try:
        run(options)
    except UserError as problem:
        sys.stderr.write(problem.error_lines("ask.py"))
        return 1
    except KeyboardInterrupt:
        print("ask.py: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_command(main)
