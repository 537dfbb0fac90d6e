"""train.py with a fault in its first start; `deepy.py --max-restarts` must bring it to its end by itself.

The variable NEOX_FAULT has the fields of an `Injection` as JSON.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.fault_campaign.faults import Injection, install  # noqa: E402
from megatron.process import begin_process, end_process, run_command  # noqa: E402


def main() -> int:
    import train

    injection = Injection(**json.loads(os.environ["NEOX_FAULT"]))
    if os.environ["NEOX_RESTARTS"] == "0" and int(os.environ["RANK"]) == injection.rank:
        install(injection, Path.cwd())
    return train.main()


if __name__ == "__main__":
    begin_process("train.py", promise="the run ends as soon as its current work can be interrupted")
    run_command(lambda: end_process(main()))
