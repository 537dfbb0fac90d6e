"""Parses a request for other weights, and downloads their files if it names a URL instead of a folder."""

import asyncio
import re
import shutil
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron.generation.serving.errors import APIError
from megatron.generation.weight_updates import WeightUpdate

_SECONDS = 60.0  # in which a byte must come


class UpdateRequest(BaseModel):
    """The body of `/v1/update_weights`.

    path: a HuggingFace folder that all machines of the server see.
    url: instead of path, the URL that holds the files of `sha256`, for a server on one machine.
    version: the number of these weights, which answers report.
    sha256: SHA-256 of each file, by file name.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str | None = None
    url: Annotated[str, Field(pattern="^https?://")] | None = None
    version: int = Field(ge=0)
    sha256: dict[str, str] = {}

    @model_validator(mode="after")
    def _check(self) -> "UpdateRequest":
        if (self.path is None) == (self.url is None):
            raise ValueError("send exactly one of path and url")
        if self.url is not None and not self.sha256:
            raise ValueError("with url, pass sha256: a map from each file name at that URL to its SHA-256")
        wrong = next((name for name in self.sha256 if not re.fullmatch(r"\w[\w.-]*", name)), None)
        if wrong is not None:
            raise ValueError(f"sha256: {wrong!r} is not a file name; a key must be a plain file name, not a path")
        return self


def parse_update(content: bytes) -> UpdateRequest:
    """Parses the body of a request to `/v1/update_weights`. Raises APIError."""
    try:
        return UpdateRequest.model_validate_json(content)
    except ValidationError as problem:
        error = problem.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, error["loc"])) or "body"
        raise APIError(400, f"{place}: {error['msg'].removeprefix('Value error, ')}", param=place) from None


@asynccontextmanager
async def fetched(request: UpdateRequest) -> AsyncIterator[WeightUpdate]:
    """Yields the requested weights as files in a folder. Raises APIError if a file cannot be fetched.

    Files of a URL are downloaded to this machine, and deleted at the end of the context.
    """
    if request.path is not None:
        yield WeightUpdate(request.path, request.version, request.sha256)
        return
    assert request.url is not None
    folder = Path(tempfile.mkdtemp(prefix="neox_weights_"))
    try:
        await asyncio.to_thread(_fetch, request.url, request.sha256, folder)
        yield WeightUpdate(str(folder), request.version, request.sha256)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fetch(url: str, files: Mapping[str, str], folder: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # inside the cluster
    for name in files:
        try:
            with opener.open(f"{url.rstrip('/')}/{name}", timeout=_SECONDS) as answer:
                with (folder / name).open("wb") as file:
                    shutil.copyfileobj(answer, file, 1 << 20)
        except OSError as problem:
            raise APIError(502, f"url: {name} cannot be fetched ({problem})", param="url") from None
