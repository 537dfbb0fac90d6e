"""The small runs and commands that a campaign breaks, and their results, which must be the same bits."""

import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import constants

from megatron.neox_arguments.frozen import FrozenDict
from megatron.process import begin_process
from tests.methods.reinforcement.toy import write_task
from tests.operations.hub.loopback_hub import LoopbackHub
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
OBJECTIVE_NAMES = (*_OBJECTIVES, "rl")


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
        (folder / "data").mkdir(exist_ok=True)
        if self.objective == "rl":
            task = _reinforcement_task(folder)
        else:
            task = {**COMMON, **_OBJECTIVES[self.objective]}
        values = {**task, **SMALL, **LAYOUTS[self.layout][1], **keys}
        if self.objective in ("dpo", "kto"):
            make_pairs(folder / "data" / "pairs")
        values = {
            key: self._with_copies(folder, value) if "data_path" in key else value for key, value in values.items()
        }
        values["index_cache_dir"] = "index_maps"
        (folder / "run.yml").write_text(yaml.safe_dump(_as_yaml(values)))

    def begin(self) -> None:
        """Sets the signal handlers of train.py."""
        begin_process("train.py", promise="the run ends as soon as its current work can be interrupted")

    def main(self) -> int:
        """Trains, as one rank, in the folder that is the working directory."""
        return import_module("train").main(["run.yml"])

    def result(self, folder: Path) -> dict[str, Any]:
        """Returns losses and other metrics of each step, and digests of the last checkpoint's tensors."""
        save = folder / "run"
        rows = []
        for line in (save / "logs" / "metrics.jsonl").read_text(errors="replace").splitlines():
            with suppress(json.JSONDecodeError):  # a damaged row counts as a missing one
                rows.append(json.loads(line))
        last = save / (save / "latest").read_text().strip()
        return {
            "metrics": [compared_values(row) for row in rows],
            "tensors": {path.name: digest_of_tensors(path) for path in sorted(last.glob("*.pt"))},
        }

    def surroundings(self) -> AbstractContextManager[object]:
        """Returns a context in which the run can start: for training nothing."""
        return nullcontext()

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
    "generate": ("generate", "out", "run.yml --set text_gen_type=unconditional num_samples=12 maximum_tokens=12 "
                 "temperature=0.8 sample_output_file=out/samples.jsonl log_dir=out_logs"),
    "evaluate": ("eval", "out", "run.yml --eval_tasks shipped_choice --eval_limit 4 --eval_output_dir out "
                 "--set eval_cache=out/cache log_dir=out_logs"),
    "upload": ("huggingface.upload_and_evaluate_checkpoint", "run/hub", "--experiment_name run --repository org/tiny "
               "--neox_checkpoint global_step6 --retry-min-wait 0.05 --retry-max-wait 0.2"),
})  # fmt: skip
"""Name of a command: its module, the folder it writes, and its words."""
_IMPORTS: Mapping[str, tuple[str, ...]] = FrozenDict({
    "evaluate": ("lm_eval.evaluator", "lm_eval.tasks"),
    "upload": ("matplotlib.pyplot", "megatron.operations.hub.conversion"),
})  # fmt: skip
"""Modules that a command's ranks need not import again."""
_VARYING = ("metadata.json", "report.html")  # ends of the names of files that hold times
_COMPARED_SCORES = ("results", "n-samples", "versions", "task_hashes", "failures", "samples")


@dataclass(frozen=True)
class CommandRun:
    """A command that works in one process, and in workers that it starts."""

    name: str
    ranks: int = 1

    def surroundings(self) -> AbstractContextManager[object]:
        """Returns a context in which the command can start: a Hub that runs, for an upload."""
        return nullcontext()

    def rewind(self, folder: Path) -> None:
        """Removes what a finished command has written."""
        shutil.rmtree(folder / COMMANDS[self.name][1])

    def prepare(self, folder: Path) -> None:
        """Writes texts beside the finished training run of a folder, and imports what the command needs."""
        for module in (COMMANDS[self.name][0], *_IMPORTS.get(self.name, ())):
            import_module(module)
        words = ("one", "two", "three", "four", "five", "six", "seven")
        choice = random.Random(0)
        sentences = [" ".join(choice.choices(words, k=choice.randint(6, 12))).capitalize() + "." for _ in range(2000)]
        rows = [json.dumps({"text": " ".join(choice.choices(sentences, k=8))}) for _ in range(400)]
        (folder / "texts.jsonl").write_text("\n".join([*rows, *rows[:40]]) + "\n")

    def begin(self) -> None:
        """Sets the signal handlers of the command's script. Scripts of `tools` leave SIGUSR1 as it is."""
        begin_process(self.name, promise="the evaluation ends" if self.name == "evaluate" else None)
        if COMMANDS[self.name][0].startswith("tools."):
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def main(self) -> int:
        """Runs the command in the folder that is the working directory."""
        module, out, words = COMMANDS[self.name]
        if self.name == "generate":  # which makes no folder
            Path(out).mkdir(exist_ok=True)
        return import_module(module).main(words.split()) or 0

    def result(self, folder: Path) -> dict[str, Any]:
        """Returns digests of the files that the command has written."""
        out = folder / COMMANDS[self.name][1]
        files = sorted(path for path in out.rglob("*") if path.is_file() and not path.name.endswith(_VARYING))
        contents = dict(_content(path, out) for path in files if path.parent.name != "cache")
        return {"metrics": [], "tensors": {name: _digest(content) for name, content in contents.items()}}


@dataclass(frozen=True)
class UploadRun(CommandRun):
    """An upload to a Hub of this machine, whose repositories are its result."""

    hub: LoopbackHub = field(default_factory=LoopbackHub)

    def surroundings(self) -> AbstractContextManager[object]:
        """Returns a context in which the Hub answers."""
        return self.hub.serving()

    def main(self) -> int:
        """Uploads, with a client that takes this Hub for the Hub."""
        os.environ.update(self.hub.environment())
        for name, value in (("ENDPOINT", self.hub.endpoint), ("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True)):
            setattr(constants, name, value)
        return super().main()

    def result(self, folder: Path) -> dict[str, Any]:
        """Returns digests of the files in all repositories and revisions."""
        digests = {
            f"{name}@{revision}/{path}": _digest(content)
            for name, repository in self.hub.repos.items()
            for revision in repository.branches
            for path, content in self.hub.content(name, revision).items()
        }
        return {"metrics": [], "tensors": digests}


def _content(path: Path, folder: Path) -> tuple[str, bytes]:
    """Returns the name and the content of a command's file, without times."""
    name, content = str(path.relative_to(folder)), path.read_bytes()
    if path.name == "samples.jsonl":
        rows = [{**json.loads(line), "duration_seconds": None} for line in content.splitlines()]
        return name, json.dumps(rows).encode()
    if path.match("*eval_results_*.json"):  # its name holds a time too
        values = json.loads(content)
        return "results", json.dumps({key: values.get(key) for key in _COMPARED_SCORES}).encode()
    return name, content


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def run_of(layout: str, objective: str) -> TrainingRun | CommandRun:
    """Returns the run of a case."""
    if layout == COMMAND:
        return UploadRun(objective) if objective == "upload" else CommandRun(objective)
    return TrainingRun(layout, objective)


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


def _reinforcement_task(folder: Path) -> dict[str, Any]:
    """Writes prompts into `data`, reward functions and a tokenizer beside it. Returns the keys of a run."""
    (folder / "task").mkdir(exist_ok=True)
    task = write_task(folder / "task")
    os.replace(folder / "task" / "prompts.jsonl", folder / "data" / "prompts.jsonl")
    task["rollout"]["prompts"] = ["data/prompts.jsonl"]
    return {key: _with_relative_paths(value, f"{folder}/") for key, value in task.items()}


def _with_relative_paths(value: Any, folder: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_relative_paths(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_relative_paths(item, folder) for item in value]
    return value.removeprefix(folder) if isinstance(value, str) else value


def _as_yaml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_yaml(item) for key, item in value.items()}
    return [_as_yaml(item) for item in value] if isinstance(value, list | tuple) else value
