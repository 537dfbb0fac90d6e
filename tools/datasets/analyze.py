"""Measures raw data before it is tokenised: lengths of rows in tokens, and how many exceed a maximum.

    python tools/datasets/analyze.py pairs.jsonl --tokenizer folder/of/tokenizer --max-length 8192

Rows may be texts, conversations (keys messages or conversations), prompt + completion, or preference pairs
(chosen, rejected, with or without prompt). All inputs of preprocess_data.py can be read: JSONL, Parquet,
Arrow, folders, a name on the HuggingFace Hub. No GPU is used.
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
    parser.add_argument("--tokenizer", required=True, help="a folder, a tokenizer.json, or a name on the Hub")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja chat template, instead of the tokenizer's own")
    parser.add_argument("--text-column", default="text", help="key or column of plain texts (default: text)")
    add_choice_flags(parser)
    parser.add_argument(
        "--max-length", type=int, default=8192, help="count rows with more tokens than this (default: 8192)"
    )
    parser.add_argument(
        "--max-prompt-length", type=int, default=4096, help="count prompts with more tokens than this (default: 4096)"
    )
    return parser.parse_args(argv)


def rows(options: argparse.Namespace) -> Iterator[InputRow]:
    for file in resolve([options.dataset], options.split, options.subset):
        for shard in file.shards(None):
            yield from shard.rows()


def load(path: str, template: str | None) -> ChatTokenizer:
    """Loads a tokenizer from a folder, a Hub name or a `tokenizer.json`.

    A tokenizer_config.json beside a `tokenizer.json` is used too. template: file of a Jinja chat template;
    None: the tokenizer's own. Raises DataError."""
    file = Path(path)
    if not file.is_file() or file.with_name("tokenizer_config.json").is_file():
        return load_chat_tokenizer(str(file.parent) if file.is_file() else path, template)
    from transformers import PreTrainedTokenizerFast

    try:
        hf = PreTrainedTokenizerFast(tokenizer_file=path, name_or_path=path)
    except Exception as problem:  # the library raises bare Exception
        raise DataError(f"{path}: cannot be read as a tokenizer.json ({problem})") from None
    return ChatTokenizer(hf, date.today(), None if template is None else read_template(template))


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before any library looks
    try:
        chat = load(options.tokenizer, options.chat_template)
        kind, lengths = measure_lengths(rows(options), chat, options.text_column)
        if not kind:
            raise DataError(f"{options.dataset}: has no rows")
        print(f"{options.dataset}: ", end="")
        print("\n".join(summary(kind, lengths, options.max_length, options.max_prompt_length)))
    except (DataError, OSError) as problem:
        sys.exit(f"analyze.py: error: {problem}")


if __name__ == "__main__":
    run_command(main)
