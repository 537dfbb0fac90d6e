"""Text to `.bin/.idx` by the plain tool against files that GPT-NeoX 2.0's wrote; keys, the command, what is
refused.

| GPT-NeoX | here |
|---|---|
| --dataset-impl lazy stores int32 whatever the vocabulary: twice the bytes | the tokens of mmap; lazy is only
read | | each of --jsonl-keys holds the text under `text` | its own |
| an empty document with --append-eod dies of IndexError | a boundary without tokens |
| a malformed line dies of a traceback without a line number | one line: file, line, what to do; or
--on-bad-row drop |"""  # noqa: W505 (lines to copy)

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest

from megatron.data import DataError, IndexedDataset
from megatron.data.preprocessing import EncodeJob, preprocess
from megatron.process.command_parser import CommandParser
from megatron.tokenizer import make_tokenizer
from tests.data.samples import DATASET, ROOT, TOKENIZER, json_rows, jsonl, pair, rows_of
from tools.datasets import preprocess_data
from tools.datasets.run_job import add_tokenizer_flags, tokenizer_of

BPE = ("HFTokenizer", str(TOKENIZER), None)
CHAR = ("CharLevelTokenizer", None, None)


def run(inputs: list[Path], prefix: Path, *, workers: int = 1, tokenizer=CHAR, keys=("text",), **options) -> list:
    job = EncodeJob(make_tokenizer, tokenizer, keys=keys, **options)
    return preprocess(inputs, [f"{prefix}_{key}_document" for key in keys], job, workers=workers).outputs


def texts(prefix: Path, key: str = "text") -> list[bytes]:
    return [bytes(row) for row in rows_of(f"{prefix}_{key}_document")]


@pytest.mark.parametrize(("name", "source", "tokenizer", "options"), [
    ("corpusA", "corpusA", BPE, {"append_eod": True}),
    ("corpusA", "corpusA", BPE, {"append_eod": True, "workers": 2}),  # as corpusA_w2, which is the same bytes
    ("corpusB", "corpusB", BPE, {"append_eod": True}),
    ("corpusA_noeod", "corpusA", BPE, {}),
    ("corpusA_ftfy", "corpusA", BPE, {"append_eod": True, "ftfy": True}),
    ("ascii_char", "ascii", CHAR, {"append_eod": True}),
    ("corpusA_char", "corpusA", CHAR, {"append_eod": True}),
])  # fmt: skip
def test_bytes_equal_neox(name: str, source: str, tokenizer, options: dict, tmp_path: Path):
    run([DATASET / f"{source}.jsonl"], tmp_path / name, tokenizer=tokenizer, **options)
    assert pair(tmp_path / f"{name}_text_document") == pair(DATASET / f"{name}_text_document")


def test_no_lazy_files_are_written(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command("--input", "x", "--output-prefix", "x", "--tokenizer-type", "x", "--dataset-impl", "lazy")
    assert "'lazy'" in (error := capsys.readouterr().err) and "'mmap'" in error


def test_many_chunks_keep_their_order_for_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron.data.preprocessing.shards.CHUNK_BYTES", 500)
    inputs = [DATASET / "corpusA.jsonl", DATASET / "corpusB.jsonl"]
    for workers in (1, 2, 3):
        run(inputs, tmp_path / str(workers), workers=workers, tokenizer=BPE, append_eod=True)
    one_worker, *several_workers = (pair(tmp_path / f"{workers}_text_document") for workers in (1, 2, 3))
    assert several_workers == [one_worker, one_worker]
    assert one_worker[0] == b"".join(pair(DATASET / f"{name}_text_document")[0] for name in ("corpusA", "corpusB"))


def test_every_key_gets_its_own_text(tmp_path: Path):
    """Upstream tokenised "text" for each of them."""
    source = jsonl(tmp_path / "a.jsonl", [{"title": "A", "body": "one"}, {"title": "B", "body": "two"}])
    run([source], tmp_path / "a", keys=("title", "body"))
    assert [texts(tmp_path / "a", key) for key in ("title", "body")] == [[b"A", b"B"], [b"one", b"two"]]


def test_lines_that_neox_takes(tmp_path: Path):
    rows = ["a bare string", {"text": ["two", "paragraphs"]}, {"text": ""}, {"text": "last"}]
    run([jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "a")
    assert texts(tmp_path / "a") == [b"a bare string", b"two\n\nparagraphs", b"last"]


def test_documents_without_a_token(tmp_path: Path):
    """Upstream dies of an IndexError when an EOD is to follow. This tokenizer drops white space."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "[UNK]": 1, "word": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = jsonl(tmp_path / "a.jsonl", [{"text": "word"}, {"text": "  "}, {"text": "word word"}])
    spec = ("HFTokenizer", str(tmp_path / "tokenizer.json"), None)
    [output] = run([source], tmp_path / "a", tokenizer=spec, append_eod=True)
    assert (output.documents, output.empty, output.tokens) == (3, 1, 5)
    assert IndexedDataset(tmp_path / "a_text_document").doc_idx.tolist() == [0, 1, 1, 2]
    assert rows_of(tmp_path / "a_text_document") == [[2, 0], [2, 2, 0]]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("line", "message"), [
    ('{"text": "cut', "not valid JSON"), ('{"body": "x", "n": 1}', r'no key "text" \(found: body, n\).*--jsonl-keys'),
    ('{"text": 5}', '"text" is int, not text'), ("[1, 2]", "no key"), ('{"text": "\\ud800"}', ".*surrogate"),
    ("\udcff", "not UTF-8"),
])  # fmt: skip
def test_a_bad_line_is_named_and_nothing_is_written(line: str, message: str, workers: int, tmp_path: Path):
    content = '{"text": "good"}\n\n' + line + '\n{"text": "good"}\n'
    (tmp_path / "a.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=rf"a\.jsonl:3: {message}"):
        run([tmp_path / "a.jsonl"], tmp_path / "a", workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def command(*words: object) -> None:
    preprocess_data.main(list(map(str, words)))


def test_the_command_as_people_type_it(tmp_path: Path):
    name = "corpusA_text_document"
    flags = "--dataset-impl mmap --tokenizer-type HFTokenizer --append-eod --num-docs 80 --workers 4 --log-interval 80"
    files = f"--input {DATASET}/corpusA.jsonl --output-prefix {tmp_path}/corpusA --vocab {TOKENIZER}"
    words = [sys.executable, ROOT / "tools/datasets/preprocess_data.py", *files.split(), *flags.split()]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert pair(tmp_path / name) == pair(DATASET / name)
    assert re.search(r"Processed 80/80 documents \(\S+ docs/s, \S+ MB/s, 100%, 00:00:00 left\)", done.stdout)
    assert "80 documents, 7074 tokens" in done.stdout


@pytest.mark.parametrize("words, message", [
    ("HFTokenizer", r"HFTokenizer .*vocab_file.*--vocab-file"), ("CharLevel", "CharLevel"),
    ("HFTokenizer --vocab-file /none.json", "/none.json: no such file"),
])  # fmt: skip
def test_the_command_refuses_in_one_line(words: str, message: str, tmp_path: Path):
    files = ("--input", DATASET / "corpusA.jsonl", "--output-prefix", tmp_path / "x")
    with pytest.raises(SystemExit, match=rf"^preprocess_data.py: error: [^\n]*{message}[^\n]*$"):
        command(*files, "--tokenizer-type", *words.split())


def test_a_site_has_the_tokenizer_of_texts(monkeypatch: pytest.MonkeyPatch):
    parser = CommandParser()
    add_tokenizer_flags(parser)
    for name, value in (("NEOX_SITE", "isambard"), ("PROJECTDIR", "/p")):
        monkeypatch.setenv(name, value)
    flags, file = ["--tokenizer-type", "HFTokenizer"], "/p/public/data/neox_tokenizer/tokenizer.json"
    assert tokenizer_of(parser.parse_args(flags)) == ("HFTokenizer", file, None, None)
    assert tokenizer_of(parser.parse_args([*flags, "--vocab", "mine.json"]))[1] == "mine.json"
    assert tokenizer_of(parser.parse_args(["--tokenizer-type", "SPMTokenizer"]))[1] is None
    monkeypatch.setenv("NEOX_SITE", "mars")
    with pytest.raises(SystemExit, match="error: NEOX_SITE=mars: there is no"):
        tokenizer_of(parser.parse_args(flags))


def test_a_table_of_datasets_as_people_make_it(tmp_path: Path):
    """`ds.to_json(...)`, then the tool; and CSV whose column has another name, into `_text_document` too."""
    dataset = datasets.Dataset.from_list(json_rows(DATASET / "corpusA.jsonl"))
    dataset.to_json(tmp_path / "dataset.jsonl")
    dataset.rename_column("text", "body").to_csv(tmp_path / "train.csv", index=False)
    flags = f"--output-prefix {tmp_path}/x --tokenizer-type HFTokenizer --vocab {TOKENIZER} --append-eod".split()
    for name, *words in (("dataset.jsonl",), ("train.csv", "--text-column", "body")):
        command("--input", tmp_path / name, *words, *flags)
        assert rows_of(tmp_path / "x_text_document") == rows_of(DATASET / "corpusA_text_document")


def test_skipped_rows_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nbad\n')
    words = ("--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "x", "--on-bad-row", "drop")
    command(*words, "--tokenizer-type", "CharLevelTokenizer")
    assert f"1 bad rows left out, listed in {tmp_path}/x_errors.jsonl" in capsys.readouterr().err
    assert [error["row"] for error in json_rows(tmp_path / "x_errors.jsonl")] == ["bad\n"]
    assert json.loads((tmp_path / "x_metadata.json").read_text())["rows_skipped"] == 1


ENDLESS = """
import multiprocessing, sys, time
from megatron.data.preprocessing import EncodeJob, preprocess
from megatron.tokenizer import make_tokenizer

def wait(state):
    if not state.shards:
        return
    print(*[worker.pid for worker in multiprocessing.active_children()], flush=True)
    time.sleep(600)

job = EncodeJob(make_tokenizer, ("CharLevelTokenizer",))
preprocess([sys.argv[1]], [sys.argv[2]], job, workers=2, progress=wait)
"""


@pytest.mark.ends_processes
def test_workers_do_not_outlive_a_killed_command(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    words = [sys.executable, "-c", ENDLESS, str(source), str(tmp_path / "a")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as command:
        workers = [Path(f"/proc/{pid}/stat") for pid in command.stdout.readline().split()]
        command.kill()
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while alive := [stat for stat in workers if stat.exists() and ") Z " not in stat.read_text()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)
