"""Preprocess jobs: crashes and going on, bad rows, full disks, and what the metadata says."""

import gzip
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from megatron.data import DataError, IndexedDataset
from megatron.data.preprocessing import EncodeJob, job_runner, preprocess, shards
from megatron.tokenizer import make_tokenizer
from tests.data.samples import DATASET, ROOT, TOKENIZER, json_rows, jsonl, pair, refused, rows_of, write_dataset
from tools.datasets import preprocess_data

CHAR = EncodeJob(make_tokenizer, ("CharLevelTokenizer",), append_eod=True)


def corpus(path: Path, documents: int, size: int = 60) -> Path:
    chosen = random.Random(0)
    return jsonl(path, [{"text": f"{i} " + "word " * chosen.randrange(size // 5 * 2)} for i in range(documents)])


DRIVER = """
import sys
from megatron.data.preprocessing import EncodeJob, job_runner, preprocess, shards
from megatron.tokenizer import make_tokenizer

shards.CHUNK_BYTES, job_runner.JOURNAL_SECONDS = 2000, 0.02
print("start", flush=True)
job = EncodeJob(make_tokenizer, ("CharLevelTokenizer",), append_eod=True)
preprocess([sys.argv[1]], [sys.argv[2]], job, workers=2, metadata_file=sys.argv[2] + ".json")
"""


@pytest.mark.ends_processes
def test_killed_three_times_and_still_the_same_bytes(tmp_path: Path):
    """SIGKILL as soon as more is noted than before."""
    source = corpus(tmp_path / "a.jsonl", 8000)
    preprocess([source], [tmp_path / "whole"], CHAR)
    words = [sys.executable, "-c", DRIVER, str(source), str(tmp_path / "x")]

    def noted() -> list[bytes]:
        return [path.read_bytes() for path in tmp_path.glob(".x.parts-*/journal.json")]

    for _ in range(3):
        earlier_journals = noted()
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as command:
            deadline = time.monotonic() + 120
            while noted() in ([], earlier_journals):
                assert command.poll() is None and time.monotonic() < deadline
                time.sleep(0.002)
            command.kill()
        assert not (tmp_path / "x.idx").exists()
    subprocess.run(words, stdout=subprocess.PIPE, cwd=ROOT, check=True)
    assert pair(tmp_path / "x") == pair(tmp_path / "whole")
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.lstrip(".").startswith("x."))
    assert left == ["x.bin", "x.idx", "x.json"]


@pytest.mark.more
def test_a_crash_at_any_step_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The process ends, without a word, at the n-th change of the file system, for every n."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    monkeypatch.setattr(job_runner, "JOURNAL_SECONDS", 0)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # slow, and no matter where only a process ends
    source, job = corpus(tmp_path / "a.jsonl", 20), EncodeJob(make_tokenizer, ("CharLevelTokenizer",))
    preprocess([source], [tmp_path / "whole"], job)
    old, steps, went_on = write_dataset(tmp_path / "old", [5, 6]), 0, 0
    while True:
        folder = tmp_path / str(steps)
        folder.mkdir()
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{old.prefix}{suffix}", folder / f"x{suffix}")
        if (child := os.fork()) == 0:
            left = steps

            def dying(call):
                def step(*values, **options):
                    nonlocal left
                    left -= 1
                    if left < 0:
                        os._exit(9)
                    return call(*values, **options)

                return step

            for name in ("replace", "unlink", "fsync", "rmdir"):
                setattr(os, name, dying(getattr(os, name)))
            shutil.copyfileobj = dying(shutil.copyfileobj)
            try:
                preprocess([source], [folder / "x"], job, metadata_file=folder / "x.json")
            finally:
                os._exit(0)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if (folder / "x.idx").exists():  # the pair is the old one or the new one, never half of each
            assert pair(folder / "x") in (pair(tmp_path / "old"), pair(tmp_path / "whole")), steps
        result = preprocess([source], [folder / "x"], job, metadata_file=folder / "x.json")
        assert pair(folder / "x") == pair(tmp_path / "whole"), steps
        assert sorted(path.name for path in folder.iterdir()) == ["x.bin", "x.idx", "x.json"], steps
        assert json.loads((folder / "x.json").read_text())["total_tokens"] == result.outputs[0].tokens
        went_on += result.progress.resumed > 0
        shutil.rmtree(folder)
        if exit_code == 0:
            break
        steps += 1
    assert steps > 30 and went_on > 20


def test_another_job_does_not_go_on_from_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    source = corpus(tmp_path / "a.jsonl", 40)
    source.write_text(source.read_text() + "bad\n")
    for job in (CHAR, EncodeJob(make_tokenizer, ("CharLevelTokenizer",))):
        refused(r"a.jsonl:41: not valid JSON.*\d\d%.*--on-bad-row", preprocess, [source], [tmp_path / "x"], job)
        assert len(list(tmp_path.glob(".x.parts-*"))) == 1
    corpus(source, 40)  # mended, and so another input
    assert preprocess([source], [tmp_path / "x"], CHAR).progress.resumed == 0
    assert not list(tmp_path.glob(".x*"))


def test_two_at_once_on_one_output(tmp_path: Path):
    source = corpus(tmp_path / "a.jsonl", 10)
    waiting = "progress=lambda state: (print('at it', flush=True), __import__('time').sleep(600))"
    script = DRIVER.replace("workers=2", waiting)
    words = [sys.executable, "-c", script, str(source), str(tmp_path / "x")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
        assert [writer.stdout.readline() for _ in range(2)] == ["start\n", "at it\n"]
        refused("x: another process is writing it", preprocess, [source], [tmp_path / "x"], CHAR)
        writer.kill()
    assert len(IndexedDataset(preprocess([source], [tmp_path / "x"], CHAR).outputs[0].prefix)) == 10


@pytest.mark.parametrize("workers", [1, 2])
def test_skipped_bad_rows_are_counted_and_retained(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 30)
    bad = [b'{"text": "cut', b'{"n": 1}', b'{"text": "\\ud800"}', b'{"text": "\xff"}', b'{"text": 5}']
    lines = [b'{"text": "one"}', *bad[:3], b"", b'{"text": "two"}', *bad[3:]]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    skip = {"max_bad_rows": None, "errors_file": tmp_path / "x_errors.jsonl"}
    result = preprocess([tmp_path / "a.jsonl"], [tmp_path / "x"], CHAR, workers=workers, **skip)
    assert (result.progress.skipped, result.outputs[0].documents) == (5, 2)
    errors = json_rows(tmp_path / "x_errors.jsonl")
    assert [error["problem"].split(":")[1] for error in errors] == ["2", "3", "4", "7", "8"]
    assert errors[0]["row"] == bad[0].decode() + "\n" and "\\xff" in errors[3]["row"]


class Short(EncodeJob):
    """Refuses long documents when they are encoded, as --overlong refuse does."""

    def encode(self, prepared):
        if any(len(text) > 5 for texts in prepared for text in texts):
            raise DataError("too long")
        return super().encode(prepared)


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_that_fail_in_encoding_are_left_out_as_well(workers: int, tmp_path: Path):
    texts = ["one", "much too long", "two", "also too long", "three"]
    source, errors = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts]), tmp_path / "errors"
    job = Short(make_tokenizer, ("CharLevelTokenizer",))
    refused(r"^too long$", preprocess, [source], [tmp_path / "x"], job, workers=workers)
    result = preprocess([source], [tmp_path / "x"], job, workers=workers, max_bad_rows=None, errors_file=errors)
    assert result.progress.skipped == 2
    assert [json.loads(error["row"])["text"] for error in json_rows(errors)] == texts[1::2]
    assert [bytes(row).decode() for row in rows_of(tmp_path / "x")] == texts[::2]


def test_what_holds_no_text_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("a", "", " \n", "", "b", "\t", "", "c")])
    command("--input", source, "--output-prefix", tmp_path / "x")
    output, counts = capsys.readouterr().out, {"empty rows left out": 3, "documents of white space only": 2}
    assert all(f"{name}: {count}\n" in output for name, count in counts.items())
    assert json.loads((tmp_path / "x_metadata.json").read_text())["counts"] == counts


def test_a_damaged_file_is_not_said_to_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    intact_file, source = corpus(tmp_path / "a.jsonl", 40), tmp_path / "a.jsonl.gz"
    source.write_bytes(gzip.compress(intact_file.read_bytes())[:-20])
    refused(
        r"a.jsonl.gz: damaged or truncated \([^;]*\); make or copy it again$",
        preprocess,
        [intact_file, source],
        [tmp_path / "x"],
        CHAR,
    )
    assert list(tmp_path.glob(".x.parts-*"))  # something was done, so that a hint could be given


@pytest.mark.parametrize(
    "words, message", [("--jsonl-keys text text", "write the same files"), ("--workers -3", "--workers -3")]
)
def test_one_pair_for_two_keys_and_fewer_than_no_processes_are_refused(words: str, message: str, tmp_path: Path):
    with pytest.raises(SystemExit, match=f"^[^\n]*{message}[^\n]*$"):
        command("--input", corpus(tmp_path / "a.jsonl", 3), "--output-prefix", tmp_path / "x", *words.split())
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_keys_stay_in_step(tmp_path: Path):
    """A row without text under one key is an empty document there: n-th documents belong together."""
    rows = [{"q": "a", "a": "b"}, {"q": "", "a": "c"}, {"q": "", "a": ""}, {"q": "d", "a": ""}]
    job = EncodeJob(make_tokenizer, ("CharLevelTokenizer",), keys=("q", "a"))
    outputs = preprocess([jsonl(tmp_path / "a.jsonl", rows)], [tmp_path / "q", tmp_path / "a"], job).outputs
    assert [(output.documents, output.empty) for output in outputs] == [(3, 1), (3, 1)]
    assert [IndexedDataset(tmp_path / key).doc_idx.tolist() for key in job.keys] == [[0, 1, 1, 2], [0, 1, 2, 2]]


def test_a_disk_that_is_too_small_is_refused_before_and_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    source, usage = corpus(tmp_path / "a.jsonl", 40), namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10))
    with pytest.raises(DataError, match=f"{tmp_path}: disk full: about .* GB more needed, 1e-08 GB free$"):
        preprocess([source], [tmp_path / "x"], CHAR)
    free = iter([10**9, 10**9, 10])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(next(free)))
    with pytest.raises(DataError, match=r"disk full.* \(at \d+% of the input\); \d+% of the input is done and kept"):
        preprocess([source], [tmp_path / "x"], CHAR)
    assert not list(tmp_path.glob("x*"))
    monkeypatch.undo()
    monkeypatch.setattr(shards, "CHUNK_BYTES", 700)
    assert preprocess([source], [tmp_path / "x"], CHAR).progress.resumed == 2


def command(*words: object) -> None:
    preprocess_data.main(["--tokenizer-type", "CharLevelTokenizer", *map(str, words)])


def test_a_write_that_fails_is_one_line_and_leaves_no_half(tmp_path: Path):
    """A limit on the size of files stands for a disk that fills up while writing."""
    source = corpus(tmp_path / "a.jsonl", 3000, 1000)
    words = ("--input", str(source), "--output-prefix", str(tmp_path / "x"), "--workers", "2")
    tool, limit = ROOT / "tools" / "datasets" / "preprocess_data.py", source.stat().st_size // 4
    done = subprocess.run([sys.executable, str(tool), "--tokenizer-type", "CharLevelTokenizer", *words],
                          capture_output=True, text=True,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("preprocess_data.py: error: ") and "File too large" in done.stderr
    assert not list(tmp_path.glob("x*"))
    command(*words)
    assert len(IndexedDataset(tmp_path / "x_text_document")) == 3000


def test_the_metadata_tells_what_was_made_of_what(tmp_path: Path):
    source = DATASET / "corpusA.jsonl"
    words = ("--input", source, "--output-prefix", tmp_path / "x", "--tokenizer-type", "HFTokenizer")
    command(*words, "--vocab-file", TOKENIZER, "--append-eod")
    metadata, name = json.loads((tmp_path / "x_metadata.json").read_text()), "x_text_document"
    files, digest = [f"{name}.bin", f"{name}.idx"], hashlib.sha256(source.read_bytes()).hexdigest()
    assert metadata["token_counts"] == {name: 7074} and metadata["document_counts"] == {name: 80}
    assert metadata["total_tokens"] == 7074 and metadata["dtypes"] == {name: "uint16"} and metadata["rows_skipped"] == 0
    assert metadata["tokenizer"]["sha256"] == make_tokenizer("HFTokenizer", str(TOKENIZER)).fingerprint()
    assert metadata["inputs"] == [{"path": str(source), "bytes": source.stat().st_size, "sha256": digest}]
    assert metadata["args"]["append_eod"] is True and metadata["args"]["input"] == str(source)
    assert metadata["timing"]["seconds"] > 0 and metadata["output_files"] == [f"{tmp_path}/{file}" for file in files]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x_metadata.json", *files]


class Bytes:
    """A tokenizer quick enough for a long text."""

    vocab_size, eod = 256, 0

    def __init__(self, out_of_vocabulary: str = ""):
        self.out_of_vocabulary = out_of_vocabulary

    def fingerprint(self) -> str:
        return "bytes"

    def tokenize_batch(self, texts):
        return [[70000] if self.out_of_vocabulary else np.frombuffer(text.encode(), np.uint8) for text in texts]


def test_a_document_of_many_chunks(tmp_path: Path):
    text = "0123456789" * 2_000_000
    source = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("small", text, "last")])
    preprocess([source], [tmp_path / "x"], EncodeJob(Bytes, ("",)), workers=2)
    dataset = IndexedDataset(tmp_path / "x")
    assert [len(dataset[i]) for i in range(3)] == [5, 20_000_000, 4]
    assert dataset[1].astype(np.uint8).tobytes() == text.encode()


def test_an_id_beyond_the_type_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="token id 70000 does not fit uint16"):
        preprocess([corpus(tmp_path / "a.jsonl", 3)], [tmp_path / "x"], EncodeJob(Bytes, ("out of vocabulary",)))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_input_without_text_writes_nothing(tmp_path: Path):
    for name, text in (("a.jsonl", ""), ("b.jsonl", '{"text": ""}\n')):
        (tmp_path / name).write_text(text)
        refused(f"{name}: no document with text", preprocess, [tmp_path / name], [tmp_path / "x"], CHAR)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


MEMORY = """
import re, sys
from megatron.data.preprocessing import EncodeJob, preprocess
from megatron.tokenizer import make_tokenizer
preprocess([sys.argv[1]], [sys.argv[2]], EncodeJob(make_tokenizer, ("CharLevelTokenizer",)))
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


def test_memory_does_not_grow_with_the_input(tmp_path: Path):
    peaks = []
    for copies in (1, 6):
        source = jsonl(tmp_path / "a.jsonl", [{"text": "word " * 400}] * 3000 * copies)  # 6 MB, 36 MB
        words = [sys.executable, "-c", MEMORY, str(source), str(tmp_path / "x")]
        peaks.append(int(subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True).stdout))
    assert peaks[1] < peaks[0] * 1.1, peaks
