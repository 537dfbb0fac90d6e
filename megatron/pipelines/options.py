"""Builds the command lines of deepy.py that train and evaluate a stage, from pipeline.yml and typed
options."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.launch import install_root
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.reading.command_line import parse_deepy
from megatron.pipelines.definition import Pipeline, Stage


@dataclass(frozen=True)
class Options:
    """Options typed for `deepy.py pipeline run` or `resume` that apply to the runs of all stages.

    fp8: `auto` (--fp8), `off` (--no-fp8) or None (neither).
    precision: value of --precision, for the key `precision`.
    settings: KEY=VALUE of --set.
    launcher: value of --launcher, for deepy.py.
    """

    fp8: str | None = None
    precision: str | None = None
    settings: tuple[str, ...] = ()
    launcher: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the options as JSON for pipeline_state.json, without the launcher, which applies to one
        start only."""
        return {"fp8": self.fp8, "precision": self.precision, "settings": list(self.settings)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Options":
        """Returns the options that `to_json` wrote; {} gives options that are all unset."""
        return cls(values.get("fp8"), values.get("precision"), tuple(values.get("settings", ())))

    def fill_from(self, earlier: "Options") -> "Options":
        """Returns these options, with unset ones taken from `earlier`; keys of --set are merged one by one.

        The launcher is never taken from `earlier`."""
        keys = {pair.partition("=")[0] for pair in self.settings}
        retained = [pair for pair in earlier.settings if pair.partition("=")[0] not in keys]
        return Options(
            self.fp8 or earlier.fp8, self.precision or earlier.precision, (*retained, *self.settings), self.launcher
        )

    def flags(self) -> list[str]:
        """Returns the options `fp8` and `launcher` as flags of deepy.py, such as `--no-fp8`."""
        fp8 = {"auto": ["--fp8"], "off": ["--no-fp8"], None: []}[self.fp8]
        return [*fp8, *(["--launcher", self.launcher] if self.launcher is not None else [])]

    def pairs(self) -> list[str]:
        """Returns the options `precision` and `settings` as KEY=VALUE, for --set of deepy.py."""
        return [*([] if self.precision is None else [f"precision={self.precision}"]), *self.settings]


def train_words(pipeline: Pipeline, stage: Stage, options: Options, *further: str) -> list[str]:
    """Returns the arguments for deepy.py that train a stage, to be run in the pipeline's folder.

    further: additional flags, such as `--init-only` to write only initial weights.
    """
    save = f"checkpoints/{stage.name}"
    pairs = [f"save={save}", f"log_dir={save}/logs"]
    if stage.kind == "train" and stage.starts_from is not None:
        pairs += [f"load=checkpoints/{stage.starts_from}_final", "finetune=true"]
    return _words("train.py", pipeline, stage, options, pairs, further)


def eval_words(pipeline: Pipeline, stage: Stage, options: Options, checkpoint: Path, prefix: str) -> list[str]:
    """Returns the arguments for deepy.py that evaluate a checkpoint of a stage with eval.py.

    checkpoint: folder global_stepN. prefix: begins the names of the result files.
    """
    folder = checkpoint.parent.relative_to(pipeline.folder)
    pairs = [
        f"load={folder}", f"iteration={checkpoint.name.removeprefix('global_step')}", "save=null", "finetune=false",
        "local_save=null", "local_save_interval=0", "on_out_of_memory=stop",
        f"log_dir=logs/{stage.name}_evaluation", f"eval_output_dir=logs/{stage.name}_evaluation",
        f"eval_results_prefix={prefix}", "use_wandb=false", "tensorboard_dir=null",
    ]  # fmt: skip
    pairs += ["lora=null"] if stage.merge_adapters else []
    evaluation = [f"{name}={json.dumps(thaw(value))}" for name, value in (stage.evaluation or {}).items()]  # YAML
    return _words("eval.py", pipeline, stage, options, [*evaluation, *pairs])


def _words(
    script: str, pipeline: Pipeline, stage: Stage, options: Options, pairs: Sequence[str], further: Sequence[str] = ()
) -> list[str]:
    files = [str(path) for path in pipeline.config_files(stage)]
    script_words = [str(install_root() / script), *files, *options.flags(), *further]
    return [*script_words, "--set", *options.pairs(), *pairs]


def parse_words(words: Sequence[str]) -> NeoXArgs:
    """Returns the configuration that deepy.py, started in the current folder with these arguments, would use.

    Raises ConfigError for mistakes in it."""
    return parse_deepy(words, preset_root=install_root()).args
