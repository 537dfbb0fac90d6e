"""Tokenise text into `.bin/.idx` pairs for training; flags, file names and bytes are GPT-NeoX's.

    python tools/datasets/preprocess_data.py --input data.jsonl --output-prefix data/mine \\
        --tokenizer-type HFTokenizer --vocab-file tokenizer.json --append-eod --workers 8

A job that was interrupted goes on when the same command is given again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.data import EncodeJob  # noqa: E402
from megatron.tokenizer import make_tokenizer  # noqa: E402
from tools.datasets.run_job import add_input_flags, add_work_flags, run  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_argument_group("input data")
    add_input_flags(data, "text")
    data.add_argument("--text-column", help="read this key or column instead, into PREFIX_text_document")
    tokens = parser.add_argument_group("tokenizer")
    tokens.add_argument("--tokenizer-type", required=True, help="a tokenizer_type of the configuration")
    tokens.add_argument("--vocab-file", "--vocab", help="its vocabulary: tokenizer.json, vocab.json or a model file")
    tokens.add_argument("--merge-file", help="merges.txt of a GPT2BPETokenizer")
    tokens.add_argument("--eod-token", help="name of the token that ends documents, if it is not found by itself")
    tokens.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    tokens.add_argument("--ftfy", action="store_true", help="repair broken encodings first, with the ftfy package")
    add_work_flags(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    names = ["text"] if options.text_column else options.jsonl_keys
    job = EncodeJob(
        make_tokenizer,
        (options.tokenizer_type, options.vocab_file, options.merge_file, options.eod_token),
        keys=(options.text_column,) if options.text_column else tuple(options.jsonl_keys),
        append_eod=options.append_eod,
        ftfy=options.ftfy,
    )
    prefixes = [f"{options.output_prefix}_{name}_document" for name in names]
    run("preprocess_data.py", options, lambda: (job, prefixes))


if __name__ == "__main__":
    main()
