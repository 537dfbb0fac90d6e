"""The small commands on datasets: merge, count, convert."""

import json
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from megatron.data import IndexedDataset, IndexedDatasetWriter, write_npy
from megatron.data.preprocessing import EncodeJob, preprocess
from megatron.tokenizer import make_tokenizer
from tests.data.samples import DATASET, TOKENIZER, write_dataset
from tools.datasets import convert, dataset_token_count, merge_datasets


def refusal(main, *words: object) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, words)])
    return str(stopped.value)


def test_merging_equals_tokenising_together(tmp_path: Path):
    job = EncodeJob(make_tokenizer, ("HFTokenizer", str(TOKENIZER)), append_eod=True)
    (tmp_path / "parts").mkdir()
    for name in ("corpusA", "corpusB"):
        preprocess([DATASET / f"{name}.jsonl"], [tmp_path / "parts" / name], job)
    preprocess([DATASET / "corpusA.jsonl", DATASET / "corpusB.jsonl"], [tmp_path / "whole"], job)
    merge_datasets.main(["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "merged")])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_merging_keeps_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Upstream drops the boundaries: empty documents, and documents of several sequences."""
    write_dataset(tmp_path / "a_text_document", [3, 0, 2])
    write_dataset(tmp_path / "b_text_document", [0, 4])
    index = bytearray((tmp_path / "b_text_document.idx").read_bytes())
    merge_datasets.main(["--input", str(tmp_path), "--output-prefix", str(tmp_path / "all")])
    merged = IndexedDataset(tmp_path / "all")
    assert merged.doc_idx.tolist() == [0, 1, 1, 2, 2, 3] and merged.sizes.tolist() == [3, 2, 4]
    assert (tmp_path / "b_text_document.idx").read_bytes() == index
    assert "5 documents, 9 tokens of 2 pairs" in capsys.readouterr().out


def test_an_earlier_output_is_no_part_of_itself(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "a_text_document", [3, 2])
    write_dataset(tmp_path / "b_text_document", [4])
    for folder, output in (("./", tmp_path / "all"), (tmp_path, "all"), (".", "./all")):
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(output)])
        assert "3 documents, 9 tokens of 2 pairs" in capsys.readouterr().out


def test_what_cannot_be_merged(tmp_path: Path):
    words = ("--input", tmp_path, "--output-prefix", tmp_path / "out" / "all")
    assert "no pair" in refusal(merge_datasets.main, *words)
    write_dataset(tmp_path / "a_text_document", [3])
    write_dataset(tmp_path / "a_text_label_document", [3], dtype=np.int32)
    assert "are of different kinds" in refusal(merge_datasets.main, *words)
    write_dataset(tmp_path / "b_text_document", [3], dtype=np.int32)
    message = refusal(merge_datasets.main, *words, "--match", "*_text_document")
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
    assert [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "2 documents, 6 tokens",
        "80 documents, 7074 tokens",
        "82 documents, 7080 tokens",
    ]
    assert "none.idx: no such file" in refusal(dataset_token_count.main, tmp_path / "none")


def test_an_empty_pair_is_merged_too(tmp_path: Path):
    with IndexedDatasetWriter(tmp_path / "a", np.uint16):
        pass
    write_dataset(tmp_path / "b", [7])
    merge_datasets.main(["--input", str(tmp_path), "--output-prefix", str(tmp_path / "all")])
    assert IndexedDataset(tmp_path / "all").sizes.tolist() == [7]


def test_rows_as_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = [
        {"text": "a", "n": None},
        {"text": "b", "n": 1, "messages": [{"role": "user", "content": "x"}]},
        {"text": "c", "more": 0.5},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for group in (1, 1 << 20):
        monkeypatch.setattr(convert, "GROUP_BYTES", group)
        convert.main([str(tmp_path / "a.jsonl"), str(tmp_path / "out" / "a.parquet")])
        table = parquet.read_table(tmp_path / "out" / "a.parquet")
        assert table.column_names == ["text", "n", "messages", "more"]
        assert table.to_pylist() == [{name: row.get(name) for name in table.column_names} for row in rows]


def test_what_cannot_be_converted(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    message = refusal(convert.main, tmp_path / "a.jsonl", tmp_path / "a.parquet")
    assert message.startswith(f"convert.py: error: {tmp_path}/a.jsonl: a column holds values of different types")
    assert "the name of a .parquet file is wanted" in refusal(convert.main, tmp_path / "a.jsonl", tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("5\n")
    assert "a.jsonl:1: int, not an object" in refusal(convert.main, tmp_path / "a.jsonl", tmp_path / "a.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
