"""The small runs and commands that a campaign breaks, and their results, which must be the same bits."""

import hashlib
import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from megatron.neox_arguments.frozen import FrozenDict
from tools.compare_commits import COMMON, GOLDEN, OBJECTIVES, compared_values, digest_of_tensors, make_pairs

STEPS, SAVE_EVERY = 6, 2
TENSOR, PIPE = "model_parallel_size", "pipe_parallel_size"
SMALL: Mapping[str, Any] = FrozenDict({
    "num_layers": 2, "train_iters": STEPS, "checkpoint_factor": SAVE_EVERY, "eval_interval": 3, "seq_length": 32,
    "max_position_embeddings": 32, "train_micro_batch_size_per_gpu": 4, "save": "run", "load": "run",
    "log_dir": "run/logs", "rendezvous_timeout_s": 20, "collective_timeout_s": 15,
})  # fmt: skip
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = FrozenDict({
    "plain": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {TENSOR: 2}),
    "pp2": (2, {PIPE: 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "ep2": (2, {"moe_num_experts": 4, "expert_parallel_size": 2, "moe_router_type": "topk"}),
    "zero1": (2, {"zero_optimization": {"stage": 1}}),
    "zero3": (2, {"zero_optimization": {"stage": 3}}),
    "deepspeed-zero1": (2, {"engine": "deepspeed", "zero_optimization": {"stage": 1}}),
    "deepspeed-pp2": (2, {"engine": "deepspeed", PIPE: 2}),
})  # fmt: skip
"""Number of ranks and keys of each layout."""
_WITH_REFERENCE = {key: value for key, value in OBJECTIVES["dpo"].items() if key != "dpo_loss_type"}
_OBJECTIVES: Mapping[str, Mapping[str, Any]] = FrozenDict(
    {**OBJECTIVES, "dpo": _WITH_REFERENCE, "kto": {**_WITH_REFERENCE, "train_impl": "kto"}}
)
OBJECTIVE_NAMES = tuple(_OBJECTIVES)


LOCK = ".lock"
"""Name of the file in `save` that a start of a run makes once it has fingerprinted its data, and locks."""


@dataclass(frozen=True)
class TrainingRun:
    """A layout and an objective, with the folder in which it runs."""

    layout: str
    objective: str

    @property
    def ranks(self) -> int:
        """Returns the number of ranks."""
        return LAYOUTS[self.layout][0]

    def prepare(self, folder: Path, **keys: Any) -> None:
        """Writes `run.yml` into a folder, and copies the data beside it: a fault may change it there."""
        folder.mkdir(parents=True, exist_ok=True)
        values = {**COMMON, **_OBJECTIVES[self.objective], **SMALL, **LAYOUTS[self.layout][1], **keys}
        (folder / "data").mkdir(exist_ok=True)
        if self.objective in ("dpo", "kto"):
            make_pairs(folder / "data" / "pairs")
        values = {
            key: self._with_copies(folder, value) if "data_path" in key else value for key, value in values.items()
        }
        values["index_cache_dir"] = "index_maps"
        (folder / "run.yml").write_text(yaml.safe_dump(_as_yaml(values)))

    def main(self) -> int:
        """Trains, as one rank, in the folder that is the working directory."""
        return import_module("train").main(["run.yml"])

    def result(self, folder: Path) -> dict[str, Any]:
        """Returns losses and other metrics of each step, and digests of the last checkpoint's tensors."""
        save = folder / "run"
        rows = [json.loads(line) for line in (save / "logs" / "metrics.jsonl").read_text().splitlines()]
        last = save / (save / "latest").read_text().strip()
        return {
            "metrics": [compared_values(row) for row in rows],
            "tensors": {path.name: digest_of_tensors(path) for path in sorted(last.glob("*.pt"))},
        }

    def _with_copies(self, folder: Path, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._with_copies(folder, item) for item in value]
        if str(value).startswith("PAIRS/"):
            return str(value).replace("PAIRS", "data/pairs")
        for suffix in (".bin", ".idx"):
            source = Path(f"{value}{suffix}")
            if not (folder / "data" / source.name).exists():
                shutil.copy(source, folder / "data" / source.name)
        return f"data/{Path(value).name}"


COMMAND = "command"
"""The place of a layout's name in the cases of commands, which run in one process."""
COMMANDS: Mapping[str, tuple[str, str, str]] = FrozenDict({
    "tokenise": ("tools.datasets.preprocess_data", "out", "--input texts.jsonl --output-prefix out/texts "
                 f"--tokenizer-type HFTokenizer --vocab-file {GOLDEN / 'tokenizer.json'} --append-eod --workers 2"),
    "clean": ("tools.datasets.clean", "out", "texts.jsonl out --recipe c4 --minhash --format jsonl --workers 2"),
    "convert": ("tools.ckpts.convert_neox_to_hf", "hf", "--input_dir run --output_dir hf"),
})  # fmt: skip
"""Name of a command: its module, the folder it writes, and its words."""
_VARYING = ("metadata.json", "report.html")  # ends of the names of files that hold times


@dataclass(frozen=True)
class CommandRun:
    """A command that works in one process, and in workers that it starts."""

    name: str
    ranks: int = 1

    def prepare(self, folder: Path) -> None:
        """Writes texts beside the finished training run of a folder."""
        words = ("one", "two", "three", "four", "five", "six", "seven")
        choice = random.Random(0)
        sentences = [" ".join(choice.choices(words, k=choice.randint(6, 12))).capitalize() + "." for _ in range(2000)]
        rows = [json.dumps({"text": " ".join(choice.choices(sentences, k=8))}) for _ in range(400)]
        (folder / "texts.jsonl").write_text("\n".join([*rows, *rows[:40]]) + "\n")

    def main(self) -> int:
        """Runs the command in the folder that is the working directory."""
        module, _, words = COMMANDS[self.name]
        return import_module(module).main(words.split()) or 0

    def result(self, folder: Path) -> dict[str, Any]:
        """Returns digests of the files that the command has written."""
        out = folder / COMMANDS[self.name][1]
        files = sorted(path for path in out.rglob("*") if path.is_file() and not path.name.endswith(_VARYING))
        digests = {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        return {"metrics": [], "tensors": digests}


def run_of(layout: str, objective: str) -> TrainingRun | CommandRun:
    """Returns the run of a case."""
    return CommandRun(objective) if layout == COMMAND else TrainingRun(layout, objective)


def rewind(folder: Path, iteration: int) -> None:
    """Makes a finished run look as it did when the checkpoint of `iteration` had been written."""
    save = folder / "run"
    for checkpoint in save.glob("global_step*"):
        if int(checkpoint.name.removeprefix("global_step")) > iteration:
            shutil.rmtree(checkpoint)
    if iteration == 0:
        shutil.rmtree(save)
        return
    (save / "latest").write_text(f"global_step{iteration}")
    for name in ("training_summary.json", "training_history.json", "status.json", LOCK):
        (save / name).unlink(missing_ok=True)


def _as_yaml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_yaml(item) for key, item in value.items()}
    return [_as_yaml(item) for item in value] if isinstance(value, list | tuple) else value
