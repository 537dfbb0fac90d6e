"""Makes the quickstart data in data/quickstart: English text from Python's documentation, a tokenizer,
`.bin/.idx`.

The text is `pydoc_data.topics` (the language reference) and the docstrings of the standard library, which
every CPython has. Nothing is downloaded. Files that are intact are not made again.
"""

import ast
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data import (  # noqa: E402
    IndexedDataset,
    fingerprint,
    split_boundaries,
)
from megatron.data.files import sha256, temporary  # noqa: E402
from megatron.data.preprocessing import EncodeJob, preprocess  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from megatron.tokenizer import make_tokenizer  # noqa: E402
from megatron.tokenizer.train_tokenizer import read_texts, train_tokenizer  # noqa: E402

RECIPE = 1  # changes when the same Python would give other data
VOCAB_SIZE = 1024
SPLIT = "95,5,0"  # the split in configs/local_setup.yml
SHORTEST = 100  # characters; shorter documents are left out
# Folders that are left out: not prose, not in every installation, or not the standard library
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}


def stdlib_documents() -> Iterator[str]:
    """Yields one text for each class and module of the standard library.

    The text is its docstring and those of its methods or functions. The sources are parsed, not run.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            try:
                module = ast.parse(path.read_bytes())
            except SyntaxError:  # templates and samples are no programs
                continue
            yield from _docstrings(module)


def topic_documents() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from topics.values()


def _docstrings(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    texts = [ast.get_docstring(node)]
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            texts.append(ast.get_docstring(child))
        elif isinstance(child, ast.ClassDef):
            yield from _docstrings(child)
    yield "\n\n".join(text for text in texts if text)


def write_corpus(path: Path) -> int:
    """Writes all documents to a JSONL file, and returns their number.

    They are sorted by hash, so the last documents (for validation) are a random sample."""
    texts = {text.strip() for text in [*topic_documents(), *stdlib_documents()]}
    documents = [text for text in texts if len(text) >= SHORTEST]
    documents.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    _publish(path, lines.encode())
    return len(documents)


def build(folder: Path, report: Callable[[str], None]) -> None:
    """Makes corpus.jsonl, tokenizer.json, text_document.bin, .idx and stats.json in `folder`.

    Files that are there and intact are kept. report: called with a line of text for each file."""
    corpus, tokenizer, prefix, stamp = (
        folder / name for name in ("corpus.jsonl", "tokenizer.json", "text_document", "stats.json")
    )

    def content() -> dict:
        return {"corpus": sha256(corpus), "tokenizer": sha256(tokenizer), "dataset": fingerprint(str(prefix))}

    try:
        stats = json.loads(stamp.read_text())
        if stats["recipe"] == RECIPE and stats["content"] == content():
            report(f"{folder}: up to date ({stats['documents']} documents, {stats['tokens']} tokens)")
            return
    except (OSError, ValueError, KeyError):  # stats.json is missing or incomplete: make all files again
        pass
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    documents = write_corpus(corpus)
    report(f"{corpus}: {documents} documents, {corpus.stat().st_size / 1e6:.1f} MB")
    _publish(tokenizer, train_tokenizer(read_texts(corpus), VOCAB_SIZE).encode())
    report(f"{tokenizer}: byte-level BPE, {VOCAB_SIZE} tokens")
    job = EncodeJob(make_tokenizer, ("HFTokenizer", str(tokenizer)), append_eod=True)
    output = preprocess([corpus], [prefix], job).outputs[0]
    report(f"{prefix}.bin, .idx: {output.tokens} tokens")
    dataset = IndexedDataset(prefix)
    _, start, end, _ = split_boundaries(SPLIT, len(dataset))
    validation = dataset.span(start, end)
    stats = {
        "recipe": RECIPE,
        "documents": output.documents,
        "tokens": output.tokens,
        "validation_documents": end - start,
        "validation_tokens": len(validation),
        "content": content(),
    }
    _publish(stamp, (json.dumps(stats, indent=1) + "\n").encode())
    report(f"{stamp}: {len(validation)} of the tokens are for validation (split {SPLIT})")


def _publish(path: Path, content: bytes) -> None:
    unfinished = temporary(path)
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=Path("data/quickstart"), help="folder to write (default: data/quickstart)"
    )
    build(parser.parse_args().folder, print)


if __name__ == "__main__":
    run_command(main)
