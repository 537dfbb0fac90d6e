"""Programs written for GPT-NeoX: a configuration they wrote to, handed to the entry points."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import megatron
import train as train_script
from megatron.launch import process_info
from megatron.neox_arguments import NeoXArgs
from megatron.training import start, train
from tests.pool import run_ranks
from tests.training.runs import NEOX, config


def program(rank: int, world_size: int, values: dict[str, Any]) -> list[list[float]]:
    """The losses of the same run, started by the script and by hand."""
    losses = []
    for way in ("script", "hand"):
        args = megatron.NeoXArgs.from_dict(values)
        args.user_script = "train.py"
        args.configure_distributed_args()
        assert (args.rank, args.world_size, args.train_batch_size) == (rank, world_size, 8)
        args.update_value("save", f"{values['save']}/{way}")
        with redirect_stdout(io.StringIO()):
            if way == "script":
                assert train_script.main(args, overwrite_values={"train_iters": 3}) == 0
            else:
                args.train_iters = 3
                training = start(args, process_info())
                assert type(training.args) is NeoXArgs
                train(training)
                training.close()
        rows = [json.loads(line) for line in Path(args.save, "logs", "metrics.jsonl").read_text().splitlines()]
        losses.append([row["train/lm_loss"] for row in rows if "train/lm_loss" in row])
    return losses


def test_a_program_trains_with_what_it_wrote(tmp_path: Path) -> None:
    values = config(NEOX, num_layers=2, train_iters=9, save=str(tmp_path), checkpoint_factor=100)
    ((script, hand),) = run_ranks(program, 1, values)
    assert len(script) == 3 and script == hand
