"""A HuggingFace Hub of the tests' own on this machine: what huggingface_hub 2.4 asks for when it uploads.

It keeps repositories, branches as snapshots, and large files by digest; notes every request; and can be told
to fail.
"""

import hashlib
import json
import re
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tests.launch.runs import serving

TOKEN = "hf_" + "loopbackSECRET" * 2
_LFS = re.compile(r".*\.(safetensors|pt|bin|png)")
_INITIAL = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}


@dataclass
class Failure:
    """A rule for the next `times` requests that match, after `num_skipped` others.

    kind: a status, "cut" (the connection is closed within the body), "lost" (it is done, and the answer is
    not sent), "hang" (nothing is done and nothing answered, until `released`), "stall" (it is done, and
    nothing is answered), "late" (as ever, once `released`).
    """

    pattern: str
    kind: int | str
    times: int
    retry_after: str | None = None
    num_skipped: int = 0

    def strikes(self, request_line: str) -> bool:
        if not self.times or not re.search(self.pattern, request_line):
            return False
        self.num_skipped -= 1
        self.times -= self.num_skipped < 0
        return self.num_skipped < 0


class Request(NamedTuple):
    """A request. line: METHOD path. seconds: of the monotonic clock."""

    line: str
    seconds: float


@dataclass
class Repo:
    """branches: files by name; large ones by the digest of their object. commits: messages by branch."""

    branches: dict[str, dict[str, bytes | str]] = field(default_factory=lambda: {"main": dict(_INITIAL)})
    commits: dict[str, list[str]] = field(default_factory=dict)


class LoopbackHub:
    """The Hub, while `serving`. objects: large files by SHA-256; puts: digests as they came whole.
    waiting: requests that hang."""

    def __init__(self) -> None:
        self.repos, self.objects, self.puts = dict[str, Repo](), dict[str, bytes](), list[str]()
        self.requests, self.failures, self.waiting = list[Request](), list[Failure](), list[str]()
        self.may_create, self.released, self.lock = True, threading.Event(), threading.RLock()
        self.endpoint = ""

    def environment(self) -> dict[str, str]:
        """Returns the variables that make a process take this Hub for the Hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
                "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}  # fmt: skip

    @contextmanager
    def serving(self) -> Iterator["LoopbackHub"]:
        with serving(type("Handler", (_Handler,), {"hub": self})) as server:
            self.endpoint = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self
            finally:
                self.released.set()

    def fail(self, pattern: str, kind: int | str, times: int = 1, **options: Any) -> None:
        self.failures.append(Failure(pattern, kind, times, **options))

    def requests_matching(self, pattern: str) -> list[Request]:
        return [request for request in self.requests if re.search(pattern, request.line)]

    def content(self, repo: str, branch: str) -> dict[str, bytes]:
        """The files of a branch but for those of the Hub itself."""
        files = self.repos[repo].branches[branch].items()
        return {name: self.objects[v] if isinstance(v, str) else v for name, v in files if name not in _INITIAL}

    def download(self, repo: str, branch: str, folder: Path) -> Path:
        for name, data in self.content(repo, branch).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, content: Any, **headers: str) -> None:
        data = json.dumps(content).encode()
        self.hub.requests.append(Request(f"{self.command} {self.path}", time.monotonic()))
        if self._kind in ("lost", "stall"):
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self, share: float = 1.0) -> bytes:
        data, length = b"", self.headers.get("Content-Length")
        if length is not None:
            return self.rfile.read(int(int(length) * share))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while (size := int(self.rfile.readline(), 16)) and share == 1.0:
                data += self.rfile.read(size)
                self.rfile.readline()
            if share == 1.0:
                self.rfile.readline()
        return data

    def _handle(self) -> None:
        hub, request_line = self.hub, f"{self.command} {self.path}"
        with hub.lock:
            failure = next((failure_rule for failure_rule in hub.failures if failure_rule.strikes(request_line)), None)
        self._kind = None if failure is None else failure.kind
        body = self._body(0.5 if self._kind == "cut" else 1.0)
        if isinstance(self._kind, int):
            retry_headers = {"Retry_After": failure.retry_after} if failure.retry_after is not None else {}
            self._answer(self._kind, {"error": "told to"}, **retry_headers)
        elif self._kind in ("cut", "hang"):
            hub.requests.append(Request(request_line, time.monotonic()))
        else:
            if self._kind == "late":
                hub.waiting.append(request_line)
                hub.released.wait()
            with hub.lock:
                self._serve(urlsplit(self.path).path, body)
        if self._kind in ("hang", "stall"):
            hub.waiting.append(request_line)
            hub.released.wait()
        if isinstance(self._kind, str) and self._kind != "late":
            self.close_connection = True
            self.connection.close()

    do_GET = do_POST = do_PUT = do_HEAD = _handle

    def _serve(self, path: str, body: bytes) -> None:
        hub = self.hub
        if self.command == "PUT":  # of the store behind the Hub, whose addresses are signed
            oid = path.rpartition("/")[2]
            if hashlib.sha256(body).hexdigest() != oid:
                return self._answer(400, {"error": "not that object"})
            hub.objects[oid] = body
            hub.puts.append(oid)
            return self._answer(200, {})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid"}, X_Error_Message="Invalid credentials")
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request['organization']}/{request['name']}"
            if not hub.may_create:
                return self._answer(403, {"error": "no rights"}, X_Error_Message="no rights to create there")
            if name in hub.repos:
                return self._answer(409, {"error": "exists", "url": f"{hub.endpoint}/{name}"})
            hub.repos[name] = Repo()
            return self._answer(200, {"url": f"{hub.endpoint}/{name}", "id": name})
        if path == "/api/validate-yaml":
            return self._answer(200, {"warnings": [], "errors": []})
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._batch(json.loads(body)["objects"])
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(\w+)(?:/([^/]+))?", path)
        if match is None:
            return self._answer(404, {"error": path})
        repo = hub.repos.get(match[1])
        if repo is None:
            return self._answer(404, {"error": "no repo"}, X_Error_Code="RepoNotFound")
        revision = unquote(match[3] or "")
        if match[2] == "refs":
            branches = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": "0" * 40} for b in repo.branches]
            return self._answer(200, {"branches": branches, "converts": [], "tags": []})
        if match[2] == "branch":
            if revision in repo.branches:
                return self._answer(409, {"error": "exists"})
            repo.branches[revision] = dict(repo.branches["main"])
            return self._answer(200, {})
        if revision not in repo.branches:
            return self._answer(404, {"error": "no revision"}, X_Error_Code="RevisionNotFound")
        if match[2] == "tree":
            return self._answer(200, [self._entry(*item) for item in repo.branches[revision].items()])
        if match[2] == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if _LFS.fullmatch(path) else "regular" for path in paths}
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return self._answer(200, {"files": files})
        if match[2] == "commit":
            return self._commit(match[1], revision, body)
        self._answer(404, {"error": path})

    def _entry(self, name: str, value: bytes | str) -> dict[str, Any]:
        size, entry = len(self.hub.objects[value] if isinstance(value, str) else value), {"type": "file", "path": name}
        if isinstance(value, str):
            return {**entry, "size": size, "oid": "1" * 40, "lfs": {"oid": value, "size": size, "pointerSize": 130}}
        return {**entry, "size": size, "oid": hashlib.sha1(f"blob {size}\0".encode() + value).hexdigest()}

    def _batch(self, objects: list[dict[str, Any]]) -> None:
        for large_file in objects:
            if large_file["oid"] not in self.hub.objects:
                large_file["actions"] = {
                    "upload": {"href": f"{self.hub.endpoint}/store/{large_file['oid']}?X-Signature=SIGNED"}
                }
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, branch: str, body: bytes) -> None:
        repo = self.hub.repos[name]
        files, summary = dict(repo.branches[branch]), ""
        for line in map(json.loads, body.splitlines()):
            kind, value = line["key"], line["value"]
            if kind == "header":
                summary = value["summary"]
            elif kind == "file":
                files[value["path"]] = b64decode(value["content"])
            elif kind == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self._answer(400, {"error": f"{value['path']} was not sent"})
                files[value["path"]] = value["oid"]
            elif kind == "deletedFile":
                del files[value["path"]]
        repo.branches[branch] = files
        repo.commits.setdefault(branch, []).append(summary)
        oid = hashlib.sha1(f"{branch}{time.time()}".encode()).hexdigest()
        address = f"{self.hub.endpoint}/{name}/commit/{oid}"
        self._answer(200, {"commitUrl": address, "commitOid": oid, "pullRequestUrl": None})
