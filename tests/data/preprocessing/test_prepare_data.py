"""`prepare_data.py` and the quickstart data."""

import http.server
import json
import threading
import zipfile
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

import prepare_data
from megatron.data import IndexedDataset, split_boundaries
from megatron.tokenizer import HFTokenizer
from tests.data.samples import TOKENIZER, gpt2_files, json_rows, pair, rows_of
from tools import quickstart_data
from tools.datasets.corpora import SOURCES, parts


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, all_documents = tmp_path_factory.mktemp("data"), quickstart_data.stdlib_documents
    with pytest.MonkeyPatch.context() as patch:  # of the standard library enough for a megabyte
        patch.setattr(quickstart_data, "stdlib_documents", lambda: islice(all_documents(), 1200))
        prepare_data.main(["-d", str(folder)])
    return folder / "quickstart"


@pytest.mark.more
def test_without_a_name_the_test_data_is_made(quickstart: Path):
    dataset, tokenizer = IndexedDataset(quickstart / "text_document"), HFTokenizer(quickstart / "tokenizer.json")
    assert tokenizer.vocab_size == 1024 and (tokenizer.eod, tokenizer.pad) == (0, 1)
    rows = json_rows(quickstart / "corpus.jsonl")
    assert len(dataset) == len(rows) > 500 and (quickstart / "corpus.jsonl").stat().st_size > 1_000_000
    for index in (0, len(rows) - 1):
        *text, end = dataset[index].tolist()
        assert end == tokenizer.eod and tokenizer.detokenize(text) == rows[index]["text"]
    stats = json.loads((quickstart / "stats.json").read_text())
    _, start, end, _ = split_boundaries("95,5,0", len(dataset))
    assert stats["validation_tokens"] == len(dataset.span(start, end))


def test_nothing_is_made_again_while_it_is_whole(quickstart: Path):
    modified_ns = {path: path.stat().st_mtime_ns for path in quickstart.iterdir()}
    lines: list[str] = []
    quickstart_data.build(quickstart, lines.append)
    assert {path: path.stat().st_mtime_ns for path in quickstart.iterdir()} == modified_ns and "up to date" in lines[0]


def test_a_damaged_file_is_made_again_and_comes_out_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quickstart_data, "stdlib_documents", lambda: iter(()))  # the language reference is enough
    quickstart_data.build(tmp_path, lambda line: None)
    original = pair(tmp_path / "text_document")
    (tmp_path / "text_document.bin").write_bytes(original[0][:-2])
    quickstart_data.build(tmp_path, lambda line: None)
    assert pair(tmp_path / "text_document") == original


@pytest.fixture(autouse=True)
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)


def refusal(*words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        prepare_data.main(words)
    return str(stopped.value)


def test_a_corpus_that_cannot_be_reached_is_one_error_with_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no network, wherever the test runs
    message = refusal("-d", str(tmp_path), "-t", "GPT2BPETokenizer", "enwik8")
    assert message.startswith("prepare_data.py: error: https://data.deepai.org/enwik8.zip: cannot be downloaded (")
    assert f"put the file at {tmp_path}/enwik8/enwik8.zip" in message and "--mirror" in message and "\n" not in message
    assert "choose from" in refusal("-d", str(tmp_path), "enwik7")
    assert "-t Foo: no such kind of tokenizer; choose from" in refusal("-d", str(tmp_path), "-t", "Foo", "enwik8")


class Server(http.server.SimpleHTTPRequestHandler):
    requested_paths: list[str] = []

    def do_GET(self):
        self.requested_paths.append(self.path)
        if self.path != "/cut/enwik8.zip":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"half of it")

    def log_message(self, *values):
        pass


@pytest.fixture
def mirror(tmp_path: Path):
    """A loopback server of tmp_path/mirror: its address, and the paths that were asked for."""
    (tmp_path / "mirror").mkdir()
    Server.requested_paths = []
    handler = partial(Server, directory=str(tmp_path / "mirror"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", Server.requested_paths
        server.shutdown()


TEXT = "The patient ribbon paints the kettle."


def enwik8(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", TEXT)


def is_written(data: Path) -> bool:
    return rows_of(data / "enwik8" / "enwik8_text_document") == [[*HFTokenizer(TOKENIZER).tokenize(TEXT), 0]]


def test_a_mirror(tmp_path: Path, mirror, capsys: pytest.CaptureFixture[str]):
    address, requested_paths = mirror
    gpt2_files(tmp_path / "mirror")
    enwik8(tmp_path / "mirror")
    for flags in ([], [], ["-f"]):
        words = ["-d", str(tmp_path / "data"), "-t", "GPT2BPETokenizer", "--mirror", address + "/", "enwik8", *flags]
        prepare_data.main(words)
    assert requested_paths == ["/enwik8.zip", "/gpt2-vocab.json", "/gpt2-merges.txt", "/enwik8.zip"]
    assert f"{address}/enwik8.zip -> {tmp_path}/data/enwik8/enwik8.zip" in capsys.readouterr().out
    assert is_written(tmp_path / "data")


def test_a_mirror_that_fails_leaves_nothing(tmp_path: Path, mirror):
    address, _ = mirror
    for url, reason in ((address, "File not found"), (address + "/cut", "truncated after 10 of 1000 bytes")):
        message = refusal("-d", str(tmp_path / "data"), "--mirror", url, "enwik8")
        assert (
            message.startswith(f"prepare_data.py: error: {url}/enwik8.zip: cannot be downloaded (")
            and reason in message
        )
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file()]


def test_numbered_parts():
    assert parts("http://x/{08..11}.gz") == [f"http://x/{n}.gz" for n in ("08", "09", "10", "11")]
    assert all(len(parts(address)) in (1, 30, 512, 1024) for address in SOURCES.values())


def test_a_corpus_in_the_data_folder_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    gpt2_files(tmp_path)
    enwik8(tmp_path / "enwik8")
    for _ in range(2):
        prepare_data.main(["-d", str(tmp_path), "-t", "GPT2BPETokenizer", "enwik8"])
    first_line, second_line = capsys.readouterr().out.splitlines()[-2:]
    assert "1 documents" in first_line and "exist already" in second_line
    assert is_written(tmp_path)
