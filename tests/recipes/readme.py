"""Commands of a README, as a reader would type them, run at tiny size."""

import importlib
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from megatron.launch import process_info
from megatron.neox_arguments import load
from megatron.neox_arguments.reading.command_line import parse_deepy
from megatron.training import start, train
from tests.pool import run_ranks

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("tools", "post-training", "train.py", "deepy.py")
# What real sizes become. A key that a command sets itself is made small too, unless it has no say in size.
SMALL: Mapping[str, Any] = {
    "seq_length": 64, "max_length": 32, "max_prompt_length": 8, "truncate_documents": 32, "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "eval_iters": 1, "exit_interval": 2,
    "log_interval": 1, "warmup_iters": 0, "zero_optimization.stage": 0, "rollout.num_generations": 2,
    "rollout.max_completion_length": 4, "rollout.max_prompt_length": 32,
}  # fmt: skip
QUICK = ("num_workers=0", "async_save=false")
Weights = dict[int, dict[str, Tensor]]


def commands(text: str) -> list[str]:
    """Commands of the plain code blocks, continued lines joined, a line each."""
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [" ".join(line.split()) for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines()]


def small(argv: list[str]) -> tuple[list[str], list[str]]:
    """Files and overrides of a training command, at tiny size."""
    config_values = parse_deepy(argv).args.user_values  # what the files and the command say, checked as deepy.py does
    set_index = argv.index("--set") if "--set" in argv else len(argv)
    named_keys = {"exit_interval", *config_values}
    named_keys |= {
        f"{section}.{name}" for section, keys in config_values.items() if isinstance(keys, Mapping) for name in keys
    }
    sizes = {key: value for key, value in SMALL.items() if key in named_keys}
    if "ga_dataset" in config_values:  # so many, until one unlearns
        sizes |= {"exit_interval": 3, "ga_interleave_ratio": 1}
    if "gradient_accumulation_steps" in config_values and "train_batch_size" in config_values:
        del sizes["gradient_accumulation_steps"]
    words = {word.partition("=")[0]: word.partition("=")[2] for word in argv[set_index + 1 :]}
    sizes = {
        key: value for key, value in sizes.items() if words.get(key, config_values.get(key)) not in ("null", "0", 0)
    }
    merged = {**words, **{key: str(value) for key, value in sizes.items()}}
    return argv[1:set_index], [f"{key}={value}" for key, value in merged.items()] + list(QUICK)


def run(
    rank: int, world_size: int, files: list[str], words: list[str], environment: Mapping[str, str] | None = None
) -> tuple[Weights, Weights]:
    """For the pool: train.py's run of these files; the weights before and after."""
    os.environ.update(environment or {})
    with redirect_stdout(io.StringIO()):
        training = start(load(files, words), process_info())
        weights_before = _copy(training.engine.weights(master=True))
        train(training)
    weights_after = _copy(training.engine.weights(master=True))
    training.close()
    training.engine.close()
    return weights_before, weights_after


def _copy(weights: Any) -> Weights:
    return {layer: {name: value.clone() for name, value in tensors.items()} for layer, tensors in weights.items()}


class Trained:
    """A training command that ran. recipe: its file; save: its folder."""

    def __init__(self, files: list[str], words: list[str], weights: tuple[Weights, Weights]) -> None:
        args = load(files, words)
        self.files, self.words, self.args, self.save = files, words, args, Path(str(args.save))
        self.weights_before, self.weights_after = weights
        self.recipe = yaml.safe_load(Path(files[-1]).read_text())


def follow(text: str, names: Mapping[str, str], monkeypatch: Any) -> Iterator[Trained]:
    """Types the README's commands in the working folder. names: what stands for models and data."""
    for line in commands(text):
        for name, local_path in names.items():
            line = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w-])", local_path, line)
        line = re.sub(r"--workers \d+", "--workers 1", line)
        words = shlex.split(line)
        count = next(i for i, word in enumerate(words) if "=" not in word)
        environment, words = dict(word.split("=", 1) for word in words[:count]), words[count:]
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            if words[:2] == ["python", "deepy.py"]:
                files, overrides = small(words[2:])
                yield Trained(files, overrides, run_ranks(run, 1, files, overrides, environment)[0])
            elif words[0] == "python":
                module = importlib.import_module(words[1].removesuffix(".py").replace("/", "."))
                with redirect_stdout(io.StringIO()):
                    module.main(words[2:])
            else:
                assert words[0] == "sbatch", f"not known what this does: {line}"
                inner = shlex.split(words[words.index("--wrap") + 1])
                assert inner[:3] == ["srun", "python", "train.py"]
                parse_deepy(inner[2:])
