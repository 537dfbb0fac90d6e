"""A process that has imported what is slow and nothing of this project; it forks for each copy of the tree.

Started by its path, `python -P zygote.py`, so that no folder of ours is on `sys.path`. Each line of stdin is
a JSON object {folder, code, log}: `code` runs in `folder`, whose packages it finds first; the answer is a
line with the exit code.
"""

import importlib
import json
import os
import sys
import traceback

WARM = (
    "torch", "torch.distributed", "torch.utils.data", "torch.utils.checkpoint", "torch.utils.tensorboard",
    "torch._dynamo", "torch.onnx", "numpy", "tokenizers", "tqdm", "yaml", "deepspeed", "deepspeed.runtime.engine",
    "deepspeed.runtime.pipe.engine", "deepspeed.runtime.zero.muon.original_muon",
    "deepspeed.module_inject.auto_ep_layer",
)  # fmt: skip


def main() -> None:
    """Import, then serve until stdin ends."""
    answers = open(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is imported may print
    for name in WARM:
        importlib.import_module(name)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing may be compiled
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(**job)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers)
    os._exit(0)  # what was imported has threads and files to close, which takes seconds


def _run(folder: str, code: str, log: str) -> None:
    """In the fork; never returns."""
    status = 1
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        exec(compile(code, "recipe", "exec"), {"__name__": "recipe"})
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
