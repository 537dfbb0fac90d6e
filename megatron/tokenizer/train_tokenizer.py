"""Trains a byte-level BPE tokenizer on JSONL texts; the flags are GPT-NeoX's.

    python megatron/tokenizer/train_tokenizer.py --json_input_dir data --tokenizer_output_path tokenizer.json -v 52000

Unlike GPT-NeoX's tokenizer, it decodes every text exactly as it was: no normalisation, no added space, and all
256 bytes are tokens.
"""  # noqa: W505 (lines to copy)

import argparse
import gzip
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.neox_arguments.values.json_text import parse_json
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from megatron.tokenizer.interface import END_OF_DOCUMENT, PADDING, TokenizerError  # noqa: E402

ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst")
SMALLEST = 256 + 2  # all bytes, and two special tokens


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE on `texts`; return its `tokenizer.json` as text.

    NeoX's two special tokens get the first ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST:
        raise TokenizerError(
            f"--vocab_size {vocab_size}: must be at least {SMALLEST}, for all bytes and two special tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def read_texts(folder: Path) -> Iterator[str]:
    """Yield the field `text` of every line of the JSONL files in `folder`, in the order of the files' names.

    folder: a folder, or a single file.
    """
    files = [folder] if folder.is_file() else sorted(path for path in folder.glob("*") if path.name.endswith(ENDINGS))
    if not files:
        raise TokenizerError(f"--json_input_dir {folder}: no file there ends in {', '.join(ENDINGS)}")
    for file in files:
        with _open(file) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    text = parse_json(line)["text"]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    raise TokenizerError(
                        f'{file}:{number}: not a JSON object with a text under "text"; mend or remove the line'
                    )
                yield text


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    if path.suffix != ".zst":
        return open(path, "rb")
    try:
        import zstandard
    except ModuleNotFoundError:
        raise TokenizerError(f"{path}: reading .zst needs the zstandard package (pip install zstandard)") from None
    frames = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # as preprocessing reads them
    return io.BufferedReader(zstandard.open(path, "rb", dctx=frames))


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--json_input_dir", type=Path, required=True, help=f"folder of {', '.join(ENDINGS)} files")
    parser.add_argument("--tokenizer_output_path", type=Path, required=True, help="path of the tokenizer.json to write")
    parser.add_argument(
        "--tokenizer_type", choices=["BPE"], default="BPE", help="kind of tokenizer; only BPE is supported"
    )
    parser.add_argument(
        "-v", "--vocab_size", type=int, default=52000, help="number of tokens in the vocabulary (default: 52000)"
    )
    return parser.parse_args(argv)


def main(options: argparse.Namespace) -> None:
    if not options.tokenizer_output_path.name:
        sys.exit("train_tokenizer.py: error: --tokenizer_output_path names no file; give a path such as tokenizer.json")
    try:
        content = train_tokenizer(read_texts(options.json_input_dir), options.vocab_size)
    except TokenizerError as problem:
        sys.exit(f"train_tokenizer.py: error: {problem}")
    path = options.tokenizer_output_path
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    unfinished.write_text(content, encoding="utf-8")
    os.replace(unfinished, path)
    vocab_size = len(parse_json(content)["model"]["vocab"])
    requested = options.vocab_size
    shortfall = f" (the texts give no more tokens; {requested} were requested)" if vocab_size < requested else ""
    print(f"Tokenizer saved at {path}: {vocab_size} tokens{shortfall}")


if __name__ == "__main__":
    run_command(lambda: main(parse_args()))
