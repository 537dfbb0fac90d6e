"""Cut a checkpoint for another layout, optimizer state included, one layer in memory at a time.

    python tools/ckpts/reshard.py --input_dir checkpoints/run/global_step1000 --output_dir resharded --tp 4 --pp 2

Runs also do this by themselves when they load a checkpoint of another layout. Nothing is visible in the output folder
until it is whole; after an interruption the same command is given again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm  # noqa: E402

from megatron.checkpointing import (  # noqa: E402
    CheckpointError,
    Layout,
    checkpoint_args,
    find_checkpoint,
    read_manifest,
    reshard,
)
from megatron.neox_arguments import ConfigError  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input_dir", "--input-dir", type=Path, required=True, help="a global_stepN, or their folder")
    parser.add_argument("--output_dir", "--output-dir", type=Path, required=True, help="folder for the new one")
    parser.add_argument("--iteration", type=int, help="which one of --input_dir; unset: the one `latest` names")
    parser.add_argument("--tp", type=int, help="tensor-parallel size; unset: as it is")
    parser.add_argument("--pp", type=int, help="pipeline stages; unset: as it is")
    parser.add_argument("--dp", type=int, help="data-parallel size, for the manifest: files are the same for every one")
    parser.add_argument("--zero-stage", type=int, choices=range(4), help="ZeRO stage, likewise")
    parser.add_argument("--config_file", "--config-file", action="append", default=[], help="unset: the checkpoint's")
    parser.add_argument("--no-optimizer", action="store_true", help="leave the optimizer's state out")
    options = parser.parse_args(argv)
    for name in ("tp", "pp", "dp"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name}: must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    try:
        single = options.input_dir if list(options.input_dir.glob("mp_rank_*")) else None
        source = single or find_checkpoint(options.input_dir, options.iteration)
        manifest = read_manifest(source)
        now = manifest.layout if manifest is not None else Layout(1, 1, 1, 0, "fp32", 1)
        pipe, tensor, data = options.pp or now.pipe, options.tp or now.tensor, options.dp or now.data
        stage = now.zero_stage if options.zero_stage is None else options.zero_stage
        to = Layout(pipe, data, tensor, stage, now.precision, pipe * tensor * data)
        args = checkpoint_args(source, options.config_file)
        path = reshard(
            source, options.output_dir, args, to, optimizer=not options.no_optimizer,
            each=lambda layers, count: tqdm(layers, total=count, unit="layer", file=sys.stderr, disable=None),
        )  # fmt: skip
    except (CheckpointError, ConfigError, OSError) as problem:
        sys.exit(f"reshard.py: error: {problem}")
    print(f"{path}: tensor {tensor}, pipeline {pipe}, data {data}, ZeRO {stage}")


if __name__ == "__main__":
    main()
