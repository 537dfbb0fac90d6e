"""Seconds from a stop signal to its acknowledgement and to the end of a run, in phases that take long.

A small model trains on the quickstart data through deepy.py. In each phase,
as soon as `<save>/status.json` names it, the run gets SIGUSR1, as from Slurm.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

DATA = ROOT / "data" / "quickstart"
MODEL: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 512, "max_position_embeddings": 512,
    "train_iters": 10_000, "train_batch_size": 8, "eval_iters": 0, "checkpoint_factor": 10_000, "precision": "fp32",
    "data_path": str(DATA / "text_document"), "split": "95,5,0", "tokenizer_type": "HFTokenizer",
    "vocab_file": str(DATA / "tokenizer.json"), "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
}  # fmt: skip
PHASES: dict[str, tuple[str, dict[str, Any]]] = {  # by name: what status.json calls it, and keys that make it long
    "steps": ("training", {}),
    "validation": ("computing the validation loss", {"eval_iters": 10_000}),
    "lm-eval": ("evaluating", {"eval_tasks": ["shipped_choice", "shipped_cloze", "shipped_perplexity"]}),
    "demos": ("answering demo_prompts", {"maximum_tokens": 480}),
}


def measure(name: str, ranks: int, folder: Path) -> tuple[float, float]:
    """Sends SIGUSR1 to a run during a phase of PHASES.

    Returns the seconds until launcher and rank log the signal, and until the run has ended."""
    phase, keys = PHASES[name]
    save = folder / name
    save.mkdir()
    if name == "demos":
        (save / "prompts.txt").write_text("".join(f"The {number}th\n" for number in range(500)))
        keys = {**keys, "demo_prompts": str(save / "prompts.txt")}
    (save / "run.yml").write_text(json.dumps({**MODEL, **keys, "save": str(save), "load": str(save)}))
    command = [sys.executable, "-u", "deepy.py", "--num_gpus", str(ranks), "train.py", str(save / "run.yml")]
    with open(save / "output", "wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        while process.poll() is None and _phase(save) != phase:
            time.sleep(0.05)
        time.sleep(1.0)  # in the middle of it
        start = time.monotonic()
        os.kill(process.pid, signal.SIGUSR1)
        while (save / "output").read_bytes().count(b"SIGUSR1: ") < 2 and process.poll() is None:
            time.sleep(0.01)
        acknowledged = time.monotonic() - start
        if process.wait() != 0:
            sys.exit(f"{save / 'output'}: the run ended with code {process.returncode}")
    return acknowledged, time.monotonic() - start


def _phase(save: Path) -> str | None:
    try:
        return json.loads((save / "status.json").read_text()).get("phase")
    except (OSError, ValueError):
        return None


def main() -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    subprocess.run([sys.executable, "tools/quickstart_data.py"], cwd=ROOT, check=True)
    print("| phase | acknowledged after (s) | ended after (s) |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.phases:
            print("| {} | {:.2f} | {:.1f} |".format(name, *measure(name, options.ranks, Path(folder))), flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)
