"""`prepare_data.py` and the quickstart data."""

import json
import zipfile
from pathlib import Path

import pytest

import prepare_data
from megatron.data import IndexedDataset, split_boundaries, unigram_entropy
from megatron.tokenizer import HFTokenizer
from tests.data.samples import TOKENIZER
from tools import quickstart_data


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare_data.main(["-d", str(folder)])
    return folder / "quickstart"


def test_without_a_name_the_test_data_is_made(quickstart: Path):
    dataset, tokenizer = IndexedDataset(quickstart / "text_document"), HFTokenizer(quickstart / "tokenizer.json")
    assert tokenizer.vocab_size == 1024 and (tokenizer.eod, tokenizer.pad) == (0, 1)
    lines = (quickstart / "corpus.jsonl").read_text().splitlines()
    assert len(dataset) == len(lines) > 500
    assert (quickstart / "corpus.jsonl").stat().st_size > 1_000_000
    for index in (0, len(lines) - 1):
        *text, end = dataset[index].tolist()
        assert end == tokenizer.eod and tokenizer.detokenize(text) == json.loads(lines[index])["text"]
    stats = json.loads((quickstart / "stats.json").read_text())
    _, start, end, _ = split_boundaries("95,5,0", len(dataset))
    assert stats["validation_unigram_entropy"] == unigram_entropy(dataset.span(start, end))
    assert 5 < stats["validation_unigram_entropy"] < 7


def test_nothing_is_made_again_while_it_is_whole(quickstart: Path):
    before = {path: path.stat().st_mtime_ns for path in quickstart.iterdir()}
    said: list[str] = []
    quickstart_data.build(quickstart, said.append)
    assert {path: path.stat().st_mtime_ns for path in quickstart.iterdir()} == before
    assert "up to date" in said[0]


def test_a_damaged_file_is_made_again_and_comes_out_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quickstart_data, "library_documents", lambda: iter(()))  # the language reference is enough
    quickstart_data.build(tmp_path, lambda line: None)
    data = tmp_path / "text_document.bin"
    before = data.read_bytes()
    data.write_bytes(before[:-2])
    quickstart_data.build(tmp_path, lambda line: None)
    assert data.read_bytes() == before


def refusal(*words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        prepare_data.main(words)
    return str(stopped.value)


def test_a_corpus_that_is_not_here_is_refused_with_what_to_put_where(tmp_path: Path):
    said = refusal("-d", str(tmp_path), "-t", "GPT2BPETokenizer", "enwik8")
    assert said.startswith("prepare_data.py: enwik8 is not on this machine")
    assert f"https://data.deepai.org/enwik8.zip into {tmp_path}/enwik8/" in said
    assert "gpt2-vocab.json" in said and "gpt2-merges.txt" in said
    assert "known are" in refusal("-d", str(tmp_path), "enwik7")


def test_a_corpus_in_the_data_folder_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # GPT-2's two files, from the golden byte-level BPE
    model = json.loads(TOKENIZER.read_text())["model"]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (tmp_path / "enwik8").mkdir()
    with zipfile.ZipFile(tmp_path / "enwik8" / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", "The patient ribbon paints the kettle.")
    words = ["-d", str(tmp_path), "-t", "GPT2BPETokenizer", "enwik8"]
    prepare_data.main(words)
    prepare_data.main(words)
    said = capsys.readouterr().out.splitlines()
    assert "1 documents" in said[0] and "there already" in said[1]
    dataset = IndexedDataset(tmp_path / "enwik8" / "enwik8_text_document")
    text = "The patient ribbon paints the kettle."
    assert dataset[0].tolist() == [*HFTokenizer(TOKENIZER).tokenize(text), 0]
