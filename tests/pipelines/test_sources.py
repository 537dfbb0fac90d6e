"""Sources: from a path, an address and the Hub; fetched once, gone on with, refused when they are others."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from megatron.data.downloads import DownloadError, download
from megatron.pipelines.definition import Source
from megatron.pipelines.errors import PipelineError
from megatron.pipelines.sources import fetch_sources, pending_sources, read_notes
from tests.launch.runs import ROOT, environment, serving

BODY = bytes(range(256)) * 4000  # 1 MB
DIGEST = hashlib.sha256(BODY).hexdigest()
COMMIT = "c" * 40


@dataclass
class Server:
    """A server of files.

    answer_ends: bytes after which answers end. requests: (method, path, first byte). ranges: it can go on.
    files_afterwards: what it has after a request.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    answer_ends: list[int] = field(default_factory=list)
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    ranges: bool = True
    files_afterwards: dict[str, bytes] = field(default_factory=dict)
    status: list[int] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = state.files.get(self.path.partition("?")[0])
            tag = "" if body is None else hashlib.sha256(body).hexdigest()
            is_same = self.headers.get("If-Range", tag) == tag  # else the whole of what is there now
            range_header = self.headers.get("Range", "") if state.ranges and is_same else ""
            first_byte = int(range_header.removeprefix("bytes=").partition("-")[0]) if range_header else 0
            state.requests.append((self.command, self.path, first_byte))
            usual = 404 if body is None else 200 if not range_header else 206 if first_byte < len(body) else 416
            status = state.status.pop(0) if state.status else usual
            headers: dict[str, Any] = {"Content-Length": 0}
            if status < 400:
                headers = {"Content-Length": len(body) - first_byte, "ETag": tag, "X-Repo-Commit": COMMIT}
            elif status == 416:
                headers["Content-Range"] = f"bytes */{len(body)}"
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET" and status < 400:
                end = state.answer_ends.pop(0) if state.answer_ends else len(body)
                self.wfile.write(body[first_byte:end])
                state.files |= state.files_afterwards
                if end < len(body):
                    self.close_connection = True

        do_HEAD = do_GET

    with serving(Handler) as httpd:
        state.url = f"http://127.0.0.1:{httpd.server_port}"
        yield state


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)


def url_source(server: Server, sha256: str = DIGEST) -> Source:
    server.files["/x.bin"] = BODY
    return Source(name="x.bin", license="MIT", url=f"{server.url}/x.bin", sha256=sha256)


def fetch(folder: Path, *wanted_sources: Source) -> tuple[dict[str, str], list[str]]:
    messages: list[str] = []
    return fetch_sources(folder, wanted_sources, messages.append), messages


def test_an_address_is_asked_once(tmp_path, server):
    digests, messages = fetch(tmp_path, url_source(server))
    assert digests == {"x.bin": DIGEST} and (tmp_path / "data/raw/x.bin").read_bytes() == BODY
    note = json.loads((tmp_path / "data/raw/sources.json").read_text())["x.bin"]
    assert (note["license"], note["bytes"], note["sha256"]) == ("MIT", len(BODY), DIGEST)
    second_digests, messages = fetch(tmp_path, url_source(server))
    assert second_digests == digests and "there already" in messages[0] and len(server.requests) == 1


def test_what_was_cut_off_goes_on(tmp_path, server):
    server.answer_ends = [300_000, 700_000]
    digests, messages = fetch(tmp_path, url_source(server))
    assert digests == {"x.bin": DIGEST}
    assert [first_byte for _, _, first_byte in server.requests] == [0, 300_000, 700_000]
    assert any("of which 0.3 MB are here" in line for line in messages)


def test_a_killed_download_goes_on(tmp_path, server):
    part = tmp_path / "data/raw/.x.bin.part"
    part.parent.mkdir(parents=True)
    for partial_bytes in (BODY[:500_000], BODY, BODY + b"more"):  # of the second only its name was not given yet
        (tmp_path / "data/raw/x.bin").unlink(missing_ok=True)
        part.write_bytes(partial_bytes)
        assert fetch(tmp_path, url_source(server))[0] == {"x.bin": DIGEST} and not part.exists()
    assert [first_byte for *_, first_byte in server.requests[:2]] == [500_000, len(BODY)]


def test_a_server_that_cannot_go_on_gives_all_again(tmp_path, server):
    server.ranges, server.answer_ends = False, [300_000]
    assert fetch(tmp_path, url_source(server))[0] == {"x.bin": DIGEST}


def test_without_a_digest_only_parts_of_the_same_call_count(tmp_path, server):
    """The server names its content by a tag; a part that an earlier call left may be of another file."""
    server.files["/x.bin"], part = BODY, tmp_path / ".x.bin.part"
    part.write_bytes(b"an older file")
    server.answer_ends = [300_000]
    download(f"{server.url}/x.bin", tmp_path / "x.bin", lambda line: None)
    assert (tmp_path / "x.bin").read_bytes() == BODY
    assert [first_byte for _, _, first_byte in server.requests] == [0, 300_000]
    server.answer_ends = [300_000] * 4
    with pytest.raises(DownloadError, match="truncated after 300000 of"):
        download(f"{server.url}/x.bin", tmp_path / "y.bin", lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


def test_a_file_that_changes_between_two_tries_is_downloaded_from_its_beginning(tmp_path, server):
    server.files["/x.bin"], server.files_afterwards = BODY, {"/x.bin": BODY[::-1]}
    server.answer_ends = [300_000]
    download(f"{server.url}/x.bin", tmp_path / "x.bin", lambda line: None)
    assert (tmp_path / "x.bin").read_bytes() == BODY[::-1], "not a half of each"


def test_another_content_is_refused_and_goes(tmp_path, server):
    with pytest.raises(PipelineError, match=f"has SHA-256 {DIGEST}, but 0000"):
        fetch(tmp_path, url_source(server, "0" * 64))
    assert not [path for path in (tmp_path / "data/raw").iterdir() if "x.bin" in path.name]


def test_what_cannot_be_had(tmp_path, server):
    with pytest.raises(PipelineError, match="404"):
        fetch(tmp_path, Source(name="y", license="MIT", url=f"{server.url}/y", sha256=DIGEST))
    assert len(server.requests) == 1  # it is not there: no second try
    server.status = [503, 429]
    assert fetch(tmp_path, url_source(server))[0] == {"x.bin": DIGEST}
    with pytest.raises(PipelineError, match=r"cannot be downloaded .* put the file at .*/y by other means"):
        fetch(tmp_path, Source(name="y", license="MIT", url="http://127.0.0.1:9/y", sha256=DIGEST))


def test_a_file_put_there_by_hand_is_taken_and_one_that_changed_kept_beside_the_right_one(tmp_path, server):
    file = tmp_path / "data/raw/x.bin"
    file.parent.mkdir(parents=True)
    file.write_bytes(BODY)
    assert fetch(tmp_path, url_source(server))[0] == {"x.bin": DIGEST} and server.requests == []
    file.write_bytes(b"edited")
    assert fetch(tmp_path, url_source(server))[0] == {"x.bin": DIGEST}
    assert file.with_name("x.bin.old1").read_bytes() == b"edited" and file.read_bytes() == BODY


def test_paths_are_linked_and_looked_at(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.txt").write_text("a")
    source = Source(name="mine", license="own", path="mine")
    first_digests, _ = fetch(tmp_path, source)
    assert (tmp_path / "data/raw/mine").is_symlink() and (tmp_path / "data/raw/mine/a.txt").read_text() == "a"
    assert fetch(tmp_path, source)[0] == first_digests
    (tmp_path / "mine/b.txt").write_text("b")
    assert fetch(tmp_path, source)[0] != first_digests
    with pytest.raises(PipelineError, match="no such file or folder"):
        fetch(tmp_path, Source(name="none", license="own", path="none"))


def test_the_hub(tmp_path, server):
    """huggingface_hub against an address of its form: what `files` names, at the commit that main was."""
    files = {"data/a.jsonl": b'{"text": "a"}\n', "data/b.jsonl": b'{"text": "b"}\n', "README.md": b"no"}
    siblings = [{"rfilename": name} for name in files]
    info = {"id": "org/set", "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0, "private": False,
            "disabled": False, "gated": False, "likes": 0, "lastModified": "2026-01-01T00:00:00.000Z"}  # fmt: skip
    for path in ("", "/revision/main", f"/revision/{COMMIT}"):
        server.files[f"/api/datasets/org/set{path}"] = json.dumps(info).encode()
    shas = {name: hashlib.sha1(text).hexdigest() for name, text in files.items()}
    tree_entries = [{"type": "file", "path": name, "size": len(files[name]), "oid": sha} for name, sha in shas.items()]
    server.files[f"/api/datasets/org/set/tree/{COMMIT}"] = json.dumps(tree_entries).encode()
    server.files |= {f"/datasets/org/set/resolve/{COMMIT}/{name}": text for name, text in files.items()}
    program = (
        "import sys; from pathlib import Path; from megatron.pipelines.definition import Source\n"
        "from megatron.pipelines.sources import fetch_sources\n"
        "source = Source(name='set', license='MIT', hub='org/set', files=('data/*',))\n"
        "print(fetch_sources(Path(sys.argv[1]), (source,), lambda line: print(line, file=sys.stderr)))"
    )
    env = {**environment(), "HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
           "HF_HOME": str(tmp_path / "home")}  # fmt: skip

    def run() -> "subprocess.CompletedProcess[str]":
        words = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)

    done = run()
    assert done.returncode == 0, done.stderr
    raw = tmp_path / "data/raw/set"
    assert {str(path.relative_to(raw)) for path in raw.rglob("*") if path.is_file()} == {"data/a.jsonl", "data/b.jsonl"}
    note = json.loads((tmp_path / "data/raw/sources.json").read_text())["set"]
    assert note["revision"] == COMMIT and note["files"] == 2
    num_requests = len(server.requests)
    second_run = run()
    assert (
        second_run.stdout == done.stdout
        and "there already" in second_run.stderr
        and len(server.requests) == num_requests
    )


def test_no_signature_of_an_address_is_stored_or_printed(tmp_path, server):
    """Another one, made an hour later, asks for nothing new; what an earlier version kept goes."""
    unsigned, notes, messages = url_source(server), tmp_path / "data/raw/sources.json", []
    for number in (1, 2):
        signed = replace(unsigned, url=f"{unsigned.url}?X-Amz-Signature=s1gned{number}&X-Amz-Expires=3600")
        messages += [signed.origin, *fetch(tmp_path, signed)[1]]
        assert unsigned.url in notes.read_text() and "s1gned" not in notes.read_text()
    assert len(server.requests) == 1 and not pending_sources(tmp_path, (signed,))
    notes.write_text(notes.read_text().replace('/x.bin"', '/x.bin?X-Amz-Signature=s1gned0"'))
    assert "s1gned" not in read_notes(tmp_path)["x.bin"].origin, "as the page shows it"
    messages += fetch(tmp_path, signed)[1]
    assert "s1gned" not in notes.read_text() and len(server.requests) == 1
    for name, digest in (("/x.bin", "0" * 64), ("/y", DIGEST)):
        absent = replace(unsigned, name="y", sha256=digest, url=f"{server.url}{name}?X-Amz-Signature=s1gned3")
        with pytest.raises(PipelineError) as raised:
            fetch(tmp_path, absent)
        messages.append(str(raised.value))
    assert len(messages) >= 7 and "s1gned" not in "\n".join(messages)
