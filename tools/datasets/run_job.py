"""Provides the preprocess_data*.py commands with common flags, progress lines, the report and error
messages."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.data import DataError
from megatron.data.preprocessing import EncodeJob, PreprocessProgress, PreprocessResult, preprocess
from megatron.data.preprocessing.encode_job import Job
from megatron.data.preprocessing.inputs import InputFile, resolve, split_names
from megatron.neox_arguments.values.integers import parse_integer
from megatron.tokenizer import KINDS, TokenizerError, make_tokenizer
from tools.site import site_defaults

BAD_ROWS = 100
INPUT_HELP = (
    "files, globs or folders, separated by commas: JSONL, JSON arrays, CSV, TSV, Parquet, Arrow, save_to_disk folders; "
    ".txt files and members of .zip and .tar, which are one document each; all may be compressed (.gz, .zst); also "
    "organisation/name of a HuggingFace dataset, or the folder of its clone"
)


def add_input_flags(parser: argparse._ArgumentGroup, keys: str) -> None:
    """Adds --input, --jsonl-keys, --split, --subset and --num-docs. keys: default of --jsonl-keys."""
    parser.add_argument("--input", required=True, help=INPUT_HELP)
    parser.add_argument(
        "--jsonl-keys",
        nargs="+",
        default=[keys],
        help=f"keys or columns to read; each gets its own output files (default: {keys})",
    )
    add_choice_flags(parser)
    parser.add_argument(
        "--num-docs", type=int, help="number of documents, if known; then progress lines show a share of it"
    )


def add_choice_flags(parser: argparse._ActionsContainer) -> None:
    """Adds --split and --subset, which choose rows of a dataset."""
    parser.add_argument(
        "--split",
        help="split, as HuggingFace writes it: train, train[:10%%], train+test, all",
    )
    parser.add_argument("--subset", help="configuration of a HuggingFace dataset that has several")


def add_tokenizer_flags(parser: argparse._ActionsContainer, default: str | None = None) -> None:
    """Adds --tokenizer-type, --vocab-file, --merge-file and --eod-token.

    default: default of --tokenizer-type; None: the flag is required."""
    kinds, words = (KINDS, default) if default else (None, "kind of the tokenizer, as the key tokenizer_type")
    parser.add_argument("--tokenizer-type", choices=kinds, default=default, required=default is None, help=words)
    parser.add_argument(
        "--vocab-file", "--vocab",
        help="file of the tokenizer: tokenizer.json, vocab.json or a model file (default for HFTokenizer: "
        "tokenizer.json in the site's NEOX_BASE_TOKENIZER_DIR)",
    )  # fmt: skip
    parser.add_argument("--merge-file", help="merges.txt, for a GPT2BPETokenizer")
    parser.add_argument("--eod-token", help="text of the end-of-document token, if it is not found automatically")


def tokenizer_of(options: argparse.Namespace) -> tuple[str, str | None, str | None, str | None]:
    """Returns the arguments of `make_tokenizer` (type, vocabulary, merges, end token) from the tokenizer
    flags.

    For a HFTokenizer without --vocab-file it is the site's tokenizer.json."""
    vocab = options.vocab_file
    if vocab is None and options.tokenizer_type == "HFTokenizer":
        folder = site_defaults().get("NEOX_BASE_TOKENIZER_DIR")
        vocab = folder and f"{folder}/tokenizer.json"
    return options.tokenizer_type, vocab, options.merge_file, options.eod_token


def add_text_flags(parser: argparse._ActionsContainer) -> None:
    """Adds the flags for tokenising text: --tokenizer-type, --vocab-file and others, --append-eod and
    --ftfy."""
    add_tokenizer_flags(parser)
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument("--ftfy", action="store_true", help="repair broken encodings first, with the package ftfy")


def text_job(options: argparse.Namespace, keys: Sequence[str]) -> EncodeJob:
    """Returns the job that tokenises the texts under `keys`, as the flags of `add_text_flags` say."""
    return EncodeJob(
        make_tokenizer, tokenizer_of(options), keys=tuple(keys), append_eod=options.append_eod, ftfy=options.ftfy
    )


def add_work_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --output-prefix, --dataset-impl, --workers, --on-bad-row and --log-interval."""
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-prefix", required=True, help="path PREFIX; PREFIX_KEY_document.bin and .idx are written"
    )
    output.add_argument(
        "--dataset-impl", choices=["mmap"], default="mmap", help="format of the written files; only mmap is supported"
    )
    work = parser.add_argument_group("work")
    work.add_argument(
        "--workers", type=int, default=1, help="number of processes (default: 1); the output does not depend on it"
    )
    work.add_argument(
        "--log-interval", type=int, default=100, help="documents between two progress lines (default: 100)"
    )
    work.add_argument(
        "--on-bad-row",
        "--on-error",
        type=_bad_rows,
        default=BAD_ROWS,
        metavar="stop|drop|N",
        help="what to do with unusable rows: stop the job, drop all of them, or drop up to N and then stop; dropped "
        f"rows are counted and written to PREFIX_errors.jsonl (default: {BAD_ROWS})",
    )


def _bad_rows(text: str) -> int | None:
    """Converts `stop`, `drop` or a number to how many bad rows may be dropped: 0, None (any number), or the
    number."""
    if text in ("drop", "skip"):  # --on-error, the older name of the flag, calls it skip
        return None
    rows = 0 if text == "stop" else parse_integer(text)
    if rows is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected stop, drop or a number of rows")
    return rows


def run(tool: str, options: argparse.Namespace, make: Callable[[], tuple[Job, Sequence[str]]]) -> PreprocessResult:
    """Runs the preprocessing job of a command, and prints its report.

    Also writes PREFIX_metadata.json, which describes inputs, settings and outputs. For unusable input or
    flags it exits with an error message.

    tool: name of the command, for messages. make: returns (job, prefixes of the files that it writes).
    """
    try:
        job, prefixes = make()
        files = resolve(split_names(options.input), options.split, options.subset)
        for note in job.notes(_first_columns(files)):
            print(note, flush=True)
        result = preprocess(
            files,
            prefixes,
            job,
            workers=options.workers,
            max_bad_rows=options.on_bad_row,
            errors_file=f"{options.output_prefix}_errors.jsonl",
            metadata_file=f"{options.output_prefix}_metadata.json",
            arguments={name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
            progress=progress_line(options.num_docs, options.log_interval),
        )
    except (DataError, TokenizerError) as problem:
        sys.exit(f"{tool}: error: {problem}")
    except KeyboardInterrupt:
        sys.exit(f"{tool}: stopped; run the same command again to continue")
    for output in result.outputs:
        empty_note = f", {output.empty} of them without a token" if output.empty else ""
        size = f"{output.documents} documents{empty_note}, {output.tokens} tokens, {output.dtype}"
        print(f"{output.prefix}.bin, .idx: {size}")
    for name, count in result.counts.items():
        print(f"{name}: {count}")
    if result.progress.skipped:
        with open(f"{options.output_prefix}_errors.jsonl", encoding="utf-8") as errors:
            first_problem = json.loads(next(errors))["problem"]
        rejected_file = f"{options.output_prefix}_errors.jsonl"
        print(
            f"{result.progress.skipped} bad rows left out, listed in {rejected_file}; the first: {first_problem}",
            file=sys.stderr,
        )
    return result


def _first_columns(files: Sequence[InputFile]) -> list[str]:
    """Returns the columns of the first input row; [] if it has none or cannot be read, which `preprocess`
    reports."""
    try:
        value = next((row.value() for file in files[:1] for shard in file.shards(None) for row in shard.rows()), None)
    except DataError:
        return []
    return list(value) if isinstance(value, dict) else []


def progress_line(total: int | None, interval: int) -> Callable[[PreprocessProgress], None]:
    """Returns a function that prints progress, rates and remaining time every `interval` documents.

    total: number of documents, if known. On a terminal the line is rewritten in place.
    """
    start, start_state, printed = time.monotonic(), PreprocessProgress(), 0
    terminal = sys.stdout.isatty()

    def show(state: PreprocessProgress) -> None:
        nonlocal start_state, printed
        if not state.seconds or state.shards == state.resumed:  # this run has not finished a shard yet
            start_state, printed = PreprocessProgress(**vars(state)), state.documents
            if state.resumed:
                print(f"Continuing after {state.documents} documents of an earlier run.", flush=True)
            return
        if state.documents - printed < interval:
            return
        printed = state.documents
        seconds = max(time.monotonic() - start, 1e-9)
        done = state.documents / total if total else state.disk_bytes / max(state.total_bytes, 1)
        resumed_share = (
            start_state.documents / total if total else start_state.disk_bytes / max(start_state.total_bytes, 1)
        )
        left = max(1 - done, 0) * seconds / max(done - resumed_share, 1e-9)
        total_text = f"/{total}" if total else ""
        line = (
            f"Processed {state.documents}{total_text} documents "
            f"({(state.documents - start_state.documents) / seconds:.1f} docs/s, "
            f"{(state.text_bytes - start_state.text_bytes) / seconds / 1e6:.2f} MB/s, {min(done, 1):.0%}, "
            f"{time.strftime('%H:%M:%S', time.gmtime(left))} left)."
        )
        print(f"\r{line}\033[K" if terminal else line, end="" if terminal and done < 1 else "\n", flush=True)

    return show
