"""Merges, exports, imports and verifies LoRA adapters, from checkpoints and from folders in peft's format.

    python tools/ckpts/adapter.py merge --adapter checkpoints/lora --output_dir checkpoints/merged
    python tools/ckpts/adapter.py merge --adapter law=0.7 --adapter news=0.3 --output_dir checkpoints/both
    python tools/ckpts/adapter.py export --adapter checkpoints/lora --output_dir peft/lora
    python tools/ckpts/adapter.py import --adapter peft/lora --base checkpoints/pythia --output_dir checkpoints/lora
    python tools/ckpts/adapter.py verify --adapter checkpoints/lora

--adapter is a folder of checkpoints (the checkpoint that `latest` names is used), one global_stepN, or a
folder in peft's format. Its base weights are read from the path that the adapter names, or from --base, a
checkpoint or a HuggingFace model.

merge adds adapters to the base weights and writes full weights, which load without `lora` and which
convert_neox_to_hf.py can convert. Before they appear, their logits are compared with those of base weights
with adapters. For several adapters, the weight changes of each are multiplied by its factor and added.
export writes peft's adapter_config.json and adapter_model.safetensors. import writes a checkpoint of adapters
alone, which a run with the same `lora` can `load`. verify compares the logits of base weights with adapters
here with those in transformers with peft, or with those of merged weights.

Except for verify, one layer is in memory at a time. The output appears only when it is complete. After an
interruption, run the same command again.
"""  # noqa: W505 (lines to copy)

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.neox_arguments.values.lora_settings import weighted  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import PRECISIONS, local, place, progress  # noqa: E402

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

_BASE = "base weights: a checkpoint, a HuggingFace folder or hf://ORG/NAME (default: the path that the adapter names)"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="merge|export|import|verify")

    def command(name: str, words: str, output: str | None) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=words, description=f"{words}. More: adapter.py --help")
        several = name == "merge"
        subparser.add_argument(
            "--adapter", required=True, metavar="PATH[=WEIGHT]" if several else "PATH", action="append",
            help="adapter to merge, with its factor (default: 1); repeat to add several adapters"
            if several
            else "a checkpoint with adapters, or a folder in peft's format",
        )  # fmt: skip
        subparser.add_argument(
            "--iteration", type=int, help="iteration to use if PATH is a folder of checkpoints (default: the latest)"
        )
        subparser.add_argument("--base", help=_BASE)
        if output is not None:
            subparser.add_argument("--output_dir", "--output-dir", type=place, required=True, help=output)
        return subparser

    command("merge", "write full weights, with adapters merged in", "folder in which global_stepN is written")
    command_parser = command("export", "write adapters in peft's format", "the folder to write")
    command_parser.add_argument(
        "--base-name",
        help="base_model_name_or_path in adapter_config.json (default: the HuggingFace base model, if known)",
    )
    command_parser.add_argument(
        "--precision", choices=PRECISIONS, default="auto", help="dtype of the written adapters; auto: the checkpoint's"
    )
    command_parser.add_argument(
        "--architecture", default="auto", help="HuggingFace model_type; auto: the first that fits the model"
    )
    command(
        "import",
        "write a checkpoint of adapters, from a folder in peft's format",
        "folder in which global_step0 is written",
    )
    command_parser = command("verify", "compare logits with those in peft, or of merged weights", None)
    command_parser.add_argument(
        "--against",
        choices=("peft", "merged"),
        default="peft",
        help="compare with peft (default), or with merged weights",
    )
    options = parser.parse_args(argv)
    if options.command != "merge" and len(options.adapter) > 1:
        parser.error(f"{options.command} takes only one --adapter; remove the others")
    return options


def sources_of(options: argparse.Namespace) -> list[tuple[str | Path, float]]:
    """Returns (path, factor in a merge) of each --adapter. Raises CheckpointError if a path holds no
    adapter."""
    from megatron.checkpointing.adapters import checkpoint_folder, is_peft

    weighted_paths = [weighted(text) for text in options.adapter]
    return [(p if is_peft(p) else checkpoint_folder(p, options.iteration), factor) for p, factor in weighted_paths]


def merge(options: argparse.Namespace) -> None:
    from megatron.checkpointing.adapters import open_with_base, write_merged

    weighted_paths = sources_of(options)
    base, sources = open_with_base([path for path, _ in weighted_paths], options.base)
    print(f"{base.path}: base weights", flush=True)
    weights = [factor for _, factor in weighted_paths]
    path, compared = write_merged(base, list(zip(sources, weights, strict=True)), options.output_dir, progress=progress)
    for comparison in compared:
        print(comparison)
    print(f"{path}: wrote the merged weights; load them without lora")


def export(options: argparse.Namespace) -> None:
    import torch

    from megatron.checkpointing.adapters import export_peft, open_adapter

    path, _ = sources_of(options)[0]
    base = _base_args(options)
    dtype = PRECISIONS[options.precision]
    written = export_peft(
        open_adapter(path, base), options.output_dir, base=options.base_name or options.base,
        family=None if options.architecture == "auto" else options.architecture,
        dtype=getattr(torch, dtype) if dtype else None, progress=progress,
    )  # fmt: skip
    print(f"{written}: wrote the adapters in peft's format")


def _base_args(options: argparse.Namespace) -> "NeoXArgs | None":
    from megatron.checkpointing.adapters import open_base

    return open_base(options.base).args if options.base else None


def import_(options: argparse.Namespace) -> None:
    from megatron.checkpointing import CheckpointError
    from megatron.checkpointing.adapters import open_with_base, write_adapters

    path, _ = sources_of(options)[0]
    base, (source,) = open_with_base([path], options.base)
    if source.manifest is not None:
        raise CheckpointError(
            f"{path}: is a checkpoint of this project already; import needs a folder in peft's format as --adapter"
        )
    path = write_adapters(base, source, options.output_dir, progress=progress)
    print(f"{path}: wrote the adapters for the base weights {base.path}")


def verify(options: argparse.Namespace) -> None:
    from megatron.checkpointing.adapters import compare_merged, compare_with_peft, open_with_base

    path, _ = sources_of(options)[0]
    base, (source,) = open_with_base([path], options.base)
    print(f"{path}: {(compare_with_peft if options.against == 'peft' else compare_merged)(base, source)}")


COMMANDS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "merge": merge, "export": export, "import": import_, "verify": verify,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        with local(options, [], ["output_dir"] if hasattr(options, "output_dir") else []):
            COMMANDS[options.command](options)
    except (UserError, OSError) as problem:
        sys.exit(f"adapter.py: error: {problem}")


if __name__ == "__main__":
    run_command(main)
