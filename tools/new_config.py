"""Writes the configuration of a fine-tuning run that starts from the last checkpoint of another run.

    python tools/new_config.py sft --from checkpoints/mid_unfiltered --filtering unfiltered --variant synthetic_mid \\
        --data data/dolci data/mcqa

The command writes sft_dolci_mcqa_instruct_unfiltered_synthetic_mid.yml. Its keys of training and data come
from post-training/sft-mix/sft-mix.yml; model, tokenizer, precision, layout, batch and optimizer from the
checkpoint's configuration; `load` and `iteration` name the checkpoint in `latest`. The file needs no other
configuration:
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
# Classes of keys that the new run takes from the checkpoint's configuration: model, computation, batch size.
_INHERITED_GROUPS = (
    "ModelKeys", "MambaKeys", "OtherArchitectureKeys", "MoEKeys", "MuPKeys", "TransformerEngineKeys", "TokenizerKeys",
    "PrecisionKeys", "ParallelKeys", "BatchKeys", "OptimizerKeys", "DeepspeedKeys", "TrainingKeys",
)  # fmt: skip
# Keys of these classes that are not taken, because they belong to the length or the end of the old run.
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
    sft.add_argument(
        "--from",
        dest="source",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of checkpoints, with a file `latest`",
    )
    sft.add_argument(
        "--filtering", choices=FILTERINGS, required=True, help="filtering of the pre-training data, for the file's name"
    )
    sft.add_argument("--variant", required=True, help="variant of the mid-training, for the file's name")
    sft.add_argument(
        "--data", nargs=2, default=DATA, metavar=("DOLCI", "MCQA"),
        help=f"--output-prefix of the two tokenised datasets (default: {' '.join(DATA)})",
    )  # fmt: skip
    sft.add_argument("--vocab-file", help="tokenizer of the conversations (default: the checkpoint's)")
    sft.add_argument("--save", help="the key `save` of the new run (default: checkpoints/NAME)")
    sft.add_argument("--output-dir", type=Path, default=Path(), help="folder for the file (default: this folder)")
    sft.add_argument("--force", action="store_true", help="replace an existing file of the same name")
    return parser.parse_args(argv)


def inherited_keys(args: NeoXArgs) -> dict[str, Any]:
    """Returns the keys and values that the new run takes from `args`, the configuration of the finished
    run."""
    keys = keys_of(NeoXArgs)
    candidates = {
        name: value for name, value in thaw(args.user_values).items() if name in keys and name not in _EXCLUDED_KEYS
    }
    return {
        name: value for name, value in candidates.items() if keys[name].owner in _INHERITED_GROUPS and value is not None
    }


def sft_keys(args: NeoXArgs, recipe: Mapping[str, Any], data: Sequence[str]) -> dict[str, Any]:
    """Returns the keys of supervised fine-tuning: those of `recipe`, with the datasets `data`.

    The optimizer is that of `args`, the checkpoint's configuration, with the recipe's learning rate. data:
    prefixes of the tokenised conversations.
    """
    keys = {**recipe, "train_data_paths": [f"{prefix}_messages_document" for prefix in data]}
    if args.user_values.get("optimizer"):
        optimizer = thaw(args.user_values["optimizer"])
        rate = {"lr": recipe["optimizer"]["params"]["lr"]}
        keys["optimizer"] = {**optimizer, "params": {**optimizer.get("params", {}), **rate}}
    return keys


def write(options: argparse.Namespace) -> Path:
    """Writes the configuration that the command-line options describe, and returns its path.

    Raises CheckpointError, ConfigError."""
    name = f"sft_dolci_mcqa_instruct_{options.filtering}_{options.variant}"
    target = options.output_dir / f"{name}.yml"
    if not re.fullmatch(r"[\w.+-]+", options.variant):
        raise ConfigError(
            [f"--variant {options.variant}: is part of the file's name; use only letters, digits and _ . + -"]
        )
    if target.exists() and not options.force:
        raise ConfigError([f"{target}: already exists; add --force to replace it, or give another --variant"])
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
        print(f"wrote {write(options)}; to train, give it to `python deepy.py train.py`")
    except (UserError, OSError) as problem:
        sys.exit(f"new_config.py: error: {problem}")


if __name__ == "__main__":
    run_command(main)
