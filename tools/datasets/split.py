"""Splits a dataset into training, validation and test parts; a document (text, conversation, pair) stays
whole.

    python tools/datasets/split.py data/chat_messages_document --valid 0.02 --seed 1
    python tools/datasets/split.py data/pairs_chosen_document --valid 500 --test 500

The first command writes data/train/chat_messages_document, data/valid/chat_messages_document (.bin and .idx).
Files that belong to the data are split in the same way: labels and rewards (chat_messages_label_document),
the other answers of pairs, and log-probabilities of a reference model (precompute_model_name). Files keep
their names, documents their order. The same seed and shares give the same parts. A PREFIX may also be the
--output-prefix of a preprocessing command; then all its texts are split in the same way.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import DataError  # noqa: E402
from megatron.data.preprocessing.splitting import split  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

SECONDS = 10  # between two progress lines


def progress_line() -> Callable[[str, float], None]:
    """Returns a function that prints at most every ten seconds which share of a file is written."""
    printed = time.monotonic()

    def show(name: str, share: float) -> None:
        nonlocal printed
        if share < 1 and time.monotonic() - printed >= SECONDS:
            printed = time.monotonic()
            print(f"{name}: {share:.0%} written", flush=True)

    return show


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "prefix", nargs="+", metavar="PREFIX", help="dataset: path without .bin/.idx; several are split in the same way"
    )
    share = "a share of the documents (below 1), or a number of documents"
    parser.add_argument("--valid", type=float, help=f"size of the validation part: {share}")
    parser.add_argument("--test", type=float, help=f"size of the test part: {share}")
    parser.add_argument("--seed", type=int, default=1, help="seed of the choice of documents (default: 1)")
    parser.add_argument(
        "--output-dir",
        type=Path,
        help="folder in which train/, valid/ and test/ are written (default: the folder of the data)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist already")
    options = parser.parse_args(argv)
    shares = {name: value for name in ("valid", "test") if (value := getattr(options, name)) is not None}
    if not shares:
        parser.error("no part to split off: give --valid, --test or both")
    if not 0 <= options.seed < 2**32:
        parser.error("--seed: expected a number from 0 to 2^32 - 1")
    folder = options.output_dir or Path(options.prefix[0]).parent
    try:
        parts = split(
            options.prefix, folder, shares, options.seed, overwrite=options.overwrite, progress=progress_line()
        )
    except DataError as problem:
        sys.exit(f"split.py: error: {problem}")
    for part in parts:
        print(f"{part.prefix}.bin, .idx: {part.documents} documents, {part.tokens} tokens")


if __name__ == "__main__":
    run_command(main)
