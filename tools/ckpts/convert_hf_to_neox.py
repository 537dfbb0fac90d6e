"""Converts a HuggingFace model, from a folder or the Hub, to a checkpoint that training loads.

    python tools/ckpts/convert_hf_to_neox.py --hf-model EleutherAI/pythia-70m --output-dir checkpoints/pythia --tp 2

Before the checkpoint appears, its logits on a fixed batch are compared with those of transformers; if they
differ too much, the command fails. The file `configs/hf_model.yml` in the checkpoint has the model's
configuration. After an interruption, run the same command again.
"""  # noqa: W505 (lines to copy)

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.launch.site import checkpoint_folder  # noqa: E402
from megatron.neox_arguments import UserError  # noqa: E402
from megatron.neox_arguments.keys.weight_names import WEIGHT_NAMINGS  # noqa: E402
from megatron.neox_arguments.values.remote_paths import is_remote  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import (  # noqa: E402
    PRECISIONS,
    add_dry_run_flag,
    add_names_flag,
    local,
    place,
    print_plan,
    progress_then_check,
)
from tools.site import site_defaults  # noqa: E402

NAME = "convert_hf_to_neox.py"


def parser(names: str) -> argparse.ArgumentParser:
    """Returns the parser of the command line. names: default of --names, "neox" or "te"."""
    command_line = CommandParser(description=__doc__)
    command_line.add_argument("--hf-model", required=True, help="a folder, or ORG/NAME on the Hub")
    command_line.add_argument("--revision", help="branch, tag or commit on the Hub")
    command_line.add_argument(
        "--output-dir", type=place,
        help="folder in which global_stepN is written (default: the model's name, without the site's prefix, below the "
        "site's folder of checkpoints or ./checkpoints)",
    )  # fmt: skip
    site = site_defaults(command_line)
    command_line.set_defaults(checkpoints=checkpoint_folder(site), prefix=site.get("NEOX_HUB_PREFIX"))
    command_line.add_argument(
        "--tp",
        type=int,
        default=1,
        help="tensor-parallel size of the files; runs of any size can read them (default: 1)",
    )
    command_line.add_argument(
        "--pp", type=int, default=1, help="pipeline stages; 0: GPT-NeoX's file format without a pipeline (default: 1)"
    )
    command_line.add_argument(
        "--iteration", type=int, default=0, help="iteration N in the checkpoint's name global_stepN (default: 0)"
    )
    command_line.add_argument(
        "--precision", choices=PRECISIONS, default="auto", help="dtype of the written weights; auto: the model's"
    )
    add_names_flag(command_line, names, names)
    te, neox = ("--transformer-engine", "--no-transformer-engine")
    command_line.add_argument(te, action="store_const", const="te", dest="names", help="same as --names te")
    command_line.add_argument(neox, action="store_const", const="neox", dest="names", help="same as --names neox")
    words = "also copy the tokenizer's files to tokenizer/ beside global_stepN"
    command_line.add_argument(
        "--save-tokenizer", action="store_const", const="yes", default="if there" if names == "te" else "no",
        help=f"{words} (default: if the model has a tokenizer.json)" if names == "te" else words,
    )  # fmt: skip
    command_line.add_argument(
        "--no-save-tokenizer",
        action="store_const",
        const="no",
        dest="save_tokenizer",
        help="do not copy the tokenizer's files to tokenizer/",
    )
    command_line.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja chat template for the checkpoint's tokenizer"
    )
    command_line.add_argument(
        "--mtp-num-layers", type=int, default=0, metavar="N",
        help="also read N layers for multi-token prediction, as in DeepSeek V3; a run with mtp_num_layers: N trains "
        "them (default: 0)",
    )  # fmt: skip
    add_dry_run_flag(command_line)
    return command_line


def convert(options: argparse.Namespace) -> None:
    """Converts a HuggingFace model to a checkpoint, as the command-line options say.

    Raises CheckpointError, ConfigError."""
    import torch

    from megatron.checkpointing import CheckpointError
    from megatron.checkpointing.huggingface import HFFolder, find_hf, import_hf, import_plan
    from megatron.checkpointing.huggingface.importing import TOKENIZER_JSON

    if options.tp < 1 or min(options.pp, options.iteration, options.mtp_num_layers) < 0:
        raise CheckpointError("--tp must be at least 1, and --pp, --iteration and --mtp-num-layers at least 0")
    model = str(options.hf_model)
    if not Path(model).is_dir():
        print(f"{model}: no such folder, so it is read from the Hub or its local cache", flush=True)
    path = find_hf(model, options.revision)
    name, _, revision = model.partition("@")
    at_hub = f"{name}@{options.revision or revision or path.name}"  # the name of a snapshot's folder is its commit
    dtype = PRECISIONS[options.precision]
    origin = None if Path(model).is_dir() else at_hub
    folder = HFFolder(path, origin, getattr(torch, dtype) if dtype else None, options.mtp_num_layers)
    output = options.output_dir or Path(options.checkpoints) / _experiment(name, options.prefix)
    save_tokenizer = options.save_tokenizer == "yes" or (
        options.save_tokenizer == "if there" and (path / "tokenizer.json").is_file()
    )
    notes = "".join(f"; {note}" for note in (folder.quantised, folder.untied, folder.left_out) if note)
    print(f"{folder.origin}: {folder.config.get('model_type')}, {len(folder.shapes)} tensors{notes}", flush=True)
    import_options = {
        "iteration": options.iteration, "tensor": options.tp, "pipe": options.pp, "naming": options.names,
        "chat_template": options.chat_template,
    }  # fmt: skip
    if options.dry_run:
        print_plan({f"{output}/{name}": size for name, size in import_plan(folder, **import_options).items()})
        return
    saved = Path(output) / TOKENIZER_JSON
    if options.save_tokenizer == "if there" and save_tokenizer and saved.exists():
        if saved.read_bytes() != (path / "tokenizer.json").read_bytes():
            raise CheckpointError(
                f"{saved}: differs from the model's tokenizer; add --save-tokenizer to replace it, or "
                "--no-save-tokenizer to keep it"
            )
    path, parity = import_hf(
        folder, output, save_tokenizer=save_tokenizer, progress=progress_then_check, **import_options
    )
    names, config = WEIGHT_NAMINGS[options.names], path / "configs" / "hf_model.yml"
    print(f"{path}: written for {options.tp} tensor ranks, names {names}; the model's configuration is in {config}")
    if options.names == "te":
        print(
            "note: as in GPT-NeoX, te_layernorm_mlp: true computes gelu with tanh instead of erf, and norms with an "
            "epsilon of its own"
        )
    if save_tokenizer:
        print(f"{output / 'tokenizer'}: wrote the model's tokenizer")
    elif options.save_tokenizer == "if there":
        print(f"{model}: has no tokenizer.json, so no tokenizer was copied")
    print(f"{path}: {parity}")


def _experiment(model: str, prefix: str | None) -> str:
    """Returns the name of the experiment's folder: the last part of `model`, without the site's Hub
    prefix."""
    name = Path(model).name
    return name.removeprefix(f"{prefix}-") if prefix else name


def run(command: str, argv: Sequence[str] | None, names: str) -> None:
    try:
        options = parser(names).parse_args(argv)
        if options.save_tokenizer == "if there" and options.output_dir and is_remote(str(options.output_dir)):
            options.save_tokenizer = "no"  # a run cannot read a tokenizer from a bucket
        with local(options, ["hf_model"], [] if options.dry_run else ["output_dir"]):
            convert(options)
    except (UserError, OSError) as problem:
        sys.exit(f"{command}: error: {problem}")


def main(argv: Sequence[str] | None = None) -> None:
    run(NAME, argv, "neox")


if __name__ == "__main__":
    run_command(main)
