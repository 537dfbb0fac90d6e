"""Prepares a dataset for training: a corpus by its name in GPT-NeoX, or without a name the quickstart data.

A corpus is downloaded and tokenised. The quickstart data is made offline.

python prepare_data.py
python prepare_data.py -d ./data -t GPT2BPETokenizer enwik8
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.data import DataError
from megatron.data.preprocessing import EncodeJob, preprocess
from megatron.data.preprocessing.compression import COMPRESSED
from megatron.data.preprocessing.readers import SUFFIXES
from megatron.process import run_command
from megatron.process.command_parser import CommandParser
from megatron.tokenizer import KINDS, TokenizerError, make_tokenizer
from tools import quickstart_data
from tools.datasets.corpora import GPT2_MERGES, GPT2_VOCAB, SOURCES, fetch, parts
from tools.datasets.run_job import progress_line
from tools.site import site_defaults


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("dataset", nargs="?", help=f"one of {', '.join(SOURCES)} (default: the quickstart data)")
    parser.add_argument(
        "-t", "--tokenizer", default="GPT2BPETokenizer", help="kind of the tokenizer (default: GPT2BPETokenizer)"
    )
    folder = os.environ.get("DATA_DIR") or site_defaults(parser).get("NEOX_DATA_DIR", "./data")
    parser.add_argument(
        "-d",
        "--data-dir",
        type=Path,
        default=Path(folder),
        help="folder of the data (default: $DATA_DIR, else the site's NEOX_DATA_DIR, else ./data)",
    )
    parser.add_argument(
        "-v", "--vocab-file", "--vocab", help="vocabulary of the tokenizer (default: <data-dir>/gpt2-vocab.json)"
    )
    parser.add_argument("-m", "--merge-file", help="merges of the tokenizer (default: <data-dir>/gpt2-merges.txt)")
    parser.add_argument(
        "-f", "--force-redownload", action="store_true", help="download and tokenise again, even if the files exist"
    )
    parser.add_argument("--mirror", help="URL of a folder that has the files, instead of the published URLs")
    return parser.parse_args(argv)


def raw_files(folder: Path, name: str, options: argparse.Namespace) -> list[Path]:
    """Returns the raw files of the corpus `name`: your own files in `folder`, else the published ones,
    downloaded."""
    addresses = {folder / address.rsplit("/", 1)[1]: address for address in parts(SOURCES[name])}
    suffixes = tuple(f"{suffix}{packing}" for suffix in SUFFIXES for packing in ("", *COMPRESSED))
    present = sorted(path for path in folder.glob("*") if path.name.endswith(suffixes) or path.name == name)
    if present and not options.force_redownload and addresses.keys().isdisjoint(present):
        return present
    for path, address in addresses.items():
        if options.force_redownload or not path.exists():
            fetch(address, path, options.mirror, print)
    return list(addresses)


def gpt2_file(option: str | None, name: str, address: str, options: argparse.Namespace) -> str:
    path = Path(option or options.data_dir / name)
    if not path.exists() and not option:
        fetch(address, path, options.mirror, print)
    return str(path)


def prepare(options: argparse.Namespace) -> str:
    """Downloads and tokenises the corpus that the options name. Returns a line of text about the result.

    Raises DataError for an unknown name, or if a file cannot be downloaded or read."""
    name, folder = options.dataset.lower(), options.data_dir / options.dataset.lower()
    if name not in SOURCES:
        raise DataError(f"{name}: no dataset of that name; choose from {', '.join(SOURCES)}")
    if options.tokenizer not in KINDS:  # before anything is downloaded
        raise DataError(f"-t {options.tokenizer}: no such kind of tokenizer; choose from {', '.join(KINDS)}")
    prefix = folder / f"{name}_text_document"
    if Path(f"{prefix}.idx").exists() and not options.force_redownload:
        return f"{prefix}.bin, .idx: exist already; add -f to make them again"
    files = raw_files(folder, name, options)
    vocab, merges = options.vocab_file, options.merge_file
    if options.tokenizer == "GPT2BPETokenizer":
        vocab = gpt2_file(vocab, "gpt2-vocab.json", GPT2_VOCAB, options)
        merges = gpt2_file(merges, "gpt2-merges.txt", GPT2_MERGES, options)
    output = preprocess(
        files,
        [prefix],
        EncodeJob(make_tokenizer, (options.tokenizer, vocab, merges), append_eod=True),
        workers=os.cpu_count() or 1,
        metadata_file=folder / f"{name}_metadata.json",
        progress=progress_line(None, 1000),
    ).outputs[0]
    return f"{prefix}.bin, .idx: {output.documents} documents, {output.tokens} tokens"


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        if options.dataset is None:
            quickstart_data.build(options.data_dir / "quickstart", print)
        else:
            print(prepare(options))
    except (DataError, TokenizerError) as problem:
        sys.exit(f"prepare_data.py: error: {problem}")


if __name__ == "__main__":
    run_command(main)
