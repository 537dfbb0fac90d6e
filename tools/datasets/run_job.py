"""Helpers that the preprocess commands share: flags, progress, the report, one-line errors."""

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
from megatron.tokenizer import KINDS, TokenizerError, make_tokenizer
from tools.site import site_defaults

BAD_ROWS = 100
INPUT_HELP = (
    "files, globs or folders, separated by commas: JSONL, JSON arrays, CSV, TSV, Parquet, Arrow, save_to_disk folders; "
    ".txt and the members of .zip and .tar are one document each; .gz and .zst of these; organisation/name of a "
    "HuggingFace dataset, or the folder it was cloned to"
)


def add_input_flags(parser: argparse._ArgumentGroup, keys: str) -> None:
    """Add --input and the flags that choose rows of it; keys: the default of --jsonl-keys."""
    parser.add_argument("--input", required=True, help=INPUT_HELP)
    parser.add_argument(
        "--jsonl-keys", nargs="+", default=[keys], help=f"keys or columns to read, each into its own pair ({keys})"
    )
    add_choice_flags(parser)
    parser.add_argument("--num-docs", type=int, help="number of documents, if known: progress then shows a percentage")


def add_choice_flags(parser: argparse._ActionsContainer) -> None:
    """Add --split and --subset, which choose rows of a dataset."""
    parser.add_argument(
        "--split", help="of a dataset that has several, in HuggingFace's words: train, train[:10%%], train+test, all"
    )
    parser.add_argument("--subset", help="configuration of a HuggingFace dataset that has several")


def add_tokenizer_flags(parser: argparse._ActionsContainer, default: str | None = None) -> None:
    """Add --tokenizer-type, which is required without a default, --vocab-file, --merge-file and
    --eod-token."""
    kinds, words = (KINDS, default) if default else (None, "a tokenizer_type of the configuration")
    parser.add_argument("--tokenizer-type", choices=kinds, default=default, required=default is None, help=words)
    parser.add_argument(
        "--vocab-file", "--vocab",
        help="its vocabulary: tokenizer.json, vocab.json or a model file (of a HFTokenizer, the site's base tokenizer)",
    )  # fmt: skip
    parser.add_argument("--merge-file", help="merges.txt of a GPT2BPETokenizer")
    parser.add_argument("--eod-token", help="name of the token that ends documents, if it is not found by itself")


def tokenizer_of(options: argparse.Namespace) -> tuple[str, str | None, str | None, str | None]:
    """Returns the arguments of `make_tokenizer`, from the flags of `add_tokenizer_flags`."""
    vocab = options.vocab_file
    if vocab is None and options.tokenizer_type == "HFTokenizer":
        folder = site_defaults().get("NEOX_BASE_TOKENIZER_DIR")
        vocab = folder and f"{folder}/tokenizer.json"
    return options.tokenizer_type, vocab, options.merge_file, options.eod_token


def add_text_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags for how text becomes tokens: those of `add_tokenizer_flags`, --append-eod and --ftfy."""
    add_tokenizer_flags(parser)
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument("--ftfy", action="store_true", help="repair broken encodings first, with the ftfy package")


def text_job(options: argparse.Namespace, keys: Sequence[str]) -> EncodeJob:
    """Returns the preprocessing job that the flags of `add_text_flags` describe."""
    return EncodeJob(
        make_tokenizer, tokenizer_of(options), keys=tuple(keys), append_eod=options.append_eod, ftfy=options.ftfy
    )


def add_work_flags(parser: argparse.ArgumentParser) -> None:
    """Add --output-prefix, --dataset-impl, --workers, --on-bad-row and --log-interval."""
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    output.add_argument("--dataset-impl", choices=["mmap"], default="mmap", help="mmap; no other is written")
    work = parser.add_argument_group("work")
    work.add_argument("--workers", type=int, default=1, help="processes (1); the output does not depend on it")
    work.add_argument("--log-interval", type=int, default=100, help="documents between two progress lines (100)")
    work.add_argument(
        "--on-bad-row",
        "--on-error",
        type=_bad_rows,
        default=BAD_ROWS,
        metavar="stop|drop|N",
        help="a row that cannot be used stops the job, or is left out, counted and put into PREFIX_errors.jsonl: all "
        f"of them, or N ({BAD_ROWS})",
    )


def _bad_rows(text: str) -> int | None:
    """Converts stop, drop or a number to the number of bad rows that may be skipped; None: any number."""
    if text in ("drop", "skip"):  # skip: its name under --on-error
        return None
    if text != "stop" and not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected stop, drop or a number of rows")
    return 0 if text == "stop" else int(text)


def run(tool: str, options: argparse.Namespace, make: Callable[[], tuple[Job, Sequence[str]]]) -> PreprocessResult:
    """Run the preprocessing job of a command, and print its report. Exits with one line for unusable input or
    flags.

    Writes PREFIX_metadata.json, which describes the inputs, settings and outputs.
    make: returns (job, prefixes of the files that it writes).
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
        sys.exit(f"{tool}: stopped; the same command goes on from there")
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
            f"{result.progress.skipped} bad rows left out: {rejected_file}; the first: {first_problem}", file=sys.stderr
        )
    return result


def _first_columns(files: Sequence[InputFile]) -> list[str]:
    """Returns the columns of the first row; empty if it cannot be read, which `preprocess` reports."""
    try:
        value = next((row.value() for file in files[:1] for shard in file.shards(None) for row in shard.rows()), None)
    except DataError:
        return []
    return list(value) if isinstance(value, dict) else []


def progress_line(total: int | None, interval: int) -> Callable[[PreprocessProgress], None]:
    """Returns a function that prints rates and remaining time every `interval` documents.

    On a terminal it rewrites the line in place.
    """
    start, start_state, printed = time.monotonic(), PreprocessProgress(), 0
    terminal = sys.stdout.isatty()

    def show(state: PreprocessProgress) -> None:
        nonlocal start_state, printed
        if not state.seconds or state.shards == state.resumed:  # before the first shard of this run
            start_state, printed = PreprocessProgress(**vars(state)), state.documents
            if state.resumed:
                print(f"Going on after {state.documents} documents of an earlier run.", flush=True)
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
