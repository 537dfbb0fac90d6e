"""Runs cases, one a line of JSON on stdin, and answers each with a line of JSON on stdout.

`python -m tests.fake.child LIBRARY`: torch is imported after the shim is loaded, once for all cases.
"""

import json
import os
import sys
from pathlib import Path

from tests.fake.layouts import Case
from tests.fake.shim import preload


def main(library: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints does not stand between the answers
    preload(Path(library))
    from tests.fake.runs import run

    for line in sys.stdin:
        print(json.dumps(run(Case(**json.loads(line)))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
