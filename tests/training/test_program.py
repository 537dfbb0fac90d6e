"""Programs written for GPT-NeoX: a configuration they wrote to, handed to the entry points."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import megatron
import train as train_script
from megatron.launch import process_info
from megatron.training import start
from tests.pool import run_ranks
from tests.training.runs import NEOX, config


def program(rank: int, world_size: int, values: dict[str, Any], ways: list[str]) -> list[list[float]]:
    """The losses of the same run, started in each way."""
    losses = []
    for way in ways:
        save = Path(values["save"]) / way
        args = megatron.NeoXArgs.from_dict(values)
        args.user_script = "train.py"
        args.configure_distributed_args()
        assert (args.rank, args.world_size, args.train_batch_size) == (rank, world_size, 8)
        args.train_iters = 3
        args.update_value("save", str(save))
        with redirect_stdout(io.StringIO()):
            if way == "object":
                assert train_script.main(args) == 0
            elif way == "words":
                args.train_iters = 9
                words = args.get_deepspeed_main_args()
                assert train_script.main(input_args=words, overwrite_values={"train_iters": 3}) == 0
                Path(words[-1]).unlink()
            else:
                training = start(args, process_info())
                assert type(training.args).__name__ == "NeoXArgs" and training.args.train_iters == 3
                training.close()
                continue
        rows = [json.loads(line) for line in (save / "logs" / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["train/lm_loss"] for row in rows if "train/lm_loss" in row])
    return losses


def test_a_program_trains_with_what_it_wrote(tmp_path: Path) -> None:
    values = config(NEOX, train_iters=9, save=str(tmp_path), checkpoint_factor=100)
    ((object_, words),) = run_ranks(program, 1, values, ["object", "words", "start"])
    assert len(object_) == 3 and object_ == words
