"""`prepare_hf_dataset.py`: the fork's flags and files, on datasets that `datasets` wrote."""

import json
from pathlib import Path

import datasets
import pytest
from transformers import AutoTokenizer

import prepare_hf_dataset
from megatron.tokenizer import HFTokenizer
from tests.data.samples import DATASET, TOKENIZER, json_rows, jsonl, rows_of

HF_TOKENIZER = DATASET / "hf_tokenizer"
TEXTS = [{"user": f"Question {i}?", "assistant": f"Answer {'so ' * i}."} for i in range(30)]
CHATS = [[{"role": role, "content": content} for role, content in text.items()] for text in TEXTS]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [{"messages": messages, "id": i} for i, messages in enumerate(CHATS)]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "chats")
    return tmp_path / "chats"


def run(tmp_path: Path, dataset: object, *words: object) -> dict:
    common = ["--output-base", tmp_path / "out", "--vocab-file", TOKENIZER, "--num-proc", 2]
    prepare_hf_dataset.main([*map(str, ["--dataset", dataset, *common, *words])])
    return json.loads(next((tmp_path / "out").glob("*/pipeline_results.json")).read_text())


def exported(results: dict) -> list[str]:
    return [row["text"] for row in json_rows(Path(results["jsonl_path"]))]


def test_conversations_become_text_through_the_template(chats: Path, tmp_path: Path):
    results = run(tmp_path, chats, "--hf-tokenizer", HF_TOKENIZER)
    reference = AutoTokenizer.from_pretrained(HF_TOKENIZER)
    texts = [reference.apply_chat_template(messages, tokenize=False) for messages in CHATS]
    assert exported(results) == texts
    num_tokens = sum(len(reference(text, add_special_tokens=False)["input_ids"]) for text in texts)
    assert (results["num_documents"], results["token_count"]) == (30, num_tokens)
    assert results["status"] == "completed" and results["tokenized"] and results["is_messages"]
    folder = tmp_path / "out" / "chats_train"
    assert results["bin_path"] == f"{folder}/chats_train_text_document.bin"
    tokenizer = HFTokenizer(TOKENIZER)
    rows = [[*tokenizer.tokenize(text), tokenizer.eod] for text in texts]
    assert rows_of(folder / "chats_train_text_document") == rows
    pair = {f"chats_train_text_document.{suffix}" for suffix in ("bin", "idx")}
    notes = {"dataset.jsonl", "pipeline_results.json", "chats_train_metadata.json"}
    assert {path.name for path in folder.iterdir()} == notes | pair


def test_other_ways_to_a_text(chats: Path, tmp_path: Path):
    results = run(tmp_path, chats, "--midtrain-chat-messages", "--skip-count", "--skip-tokenize")
    assert exported(results) == ["\n\n".join(message["content"] for message in messages) for messages in CHATS]
    assert results["token_count"] is None and not results["tokenized"]
    results = run(tmp_path, chats, "--skip-chat-template", "--skip-count", "--skip-tokenize")
    assert [eval(text) for text in exported(results)] == CHATS
    source = jsonl(tmp_path / "qa.jsonl", [{"q": "one", "a": "two", "n": 3}, {"q": "", "a": "four", "n": 5}])
    words = ("--skip-count", "--skip-tokenize", "--output-dir", tmp_path / "out" / "chats_train")
    results = run(tmp_path, "anything", "--data-files", source, "--join-columns", "q,a,n", *words)
    assert exported(results) == ["one\n\ntwo\n\n3", "four\n\n5"]
    results = run(tmp_path, "anything", "--data-files", source, "--text-column", "a", *words)
    assert exported(results) == ["two", "four"] and not results["is_messages"]


def test_counting_only_writes_nothing(chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--dataset", chats, "--count-only", "--hf-tokenizer", HF_TOKENIZER, "--num-proc", 1, "--batch-size", 7]
    prepare_hf_dataset.main([*map(str, words), "--output-base", str(tmp_path / "out")])
    assert capsys.readouterr().out.startswith("30 documents, ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("words", "message"), [
    (["--hf-tokenizer", "{hf}"], "--vocab-file is missing: .*tokenizer.json"),
    (["--skip-tokenize"], "--hf-tokenizer"),
    (["--skip-tokenize", "--text-column", "body"], "body.*messages, id"),
    (["--skip-tokenize", "--split", "test"], "no split test; there are train"),
    (["--skip-tokenize", "--skip-count", "--text-column", "id"], r'row 0 .*"id" is int'),
    (["--skip-tokenize", "--hf-tokenizer", "/none"], "/none: no such folder"),
])  # fmt: skip
def test_what_cannot_be_done_is_one_line(words: list[str], message: str, chats: Path, tmp_path: Path):
    flags = [word.format(hf=HF_TOKENIZER) for word in words]
    with pytest.raises(SystemExit, match=rf"^prepare_hf_dataset.py: error: .*{message}") as stopped:
        prepare_hf_dataset.main(["--dataset", str(chats), "--output-base", str(tmp_path / "out"), *flags])
    assert "\n" not in str(stopped.value)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
