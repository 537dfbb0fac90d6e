"""Prepare a dataset: without a name the test data, made offline; with a name of NeoX's list, from its raw file.

python prepare_data.py
python prepare_data.py -d ./data -t GPT2BPETokenizer enwik8
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.data import DataError, EncodeJob, preprocess
from megatron.data.readers import SUFFIXES
from megatron.tokenizer import TokenizerError, make_tokenizer
from tools import quickstart_data
from tools.datasets.corpora import GPT2_MERGES, GPT2_VOCAB, SOURCES


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", nargs="?", help=f"one of {', '.join(SOURCES)}; without it: the test data")
    parser.add_argument("-t", "--tokenizer", default="GPT2BPETokenizer", help="kind of tokenizer (GPT2BPETokenizer)")
    parser.add_argument(
        "-d", "--data-dir", type=Path, default=Path(os.environ.get("DATA_DIR", "./data")), help="./data, or $DATA_DIR"
    )
    parser.add_argument("-v", "--vocab-file", help="its vocabulary (<data-dir>/gpt2-vocab.json)")
    parser.add_argument("-m", "--merge-file", help="its merges (<data-dir>/gpt2-merges.txt)")
    parser.add_argument("-f", "--force-redownload", action="store_true", help="tokenise again what is there already")
    return parser.parse_args(argv)


def raw_files(folder: Path, name: str) -> list[Path]:
    """The raw text in `folder`, in order of name: files of the known kinds, or a bare file called as the dataset."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if str(path).endswith(SUFFIXES) or path.name == name)


def prepare(options: argparse.Namespace) -> str:
    """Tokenise a named dataset; returns what was done. Raises DataError for anything that is not there."""
    name, folder = options.dataset.lower(), options.data_dir / options.dataset.lower()
    if name not in SOURCES:
        raise DataError(f"{name}: no dataset of that name; known are {', '.join(SOURCES)}")
    prefix = folder / f"{name}_text_document"
    if Path(f"{prefix}.idx").exists() and not options.force_redownload:
        return f"{prefix}.bin, .idx: there already (-f makes them again)"
    gpt2 = options.tokenizer == "GPT2BPETokenizer"
    vocab = options.vocab_file or (str(options.data_dir / "gpt2-vocab.json") if gpt2 else None)
    merges = options.merge_file or (str(options.data_dir / "gpt2-merges.txt") if gpt2 else None)
    files = raw_files(folder, name)
    missing = [] if files else [f"{SOURCES[name]} into {folder}/ (as {', '.join(SUFFIXES)}, or unpacked as {name})"]
    if gpt2:
        sources = ((vocab, GPT2_VOCAB), (merges, GPT2_MERGES))
        missing += [f"{address} to {path}" for path, address in sources if path and not Path(path).is_file()]
    if missing:
        raise DataError(f"{name} is not on this machine, and nothing is downloaded. Put " + "; ".join(missing))
    job = EncodeJob(make_tokenizer, (options.tokenizer, vocab, merges), append_eod=True)
    output = preprocess(files, [prefix], job, workers=os.cpu_count() or 1)[0]
    return f"{prefix}.bin, .idx: {output.documents} documents, {output.tokens} tokens"


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        if options.dataset is None:
            quickstart_data.build(options.data_dir / "quickstart", print)
        else:
            print(prepare(options))
    except (DataError, TokenizerError) as problem:
        sys.exit(f"prepare_data.py: {problem}")


if __name__ == "__main__":
    main()
