"""Write the configuration of a run that begins where a checkpoint ended.

    python tools/new_config.py sft --from checkpoints/mid_unfiltered --filtering unfiltered --variant synthetic_mid \\
        --data data/dolci data/mcqa

writes sft_dolci_mcqa_instruct_unfiltered_synthetic_mid.yml: training, data and weights of the mix as in
post-training/sft-mix/sft-mix.yml; model, tokenizer, precision, layout, batch and optimizer of the
checkpoint's own configuration; `load` and `iteration` of what `latest` names. The file needs no other:
`python deepy.py train.py FILE` trains.
"""  # noqa: W505 (lines to copy)

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.neox_arguments import ConfigError, NeoXArgs, UserError  # noqa: E402
from megatron.neox_arguments.frozen import thaw  # noqa: E402
from megatron.neox_arguments.keys.declaration import keys_of  # noqa: E402
from megatron.neox_arguments.reading.files import read_files  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402

RECIPE = ROOT / "post-training" / "sft-mix" / "sft-mix.yml"
FILTERINGS = ("unfiltered", "filtered")
DATA = ("data/dolci", "data/mcqa")
# What a run takes over: whatever says what the model is, how it is computed and how many rows a step has.
_INHERITED_GROUPS = (
    "ModelKeys", "MambaKeys", "OtherArchitectureKeys", "MoEKeys", "MuPKeys", "TransformerEngineKeys", "TokenizerKeys",
    "PrecisionKeys", "ParallelKeys", "BatchKeys", "OptimizerKeys", "DeepspeedKeys", "TrainingKeys",
)  # fmt: skip
# Of these what belongs to the length of the old run, or to its end.
_EXCLUDED_KEYS = (
    "train_iters", "lr_decay_iters", "lr_decay_fraction", "lr_wsd_decay_iters", "min_lr", "warmup_iters",
    "override_lr_scheduler", "use_checkpoint_lr_scheduler", "eval_interval", "exit_interval", "exit_duration_in_mins",
    "curriculum_learning",
)  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    sft = parser.add_subparsers(dest="kind", required=True).add_parser(
        "sft", help="SFT on 89 %% Dolci conversations and 11 %% multiple-choice questions",
        description=__doc__,
    )  # fmt: skip
    sft.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR", help="with global_stepN, latest")
    sft.add_argument("--filtering", choices=FILTERINGS, required=True, help="of the pre-training data, for the name")
    sft.add_argument("--variant", required=True, help="of the mid-training, for the name")
    sft.add_argument(
        "--data", nargs=2, default=DATA, metavar=("DOLCI", "MCQA"),
        help=f"--output-prefix of both when they were tokenised ({' '.join(DATA)})",
    )  # fmt: skip
    sft.add_argument("--vocab-file", help="tokenizer of the conversations; unset: the checkpoint's")
    sft.add_argument("--save", help="of the run; unset: checkpoints/NAME")
    sft.add_argument("--output-dir", type=Path, default=Path(), help="where the file is written (.)")
    sft.add_argument("--force", action="store_true", help="replace a file of this name")
    return parser.parse_args(argv)


def inherited_keys(args: NeoXArgs) -> dict[str, Any]:
    """Returns the keys and values that the next run takes over from the configuration of a finished run."""
    keys = keys_of(NeoXArgs)
    candidates = {
        name: value for name, value in thaw(args.user_values).items() if name in keys and name not in _EXCLUDED_KEYS
    }
    return {
        name: value for name, value in candidates.items() if keys[name].owner in _INHERITED_GROUPS and value is not None
    }


def sft_keys(args: NeoXArgs, recipe: Mapping[str, Any], data: Sequence[str]) -> dict[str, Any]:
    """Returns the keys of supervised fine-tuning from the recipe, with the prefixes `data` of tokenised
    conversations.

    The optimizer is the checkpoint's, with the recipe's learning rate.
    """
    keys = {**recipe, "train_data_paths": [f"{prefix}_messages_document" for prefix in data]}
    if args.user_values.get("optimizer"):
        optimizer = thaw(args.user_values["optimizer"])
        rate = {"lr": recipe["optimizer"]["params"]["lr"]}
        keys["optimizer"] = {**optimizer, "params": {**optimizer.get("params", {}), **rate}}
    return keys


def write(options: argparse.Namespace) -> Path:
    """Write the configuration that the options describe, and return its path. Raises CheckpointError,
    ConfigError."""
    name = f"sft_dolci_mcqa_instruct_{options.filtering}_{options.variant}"
    target = options.output_dir / f"{name}.yml"
    if not re.fullmatch(r"[\w.+-]+", options.variant):
        raise ConfigError([f"--variant {options.variant}: becomes part of names; use letters, digits and _ . + -"])
    if target.exists() and not options.force:
        raise ConfigError([f"{target}: already exists; give --force, or another --variant"])
    from megatron.checkpointing import CheckpointError, find_checkpoint, load_checkpoint_args, step_of
    from megatron.checkpointing.layout import LATEST
    from megatron.checkpointing.tensor_files import replace_file

    if options.source.is_dir() and not (options.source / LATEST).is_file():
        raise CheckpointError(f"{options.source}: no file `{LATEST}`; create it with the name of a global_stepN in it")
    checkpoint = find_checkpoint(options.source)
    args, _ = load_checkpoint_args(checkpoint)
    new = {
        **sft_keys(args, read_files([RECIPE]).values, options.data),
        "load": str(options.source.resolve()),
        "iteration": step_of(checkpoint),
        "save": options.save or f"checkpoints/{name}",
    }
    inherited = {key: value for key, value in inherited_keys(args).items() if key not in new}
    if options.vocab_file:
        inherited["vocab_file"] = options.vocab_file
    text = (
        f"# SFT of {options.source.name}, iteration {new['iteration']}, by tools/new_config.py: post-training/sft-mix\n"
        f"{_yaml(new)}\n# as {checkpoint.name} was trained\n{_yaml(inherited)}"
    )
    NeoXArgs.from_dict({**inherited, **new}, str(target)).check_training()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    replace_file(target, text.encode())
    return target


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        print(f"{write(options)}: trains with `python deepy.py train.py`")
    except (UserError, OSError) as problem:
        sys.exit(f"new_config.py: error: {problem}")


if __name__ == "__main__":
    run_command(main)
