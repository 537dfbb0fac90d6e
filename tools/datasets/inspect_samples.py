"""Shows samples of a dataset as text, coloured by whether a token is trained or masked.

    python tools/datasets/inspect.py data/chat --vocab-file tokenizer.json                  # documents, in colour
    python tools/datasets/inspect.py data/chat_messages_document --vocab-file tokenizer.json \\
        --seq-length 2048 --pack-impl best_fit --html chat.html                             # rows as training sees them
    python tools/datasets/inspect.py data/mine_text_document --vocab-file tokenizer.json --stats

Labels, rewards and the other answers of pairs are found by their names beside the named file.
"""  # noqa: W505 (lines to copy)

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron.data import DataError
from megatron.data.files import temporary
from megatron.data.inspection.file_groups import FileGroup, find_file_groups
from megatron.data.inspection.render import page, terminal
from megatron.data.inspection.samples import DisplayedSample, PackedRows, StoredDocuments, group_pairs
from megatron.data.inspection.statistics import dataset_stats, histogram, table
from megatron.neox_arguments.values.integers import parse_integer
from megatron.process.command_parser import CommandParser
from megatron.process.terminal import has_colours
from megatron.tokenizer import TokenizerError, make_tokenizer
from tools.datasets.run_job import add_tokenizer_flags, tokenizer_of


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="inspect.py", description=__doc__)
    parser.add_argument("prefix", help="dataset: path without .bin/.idx, or the --output-prefix it was written with")
    tokens = parser.add_argument_group("tokenizer")
    add_tokenizer_flags(tokens, "HFTokenizer")
    samples = parser.add_argument_group("samples")
    samples.add_argument("--samples", type=at_least(1), default=5, help="number of samples to show (default: 5)")
    samples.add_argument("--start", type=at_least(0), default=0, help="first sample to show (default: 0)")
    samples.add_argument("--random", type=at_least(0), metavar="SEED", help="show random samples, drawn with this seed")
    samples.add_argument(
        "--seq-length",
        type=at_least(1),
        help="show rows of this length, packed as in training (default: show documents as stored)",
    )
    samples.add_argument(
        "--pack-impl", choices=["packed", "pack_until_overflow", "unpacked", "best_fit"], default="packed",
        help="how documents are packed into rows, with --seq-length (default: packed)",
    )  # fmt: skip
    samples.add_argument(
        "--seed", type=int, default=1234, help="seed of the rows' order (default: 1234, as in training)"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--html", type=Path, metavar="FILE", help="write the samples as a page of HTML")
    output.add_argument(
        "--stats", action="store_true", help="print statistics of all documents, and draw a histogram of lengths"
    )
    output.add_argument(
        "--picture", type=Path, help="with --stats: file of the histogram (default: PREFIX_lengths.png)"
    )
    output.add_argument(
        "--color",
        choices=["auto", "always", "never"],
        default="auto",
        help="colours; auto: only on a terminal (default)",
    )
    return parser.parse_args(argv)


def at_least(minimum: int) -> Callable[[str], int]:
    """Returns an argparse type for whole numbers of at least `minimum`."""

    def number(text: str) -> int:
        value = parse_integer(text)
        if value is None or value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {minimum}")
        return value

    return number


def chosen(group: list[FileGroup], options: argparse.Namespace) -> Iterator[list[DisplayedSample]]:
    if options.seq_length is None:
        source: StoredDocuments | PackedRows = StoredDocuments(group)
    elif len(group) > 1:
        raise DataError(f"{options.prefix}: holds pairs, which are never packed into rows; remove --seq-length")
    else:
        source = PackedRows(group[0], options.seq_length, options.pack_impl, options.seed)
    if options.start >= len(source) > 0:
        raise DataError(f"--start {options.start}: the data has only {len(source)} samples, numbered from 0")
    indices: Sequence[int] = range(options.start, min(len(source), options.start + options.samples))
    if options.random is not None:
        indices = sorted(random.Random(options.random).sample(range(len(source)), min(len(source), options.samples)))
    for index in indices:
        yield source[index]


def publish(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary(path).write_bytes(content)
    os.replace(temporary(path), path)


def show(options: argparse.Namespace) -> None:
    tokenizer = make_tokenizer(*tokenizer_of(options))
    columns = find_file_groups(options.prefix)
    views = [chosen_view for group in group_pairs(columns) for chosen_view in chosen(group, options)]
    stats, picture = [], None
    colour = options.color == "always" or (options.color == "auto" and sys.stdout.isatty() and has_colours())
    if options.stats:
        stats = [dataset_stats(column, tokenizer.special_tokens) for column in columns]
        picture = histogram({Path(column_stats.name).name: column_stats.lengths for column_stats in stats})
        for column_stats in stats:
            print("\n".join(table(column_stats)))
        file = options.picture or Path(f"{options.prefix}_lengths.png")
        publish(file, picture)
        print(f"wrote the histogram: {file}")
    if options.html is not None:
        publish(options.html, page(options.prefix, views, tokenizer, stats, picture).encode())
        print(f"wrote the page: {options.html}")
    elif not options.stats:
        for view in (view for group in views for view in group):
            print(terminal(view, tokenizer, colour))


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        show(options)
    except (DataError, TokenizerError, OSError) as problem:
        sys.exit(f"inspect.py: error: {problem}")
