"""Tiny runs of each kind of training: the names of their metrics, their log lines and their files."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing import load_tensors
from tests.methods.preferences.test_pairs_train import pairs, pairwise
from tests.methods.reinforcement.toy import full_run, with_keys, write_task
from tests.methods.reward.test_runs import reward_data, values_of
from tests.pool import run_ranks
from tests.training.runs import NEOX, config, output_of_run
from tests.training.test_experts import MOE

SMALL = {"num_layers": 1, "train_iters": 2, "train_micro_batch_size_per_gpu": 4, "checkpoint_factor": 2,
         "peak_theoretical_tflops": 1.0}  # fmt: skip
VALIDATED = {"eval_iters": 1, "eval_interval": 2}
PAIRS = {"pack_impl": "best_fit", **SMALL, **VALIDATED}
NORMS = dict.fromkeys(("log_grad_norm", "log_param_norm", "log_optimizer_states", "log_grad_pct_zeros"), True)


def configs(folder: Path) -> dict[str, dict[str, Any]]:
    """One run of each kind of training, by name."""
    for name in ("pairs", "scores"):
        (folder / name).mkdir()
    pair_files, score_files = pairs(folder / "pairs", 12), reward_data(folder / "scores", 12)
    runs = {
        "pretraining": config(NEOX, SMALL, VALIDATED, NORMS, split="80,15,5"),
        "experts": config(MOE, SMALL),
        "dpo": pairwise(pair_files, PAIRS),
        "kto": pairwise(pair_files, PAIRS, {"train_impl": "kto"}),
        "reward model": values_of(score_files, PAIRS),
    }
    return {name: {**values, "save": str(folder / name)} for name, values in runs.items()}


def all_output(rank: int, world_size: int, values: dict[str, dict[str, Any]]) -> dict[str, str]:
    """For the pool: what each run prints."""
    return {name: output_of_run(rank, world_size, run, True) for name, run in values.items()}


def metric_names(save: Path) -> list[str]:
    """Names of a run's metrics; those of single parameters once, without the parameter."""
    rows = map(json.loads, (save / "logs" / "metrics.jsonl").read_text().splitlines())
    names = {re.sub(r"/\d+\.[\w.]+?(_exp_avg\w*)?$", r"/PARAMETER\1", name) for row in rows for name in row}
    return sorted(names)


def log_lines(output: str) -> list[str]:
    """The lines of steps, validation and the end, with numbers replaced; each once."""
    lines = output.partition("end of arguments")[2].splitlines()
    stable = [re.sub(r"git hash: \w+", "git hash: N", line) for line in lines if " | " in line]
    numbered = [re.sub(r"\d[\d.]*(?:E[+-]\d+)?(?: ?[KMGTP]FLOPS)?", "N", line) for line in stable]
    return list(dict.fromkeys(re.sub(r" +", " ", line).strip() for line in numbered))


def shape(value: Any, path: str = "") -> Iterator[str]:
    """A line for each value in a file: the keys that lead to it, and its kind. Items of a list are one."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from shape(inner, f"{path}/{key}")
    elif isinstance(value, list | tuple) and value:
        yield from dict.fromkeys(line for inner in value for line in shape(inner, f"{path}[]"))
    elif isinstance(value, torch.Tensor):
        yield f"{path}: {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    else:
        yield f"{path}: {'null' if value is None else type(value).__name__}"


def files(save: Path) -> Iterator[str]:
    """The files of a run, and the keys of those with JSON or tensors."""
    for path in sorted(path for path in save.rglob("*") if path.is_file()):
        name = path.relative_to(save)
        yield str(name)
        if path.suffix == ".json" and name.parts[-2:-1] != ("tokenizer",):
            yield from (f"{name} {line}" for line in shape(json.loads(path.read_text())))
        elif path.suffix == ".pt":
            yield from (f"{name} {line}" for line in shape(load_tensors(path)))


def run_contracts(folder: Path) -> dict[str, list[str]]:
    """Lines by section."""
    values = configs(folder)
    [output] = run_ranks(all_output, 1, values, timeout=250)
    (folder / "task").mkdir()
    saved = {"train_iters": 2, "checkpoint_factor": 2, "save": str(folder / "grpo")}
    grpo = with_keys(write_task(folder / "task"), saved)
    run_ranks(full_run, 1, grpo)
    sections = {f"metrics of {name}": metric_names(folder / name) for name in (*values, "grpo")}
    sections["log lines of pretraining"] = log_lines(output["pretraining"])
    sections["files of pretraining"] = list(files(folder / "pretraining"))
    return sections
