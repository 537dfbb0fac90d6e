"""Writes questions and answers on Python's standard library as training data for the quickstart pipeline.

    python tools/quickstart_dialogues.py --corpus data/raw/corpus.jsonl --folder data/dialogues

It writes chats.jsonl (`messages`: the question "What does json.dumps do?", and the first sentence of its
docstring as answer); pairs.jsonl and valid_pairs.jsonl (`prompt`, `chosen`, and as `rejected` the same words
in another order); and domain.jsonl, the texts of the corpus about files. Sources are read, not run. Nothing
is downloaded. The same Python version writes the same bytes.
"""  # noqa: W505 (lines to copy)

import ast
import hashlib
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data.files import sync, temporary  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.quickstart_data import LEFT_OUT  # noqa: E402

_WORDS = (6, 30)  # fewest and most words of an answer
PAIRS = 800  # a reference model scores each pair, which takes a CPU longer than the training
_VALIDATION_INTERVAL = 12  # one of so many pairs is for validation
_DOMAIN = re.compile(r"\b(file|files|path|directory)\b")


def answers() -> Iterator[tuple[str, str]]:
    """Yields (name, first sentence of the docstring) of the standard library's public functions and classes.

    Sentences with fewer than 6 or more than 30 words are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if LEFT_OUT.isdisjoint(parts) and not any(part.startswith("_") for part in parts):
            try:
                module = ast.parse(path.read_bytes())
            except SyntaxError:  # templates and samples are no programs
                continue
            yield from _documented_names(".".join(parts), module)


def _documented_names(prefix: str, node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, str]]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            name, text = f"{prefix}.{child.name}", ast.get_docstring(child)
            sentence = " ".join(re.split(r"(?<=[.!?])\s|\n\n", text or "")[0].split())
            if _WORDS[0] <= len(sentence.split()) <= _WORDS[1]:
                yield name, sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
            if isinstance(child, ast.ClassDef):
                yield from _documented_names(name, child)


def _shuffled(sentence: str, seed: str) -> str:
    """Returns the words of a sentence in another order; the same sentence and seed always give the same
    order."""
    words = sentence.split()
    while " ".join(words) == sentence:
        Random(seed).shuffle(words)
        seed += "."
    return " ".join(words)


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    unfinished = temporary(path)
    unfinished.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    sync(unfinished)
    unfinished.replace(path)
    print(f"{path}: {len(rows)} rows")


def write(corpus: Path, folder: Path) -> None:
    """Writes chats.jsonl, pairs.jsonl, valid_pairs.jsonl and domain.jsonl into `folder`.

    Half of the questions become chats; 800 of the other half become pairs. corpus: corpus.jsonl of
    tools/quickstart_data.py, from which the domain texts are chosen."""
    answer_by_question = {f"What does {name} do?": sentence for name, sentence in answers()}
    items = sorted(answer_by_question.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest())
    chats, pair_items = items[: len(items) // 2], items[len(items) // 2 :][:PAIRS]
    pairs: list[dict[str, object]] = [
        {"prompt": question, "chosen": sentence, "rejected": _shuffled(sentence, question)}
        for question, sentence in pair_items
    ]
    texts = [row for row in map(json.loads, corpus.open(encoding="utf-8")) if len(_DOMAIN.findall(row["text"])) > 3]
    folder.mkdir(parents=True, exist_ok=True)
    _write(
        folder / "chats.jsonl",
        [
            {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": sentence}]}
            for question, sentence in chats
        ],
    )
    _write(folder / "pairs.jsonl", [row for i, row in enumerate(pairs) if i % _VALIDATION_INTERVAL])
    _write(folder / "valid_pairs.jsonl", pairs[::_VALIDATION_INTERVAL])
    _write(folder / "domain.jsonl", texts)


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="corpus.jsonl of tools/quickstart_data.py")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the written files")
    options = parser.parse_args()
    write(options.corpus, options.folder)


if __name__ == "__main__":
    run_command(main)
