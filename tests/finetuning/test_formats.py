"""Rows of every format, as they are published, beside TRL's."""

import json
from pathlib import Path
from typing import Any

import pytest
from trl.data_utils import extract_prompt

from megatron.data import DataError
from megatron.finetuning.formats import CHATS, JUDGED, PAIRS, TEXTS, prompt_of, recognise
from megatron.finetuning.rows import RowSource, write_rows


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CONVERSATION = [user("Why?"), assistant("So."), user("Still?"), assistant("Yes.")]
SHAREGPT = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]
FORMATS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "messages": ({"messages": CONVERSATION, "id": 1}, CHATS, {"messages": CONVERSATION, "id": 1}),
    "sharegpt": ({"conversations": SHAREGPT}, CHATS, {"messages": CONVERSATION[:2]}),
    "alpaca": ({"instruction": "Sum.", "input": "1 2", "output": "3"}, CHATS,
               {"messages": [user("Sum.\n\n1 2"), assistant("3")]}),
    "alpaca without input": ({"instruction": "Sing.", "input": "", "output": "La"}, CHATS,
                             {"messages": [user("Sing."), assistant("La")]}),
    "dolly": ({"instruction": "Sing.", "context": "Low.", "response": "La"}, CHATS,
              {"messages": [user("Sing.\n\nLow."), assistant("La")]}),
    "question": ({"system": "Brief.", "question": "Why?", "answer": "So."}, CHATS,
                 {"messages": [{"role": "system", "content": "Brief."}, user("Why?"), assistant("So.")]}),
    "capitals": ({"Question": "Why?", "Answer": "So."}, CHATS, {"messages": [user("Why?"), assistant("So.")]}),
    "completion of messages": ({"prompt": [user("Why?")], "completion": [assistant("So.")]}, CHATS,
                               {"messages": [user("Why?"), assistant("So.")]}),
    "texts of pairs": ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, PAIRS,
                       {"prompt": [user("Why?")], "chosen": [assistant("So.")], "rejected": [assistant("No.")]}),
    "conversations and their prompt": (
        {"prompt": "Why?", "chosen": CONVERSATION[:2], "rejected": [user("Why?"), assistant("No.")]}, PAIRS,
        {"prompt": [user("Why?")], "chosen": [assistant("So.")], "rejected": [assistant("No.")]}),
    "judged": ({"prompt": "Why?", "completion": "So.", "label": True}, JUDGED,
               {"prompt": [user("Why?")], "completion": [assistant("So.")], "label": True}),
    "judged in CSV": ({"prompt": "Why?", "response": "So.", "label": "False"}, JUDGED,
                      {"prompt": [user("Why?")], "completion": [assistant("So.")], "label": False}),
    "texts that begin with brackets": ({"prompt": "[INST] a", "completion": "[1, 2]"}, CHATS,
                                       {"messages": [user("[INST] a"), assistant("[1, 2]")]}),
    "messages in CSV": ({"prompt": '[{"role": "user", "content": "Why?"}]', "completion": "So."}, CHATS,
                        {"messages": [user("Why?"), assistant("So.")]}),
    "text": ({"text": "Once upon a time"}, TEXTS, {"text": "Once upon a time"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_recognised(name: str) -> None:
    row, kind, expected = FORMATS[name]
    row_format = recognise(row, "data.jsonl")
    assert (row_format.kind, row_format.convert(row)) == (kind, expected)


def test_common_beginnings_are_those_of_trl() -> None:
    pair = {"chosen": CONVERSATION, "rejected": [*CONVERSATION[:3], assistant("No.")]}
    assert recognise(pair, "a").convert(pair) == extract_prompt(pair)


@pytest.mark.parametrize(("row", "words"), [
    ({"a": 1, "b": 2}, "a, b"),
    ([1], "list"),
])  # fmt: skip
def test_other_rows_are_refused(row: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        recognise(row, "data.jsonl")


@pytest.mark.parametrize(("row", "words"), [
    ({"messages": [user("Why?")]}, "messages.*assistant"),
    ({"question": "Why?", "answer": " "}, "answer"),
    ({"prompt": "Why?", "completion": "So.", "label": "maybe"}, "label.*maybe"),
    ({"chosen": [user("Why?"), assistant("So.")], "rejected": [user("How?"), assistant("No.")]}, "prompt"),
    ({"text": 3}, "text"),
])  # fmt: skip
def test_unusable_rows_are_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        recognise(row, "data.jsonl").convert(row)


def test_the_questions_are_the_users() -> None:
    rows = {kind: recognise(row, "a").convert(row) for row, kind, _ in FORMATS.values()}
    rows[CHATS] = {"messages": CONVERSATION}
    assert prompt_of(rows[CHATS], CHATS) == {"messages": CONVERSATION[:3]}
    assert prompt_of(rows[PAIRS], PAIRS) == {"messages": [user("Why?")]}
    assert prompt_of({"text": "a " * 20}, TEXTS) == {"prompt": " ".join("a" * 12)}
    assert prompt_of({"text": "a b"}, TEXTS) is None


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_row_is_in_one_part(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": f"{n}." if n != 5 else ""} for n in range(30)]
    written = write_rows(RowSource(write(tmp_path / "a.jsonl", rows), "0.1"), tmp_path / "data")
    parts = {name: read(tmp_path / "data" / f"{name}.jsonl") for name in ("train", "valid", "questions")}
    assert (written.train, written.valid, written.bad) == (26, 3, 1) and "a.jsonl:6" in written.problem
    answers = [row["messages"][1]["content"] for row in [*parts["train"], *parts["valid"]]]
    assert sorted(answers, key=float) == [f"{n}." for n in range(30) if n != 5]
    assert [line["messages"] for line in parts["questions"]] == [row["messages"][:1] for row in parts["valid"]]


def test_validation_may_be_another_file(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", [{"question": "1?", "answer": "1."}])
    valid = write(tmp_path / "b.jsonl", [{"messages": CONVERSATION}])
    assert write_rows(RowSource(train, valid), tmp_path / "data")[1:3] == (1, 1)
    assert read(tmp_path / "data" / "valid.jsonl") == [{"messages": CONVERSATION}]
    texts = write(tmp_path / "c.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match=r"c\.jsonl.*texts"):
        write_rows(RowSource(train, texts), tmp_path / "data")


@pytest.mark.parametrize(("rows", "valid", "words"), [
    ([], "0.1", r"a\.jsonl.*no rows"),
    ([{"question": "1?", "answer": ""}], "0.1", r"a\.jsonl:1"),
    ([{"question": "1?", "answer": "1."}], "0.1", "--valid FILE"),
    ([{"question": "1?", "answer": "1."}] * 4, "none.jsonl", "none.jsonl"),
    ([{"question": "1?", "answer": "1."}] * 4, "4", "valid 4"),
    ([{"question": "1?", "answer": "1."}, *[{"question": "1?"}] * 101], "1", r"a\.jsonl:2.*101 of the first 102"),
    ([{"text": "a"}, *[{"question": "1?", "answer": "1."}] * 9], "1", r"a\.jsonl:2.*9 of the first 10"),
    ([{"prompt": "1?", "completion": "1.", "label": True}] * 9, "1", "label is true"),
])  # fmt: skip
def test_files_are_refused(tmp_path: Path, rows: list[Any], valid: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        write_rows(RowSource(write(tmp_path / "a.jsonl", rows), valid), tmp_path / "data")


def test_a_surrogate_is_a_row_left_out(tmp_path: Path) -> None:
    rows = [json.dumps({"question": f"{n}?", "answer": f"{n}."}) for n in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows, r'{"question": "1?", "answer": "\ud83d"}']))
    written = write_rows(RowSource(str(tmp_path / "a.jsonl"), "1"), tmp_path / "data")
    assert (written.train, written.bad) == (29, 1) and "a.jsonl:31" in written.problem


def test_the_first_rows_may_be_unusable(tmp_path: Path) -> None:
    rows = [{"messages": None}, *[{"messages": CONVERSATION}] * 30]
    assert write_rows(RowSource(write(tmp_path / "a.jsonl", rows), "1"), tmp_path / "data")[1:4] == (29, 1, 1)


def test_a_split_of_a_dataset_as_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "set/data").mkdir(parents=True)
    for name in ("train", "test"):
        rows = [{"text": f"{name} {number}"} for number in range(20)]
        write(tmp_path / f"set/data/{name}-00000-of-00001.jsonl", rows)
    with pytest.raises(DataError, match="--split"):
        write_rows(RowSource(str(tmp_path / "set"), "2"), tmp_path / "data")
    assert write_rows(RowSource(str(tmp_path / "set"), "2", "test[:10]"), tmp_path / "data")[1:3] == (8, 2)
    texts = {row["text"] for name in ("train", "valid") for row in read(tmp_path / "data" / f"{name}.jsonl")}
    assert texts == {f"test {number}" for number in range(10)}


@pytest.mark.parametrize("files", [1, 30])
def test_text_files(tmp_path: Path, files: int) -> None:
    """The end of a single text is for validation, of several texts some."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(files):
        (folder / f"{number:02}.txt").write_text("".join(f"line {n} of {number}\n" for n in range(100)))
    written = write_rows(RowSource(str(folder), "0.1"), tmp_path / "data")
    parts = [[row["text"] for row in read(tmp_path / "data" / f"{name}.jsonl")] for name in ("train", "valid")]
    assert (written.format.kind, [len(part) for part in parts]) == (TEXTS, [1, 1] if files == 1 else [27, 3])
    texts = sorted((folder / f"{number:02}.txt").read_text() for number in range(files))
    assert sorted(["".join(parts[0] + parts[1])] if files == 1 else parts[0] + parts[1]) == texts
    assert files > 1 or len(parts[1][0].splitlines()) in (10, 11)
