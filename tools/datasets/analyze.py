"""Measure raw data before it is tokenised: how long rows are, and what a maximal length would cut.

    python tools/datasets/analyze.py pairs.jsonl --tokenizer folder/of/tokenizer --max-length 8192

Reads texts, conversations (messages, conversations), prompt + completion, and preference pairs (chosen,
rejected, with or without prompt) from what preprocess_data.py reads: JSONL, Parquet, Arrow, folders, a name
on the HuggingFace hub. Only tokenises: never touches a GPU.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import DataError  # noqa: E402
from megatron.data.inspection.row_lengths import measure_lengths, summary  # noqa: E402
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer, load_chat_tokenizer, read_template  # noqa: E402
from megatron.data.preprocessing.inputs import resolve  # noqa: E402
from megatron.data.preprocessing.shards import InputRow  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.datasets.run_job import add_choice_flags  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("dataset", help="a file, a folder, or a name on the HuggingFace hub")
    parser.add_argument("--tokenizer", required=True, help="a folder, a tokenizer.json, or a name on the hub")
    parser.add_argument("--chat-template", metavar="FILE", help="instead of the tokenizer's own")
    parser.add_argument("--text-column", default="text", help="column of plain texts (text)")
    add_choice_flags(parser)
    parser.add_argument("--max-length", type=int, default=8192, help="rows that are longer are counted (8192)")
    parser.add_argument("--max-prompt-length", type=int, default=4096, help="as are longer prompts (4096)")
    return parser.parse_args(argv)


def rows(options: argparse.Namespace) -> Iterator[InputRow]:
    for file in resolve([options.dataset], options.split, options.subset):
        for shard in file.shards(None):
            yield from shard.rows()


def load(path: str, template: str | None) -> ChatTokenizer:
    """Load a tokenizer from a folder, the Hub or a `tokenizer.json`. If a tokenizer_config.json is next to
    that file, both are used."""
    file = Path(path)
    if not file.is_file() or file.with_name("tokenizer_config.json").is_file():
        return load_chat_tokenizer(str(file.parent) if file.is_file() else path, template)
    from transformers import PreTrainedTokenizerFast

    try:
        hf = PreTrainedTokenizerFast(tokenizer_file=path, name_or_path=path)
    except Exception as problem:  # the library raises bare Exception
        raise DataError(f"{path}: not a tokenizer.json ({problem})") from None
    return ChatTokenizer(hf, date.today(), None if template is None else read_template(template))


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any library looks
    try:
        chat = load(options.tokenizer, options.chat_template)
        kind, lengths = measure_lengths(rows(options), chat, options.text_column)
        if not kind:
            raise DataError(f"{options.dataset}: no rows")
        print(f"{options.dataset}: ", end="")
        print("\n".join(summary(kind, lengths, options.max_length, options.max_prompt_length)))
    except (DataError, OSError) as problem:
        sys.exit(f"analyze.py: error: {problem}")


if __name__ == "__main__":
    run_command(main)
