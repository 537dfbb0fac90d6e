"""One rank of `tests.gpu.runs.on_ranks`: calls what FILE holds, and writes the result beside it."""

import os
import pickle
import sys
from pathlib import Path


def main(file: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fn, args = pickle.loads(Path(file).read_bytes())
    Path(file).with_suffix(f".result{rank}").write_bytes(pickle.dumps(fn(rank, world, *args)))


if __name__ == "__main__":
    main(sys.argv[1])
