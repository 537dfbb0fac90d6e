"""Write a LLaMA or Mistral, a checkpoint or a HuggingFace folder, in Meta's format: params.json, consolidated.NN.pth.

    python tools/ckpts/convert_neox_to_raw_llama.py --input_dir checkpoints/run/global_step1000 --output_dir raw \\
        --num_output_shards 2

A checkpoint goes through HuggingFace's format, with its check of the logits, in a temporary folder beside the output.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm  # noqa: E402

from megatron.checkpointing import CheckpointError, find_checkpoint  # noqa: E402
from megatron.checkpointing.huggingface import HFFolder, export_args, export_hf, is_hf  # noqa: E402
from megatron.checkpointing.huggingface.raw_llama import write_raw  # noqa: E402
from megatron.neox_arguments import ConfigError  # noqa: E402

NAME = "convert_neox_to_raw_llama.py"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_dir", "--input-dir", type=Path, required=True, help="a global_stepN, or their folder")
    parser.add_argument("--iteration", type=int, help="which one of --input_dir; unset: the one `latest` names")
    parser.add_argument(
        "--config_file", "--config-file", action="extend", nargs="+", default=[], help="unset: the checkpoint's own"
    )
    parser.add_argument("--output_dir", "--output-dir", type=Path, required=True, help="the folder to write")
    parser.add_argument("--num_output_shards", "--num-output-shards", type=int, default=1, help="consolidated.NN.pth")
    return parser.parse_args(argv)


def convert(options: argparse.Namespace) -> None:
    """Raises CheckpointError, ConfigError."""
    if is_hf(options.input_dir):
        write_raw(HFFolder(options.input_dir), options.output_dir, options.num_output_shards)
        return
    alone = any(file for kind in ("mp_rank_*", "layer_*") for file in options.input_dir.glob(kind))
    source = options.input_dir if alone else find_checkpoint(options.input_dir, options.iteration)
    args, _ = export_args(source, options.config_file)
    options.output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp_", dir=options.output_dir.parent) as spare:
        hf = Path(spare) / "hf"
        found = export_hf(
            source, args, hf,
            each=lambda layers, count: tqdm(layers, total=count, unit="layer", file=sys.stderr, disable=None),
        )  # fmt: skip
        write_raw(HFFolder(hf), options.output_dir, options.num_output_shards)
    print(f"{options.output_dir}: {found}")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        convert(options)
    except (CheckpointError, ConfigError, OSError) as problem:
        sys.exit(f"{NAME}: error: {problem}")
    print(f"{options.output_dir}: {options.num_output_shards} files, Meta's names")


if __name__ == "__main__":
    main()
