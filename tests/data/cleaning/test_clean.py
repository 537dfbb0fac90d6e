"""tools/datasets/clean.py from files to files: the same documents from any workers, files and devices, after
a kill too, and every document accounted for."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import zstandard

from megatron.data.cleaning import plan
from megatron.data.preprocessing.inputs import resolve
from tests.data.cleaning.corpus import documents
from tests.data.samples import jsonl
from tools.datasets import clean as tool

ROOT = Path(__file__).resolve().parents[3]
RULES = ["--recipe", "gopher-repetition,c4", "--set", "c4.min_num_sentences=1"]
TOGETHER = ["--exact", "document,paragraph,line", "--minhash", "--validation", "0.2"]
ALL = [*RULES, *TOGETHER]


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Documents with further fields, among them copies, near copies, and copies of lines."""
    draw, made = random.Random(seed), list[dict[str, Any]]()
    texts = documents(count, seed)
    for number, text in enumerate(texts):
        kind = draw.random()
        if made and kind < 0.1:
            text = made[draw.randrange(len(made))]["text"]
        elif made and kind < 0.2:
            text = f"{made[draw.randrange(len(made))]['text']} and more"
        elif made and kind < 0.3:
            text += "\n" + draw.choice(made[-1]["text"].splitlines() or [""])
        made.append({"id": f"d{number}", "text": text, "meta": {"score": draw.randrange(5), "n": None}})
    return made


def read(folder: Path, name: str = "train") -> list[dict[str, Any]]:
    """All rows of a set, by zstandard, gzip, json and pyarrow."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob(f"{name}-*")):
        if path.suffix == ".parquet":
            found += pyarrow.parquet.read_table(path).to_pylist()
            continue
        data = path.read_bytes()
        if path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
        found += map(json.loads, (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines())
    return found


def clean(folder: Path, source: Path, *flags: str | Path) -> dict[str, Any]:
    """Run the tool into a folder; its metadata."""
    tool.main([str(source), str(folder), *map(str, flags)])
    return json.loads((folder / "metadata.json").read_text())


def results(folder: Path) -> dict[str, bytes]:
    """The files of a result by name, and its counts."""
    metadata = json.loads((folder / "metadata.json").read_text())
    kept = {name: (folder / name).read_bytes() for name in metadata["output_files"]}
    names = ("counts", "account", "document_counts", "chars", "exact", "minhash", "pieces")
    return {**kept, "counts": json.dumps({name: metadata.get(name) for name in names}).encode()}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts and several files, though there is little input."""
    from megatron.data.preprocessing import shards

    monkeypatch.setattr(plan, "_LEAST", 1 << 14)
    monkeypatch.setattr(shards, "CHUNK_BYTES", 1 << 13)
    monkeypatch.setattr(tool, "_MB", 1 << 14)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "raw.jsonl", rows(260))


def texts_of(path: Path, texts: Iterable[str]) -> Path:
    return jsonl(path, [{"text": text} for text in texts])


def test_workers_files_and_devices_change_nothing(source: Path, tmp_path: Path, small_parts: None) -> None:
    clean(tmp_path / "one", source, *ALL, "--file-mb", "1")
    expected = results(tmp_path / "one")
    assert len(list((tmp_path / "one").glob("train-*"))) > 2
    clean(tmp_path / "three", source, *ALL, "--file-mb", "1", "--workers", "3")
    assert results(tmp_path / "three") == expected
    lines, parts = source.read_text().splitlines(keepends=True), tmp_path / "parts"
    parts.mkdir()
    (parts / "a.jsonl").write_text("".join(lines[:7]))
    (parts / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[7:150]).encode()))
    (parts / "c.jsonl.zst").write_bytes(zstandard.compress("".join(lines[150:]).encode()))
    clean(tmp_path / "files", parts, *ALL, "--file-mb", "1", "--workers", "2")
    files = results(tmp_path / "files")
    one, other = (json.loads(found.pop("counts")) for found in (files, expected))
    assert files == expected and one["counts"] == other["counts"]
    texts, others = (
        {reason: [sample[1] for sample in samples] for reason, samples in counted["account"]["samples"].items()}
        for counted in (one, other)
    )
    assert texts == others and max(map(len, texts.values())) == 8, "of more than eight the same eight"


def test_which_pairs_are_compared_does_not_depend_on_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of document in turn, which share most bands; only those of one kind are similar enough."""
    given = []
    for family in range(8):
        words = ["".join(random.Random(1000 * family + n).choices("abcdef", k=6)) for n in range(404)]
        for number in range(9):
            kind = words[:400] if number % 2 else words[4:]  # a similarity of 0.98
            given.append({"text": " ".join([*kind, "and", "abcdefghi"[number] * 3])})
    source = jsonl(tmp_path / "raw.jsonl", given)
    left = []
    for least in (1 << 20, 8 << 10):
        monkeypatch.setattr(plan, "_LEAST", least)
        monkeypatch.setattr("megatron.data.preprocessing.shards.CHUNK_BYTES", 1 << 10)
        clean(tmp_path / str(least), source, "--minhash", "--jaccard", "0.99")
        left.append(read(tmp_path / str(least)))
    assert left[0] == left[1] and len(left[0]) >= 16, "two kinds of eight families"


def test_killed_while_files_get_their_places(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some have theirs, over another result too; nothing of what was dropped is lost."""
    flags = [*TOGETHER, "--keep-rejected"]
    clean(tmp_path / "whole", source, *flags)
    clean(tmp_path / "out", source, "--keep-rejected")

    class Killed(BaseException):
        pass

    moved, kill_at = list[Path](), 0

    def replace(one: Path, other: Path) -> None:
        if Path(other).parent in (tmp_path / "out", tmp_path / "out" / "rejected"):
            moved.append(other)
            if len(moved) == kill_at:
                raise Killed
        os.rename(one, other)

    monkeypatch.setattr("megatron.data.cleaning.output_folder.os.replace", replace)
    for number in (2, 4, 3):  # the last is the metadata
        moved.clear()
        kill_at = number
        with pytest.raises(Killed):
            clean(tmp_path / "out", source, *flags, "--overwrite")
    monkeypatch.undo()
    clean(tmp_path / "out", source, *flags)
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    one, other = (sorted(path.name for path in (tmp_path / name / "rejected").iterdir()) for name in ("out", "whole"))
    assert one == other and len(one) > 1


def test_nothing_of_somebody_else_s_is_lost(source: Path, tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    data.mkdir()
    other.mkdir()
    mine = data / "train-00000-of-00001.jsonl"
    mine.write_text(source.read_text())
    for words, message in (
        ([mine, data, "--overwrite"], "train-00000-of-00001.jsonl.*read"),
        ([data, data / "out"], "lies in .*/data"),
        ([source, data, "--overwrite"], "train-00000-of-00001.jsonl: .*not made"),
    ):
        with pytest.raises(SystemExit, match=message):
            tool.main(list(map(str, words)))
    assert mine.read_text() == source.read_text()
    for text in ("[1, 2]", "{}", '{"model": 1}'):
        (other / "metadata.json").write_text(text)
        with pytest.raises(SystemExit, match="metadata.json: .*not made.*damaged"):
            tool.main([str(source), str(other), "--overwrite"])
    unfinished = tmp_path / "new" / ".clean-0123" / "filtered"
    unfinished.mkdir(parents=True)
    with pytest.raises(SystemExit, match="no key"):
        tool.main([str(source), str(tmp_path / "new"), "--text-key", "typo"])
    assert unfinished.exists(), "of another command, which may be typed again"
    clean(tmp_path / "new", source)
    assert not list((tmp_path / "new").glob(".clean-*"))


def test_what_a_dropped_document_repeats_stays(tmp_path: Path) -> None:
    """A line of a near-duplicate that goes is no reason to take it out of another document."""
    core = " ".join("".join(random.Random(n).choices("abcdef", k=6)) for n in range(300))
    line = "A sentence that two of the documents have."
    source = texts_of(tmp_path / "raw.jsonl", (core, f"{core} x\n{line}", f"Other.\n{line}"))
    clean(tmp_path / "out", source, "--exact", "line", "--minhash")
    assert [row["text"] for row in read(tmp_path / "out")] == [core, f"Other.\n{line}"]


def test_torch_s_signatures_are_the_same_and_go_on_where_there_is_no_device(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean(tmp_path / "numpy", source, "--minhash")
    with monkeypatch.context() as patch:
        patch.setattr(tool, "resources_of", lambda flags: tool.Resources(2, "cpu"))
        clean(tmp_path / "torch", source, "--minhash")
        patch.setattr(tool, "resources_of", lambda flags: tool.Resources(1, "cpu"))
        patch.setattr("megatron.data.cleaning.job.sign_on_device", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            clean(tmp_path / "begun", source, "--minhash")
    clean(tmp_path / "begun", source, "--minhash")
    whole, torch = results(tmp_path / "numpy"), results(tmp_path / "torch")
    assert results(tmp_path / "begun") == whole and any(name.startswith("train-") for name in whole)
    assert all(torch[name] == data for name, data in whole.items() if name.startswith("train-"))


@pytest.mark.ends_processes
def test_killed_and_started_again_it_writes_the_same_bytes(
    source: Path, tmp_path: Path, small_parts: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL to all processes as soon as a file of a pass is there."""
    flags = [*TOGETHER, "--file-mb", "1"]
    clean(tmp_path / "whole", source, *flags)
    code = (
        "import sys; from megatron.data.cleaning import plan; from megatron.data.preprocessing import shards\n"
        "from tools.datasets import clean\n"
        "plan._LEAST, shards.CHUNK_BYTES, clean._MB = 1 << 14, 1 << 13, 1 << 14\n"
        "clean.main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, str(source), str(tmp_path / "out"), *flags, "--workers", "2"]
    for after in ("filtered/000003.json", "minhash/clusters.json", "pieces/000002.json"):
        killed = subprocess.Popen(
            words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 120
        while not list((tmp_path / "out").glob(f".clean-*/{after}")):
            assert time.monotonic() < deadline and killed.poll() is None, killed.communicate()[0]
            time.sleep(0.002)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        assert not (tmp_path / "out" / "metadata.json").exists() and not list((tmp_path / "out").glob("train-*"))
    capsys.readouterr()
    clean(tmp_path / "out", source, *flags)
    assert "of an earlier run" in "".join(capsys.readouterr())
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    assert not list((tmp_path / "out").glob(".clean-*"))


def test_every_document_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = rows(200, seed=4)
    source, out = jsonl(tmp_path / "raw.jsonl", given), tmp_path / "out"
    flags = [*RULES, "--exact", "document", "--minhash", "--validation", "0.2", "--keep-rejected"]
    metadata = clean(out, source, *flags)
    train, validation = read(out), read(out, "validation")
    rejected = [row for path in sorted((out / "rejected").iterdir()) for row in resolve_rows(path)]
    assert metadata["documents_read"] == 200 == len(train) + len(validation) + len(rejected)
    assert metadata["document_counts"] == {"train": len(train), "validation": len(validation)}
    all_rows = [*train, *validation, *(one["row"] for one in rejected)]
    assert {row["id"] for row in given} == {row["id"] for row in all_rows}
    assert sum(metadata["counts"].values()) == len(rejected)
    by_reason = Counter(row["reason"] for row in rejected)
    assert by_reason == metadata["counts"] and {"exact/document", "minhash/near_duplicate"} < by_reason.keys()
    originals = {row["id"]: row for row in given}
    for row in train:
        assert {**row, "text": ""} == {**originals[row["id"]], "text": ""}, "further fields stay"
    assert metadata["inputs"][0]["sha256"] and metadata["args"]["validation"] == 0.2
    page = (out / "report.html").read_text()
    assert all(reason in page for reason in by_reason)
    said = capsys.readouterr().out
    assert f"train: {len(train):,} documents" in said
    tool.main([str(source), str(out), *flags])
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="another job.*--overwrite"):
        tool.main([str(source), str(out), "--minhash"])
    (out / "train-of-mine-00000-of-00001.txt").write_text("somebody else's")
    clean(out, source, "--minhash", "--overwrite")
    assert not read(out, "validation") and not list((out / "rejected").iterdir())
    assert (out / "train-of-mine-00000-of-00001.txt").exists()


def resolve_rows(path: Path) -> list[dict[str, Any]]:
    return [row.value() for file in resolve([path]) for shard in file.shards(None) for row in shard.rows()]


def test_what_is_exactly_the_same(tmp_path: Path) -> None:
    head, line = "The first paragraph of a document.", "A line that stands in several places."
    texts = [
        f"{head}\n\nOne.\n{line}", f"{head}  \n\nOne.\n{line} ", f"{line}\nTwo.\n\n{head}", f"{head}\n\n{line}",
        "short\nshort\nAnother text.\n\n\nwhose paragraphs are its own, as they stand.",
    ]  # fmt: skip
    source = texts_of(tmp_path / "raw.jsonl", texts)
    expected = {
        "document": [texts[0], texts[2], texts[3], texts[4]],
        "line": [texts[0], "One.", "Two.", texts[4]],
        "paragraph": [texts[0], f"{line}\nTwo.", line, texts[4]],
        "document,paragraph,line": [texts[0], "Two.", texts[4]],
    }
    for scopes, left in expected.items():
        metadata = clean(tmp_path / scopes, source, "--exact", scopes)
        assert [row["text"] for row in read(tmp_path / scopes)] == left, scopes
    assert metadata["counts"] == {"exact/document": 1, "exact/nothing_left": 1}


@pytest.mark.parametrize(("flags", "stays"), [
    ([], ["a", "d"]),
    (["--keep", "longest"], ["c", "d"]),
    (["--keep", "best", "--score", "meta.score"], ["b", "d"]),
    (["--jaccard", "0.999"], ["a", "b", "c", "d"]),
    (["--jaccard", "0.9"], ["a", "d"]),
])  # fmt: skip
def test_which_of_a_cluster_stays(flags: list[str], stays: list[str], tmp_path: Path) -> None:
    base, other = documents(2, seed=11)[0], "Entirely different words are found in this one, and nowhere else."
    text = " ".join("".join(random.Random(n).choices("abcdef", k=6)) for n in range(300))
    given = [
        {"id": "a", "text": text, "meta": {"score": 1}}, {"id": "b", "text": text + " end", "meta": {"score": 3.5}},
        {"id": "c", "text": text + " longer end", "meta": {"score": 3}},
        {"id": "d", "text": other + base[:0], "meta": {"score": 0}},
    ]  # fmt: skip
    clean(tmp_path / "out", jsonl(tmp_path / "raw.jsonl", given), "--minhash", *flags)
    assert [row["id"] for row in read(tmp_path / "out")] == stays


def test_contamination(tmp_path: Path) -> None:
    question = "Which of these metals is a liquid at the temperature of an ordinary room?"
    asked = [{"question": question, "choices": {"text": ["mercury", "iron"]}}, {"question": "Too short to compare."}]
    (tmp_path / "sets").mkdir()
    jsonl(tmp_path / "sets" / "quiz.jsonl", asked)
    texts = [
        f"He asked: {question.upper()} Nobody knew.", "Which of these metals is a liquid? Nobody knew.",
        "Too short to compare.", f"Said he; “{question.replace(' ', chr(10))}”",
    ]  # fmt: skip
    source = texts_of(tmp_path / "raw.jsonl", texts)
    metadata = clean(tmp_path / "out", source, "--decontaminate", tmp_path / "sets")
    assert [row["text"] for row in read(tmp_path / "out")] == texts[1:3]
    assert metadata["counts"] == {"contamination/quiz.jsonl": 2}
    (note,) = metadata["notes"]
    assert note.startswith("--decontaminate: 3 of 4 texts ") and "13 words" in note
    with pytest.raises(SystemExit, match="40 words.*--decontaminate-ngrams"):
        clean(tmp_path / "b", source, "--decontaminate", tmp_path / "sets", "--decontaminate-ngrams", "40")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_formats_in_and_out(kind: str, tmp_path: Path) -> None:
    given = [{"text": f"text {n}", "n": n, "tags": [n, None], "of": {"a": str(n)}} for n in range(30)]
    clean(tmp_path / "a", jsonl(tmp_path / "raw.jsonl", given), "--format", kind)
    assert read(tmp_path / "a") == given
    clean(tmp_path / "b", tmp_path / "a", "--format", "jsonl")
    assert read(tmp_path / "b") == given


def test_fields_that_only_some_rows_have(tmp_path: Path) -> None:
    last = {"text": "b", "n": float("nan"), "reason": "too"}
    given = [{"text": "a"}, {"text": "b", "extra": 5, "reason": "mine"}, last]
    source = jsonl(tmp_path / "raw.jsonl", given)
    clean(tmp_path / "a", source, "--format", "parquet", "--exact", "document", "--keep-rejected")
    assert read(tmp_path / "a") == [
        {"text": "a", "extra": None, "reason": None, "n": None}, {"text": "b", "extra": 5, "reason": "mine", "n": None}
    ]  # fmt: skip
    (rejected,) = resolve_rows(tmp_path / "a/rejected/duplicates-00000-of-00001.jsonl.zst")
    assert rejected == {"reason": "exact/document", "row": {"text": "b", "n": None, "reason": "too"}}
    for bad in ({"of": {}}, {"of": 2**70}, {"of": "\ud800"}):
        with pytest.raises(SystemExit, match="--format parquet: .*jsonl"):
            clean(tmp_path / "b", jsonl(tmp_path / "bad.jsonl", [{"text": "a", **bad}]), "--format", "parquet")


def test_repairs_languages_and_personal_data(tmp_path: Path) -> None:
    german = "Der schnelle braune Fuchs springt über den faulen Hund, und alle Leute sehen ihm dabei zu."
    english = "The quick brown fox jumps over the lazy dog, and all of the people look at it."
    broken = (
        "caf\u00c3\u00a9 e\x07\u0301 \r\nof\x0cpage Write to me@example.org or 8.8.8.8, not 192.168.0.1 or 1.2.3.4.5"
    )
    source = texts_of(tmp_path / "raw.jsonl", (german, f"{english} {broken}"))
    metadata = clean(tmp_path / "out", source, "--language", "en", "--mask-personal")
    assert [row["text"] for row in read(tmp_path / "out")] == [
        f"{english} café é \nof\npage Write to email@example.com or 192.0.2.1, not 192.168.0.1 or 1.2.3.4.5"
    ]
    assert metadata["counts"] == {"language/other_language": 1}
    details = metadata["account"]["details"]
    assert details["languages"] == {"de": 1, "en": 1} and details["addresses_replaced"] == {"addresses_replaced": 2}
    clean(tmp_path / "as it is", source, "--normalize", "none")
    assert [row["text"] for row in read(tmp_path / "as it is")][1].endswith(broken)


@pytest.mark.parametrize(("flags", "message"), [
    ("--text-key body", 'raw.jsonl:1: no key "body".*id, text, meta.*--text-key'),
    ("--exact word", "--exact: .*word.*document, paragraph, line"),
    ("--normalize nfkc", "--normalize: .*nfkc.*ftfy, control, nfc"),
    ("--keep longest", "--keep, --jaccard and --device .*--minhash"),
    ("--minhash --keep best", "--keep best .*--score"),
    ("--minhash --keep best --score meta.n", "raw.jsonl:1: --score meta.n .*None"),
    ("--minhash --device cuda:99", "--device cuda:99: "),
    ("--language xx", "--language xx: py3langid"),
    ("--language ", "--language: .*none"),
    ("--set c4.min_num_sentences=1", "--set .*--recipe"),
    ("--minhash --minhash-seed 5000000000", "--minhash-seed "),
    ("--recipe c4 --word-language xx-none", "spaCy"),
    ("--recipe gopher --set gopher-quality.min_doc_words=9999", "no document .*3"),
])  # fmt: skip
def test_what_cannot_be_is_said_in_a_line(flags: str, message: str, tmp_path: Path) -> None:
    source = jsonl(tmp_path / "raw.jsonl", rows(3))
    with pytest.raises(SystemExit, match=message) as refused:
        tool.main([str(source), str(tmp_path / "out"), *flags.split(" ")])
    assert "\n" not in str(refused.value) and str(refused.value).startswith("clean.py: error: ")
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_rows_that_cannot_be_read(tmp_path: Path) -> None:
    source = tmp_path / "raw.jsonl"
    source.write_text('{"text": "one"}\n{"text": 2}\nnot json\n{"text": "four"}\n')
    with pytest.raises(SystemExit, match=r'raw.jsonl:2: "text" is int, not text'):
        clean(tmp_path / "out", source)
    metadata = clean(tmp_path / "out", source, "--on-error", "skip", "--keep-rejected")
    rejected = resolve_rows(tmp_path / "out/rejected/filtered-000000.jsonl.zst")
    (refused,) = [row for row in rejected if "not json" in row["row"]]
    assert refused["reason"] == "unreadable/row" and "not valid JSON" in refused["problem"]
    assert [row["text"] for row in read(tmp_path / "out")] == ["one", "four"]
    assert metadata["counts"] == {"unreadable/row": 2}
