"""tools/datasets/clean.py: workers, files, devices, kills change nothing; every document is accounted for."""

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
from megatron.data.preprocessing import shards
from tests.data.cleaning.corpus import documents
from tests.data.preprocessing.test_readers import input_rows
from tests.data.samples import ROOT, jsonl
from tools.datasets import clean as tool

RULES = ["--recipe", "gopher-repetition,c4", "--set", "c4.min_num_sentences=1"]
CORPUS_FLAGS = ["--exact", "document,paragraph,line", "--minhash", "--validation", "0.2"]
ALL = [*RULES, *CORPUS_FLAGS]


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Documents with further fields, among them copies, near copies, and copies of lines."""
    draw, result = random.Random(seed), list[dict[str, Any]]()
    for number, text in enumerate(documents(count, seed)):
        kind = draw.random()
        if result and kind < 0.1:
            text = result[draw.randrange(len(result))]["text"]
        elif result and kind < 0.2:
            text = f"{result[draw.randrange(len(result))]['text']} and more"
        elif result and kind < 0.3:
            text += "\n" + draw.choice(result[-1]["text"].splitlines() or [""])
        result.append({"id": f"d{number}", "text": text, "meta": {"score": draw.randrange(5), "n": None}})
    return result


def read(folder: Path, name: str = "train") -> list[dict[str, Any]]:
    """All rows of a set, by zstandard, gzip, json and pyarrow."""
    loaded: list[dict[str, Any]] = []
    for path in sorted(folder.glob(f"{name}-*")):
        if path.suffix == ".parquet":
            loaded += pyarrow.parquet.read_table(path).to_pylist()
            continue
        data = path.read_bytes()
        if path.suffix == ".zst":
            data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
        loaded += map(json.loads, (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines())
    return loaded


def left_in(folder: Path, key: str = "text") -> list[Any]:
    return [row[key] for row in read(folder)]


def clean(folder: Path, source: Path, *flags: str | Path) -> dict[str, Any]:
    """Run the tool into a folder; its metadata."""
    tool.main([str(source), str(folder), *map(str, flags)])
    return json.loads((folder / "metadata.json").read_text())


def refused(*words: str | Path, saying: str) -> None:
    """By the tool, in one line of its own."""
    with pytest.raises(SystemExit, match=rf"^clean\.py: error: [^\n]*{saying}[^\n]*$"):
        tool.main(list(map(str, words)))


def results(folder: Path) -> dict[str, bytes]:
    """The files of a result by name, and its counts."""
    metadata = json.loads((folder / "metadata.json").read_text())
    names = ("counts", "account", "document_counts", "chars", "exact", "minhash", "pieces")
    counts = json.dumps({name: metadata.get(name) for name in names}).encode()
    return {name: (folder / name).read_bytes() for name in metadata["output_files"]} | {"counts": counts}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts and several files, though there is little input."""
    for module, name, size in (
        (plan, "_MIN_PART_BYTES", 1 << 14),
        (shards, "CHUNK_BYTES", 1 << 13),
        (tool, "_MB", 1 << 14),
    ):
        monkeypatch.setattr(module, name, size)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "raw.jsonl", rows(260))


def texts_of(path: Path, texts: Iterable[str]) -> Path:
    return jsonl(path, [{"text": text} for text in texts])


def made_up_words(count: int, seed: int = 0) -> list[str]:
    return ["".join(random.Random(seed + n).choices("abcdef", k=6)) for n in range(count)]


@pytest.mark.more
def test_workers_files_and_devices_change_nothing(source: Path, tmp_path: Path, small_parts: None) -> None:
    clean(tmp_path / "one", source, *ALL, "--file-mb", "1")
    expected = results(tmp_path / "one")
    assert len(list((tmp_path / "one").glob("train-*"))) > 2
    clean(tmp_path / "three", source, *ALL, "--file-mb", "1", "--workers", "3")
    assert results(tmp_path / "three") == expected
    lines, parts = source.read_bytes().splitlines(keepends=True), tmp_path / "parts"
    parts.mkdir()
    (parts / "a.jsonl").write_bytes(b"".join(lines[:7]))
    (parts / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[7:150])))
    (parts / "c.jsonl.zst").write_bytes(zstandard.compress(b"".join(lines[150:])))
    clean(tmp_path / "files", parts, *ALL, "--file-mb", "1", "--workers", "2")
    files = results(tmp_path / "files")
    reports = [json.loads(output.pop("counts")) for output in (files, expected)]
    assert files == expected and reports[0]["counts"] == reports[1]["counts"]
    sample_texts = [
        {reason: [sample[1] for sample in samples] for reason, samples in report["account"]["samples"].items()}
        for report in reports
    ]
    assert sample_texts[0] == sample_texts[1] and max(map(len, sample_texts[0].values())) == 8, (
        "of more than eight the same eight"
    )


def test_which_pairs_are_compared_does_not_depend_on_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of document in turn, which share most bands; only those of one kind are similar enough."""
    texts = []
    for family in range(8):
        words = made_up_words(404, 1000 * family)
        for number in range(9):
            kind = words[:400] if number % 2 else words[4:]  # a similarity of 0.98
            texts.append(" ".join([*kind, "and", "abcdefghi"[number] * 3]))
    source = texts_of(tmp_path / "raw.jsonl", texts)
    left = []
    for min_bytes in (1 << 20, 8 << 10):
        monkeypatch.setattr(plan, "_MIN_PART_BYTES", min_bytes)
        monkeypatch.setattr("megatron.data.preprocessing.shards.CHUNK_BYTES", 1 << 10)
        clean(tmp_path / str(min_bytes), source, "--minhash", "--jaccard", "0.99")
        left.append(read(tmp_path / str(min_bytes)))
    assert left[0] == left[1] and len(left[0]) >= 16, "two kinds of eight families"


def test_killed_while_files_get_their_places(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some have theirs, over another result too; nothing of what was dropped is lost."""
    flags = [*CORPUS_FLAGS, "--keep-rejected"]
    clean(tmp_path / "whole", source, *flags)
    clean(tmp_path / "out", source, "--keep-rejected")

    class Killed(BaseException):
        pass

    moved, kill_at = list[Path](), 0

    def replace(old_path: Path, new_path: Path) -> None:
        if Path(new_path).parent in (tmp_path / "out", tmp_path / "out" / "rejected"):
            moved.append(new_path)
            if len(moved) == kill_at:
                raise Killed
        os.rename(old_path, new_path)

    monkeypatch.setattr("megatron.data.cleaning.publishing.os.replace", replace)
    for number in (2, 4, 3):  # the last is the metadata
        moved.clear()
        kill_at = number
        with pytest.raises(Killed):
            clean(tmp_path / "out", source, *flags, "--overwrite")
    monkeypatch.undo()
    clean(tmp_path / "out", source, *flags)
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    actual_names, expected_names = (
        sorted(path.name for path in (tmp_path / name / "rejected").iterdir()) for name in ("out", "whole")
    )
    assert actual_names == expected_names and len(actual_names) > 1


def test_nothing_of_somebody_else_s_is_lost(source: Path, tmp_path: Path) -> None:
    data, foreign_folder = tmp_path / "data", tmp_path / "other"
    data.mkdir()
    foreign_folder.mkdir()
    user_file = data / "train-00000-of-00001.jsonl"
    user_file.write_text(source.read_text())
    refused(user_file, data, "--overwrite", saying="holds the input .*train-00000-of-00001.jsonl")
    refused(data, data / "out", saying="/out: .*input .*/data.*choose another")
    refused(source, data, "--overwrite", saying="train-00000-of-00001.jsonl: .*not made")
    assert user_file.read_text() == source.read_text()
    for text in ("[1, 2]", "{}", '{"model": 1}'):
        (foreign_folder / "metadata.json").write_text(text)
        refused(source, foreign_folder, "--overwrite", saying="metadata.json: .*not made.*damaged")
    unfinished = tmp_path / "new" / ".clean-0123" / "filtered"
    unfinished.mkdir(parents=True)
    refused(source, tmp_path / "new", "--text-key", "typo", saying="no key")
    assert unfinished.exists(), "of another command, which may be typed again"
    clean(tmp_path / "new", source)
    assert not list((tmp_path / "new").glob(".clean-*"))


def test_what_a_dropped_document_repeats_stays(tmp_path: Path) -> None:
    """A line of a near-duplicate that goes is no reason to take it out of another document."""
    core = " ".join(made_up_words(300))
    line = "A sentence that two of the documents have."
    source = texts_of(tmp_path / "raw.jsonl", (core, f"{core} x\n{line}", f"Other.\n{line}"))
    clean(tmp_path / "out", source, "--exact", "line", "--minhash")
    assert left_in(tmp_path / "out") == [core, f"Other.\n{line}"]


def test_torch_s_signatures_are_the_same_and_go_on_where_there_is_no_device(source: Path, tmp_path: Path, monkeypatch):
    clean(tmp_path / "numpy", source, "--minhash")
    with monkeypatch.context() as patch:
        patch.setattr(tool, "resources_of", lambda flags: tool.Resources(2, "cpu"))
        clean(tmp_path / "torch", source, "--minhash")
        patch.setattr(tool, "resources_of", lambda flags: tool.Resources(1, "cpu"))
        patch.setattr("megatron.data.cleaning.deduplication.sign_on_device", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            clean(tmp_path / "begun", source, "--minhash")
    clean(tmp_path / "begun", source, "--minhash")
    numpy_results, torch = results(tmp_path / "numpy"), results(tmp_path / "torch")
    assert results(tmp_path / "begun") == numpy_results and any(name.startswith("train-") for name in numpy_results)
    assert all(torch[name] == data for name, data in numpy_results.items() if name.startswith("train-"))


@pytest.mark.ends_processes
def test_killed_and_started_again_it_writes_the_same_bytes(source: Path, tmp_path: Path, small_parts: None, capsys):
    """SIGKILL to all processes as soon as a file of a pass is there."""
    flags = [*CORPUS_FLAGS, "--file-mb", "1"]
    clean(tmp_path / "whole", source, *flags)
    code = (
        "import sys; from megatron.data.cleaning import plan; from megatron.data.preprocessing import shards\n"
        "from tools.datasets import clean\n"
        "plan._MIN_PART_BYTES, shards.CHUNK_BYTES, clean._MB = 1 << 14, 1 << 13, 1 << 14\n"
        "clean.main(sys.argv[1:])"
    )
    words = [sys.executable, "-c", code, str(source), str(tmp_path / "out"), *flags, "--workers", "2"]
    for progress_file in ("filtered/000003.json", "minhash/clusters.json", "pieces/000002.json"):
        killed = subprocess.Popen(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  start_new_session=True)  # fmt: skip
        deadline = time.monotonic() + 120
        while not list((tmp_path / "out").glob(f".clean-*/{progress_file}")):
            assert time.monotonic() < deadline and killed.poll() is None, killed.communicate()[0]
            time.sleep(0.002)
        os.killpg(killed.pid, signal.SIGKILL)
        killed.wait()
        assert not (tmp_path / "out" / "metadata.json").exists() and not list((tmp_path / "out").glob("train-*"))
    capsys.readouterr()
    clean(tmp_path / "out", source, *flags)
    assert "from an earlier run" in "".join(capsys.readouterr())
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    assert not list((tmp_path / "out").glob(".clean-*"))


def test_every_document_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source_rows = rows(200, seed=4)
    source, out = jsonl(tmp_path / "raw.jsonl", source_rows), tmp_path / "out"
    flags = [*RULES, "--exact", "document", "--minhash", "--validation", "0.2", "--keep-rejected"]
    metadata = clean(out, source, *flags)
    train, validation = read(out), read(out, "validation")
    rejected = [row.value() for path in sorted((out / "rejected").iterdir()) for row in input_rows(path)]
    assert metadata["documents_read"] == 200 == len(train) + len(validation) + len(rejected)
    assert metadata["document_counts"] == {"train": len(train), "validation": len(validation)}
    all_rows = [*train, *validation, *(rejection["row"] for rejection in rejected)]
    assert {row["id"] for row in source_rows} == {row["id"] for row in all_rows}
    assert sum(metadata["counts"].values()) == len(rejected)
    reason_counts = Counter(row["reason"] for row in rejected)
    assert reason_counts == metadata["counts"] and {"exact/document", "minhash/near_duplicate"} < reason_counts.keys()
    originals = {row["id"]: row for row in source_rows}
    for row in train:
        assert {**row, "text": ""} == {**originals[row["id"]], "text": ""}, "further fields stay"
    assert metadata["inputs"][0]["sha256"] and metadata["args"]["validation"] == 0.2
    assert all(reason in (out / "report.html").read_text() for reason in reason_counts)
    assert f"train: {len(train):,} documents" in capsys.readouterr().out
    tool.main([str(source), str(out), *flags])
    assert "nothing to do" in capsys.readouterr().out
    refused(source, out, "--minhash", saying="another job.*--overwrite")
    (out / "train-of-mine-00000-of-00001.txt").write_text("somebody else's")
    clean(out, source, "--minhash", "--overwrite")
    assert not read(out, "validation") and not list((out / "rejected").iterdir())
    assert (out / "train-of-mine-00000-of-00001.txt").exists()


def test_what_is_exactly_the_same(tmp_path: Path) -> None:
    head, line = "The first paragraph of a document.", "A line that stands in several places."
    texts = [f"{head}\n\nOne.\n{line}", f"{head}  \n\nOne.\n{line} ", f"{line}\nTwo.\n\n{head}", f"{head}\n\n{line}",
             "short\nshort\nAnother text.\n\n\nwhose paragraphs are its own, as they stand."]  # fmt: skip
    source = texts_of(tmp_path / "raw.jsonl", texts)
    expected = {
        "document": [texts[0], texts[2], texts[3], texts[4]],
        "line": [texts[0], "One.", "Two.", texts[4]],
        "paragraph": [texts[0], f"{line}\nTwo.", line, texts[4]],
        "document,paragraph,line": [texts[0], "Two.", texts[4]],
    }
    for scopes, left in expected.items():
        metadata = clean(tmp_path / scopes, source, "--exact", scopes)
        assert left_in(tmp_path / scopes) == left, scopes
    assert metadata["counts"] == {"exact/document": 1, "exact/nothing_left": 1}


@pytest.mark.parametrize(("flags", "stays"), [
    ([], ["a", "d"]),
    (["--keep", "longest"], ["c", "d"]),
    (["--keep", "best", "--score", "meta.score"], ["b", "d"]),
    (["--jaccard", "0.999"], ["a", "b", "c", "d"]),
    (["--jaccard", "0.9"], ["a", "d"]),
])  # fmt: skip
def test_which_of_a_cluster_stays(flags: list[str], stays: list[str], tmp_path: Path) -> None:
    text = " ".join(made_up_words(300))
    source_rows = [
        {"id": "a", "text": text, "meta": {"score": 1}}, {"id": "b", "text": text + " end", "meta": {"score": 3.5}},
        {"id": "c", "text": text + " longer end", "meta": {"score": 3}},
        {"id": "d", "text": "Entirely different words are found in this one, and nowhere else.", "meta": {"score": 0}},
    ]  # fmt: skip
    clean(tmp_path / "out", jsonl(tmp_path / "raw.jsonl", source_rows), "--minhash", *flags)
    assert left_in(tmp_path / "out", "id") == stays


def test_contamination(tmp_path: Path) -> None:
    question = "Which of these metals is a liquid at the temperature of an ordinary room?"
    quiz_rows = [
        {"question": question, "choices": {"text": ["mercury", "iron"]}},
        {"question": "Too short to compare."},
    ]
    (tmp_path / "sets").mkdir()
    jsonl(tmp_path / "sets" / "quiz.jsonl", quiz_rows)
    texts = [f"He asked: {question.upper()} Nobody knew.", "Which of these metals is a liquid? Nobody knew.",
             "Too short to compare.", f"Said he; “{question.replace(' ', chr(10))}”"]  # fmt: skip
    source = texts_of(tmp_path / "raw.jsonl", texts)
    metadata = clean(tmp_path / "out", source, "--decontaminate", tmp_path / "sets")
    assert left_in(tmp_path / "out") == texts[1:3]
    assert metadata["counts"] == {"contamination/quiz.jsonl": 2}
    (note,) = metadata["notes"]
    assert note.startswith("--decontaminate: 3 of 4 texts ") and "13 words" in note
    words = ("--decontaminate", tmp_path / "sets", "--decontaminate-ngrams", "40")
    refused(source, tmp_path / "b", *words, saying="40 words.*--decontaminate-ngrams")


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_formats_in_and_out(kind: str, tmp_path: Path) -> None:
    source_rows = [{"text": f"text {n}", "n": n, "tags": [n, None], "of": {"a": str(n)}} for n in range(30)]
    clean(tmp_path / "a", jsonl(tmp_path / "raw.jsonl", source_rows), "--format", kind)
    assert read(tmp_path / "a") == source_rows
    clean(tmp_path / "b", tmp_path / "a", "--format", "jsonl")
    assert read(tmp_path / "b") == source_rows


def test_fields_that_only_some_rows_have(tmp_path: Path) -> None:
    last = {"text": "b", "n": float("nan"), "reason": "too"}
    source_rows = [{"text": "a"}, {"text": "b", "extra": 5, "reason": "mine"}, last]
    source = jsonl(tmp_path / "raw.jsonl", source_rows)
    clean(tmp_path / "a", source, "--format", "parquet", "--exact", "document", "--keep-rejected")
    assert read(tmp_path / "a") == [{"text": "a", "extra": None, "reason": None, "n": None},
                                    {"text": "b", "extra": 5, "reason": "mine", "n": None}]  # fmt: skip
    (rejected,) = input_rows(tmp_path / "a/rejected/duplicates-00000-of-00001.jsonl.zst")
    assert rejected.value() == {"reason": "exact/document", "row": {"text": "b", "n": None, "reason": "too"}}
    for bad in ({"of": {}}, {"of": 2**70}, {"of": "\ud800"}):
        source = jsonl(tmp_path / "bad.jsonl", [{"text": "a", **bad}])
        refused(source, tmp_path / "b", "--format", "parquet", saying="--format parquet: .*jsonl")


def test_repairs_languages_and_personal_data(tmp_path: Path) -> None:
    german = "Der schnelle braune Fuchs springt über den faulen Hund, und alle Leute sehen ihm dabei zu."
    english = "The quick brown fox jumps over the lazy dog, and all of the people look at it."
    broken = "cafÃ© e\x07\u0301 \r\nof\x0cpage Write to me@example.org or 8.8.8.8, not 192.168.0.1 or 1.2.3.4.5"
    source = texts_of(tmp_path / "raw.jsonl", (german, f"{english} {broken}"))
    metadata = clean(tmp_path / "out", source, "--language", "en", "--mask-personal")
    repaired = "café é \nof\npage Write to email@example.com or 192.0.2.1, not 192.168.0.1 or 1.2.3.4.5"
    assert left_in(tmp_path / "out") == [f"{english} {repaired}"]
    assert metadata["counts"] == {"language/other_language": 1}
    details = metadata["account"]["details"]
    assert details["languages"] == {"de": 1, "en": 1} and details["addresses_replaced"] == {"addresses_replaced": 2}
    clean(tmp_path / "as it is", source, "--normalize", "none")
    assert left_in(tmp_path / "as it is")[1].endswith(broken)


@pytest.mark.parametrize(("flags", "message"), [
    ("--text-key body", 'raw.jsonl:1: no key "body".*id, text, meta.*--text-key'),
    ("--exact word", "--exact: .*word.*document, paragraph, line"),
    ("--normalize nfkc", "--normalize: .*nfkc.*ftfy, control, nfc"),
    ("--keep longest", "--keep, --jaccard and --device .*--minhash"),
    ("--minhash --keep best", "--keep best .*--score"),
    ("--minhash --keep best --score meta.n", "raw.jsonl:1: --score meta.n .*None"),
    ("--minhash --device cuda:99", "--device cuda:99: "),
    ("--language xx", "--language xx: py3langid"),
    ("--language ", "--language: .*such as en"),
    ("--set c4.min_num_sentences=1", "--set .*--recipe"),
    ("--minhash --minhash-seed 5000000000", "--minhash-seed "),
    ("--recipe c4 --word-language xx-none", "spaCy"),
    ("--recipe gopher --set gopher-quality.min_doc_words=9999", "all 3 documents are dropped"),
])  # fmt: skip
def test_what_cannot_be_is_said_in_a_line(flags: str, message: str, tmp_path: Path) -> None:
    refused(jsonl(tmp_path / "raw.jsonl", rows(3)), tmp_path / "out", *flags.split(" "), saying=message)
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_rows_that_cannot_be_read(tmp_path: Path) -> None:
    source = tmp_path / "raw.jsonl"
    source.write_text('{"text": "one"}\n{"text": 2}\nnot json\n{"text": "four"}\n')
    refused(source, tmp_path / "out", saying=r'raw.jsonl:2: "text" is int, not text')
    metadata = clean(tmp_path / "out", source, "--on-error", "skip", "--keep-rejected")
    rejected = [row.value() for row in input_rows(tmp_path / "out/rejected/filtered-000000.jsonl.zst")]
    (bad,) = [row for row in rejected if "not json" in row["row"]]
    assert bad["reason"] == "unreadable/row" and "not valid JSON" in bad["problem"]
    assert left_in(tmp_path / "out") == ["one", "four"]
    assert metadata["counts"] == {"unreadable/row": 2}
