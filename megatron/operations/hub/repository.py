"""One repository on the Hub: what a revision holds, and making it hold something else without sending what is
there."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.operations.hub.journal import FileDigest
from megatron.operations.hub.retrying import Patience, Say, call, watch_answers

MAIN = "main"
_ALONE = 1 << 20  # bytes from which on a file is sent by itself, before the commit
_OF_GIT = 64 << 20  # bytes up to which the Hub may keep a file in git itself
# What uploads of one format write and a loader finds by name: left of another checkpoint, it would be read
# with the new one, or for it. Of adapters there is one file, which is written anew.
_HF = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_NEOX = re.compile(
    r"global_step\d+/((layer|optim_layer|mp_rank|(bf16_)?zero_pp_rank)_[^/]+\.pt|manifest\.json"
    r"|(configs|tokenizer|huggingface)/.+)"
)
_BLOCK = 1 << 20

Content = Path | bytes


@dataclass(frozen=True)
class LocalFile:
    """A file to be published: where it is, or its content; and what the Hub would know it by."""

    content: Content
    digest: FileDigest


class Repository:
    """A repository of models, by ORGANISATION/NAME; it is made when something is first published. Raises
    HubError."""

    def __init__(self, name: str, patience: Patience, say: Say) -> None:
        from huggingface_hub import HfApi

        watch_answers()
        self.name, self.patience, self.say = name, patience, say
        self._api = HfApi()

    def prepare(self) -> None:
        """Make the repository where it is not there; what the token may not do is known before anything is
        converted."""
        call(self.patience, self.name, lambda: self._make(MAIN), self.say)

    def lacks(self, revision: str, files: Mapping[str, FileDigest]) -> list[str]:
        """The files that a revision lacks or has otherwise, and those of another checkpoint of their format;
        [] where it is as it should be."""
        there = call(self.patience, f"{self.name}@{revision}: listing", lambda: self._list(revision), self.say)
        return _difference(files, there)

    def publish(
        self, revision: str, files: Mapping[str, LocalFile], message: str, sent: Callable[[str], None]
    ) -> str | None:
        """Make a revision hold these files and no other weights of their format, in one commit, whose name is
        returned; None where it did already. What else people have put there stays. sent: told the name of
        each large file once the Hub has it."""
        digests = {name: file.digest for name, file in files.items()}
        where = f"{self.name}@{revision}"
        call(self.patience, f"{where}: making it", lambda: self._make(revision), self.say)
        additions: dict[str, Any] = {}
        for name in self.lacks(revision, digests):
            if name in files and files[name].digest.size >= _ALONE:
                additions[name] = _addition(name, files[name])
                what = f"{where}: sending {name} ({files[name].digest.size:,} bytes)"
                self.say(what)
                call(self.patience, what, partial(self._send, revision, additions[name]), self.say)
                sent(name)

        def commit() -> str | None:
            from huggingface_hub import CommitOperationDelete

            # Listed anew each time: the answer to a commit may have been lost, and not the commit.
            operations: list[Any] = []
            for name in _difference(digests, self._list(revision)):
                if name not in files:
                    operations.append(CommitOperationDelete(path_in_repo=name))
                    continue
                if name not in additions:
                    additions[name] = _addition(name, files[name])
                operations.append(additions[name])
            if not operations:
                return None
            return self._api.create_commit(
                repo_id=self.name, operations=operations, commit_message=message, revision=revision
            ).oid

        made = call(self.patience, f"{where}: commit", commit, self.say)
        for name in additions if made is not None else ():
            if files[name].digest.size < _ALONE:
                sent(name)
        return made

    def _list(self, revision: str) -> dict[str, FileDigest]:
        """The files of a revision; {} where there is none."""
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
        from huggingface_hub.hf_api import RepoFile

        try:
            tree = list(self._api.list_repo_tree(self.name, recursive=True, revision=revision))
        except (RevisionNotFoundError, RepositoryNotFoundError):
            return {}
        return {
            item.path: FileDigest(item.size, item.lfs.sha256 if item.lfs else "", None if item.lfs else item.blob_id)
            for item in tree
            if isinstance(item, RepoFile)
        }

    def _make(self, revision: str) -> None:
        """Make the repository and the branch, where they are not there yet."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            refs = self._api.list_repo_refs(self.name)
        except RepositoryNotFoundError:
            self._api.create_repo(self.name, exist_ok=True)
            refs = self._api.list_repo_refs(self.name)
        if revision != MAIN and all(branch.name != revision for branch in refs.branches):
            self._api.create_branch(self.name, branch=revision, exist_ok=True)

    def _send(self, revision: str, addition: Any) -> None:
        """Send one file, if the Hub keeps it apart from git and has it under no name yet."""
        self._api.preupload_lfs_files(self.name, additions=[addition], revision=revision)


def digest(content: Content, sha256: str | None = None) -> FileDigest:
    """What the Hub knows a file by, read once; sha256: where it is known, so that large files are not read at
    all."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    small = size <= _OF_GIT
    if sha256 is not None and not small:
        return FileDigest(size, sha256, None)
    whole, blob = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    for block in _blocks(content):
        whole.update(block)
        if small:
            blob.update(block)
    return FileDigest(size, whole.hexdigest(), blob.hexdigest() if small else None)


def folder_files(folder: Path) -> dict[str, LocalFile]:
    """All files below a folder by their names in it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): LocalFile(path, digest(path)) for path in paths}


def _blocks(content: Content) -> Iterable[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block


def _addition(name: str, file: LocalFile) -> Any:
    from huggingface_hub import CommitOperationAdd

    return CommitOperationAdd(path_in_repo=name, path_or_fileobj=file.content)


def _difference(wanted: Mapping[str, FileDigest], there: Mapping[str, FileDigest]) -> list[str]:
    changed = [name for name, file in wanted.items() if name not in there or not _same(file, there[name])]
    ours = [format for format in (_HF, _NEOX) if any(map(format.fullmatch, wanted))]
    return changed + [name for name in there if name not in wanted and any(one.fullmatch(name) for one in ours)]


def _same(ours: FileDigest, theirs: FileDigest) -> bool:
    if ours.size != theirs.size:
        return False
    return ours.blob == theirs.blob if theirs.blob is not None else ours.sha256 == theirs.sha256
