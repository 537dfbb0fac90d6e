"""Names the partial output file of a long job, so that an interrupted job continues where it stopped."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.neox_arguments import NeoXArgs

_LENGTH = 16  # characters of a fingerprint


def job_fingerprint(args: NeoXArgs, sources: Sequence[str], files: Iterable[Path]) -> str:
    """Returns a hash of everything that a job's result depends on: configuration, weights and input files.

    Files are identified by path, size and modification time.

    sources: folders of the weights. files: the input files.
    """
    paths = [path for folder in sources for path in sorted(Path(folder).iterdir()) if path.is_file()]
    paths += files
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    content = json.dumps([args.public_values, states])
    return hashlib.sha256(content.encode()).hexdigest()[:_LENGTH]


def partial_file(final: Path, fingerprint: str) -> Path:
    """Returns the path under which the file `final` is written until it is complete. Deletes the partial
    files of `final` that other jobs left.

    fingerprint: the job's `job_fingerprint`.
    """
    partial = final.with_name(f".{final.name}.{fingerprint}.partial")
    for path in final.parent.glob(f".{final.name}.{'?' * _LENGTH}.partial"):
        if path != partial:
            path.unlink(missing_ok=True)
    return partial
