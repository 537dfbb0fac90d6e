"""Tokenise text into `.bin/.idx` pairs for training; flags, file names and bytes are GPT-NeoX's.

    python tools/datasets/preprocess_data.py --input data.jsonl --output-prefix data/mine \\
        --tokenizer-type HFTokenizer --vocab-file tokenizer.json --append-eod --workers 8
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm  # noqa: E402

from megatron.data import DataError, EncodeJob, preprocess  # noqa: E402
from megatron.tokenizer import TokenizerError, make_tokenizer  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_argument_group("input data")
    data.add_argument(
        "--input",
        required=True,
        help="files, separated by commas: .jsonl, .jsonl.gz, .jsonl.zst (a JSON object a line); "
        ".txt (the whole file is one document); .zip (every file in it is one document)",
    )
    data.add_argument("--jsonl-keys", nargs="+", default=["text"], help="keys to read, each into its own pair (text)")
    data.add_argument("--num-docs", type=int, help="number of documents, if known: progress then shows a percentage")
    tokens = parser.add_argument_group("tokenizer")
    tokens.add_argument("--tokenizer-type", required=True, help="HFTokenizer, GPT2BPETokenizer or CharLevelTokenizer")
    tokens.add_argument("--vocab-file", help="tokenizer.json of an HFTokenizer, vocab.json of a GPT2BPETokenizer")
    tokens.add_argument("--merge-file", help="merges.txt of a GPT2BPETokenizer")
    tokens.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    tokens.add_argument("--ftfy", action="store_true", help="repair broken encodings first, with the ftfy package")
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    output.add_argument("--dataset-impl", choices=["mmap"], default="mmap", help="mmap; no other is written")
    work = parser.add_argument_group("work")
    work.add_argument("--workers", type=int, default=1, help="processes (1); the output does not depend on it")
    work.add_argument("--log-interval", type=int, default=100, help="documents between two progress lines (100)")
    return parser.parse_args(argv)


def progress_line(total: int | None, interval: int) -> Callable[[int, int], None]:
    """A bar on a terminal; elsewhere a line whenever `interval` more documents are done."""
    start = time.monotonic()
    bar = tqdm(total=total, unit="docs") if sys.stderr.isatty() else None
    done = size = printed = 0

    def show(documents: int, input_bytes: int) -> None:
        nonlocal done, size, printed
        done, size = done + documents, size + input_bytes
        seconds = max(time.monotonic() - start, 1e-9)
        rate = f"{size / seconds / 1e6:.2f} MB/s"
        if bar is not None:
            bar.set_postfix_str(rate, refresh=False)
            bar.update(documents)
        elif done - printed >= interval:
            printed = done
            of = "" if total is None else f"/{total}"
            print(f"Processed {done}{of} documents ({done / seconds:.1f} docs/s, {rate}).", flush=True)

    return show


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    job = EncodeJob(
        make_tokenizer,
        (options.tokenizer_type, options.vocab_file, options.merge_file),
        keys=tuple(options.jsonl_keys),
        append_eod=options.append_eod,
        ftfy=options.ftfy,
    )
    try:
        outputs = preprocess(
            options.input.split(","),
            [f"{options.output_prefix}_{key}_document" for key in job.keys],
            job,
            workers=options.workers,
            progress=progress_line(options.num_docs, options.log_interval),
        )
    except (DataError, TokenizerError) as problem:
        sys.exit(f"preprocess_data.py: {problem}")
    for output in outputs:
        without = f", {output.empty} of them without a token" if output.empty else ""
        print(f"{output.prefix}.bin, .idx: {output.documents} documents{without}, {output.tokens} tokens")


if __name__ == "__main__":
    main()
