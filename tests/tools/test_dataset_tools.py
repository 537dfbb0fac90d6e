"""The small commands on datasets: merge, count, convert; and what starts without torch."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from megatron.data import IndexedDataset, IndexedDatasetWriter, write_npy
from megatron.data.preprocessing import EncodeJob, preprocess
from megatron.tokenizer import make_tokenizer
from tests.data.samples import DATASET, ROOT, TOKENIZER, write_dataset
from tests.tools.commands import refused
from tools.datasets import convert, dataset_token_count, merge_datasets


def test_merging_equals_tokenising_together(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    """An earlier output is not part of itself."""
    job = EncodeJob(make_tokenizer, ("HFTokenizer", str(TOKENIZER)), append_eod=True)
    (tmp_path / "parts").mkdir()
    for name in ("corpusA", "corpusB"):
        preprocess([DATASET / f"{name}.jsonl"], [tmp_path / "parts" / name], job)
    preprocess([DATASET / "corpusA.jsonl", DATASET / "corpusB.jsonl"], [tmp_path / "whole"], job)
    merge_datasets.main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "merged")])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    work_folder = tmp_path / "own"
    work_folder.mkdir()
    monkeypatch.chdir(work_folder)
    write_dataset(work_folder / "a_text_document", [3, 2])
    write_dataset(work_folder / "b_text_document", [4])
    for folder, output in (("./", work_folder / "all"), (work_folder, "all"), (".", "./all")):
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(output)])
        assert "3 documents, 9 tokens from 2 pairs" in capsys.readouterr().out


def test_merging_keeps_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Upstream drops the boundaries: empty documents, and documents of several sequences."""
    write_dataset(tmp_path / "a_text_document", [3, 0, 2])
    write_dataset(tmp_path / "b_text_document", [0, 4])
    with IndexedDatasetWriter(tmp_path / "c_text_document", np.uint16):
        pass
    index = bytearray((tmp_path / "b_text_document.idx").read_bytes())
    merge_datasets.main(["--input", str(tmp_path), "--output-prefix", str(tmp_path / "all")])
    merged = IndexedDataset(tmp_path / "all")
    assert merged.doc_idx.tolist() == [0, 1, 1, 2, 2, 3] and merged.sizes.tolist() == [3, 2, 4]
    assert (tmp_path / "b_text_document.idx").read_bytes() == index
    assert "5 documents, 9 tokens from 3 pairs" in capsys.readouterr().out


def test_what_cannot_be_merged(tmp_path: Path):
    words = ("--input", tmp_path, "--output-prefix", tmp_path / "out" / "all")
    assert "no pair" in refused(merge_datasets.main, *words)
    write_dataset(tmp_path / "a_text_document", [3])
    write_dataset(tmp_path / "a_text_label_document", [3], dtype=np.int32)
    assert "different kinds" in refused(merge_datasets.main, *words)
    write_dataset(tmp_path / "b_text_document", [3], dtype=np.int32)
    message = refused(merge_datasets.main, *words, "--match", "*_text_document")
    assert "b_text_document holds int32" in message and "\n" not in message
    assert not (tmp_path / "out").exists()


def test_counting(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_dataset(tmp_path / "a", [3, 0, 2])
    write_dataset(tmp_path / "b", [7])
    dataset_token_count.main([str(tmp_path / "a"), str(tmp_path / "b.bin")])
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/a: 3 documents, 5 tokens",
        f"{tmp_path}/b: 1 documents, 7 tokens",
        "Total: 4 documents, 12 tokens",
    ]
    write_npy(IndexedDataset(tmp_path / "b"), tmp_path / "rows", 3)
    dataset_token_count.main([str(tmp_path / "rows"), str(DATASET / "corpusA_lazy_text_document.idx")])
    expected = ["2 documents, 6 tokens", "80 documents, 7074 tokens", "82 documents, 7080 tokens"]
    assert [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()] == expected
    assert "none.idx: no such file" in refused(dataset_token_count.main, tmp_path / "none")


def test_rows_as_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    messages = [{"role": "user", "content": "x"}]
    rows = [{"text": "a", "n": None}, {"text": "b", "n": 1, "messages": messages}, {"text": "c", "more": 0.5}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for group in (1, 1 << 20):
        monkeypatch.setattr(convert, "GROUP_BYTES", group)
        convert.main([str(tmp_path / "a.jsonl"), str(tmp_path / "out" / "a.parquet")])
        table = parquet.read_table(tmp_path / "out" / "a.parquet")
        assert table.column_names == ["text", "n", "messages", "more"]
        assert table.to_pylist() == [{name: row.get(name) for name in table.column_names} for row in rows]


def test_what_cannot_be_converted(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    message = refused(convert.main, tmp_path / "a.jsonl", tmp_path / "a.parquet")
    assert message.startswith(f"convert.py: error: {tmp_path}/a.jsonl: ") and "types" in message
    assert ".parquet" in refused(convert.main, tmp_path / "a.jsonl", tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("5\n")
    assert "a.jsonl:1: " in refused(convert.main, tmp_path / "a.jsonl", tmp_path / "a.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


TOOLS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in [*(ROOT / "tools" / "datasets").glob("*.py"), ROOT / "prepare_data.py", ROOT / "prepare_hf_dataset.py"]
    if "def main(" in path.read_text()
)
# What launchers, login nodes and people at a terminal start.
LIGHT = ("megatron.distributed.store", "megatron.operations.hub.submission", "megatron.operations.run_folder",
         "tools.k8s", "tools.jobs")  # fmt: skip
# Ends at the first call after which torch is there.
SCRIPT = """
import contextlib, importlib, io, json, sys
for name, words in json.loads(sys.argv[1]):
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            module = importlib.import_module(name)
            words is None or module.main(words)
    except SystemExit as stopped:
        assert not stopped.code, stopped.code
    if "torch" in sys.modules:
        sys.exit(f"{name} {words} imports torch")
print("done")
"""


def _call(*runs: tuple[str, list[object] | None]) -> None:
    calls = json.dumps([(name, words and [str(word) for word in words]) for name, words in runs])
    done = subprocess.run([sys.executable, "-c", SCRIPT, calls], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr[-2000:]


def test_help_is_shown_without_torch():
    assert len(TOOLS) >= 12
    _call(*((name, None) for name in LIGHT), *((tool, ["--help"]) for tool in TOOLS))


def test_datasets_are_made_and_looked_at_without_torch(tmp_path: Path):
    """Chat templates are left out: `transformers` imports torch itself."""
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
    output_names = {path.name for path in tmp_path.iterdir()}
    assert {"a_text_document.bin", "m_label_document.bin", "all.bin", "rows", "a.parquet_train"} <= output_names
