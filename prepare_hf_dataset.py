"""Turns a HuggingFace dataset into training data: one text per row as JSONL, tokenised into `.bin/.idx`.

    python prepare_hf_dataset.py --dataset cais/wmdp-corpora --subset bio-retain-corpus --vocab-file tokenizer.json

It writes dataset.jsonl, <folder>_text_document.bin and .idx, and pipeline_results.json (with the number of
tokens) into <output-base>/<name>_<subset>_<split>. Conversations become plain text through a chat template.
All of their tokens are trained, because no labels are written; to train only the model's messages, use
tools/datasets/preprocess_data_with_chat_template.py.
"""  # noqa: W505 (lines to copy)

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron.data import DataError
from megatron.data.conversations import row_conversation, template_settings
from megatron.data.files import sync, temporary
from megatron.data.preprocessing import EncodeJob, preprocess
from megatron.data.preprocessing.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from megatron.data.preprocessing.inputs import InputFile, resolve, split_names
from megatron.data.preprocessing.shards import InputRow, Shard
from megatron.data.preprocessing.workers import in_order
from megatron.process import run_command
from megatron.process.command_parser import CommandParser
from megatron.tokenizer import TokenizerError, make_tokenizer
from tools.datasets.run_job import progress_line
from tools.site import site_defaults


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    site = site_defaults(parser)
    tokenizer = site.get("NEOX_TOKENIZER_DIR")
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", required=True, help="name on the Hub, or a local file or folder")
    data.add_argument("--subset", help="configuration of the dataset")
    data.add_argument(
        "--split", help="split, as HuggingFace writes it: train, train[:10%%], train+test, all (default: train)"
    )
    data.add_argument("--data-dir", help="folder within the repository on the Hub")
    data.add_argument("--data-files", help="local files to read instead of --dataset, separated by commas")
    text = parser.add_argument_group("text of a row")
    text.add_argument("--text-column", help="column with the text (default: text, else messages)")
    text.add_argument(
        "--join-columns", help="columns, separated by commas, whose values are joined with an empty line between them"
    )
    text.add_argument(
        "--midtrain-chat-messages", action="store_true", help="use only the contents of messages, without roles"
    )
    text.add_argument(
        "--skip-chat-template", action="store_true", help="write messages as Python's str() does, without a template"
    )
    tokens = parser.add_argument_group("tokenizers")
    tokens.add_argument(
        "--vocab-file", "--vocab", default=tokenizer and f"{tokenizer}/tokenizer.json",
        help="tokenizer.json for .bin/.idx (default: the one in the site's NEOX_TOKENIZER_DIR)",
    )  # fmt: skip
    tokens.add_argument(
        "--hf-tokenizer", default=tokenizer,
        help="tokenizer for the chat template and the token count: a folder or Hub name (default: the site's "
        "NEOX_TOKENIZER_DIR)",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--output-dir", type=Path, help="<output-base>/<name>_<subset>_<split>")
    output.add_argument(
        "--output-base",
        type=Path,
        default=Path(site.get("NEOX_DATA_DIR", "./data")),
        help="folder above the output folder (default: the site's NEOX_DATA_DIR, else ./data)",
    )
    output.add_argument("--skip-count", action="store_true", help="do not count tokens with --hf-tokenizer")
    output.add_argument("--skip-tokenize", action="store_true", help="do not write .bin/.idx")
    output.add_argument("--count-only", action="store_true", help="only count tokens, and write nothing")
    work = parser.add_argument_group("work")
    work.add_argument("--num-proc", type=int, default=16, help="number of processes (default: 16)")
    work.add_argument(
        "--batch-size", type=int, default=10000, help="rows that are tokenised at once to count tokens (default: 10000)"
    )
    work.add_argument("--tokenize-workers", type=int, help="processes that write .bin/.idx (default: --num-proc)")
    work.add_argument("--download-workers", type=int, help="parallel downloads (default: --num-proc)")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Texts:
    """Settings for turning a row of a dataset into one text. Each process converts shards with `lines`.

    columns: columns to read. joined: join them. chat: the column holds conversations.
    contents_only: use only contents of messages, without roles. verbatim: write messages as str() does.
    hf_tokenizer: folder or Hub name. count: count tokens. batch: rows that are counted at once.
    """

    columns: tuple[str, ...]
    joined: bool
    chat: bool
    contents_only: bool
    verbatim: bool
    hf_tokenizer: str | None
    count: bool
    batch: int

    @property
    def tokenizer(self) -> ChatTokenizer:
        if not self.hf_tokenizer:
            raise DataError(
                "the chat template and the token count need a tokenizer: give --hf-tokenizer, or --skip-chat-template "
                "and --skip-count"
            )
        return _load(self.hf_tokenizer)

    def text(self, row: InputRow) -> str:
        value = row.value()
        if isinstance(value, str) and len(self.columns) == 1:
            value = {self.columns[0]: value}
        missing = [name for name in self.columns if not isinstance(value, dict) or name not in value]
        if missing:
            found_columns = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise DataError(f"{row.location()}: no column {', '.join(missing)} (found: {found_columns})")
        if self.joined:
            return "\n\n".join(str(value[name]) for name in self.columns if value[name])
        content = value[self.columns[0]]
        if not self.chat:
            if not isinstance(content, str):
                raise DataError(f'{row.location()}: "{self.columns[0]}" is {type(content).__name__}, not text')
            return content
        if self.verbatim:
            return str(content)
        try:
            messages = row_conversation(value, self.columns[0])
            if self.contents_only:
                return "\n\n".join(message["content"] for message in messages if message.get("content"))
            settings = template_settings(value)
            text = self.tokenizer.render(messages, settings)
            self.tokenizer.check_rendered(text, messages, settings)
            return text
        except DataError as problem:
            raise DataError(f"{row.location()}: {problem}") from None

    def lines(self, shard: Shard) -> tuple[bytes, int, int]:
        """Returns (rows of a shard as JSONL, number of rows, number of tokens); 0 tokens if they are not
        counted."""
        texts = [self.text(row) for row in shard.rows()]
        tokens = 0
        for start in range(0, len(texts) if self.count else 0, self.batch):
            tokens += sum(len(ids) for ids, _ in self.tokenizer.encode(texts[start : start + self.batch]))
        return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode(), len(texts), tokens


@lru_cache(maxsize=1)
def _load(path: str) -> ChatTokenizer:
    return load_chat_tokenizer(path)


def first_columns(files: Sequence[InputFile]) -> list[str]:
    for row in (row for file in files for shard in file.shards(None) for row in shard.rows()):
        value = row.value()
        return list(value) if isinstance(value, dict) else ["text"]
    raise DataError("the dataset has no rows; check --dataset, --subset and --split")


def choose_columns(options: argparse.Namespace, available: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Returns (columns to read, whether they hold conversations), from the options and the available columns.

    Raises DataError if a column is not available."""
    if options.join_columns:
        columns = tuple(name.strip() for name in options.join_columns.split(","))
    elif options.text_column:
        columns = (options.text_column,)
    elif options.midtrain_chat_messages:
        columns = ("messages",)
    else:
        columns = tuple(name for name in ("text", "messages") if name in available)[:1]
    missing = [name for name in columns if name not in available]
    if missing or not columns:
        raise DataError(
            f"no column {', '.join(missing) or 'text or messages'} (found: {', '.join(available)}); "
            "give the column of the text with --text-column"
        )
    return columns, columns == ("messages",)


def export(texts: Texts, files: Sequence[InputFile], workers: int, target: Path | None) -> tuple[int, int]:
    """Converts all rows to texts with `workers` processes, and writes them as JSONL to `target`, in order.

    target: None only counts. Returns (number of rows, number of tokens). Raises DataError."""
    columns = None if texts.chat else texts.columns  # for conversations, other columns hold settings of the template
    tasks = ((shard,) for file in files for shard in file.shards(columns))
    rows = tokens = 0
    unfinished = temporary(target) if target else Path(os.devnull)
    try:
        with open(unfinished, "wb") as file:
            for lines, count, num_tokens in in_order(texts.lines, tasks, workers):
                file.write(lines)
                rows, tokens = rows + count, tokens + num_tokens
        if target:
            sync(unfinished)
            os.replace(unfinished, target)
    except OSError as problem:
        raise DataError(f"{target}: cannot be written ({problem.strerror})") from None
    finally:
        if target:
            unfinished.unlink(missing_ok=True)
    return rows, tokens


def prepare(options: argparse.Namespace) -> dict[str, Any]:
    """Does all steps: reads the dataset, writes JSONL, counts tokens, writes .bin/.idx and
    pipeline_results.json.

    Returns the content of pipeline_results.json. Raises DataError."""
    start = time.monotonic()
    split = options.split or "train"
    name_parts = [Path(options.dataset).name, options.subset, re.sub(r"[^\w.+-]+", "_", split).strip("_")]
    folder = options.output_dir or options.output_base / "_".join(part for part in name_parts if part)
    if not (options.count_only or options.skip_tokenize or options.vocab_file):
        raise DataError("--vocab-file is missing: give the tokenizer.json to tokenise with, or --skip-tokenize")
    hub = {"data_dir": options.data_dir} if options.data_dir else {}
    hub["num_proc"] = options.download_workers or options.num_proc
    if options.data_files:
        files = resolve(split_names(options.data_files), options.split)
    else:
        # A single file is read without a split, even if its name contains another split.
        requested_split = options.split if Path(options.dataset).is_file() else split
        files = resolve([options.dataset], requested_split, options.subset, **hub)
    columns, chat = choose_columns(options, first_columns(files))
    texts = Texts(
        columns,
        bool(options.join_columns),
        chat,
        options.midtrain_chat_messages,
        options.skip_chat_template,
        options.hf_tokenizer,
        options.count_only or not options.skip_count,
        options.batch_size,
    )
    if texts.count or chat and not (texts.contents_only or texts.verbatim):
        _ = texts.tokenizer  # loaded before the work starts, to find errors early and share it with all processes
    jsonl = None if options.count_only else folder / "dataset.jsonl"
    if jsonl:
        folder.mkdir(parents=True, exist_ok=True)
    rows, tokens = export(texts, files, options.num_proc, jsonl)
    results: dict[str, Any] = {
        "dataset": options.dataset,
        "subset": options.subset,
        "split": split,
        "output_dir": str(folder),
        "num_documents": rows,
        "text_column": "text" if options.join_columns else columns[0],
        "is_messages": chat,
        "token_count": tokens if texts.count else None,
    }
    if texts.count:
        results["tokens_per_doc"] = tokens / rows if rows else 0
        print(f"{rows} documents, {tokens} tokens ({options.hf_tokenizer})")
    if jsonl:
        print(f"{jsonl}: {rows} documents")
        results |= {"jsonl_path": str(jsonl), "tokenized": not options.skip_tokenize}
        if not options.skip_tokenize:
            results |= tokenize(jsonl, folder / folder.name, options)
    results |= {"status": "completed", "elapsed_time": time.monotonic() - start}
    if jsonl:
        (folder / "pipeline_results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def tokenize(jsonl: Path, prefix: Path, options: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    output = preprocess(
        [jsonl],
        [f"{prefix}_text_document"],
        EncodeJob(make_tokenizer, ("HFTokenizer", options.vocab_file, None), append_eod=True),
        workers=options.tokenize_workers or options.num_proc,
        metadata_file=f"{prefix}_metadata.json",
        progress=progress_line(None, 1000),
    ).outputs[0]
    print(f"{output.prefix}.bin, .idx: {output.documents} documents, {output.tokens} tokens")
    return {
        "tokenize_time": time.monotonic() - start,
        "bin_path": f"{output.prefix}.bin",
        "idx_path": f"{output.prefix}.idx",
    }


def main(argv: Sequence[str] | None = None) -> None:
    try:
        results = prepare(parse(argv))
    except (DataError, TokenizerError) as problem:
        sys.exit(f"prepare_hf_dataset.py: error: {problem}")
    if results.get("tokenized"):
        print(f'For the training configuration: "train_data_paths": ["{results["bin_path"].removesuffix(".bin")}"]')


if __name__ == "__main__":
    run_command(main)
