"""Options of a pipeline's command line for the runs of all stages, and the command lines of these runs."""

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
    """Options of the command line of a pipeline that apply to its stages.

    fp8: `auto` (--fp8), `off` (--no-fp8) or None.
    precision: value of the key `precision`.
    settings: KEY=VALUE of --set.
    launcher: value of --launcher, for deepy.py.
    """

    fp8: str | None = None
    precision: str | None = None
    settings: tuple[str, ...] = ()
    launcher: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the options for `pipeline_state.json`. The launcher is left out, because it applies to one
        start only."""
        return {"fp8": self.fp8, "precision": self.precision, "settings": list(self.settings)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Options":
        """Returns the options in a value of `to_json`. {} gives options that are all unset."""
        return cls(values.get("fp8"), values.get("precision"), tuple(values.get("settings", ())))

    def fill_from(self, earlier: "Options") -> "Options":
        """Returns these options, with unset ones taken from `earlier`. Of --set, each key is taken
        separately."""
        keys = {pair.partition("=")[0] for pair in self.settings}
        retained = [pair for pair in earlier.settings if pair.partition("=")[0] not in keys]
        return Options(
            self.fp8 or earlier.fp8, self.precision or earlier.precision, (*retained, *self.settings), self.launcher
        )

    def flags(self) -> list[str]:
        """Returns the flags of deepy.py for `fp8` and `launcher`."""
        fp8 = {"auto": ["--fp8"], "off": ["--no-fp8"], None: []}[self.fp8]
        return [*fp8, *(["--launcher", self.launcher] if self.launcher is not None else [])]

    def pairs(self) -> list[str]:
        """Returns `precision` and `settings` as KEY=VALUE."""
        return [*([] if self.precision is None else [f"precision={self.precision}"]), *self.settings]


def train_words(pipeline: Pipeline, stage: Stage, options: Options, *further: str) -> list[str]:
    """Returns the deepy.py arguments that train a stage, to be run in the pipeline's folder.

    further: additional flags, such as `--init-only` to write initial weights only.
    """
    save = f"checkpoints/{stage.name}"
    pairs = [f"save={save}", f"log_dir={save}/logs"]
    if stage.kind == "train" and stage.starts_from is not None:
        pairs += [f"load=checkpoints/{stage.starts_from}_final", "finetune=true"]
    return _words("train.py", pipeline, stage, options, pairs, further)


def eval_words(pipeline: Pipeline, stage: Stage, options: Options, checkpoint: Path, prefix: str) -> list[str]:
    """Returns the deepy.py arguments that evaluate a checkpoint of a stage.

    prefix: the beginning of the names of result files.
    """
    folder = checkpoint.parent.relative_to(pipeline.folder)
    pairs = [
        f"load={folder}", f"iteration={checkpoint.name.removeprefix('global_step')}", "save=null", "finetune=false",
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
    """Returns the configuration that these deepy.py arguments give in this folder. Raises ConfigError."""
    return parse_deepy(words, preset_root=install_root()).args
