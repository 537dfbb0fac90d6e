"""Files that grow over a long job, so that it goes on where it was interrupted."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.neox_arguments import NeoXArgs

_LENGTH = 16  # of a fingerprint


def job_fingerprint(args: NeoXArgs, sources: Sequence[str], files: Iterable[Path]) -> str:
    """Returns a hash of everything the result depends on: configuration, weights and inputs.

    sources: folders of the weights. files: inputs. Files of both are identified by path, size and
        modification time.
    """
    paths = [path for folder in sources for path in sorted(Path(folder).iterdir()) if path.is_file()]
    paths += files
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    content = json.dumps([json.loads(args.to_json())["given"], states])
    return hashlib.sha256(content.encode()).hexdigest()[:_LENGTH]


def partial_file(final: Path, fingerprint: str) -> Path:
    """Returns the temporary path to which `final` is written until it is complete. Deletes the partial files
    of `final` that belong to other jobs."""
    partial = final.with_name(f".{final.name}.{fingerprint}.partial")
    for path in final.parent.glob(f".{final.name}.{'?' * _LENGTH}.partial"):
        if path != partial:
            path.unlink(missing_ok=True)
    return partial
