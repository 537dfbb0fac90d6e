"""Names the sources of the training data, for losses by source and reports of spikes."""

from pathlib import Path
from typing import Any


def train_sources(args: Any, per_path: bool = False) -> tuple[str, ...]:
    """Returns the name of each source of the training data: the last parts of its path that tell it from the
    others.

    The sources are `train_data_paths`, of which equal ones are one, or `data_path`. per_path: return a
    name for each of the paths, in their order.
    """
    paths = args.train_data_paths or (args.data_path,)
    distinct = list(dict.fromkeys(paths))
    parts = [Path(path).parts for path in distinct]
    depth = next((n for n in range(1, max(map(len, parts))) if len({p[-n:] for p in parts}) == len(parts)), None)
    names = ["/".join(p[-depth:]) if depth else path for path, p in zip(distinct, parts, strict=True)]
    return tuple(names[distinct.index(path)] for path in paths) if per_path else tuple(names)
