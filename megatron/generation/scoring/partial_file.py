"""Files that grow over a long job, so that it goes on where it was interrupted."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.neox_arguments import NeoXArgs

_LENGTH = 16  # of a fingerprint


def job_fingerprint(args: NeoXArgs, sources: Sequence[str], files: Iterable[Path]) -> str:
    """A hash that differs whenever the result would: other configuration, weights, or inputs.

    sources: the folders of the weights; their files and the inputs count by name, size and time of change.
    """
    every = [path for folder in sources for path in sorted(Path(folder).iterdir()) if path.is_file()]
    every += files
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in every]
    content = json.dumps([json.loads(args.to_json())["given"], states])
    return hashlib.sha256(content.encode()).hexdigest()[:_LENGTH]


def partial_file(final: Path, fingerprint: str) -> Path:
    """The file that `final` is written as until it is whole; those of other jobs are removed."""
    partial = final.with_name(f".{final.name}.{fingerprint}.partial")
    for other in final.parent.glob(f".{final.name}.{'?' * _LENGTH}.partial"):
        if other != partial:
            other.unlink(missing_ok=True)
    return partial
