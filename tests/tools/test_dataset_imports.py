"""The data tools start without torch, which takes seconds to import: modules are counted, not seconds."""

import json
import subprocess
import sys
from pathlib import Path

from tests.data.samples import DATASET, ROOT, TOKENIZER

TOOLS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in [*(ROOT / "tools" / "datasets").glob("*.py"), ROOT / "prepare_data.py", ROOT / "prepare_hf_dataset.py"]
    if "def main(" in path.read_text()
)
# Ends at the first call after which torch is there.
SCRIPT = """
import contextlib, importlib, io, json, sys
for name, words in json.loads(sys.argv[1]):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(name).main(words)
    except SystemExit as stopped:
        assert not stopped.code, stopped.code
    if "torch" in sys.modules:
        sys.exit(f"{name} {words} imports torch")
print("done")
"""


def _call(*runs: tuple[str, list[object]]) -> None:
    given = json.dumps([(name, [str(word) for word in words]) for name, words in runs])
    done = subprocess.run([sys.executable, "-c", SCRIPT, given], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr[-2000:]


def test_help_is_shown_without_torch():
    assert len(TOOLS) >= 12
    _call(*((tool, ["--help"]) for tool in TOOLS))


def test_datasets_are_made_and_looked_at_without_torch(tmp_path: Path):
    """What reads a chat template is not among them: `transformers` imports torch itself."""
    tokenizer = ["--tokenizer-type", "HFTokenizer", "--vocab-file", TOKENIZER]
    pair, table = tmp_path / "a_text_document", tmp_path / "a.parquet"
    text, mask = DATASET / "corpusA.jsonl", DATASET / "instruct.jsonl"
    hub = ["--dataset", table, "--output-base", tmp_path, "--num-proc", 1, "--skip-count", "--vocab-file", TOKENIZER]
    _call(
        ("tools.datasets.convert", [text, table]),
        ("tools.datasets.preprocess_data", ["--input", table, "--output-prefix", tmp_path / "a", *tokenizer]),
        ("tools.datasets.preprocess_data_with_mask", [
            "--input", mask, "--output-prefix", tmp_path / "m", "--mask-before-token", 5, *tokenizer,
        ]),
        ("tools.datasets.merge_datasets", ["--input", tmp_path, "--match", "a_*", "--output-prefix", tmp_path / "all"]),
        ("tools.datasets.verify", [pair, *tokenizer[2:]]),
        ("tools.datasets.dataset_token_count", [pair]),
        ("tools.datasets.pack_npy", [pair, tmp_path / "rows", "--seq-length", 32]),
        ("tools.datasets.inspect_samples", [pair, *tokenizer[2:], "--seq-length", 32, "--pack-impl", "best_fit"]),
        ("prepare_hf_dataset", hub),
    )  # fmt: skip
    made = {path.name for path in tmp_path.iterdir()}
    assert {"a_text_document.bin", "m_label_document.bin", "all.bin", "rows", "a.parquet_train"} <= made
