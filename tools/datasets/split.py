"""Split data into training, validation and test parts, by document: a conversation, a text, a pair.

    python tools/datasets/split.py data/chat_messages_document --valid 0.02 --seed 1
    python tools/datasets/split.py data/pairs_chosen_document --valid 500 --test 500

writes data/train/chat_messages_document, data/valid/chat_messages_document, ... (.bin and .idx). Labels and
rewards beside the data (chat_messages_label_document), the other side of pairs, and a reference model's
log-probabilities (PATH_NAME of precompute_model_name) are split alike; all files keep their names and the
order of their documents. The same seed and shares give the same parts. A PREFIX may be an --output-prefix
too: all its texts are split alike.
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

SECONDS = 10  # between two lines of progress


def progress_line() -> Callable[[str, float], None]:
    """Returns a function that prints, every ten seconds, how much of a file is written."""
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
        "prefix", nargs="+", metavar="PREFIX", help="dataset: path without .bin/.idx; several are split alike"
    )
    share = "share of the documents below 1, or a number of them"
    parser.add_argument("--valid", type=float, help=f"validation part: {share}")
    parser.add_argument("--test", type=float, help=f"test part: {share}")
    parser.add_argument("--seed", type=int, default=1, help="decides which documents are drawn (1)")
    parser.add_argument(
        "--output-dir", type=Path, help="writes OUTPUT_DIR/train, .../valid, .../test (beside the data)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist already")
    options = parser.parse_args(argv)
    shares = {name: value for name in ("valid", "test") if (value := getattr(options, name)) is not None}
    if not shares:
        parser.error("give --valid, --test or both")
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
