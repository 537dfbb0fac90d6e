"""Downloads one file by its URL: retries, continues what was cut off, and checks the digest."""

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megatron.data.files import sha256, sync
from megatron.neox_arguments.addresses import without_secrets
from megatron.neox_arguments.errors import UserError

if TYPE_CHECKING:
    from tenacity import RetryCallState

_TIMEOUT_S = 30.0  # without data from the server
_TRIES = 4
_PAUSE_S = 2.0  # before the second try; later pauses are two and three times as long
_PIECE = 1 << 20
_SAY_EVERY_S = 10.0


class DownloadError(UserError):
    """Raised if a file cannot be downloaded. The message names the URL and the reason.

    refused: the server answered, and a later try would not help.
    """

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def download(url: str, target: Path, say: Callable[[str], None], digest: str | None = None) -> None:
    """Downloads one file. `target` appears only when the file is complete.

    It tries four times, and each try continues the partial file `.NAME.part` if the server supports that.
    With a digest a later call continues it too. Messages show the URL without its signature.

    digest: SHA-256 that the file must have; None: any. Raises DownloadError if all tries fail, if the SHA-256
    is another, or if the disk is full.
    """
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_incrementing

    public_url, transfer = without_secrets(url), _Transfer(url, target.with_name(f".{target.name}.part"), say, digest)

    def tell(state: "RetryCallState") -> None:
        assert state.outcome is not None and state.next_action is not None
        say(f"{public_url}: {_reason(state.outcome.exception())}; trying again in {state.next_action.sleep:.0f} s")

    try:
        Retrying(
            retry=retry_if_exception(_is_transient), stop=stop_after_attempt(_TRIES), before_sleep=tell, reraise=True,
            wait=wait_incrementing(start=_PAUSE_S, increment=_PAUSE_S),
        )(transfer.receive)  # fmt: skip
        actual = digest and sha256(transfer.part)
        if actual != digest:
            transfer.part.unlink()
            raise DownloadError(
                f"{public_url}: has SHA-256 {actual}, but {digest} is expected; the download was deleted", refused=True
            )
        try:
            sync(transfer.part)
            os.replace(transfer.part, target)
        except OSError as problem:
            raise _cannot_write(target, problem) from None
    except (OSError, http.client.HTTPException, ValueError) as problem:
        text = f"{public_url}: cannot be downloaded ({_reason(problem)})"
        raise DownloadError(text, refused=not _is_transient(problem)) from None
    finally:
        if digest is None:  # nothing would tell whether it is a part of the same file
            transfer.part.unlink(missing_ok=True)


def _reason(problem: BaseException | None) -> object:
    return problem if isinstance(problem, urllib.error.HTTPError) else getattr(problem, "reason", None) or problem


def _is_transient(problem: BaseException) -> bool:
    if isinstance(problem, urllib.error.HTTPError):
        return problem.code >= 500 or problem.code == 429
    return isinstance(problem, OSError | http.client.HTTPException)


def _cannot_write(path: Path, problem: OSError) -> DownloadError:
    reason = problem.strerror or problem
    return DownloadError(f"{path}: cannot be written ({reason}); free space or allow writing there")


class _Transfer:
    """The tries of one download, and the partial file that they share."""

    def __init__(self, url: str, part: Path, say: Callable[[str], None], digest: str | None) -> None:
        self.url, self.part, self.say, self.digest = url, part, say, digest
        self.tag: str | None = None  # the server's name of this content

    def receive(self) -> None:
        """Sends one request and appends its answer to the partial file."""
        num_received, public_url = self._num_continued(), without_secrets(self.url)
        headers = {"Range": f"bytes={num_received}-"} if num_received else {}
        if num_received and self.tag:
            headers["If-Range"] = self.tag  # all of it again, if the file has changed there
        try:
            answer = urllib.request.urlopen(urllib.request.Request(self.url, headers=headers), timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as problem:
            if problem.code == 416 and num_received:  # the partial file is already as long as the file, or longer
                length = str(problem.headers.get("Content-Range", "")).rpartition("/")[2]
                if length == str(num_received):
                    return
                self.part.unlink()
                raise OSError("the partial download is longer than the file, so it was deleted") from None
            raise
        with answer:
            self.tag = answer.headers.get("ETag")
            is_continued = num_received and getattr(answer, "status", None) == 206
            size = int(answer.headers.get("Content-Length") or -1)
            total = size + num_received if is_continued and size >= 0 else size
            present = f", of which {num_received / 1e6:,.1f} MB are here already" if is_continued else ""
            self.say(f"{public_url}: " + (f"{total / 1e6:,.1f} MB{present}" if total >= 0 else "downloading"))
            try:
                file = self.part.open("ab" if is_continued else "wb", buffering=0)
            except OSError as problem:
                raise _cannot_write(self.part, problem) from None
            with file:
                self._copy(answer, file, total)

    def _num_continued(self) -> int:
        """Returns the bytes of the partial file that may be kept; without a digest, only of earlier tries."""
        if self.digest is None and self.tag is None:
            return 0
        return self.part.stat().st_size if self.part.is_file() else 0

    def _copy(self, answer: http.client.HTTPResponse, file: BinaryIO, total: int) -> None:
        """Writes the answer's bytes. total: size of the complete file in bytes; -1: unknown."""
        last_report = time.monotonic()
        while piece := answer.read(_PIECE):
            _write(file, piece, self.part)
            if time.monotonic() - last_report > _SAY_EVERY_S:
                total_text = f" of {total / 1e6:,.1f} MB" if total >= 0 else ""
                self.say(f"{without_secrets(self.url)}: {file.tell() / 1e6:,.1f} MB{total_text}")
                last_report = time.monotonic()
        if total >= 0 and file.tell() != total:
            raise OSError(f"truncated after {file.tell()} of {total} bytes")


def _write(file: BinaryIO, piece: bytes, part: Path) -> None:
    """Appends `piece` to the partial file. Raises DownloadError if it cannot be written."""
    remaining = memoryview(piece)
    try:
        while remaining:
            remaining = remaining[file.write(remaining) :]
    except OSError as problem:
        raise _cannot_write(part, problem) from None
