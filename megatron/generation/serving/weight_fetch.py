"""What a request for other weights says, and their files where it names an address instead of a folder."""

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
    """The body of `/v1/update_weights`. path: a HuggingFace folder that all machines of the server see; url:
    in its place the address below which the files of `sha256` are, for a server on one machine; version: the
    number by which answers name these weights; sha256: of the folder's files by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str | None = None
    url: Annotated[str, Field(pattern="^https?://")] | None = None
    version: int = Field(ge=0)
    sha256: dict[str, str] = {}

    @model_validator(mode="after")
    def _check(self) -> "UpdateRequest":
        if (self.path is None) == (self.url is None):
            raise ValueError("give path or url, one of them")
        if self.url is not None and not self.sha256:
            raise ValueError("url needs sha256, the files that are there")
        wrong = next((name for name in self.sha256 if not re.fullmatch(r"\w[\w.-]*", name)), None)
        if wrong is not None:
            raise ValueError(f"sha256: {wrong!r} is no name of a file")
        return self


def parse_update(content: bytes) -> UpdateRequest:
    """A request from its body. Raises APIError."""
    try:
        return UpdateRequest.model_validate_json(content)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "body"
        raise APIError(400, f"{place}: {first['msg'].removeprefix('Value error, ')}", param=place) from None


@asynccontextmanager
async def fetched(asked: UpdateRequest) -> AsyncIterator[WeightUpdate]:
    """The weights in a folder of this machine, which lasts as long as the context. Raises APIError for files
    that cannot be fetched."""
    if asked.path is not None:
        yield WeightUpdate(asked.path, asked.version, asked.sha256)
        return
    assert asked.url is not None
    folder = Path(tempfile.mkdtemp(prefix="neox_weights_"))
    try:
        await asyncio.to_thread(_fetch, asked.url, asked.sha256, folder)
        yield WeightUpdate(str(folder), asked.version, asked.sha256)
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
