"""Lists the files of a revision of a Hub repository, and updates a revision without sending unchanged
files."""

import hashlib
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.operations.hub.journal import FileDigest
from megatron.operations.hub.retrying import Patience, Say, call, watch_answers

MAIN = "main"
_SEPARATE_BYTES = 1 << 20  # files of this size or more are sent before the commit, one by one
_GIT_BYTES = 64 << 20  # the Hub may keep files up to this size in git; larger files are always in LFS
# Files of each format that a loader finds by name. A file left from another checkpoint would be loaded
# together with the new checkpoint, or instead of it. Adapters have a single file, which is always replaced.
_HF = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")
_NEOX = re.compile(
    r"global_step\d+/((layer|optim_layer|mp_rank|(bf16_)?zero_pp_rank)_[^/]+\.pt|manifest\.json"
    r"|(configs|tokenizer|huggingface)/.+)"
)
_BLOCK = 1 << 20

Content = Path | bytes


@dataclass(frozen=True)
class LocalFile:
    """A file to be published.

    content: path of the file, or its bytes.
    digest: size and hashes by which the Hub identifies the content.
    """

    content: Content
    digest: FileDigest


class Repository:
    """A model repository ORGANISATION/NAME on the Hub. Its methods retry requests, and raise HubError."""

    def __init__(self, name: str, patience: Patience, say: Say) -> None:
        from huggingface_hub import HfApi

        watch_answers()
        self.name, self.patience, self.say = name, patience, say
        self._api = HfApi()

    def prepare(self) -> None:
        """Creates the repository if it does not exist. Called before the conversion, to find missing
        permissions."""
        call(self.patience, self.name, lambda: self._make(MAIN), self.say)

    def lacks(self, revision: str, files: Mapping[str, FileDigest]) -> list[str]:
        """Returns the names of files to upload to or delete from a revision; [] if it holds `files`.

        To upload are missing and changed files; to delete are weights in the same format from another
        checkpoint.
        """
        published = call(self.patience, f"{self.name}@{revision}: listing", lambda: self._list(revision), self.say)
        return _difference(files, published)

    def publish(
        self, revision: str, files: Mapping[str, LocalFile], message: str, sent: Callable[[str], None]
    ) -> str | None:
        """Updates a revision in one commit, so that it holds `files` and no other weights in their format.

        Other files stay. Returns the commit's id; None if nothing had to change. message: the commit message.
        sent: called with the name of each file once the Hub has it.
        """
        digests = {name: file.digest for name, file in files.items()}
        target = f"{self.name}@{revision}"
        call(self.patience, f"{target}: creating the revision", lambda: self._make(revision), self.say)
        additions: dict[str, Any] = {}
        for name in self.lacks(revision, digests):
            if name in files and files[name].digest.size >= _SEPARATE_BYTES:
                additions[name] = _addition(name, files[name])
                action = f"{target}: sending {name} ({files[name].digest.size:,} bytes)"
                self.say(action)
                # huggingface_hub sends nothing if the Hub has the content already, or keeps the file in git.
                send = partial(self._api.preupload_lfs_files, self.name, additions=[additions[name]], revision=revision)
                call(self.patience, action, send, self.say)
                sent(name)

        def commit() -> str | None:
            from huggingface_hub import CommitOperationDelete

            # Files are listed again at each try: the last commit may have succeeded although its answer was
            # lost.
            operations: list[Any] = []
            for name in _difference(digests, self._list(revision)):
                if name in files and name not in additions:
                    additions[name] = _addition(name, files[name])
                operations.append(additions[name] if name in files else CommitOperationDelete(path_in_repo=name))
            if not operations:
                return None
            return self._api.create_commit(
                repo_id=self.name, operations=operations, commit_message=message, revision=revision
            ).oid

        commit_id = call(self.patience, f"{target}: commit", commit, self.say)
        for name in additions if commit_id is not None else ():
            if files[name].digest.size < _SEPARATE_BYTES:
                sent(name)
        return commit_id

    def _list(self, revision: str) -> dict[str, FileDigest]:
        """Returns the files of a revision on the Hub, by name; {} if there is no such revision."""
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
        """Creates the repository and the branch `revision` if they do not exist."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            refs = self._api.list_repo_refs(self.name)
        except RepositoryNotFoundError:
            self._api.create_repo(self.name, exist_ok=True)
            refs = self._api.list_repo_refs(self.name)
        if revision != MAIN and all(branch.name != revision for branch in refs.branches):
            self._api.create_branch(self.name, branch=revision, exist_ok=True)


def digest(content: Content, sha256: str | None = None) -> FileDigest:
    """Returns the size and hashes by which the Hub identifies a file; reads the content once.

    sha256: SHA-256 of the content if known; then a file over 64 MiB is not read at all.
    """
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    small = size <= _GIT_BYTES
    if sha256 is not None and not small:
        return FileDigest(size, sha256, None)
    sha256_hash, blob_hash = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        while block := file.read(_BLOCK):
            sha256_hash.update(block)
            if small:
                blob_hash.update(block)
    return FileDigest(size, sha256_hash.hexdigest(), blob_hash.hexdigest() if small else None)


def folder_files(folder: Path) -> dict[str, LocalFile]:
    """Returns all files below a folder with their digests, by their paths relative to it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): LocalFile(path, digest(path)) for path in paths}


def _addition(name: str, file: LocalFile) -> Any:
    from huggingface_hub import CommitOperationAdd

    return CommitOperationAdd(path_in_repo=name, path_or_fileobj=file.content)


def _difference(expected: Mapping[str, FileDigest], published: Mapping[str, FileDigest]) -> list[str]:
    changed = [
        name for name, file in expected.items() if name not in published or not _same_content(file, published[name])
    ]
    patterns = [pattern for pattern in (_HF, _NEOX) if any(map(pattern.fullmatch, expected))]
    return changed + [
        name for name in published if name not in expected and any(pattern.fullmatch(name) for pattern in patterns)
    ]


def _same_content(local: FileDigest, published: FileDigest) -> bool:
    if local.size != published.size:
        return False
    return local.blob == published.blob if published.blob is not None else local.sha256 == published.sha256
