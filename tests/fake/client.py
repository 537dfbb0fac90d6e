"""The process that imports torch after the shim, once for all cases, and what tests see of it."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.planning.fake_cuda.shim import preload
from tests.fake.layouts import Case


class FakeCuda:
    """A process that runs cases, and what it answered: each case is run once."""

    def __init__(self, library: Path) -> None:
        command, pipe = [sys.executable, "-m", "tests.fake.client", str(library)], subprocess.PIPE
        root = Path(__file__).parents[2]
        self._process: Any = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True)
        self._answers: dict[str, dict[str, Any]] = {}

    def run(self, case: Case) -> dict[str, Any]:
        """Returns the report of `runs.run` on a case. Raises RuntimeError where the process has died."""
        request = json.dumps(asdict(case))
        if request not in self._answers:
            print(request, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
            if not answer:
                raise RuntimeError(f"{' '.join(map(str, self._process.args))}: ended with {self._process.wait()}")
            self._answers[request] = json.loads(answer)
        return self._answers[request]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def main(library: str) -> None:
    """Run cases, one a line of JSON on stdin, and answer each with one on stdout."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints does not stand between the answers
    preload(Path(library))
    from tests.fake.runs import run

    for line in sys.stdin:
        print(json.dumps(run(Case(**json.loads(line)))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
