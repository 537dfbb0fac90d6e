"""Converts a LLaMA or Mistral model in Meta's format to a checkpoint that training loads.

Meta's format is a folder with params.json and consolidated.NN.pth.

    python tools/ckpts/convert_raw_llama_weights_to_neox.py --input_dir llama --model_size 7B \\
        --output_dir checkpoints/7B --num_output_shards 2 --pipeline_parallel

The folder is `--input_dir`, or `--input_dir`/`--model_size`. Before the checkpoint appears, its logits are
compared with those of transformers. After an interruption, run the same command again.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.neox_arguments import UserError  # noqa: E402
from megatron.process import run_command  # noqa: E402
from megatron.process.command_parser import CommandParser  # noqa: E402
from tools.ckpts.flags import add_names_flag, local, place, progress  # noqa: E402

NAME = "convert_raw_llama_weights_to_neox.py"
_LLAMA, _MISTRAL = ("7B", "13B", "30B", "34B", "65B", "70B"), ("mistral-7B-v0.1", "Mistral-7b-v0.1")
_POSITIONS = {"34B": 16384, **dict.fromkeys(_MISTRAL, 32768)}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--input_dir", "--input-dir", type=place, required=True, help="folder with params.json, or the folder above it"
    )
    parser.add_argument(
        "--model_size", "--model-size", choices=(*_LLAMA, *_MISTRAL, "tokenizer_only"), required=True,
        help="name of the folder in --input_dir, which also tells LLaMA from Mistral (sizes come from params.json); "
        "tokenizer_only copies the tokenizer alone",
    )  # fmt: skip
    parser.add_argument(
        "--output_dir", "--output-dir", type=place, required=True, help="folder in which global_step0 is written"
    )
    parser.add_argument(
        "--num_output_shards",
        "--num-output-shards",
        type=int,
        default=1,
        help="tensor-parallel size of the checkpoint's files (default: 1)",
    )
    parser.add_argument(
        "--pipeline_parallel",
        "--pipeline-parallel",
        action="store_true",
        help="write one file per layer, as pipelines do",
    )
    add_names_flag(parser, "neox", "neox")
    parser.add_argument(
        "--max_position_embeddings", type=int,
        help="longest sequence of the model, which is not in params.json (default: 4096; 34B: 16384, Mistral: 32768, "
        "LLaMA 3.1: 131072)",
    )  # fmt: skip
    return parser.parse_args(argv)


def convert(options: argparse.Namespace) -> None:
    """Converts a model in Meta's format to a checkpoint, as the command-line options say.

    Raises CheckpointError, ConfigError."""
    from megatron.checkpointing import CheckpointError
    from megatron.checkpointing.huggingface import import_hf
    from megatron.checkpointing.huggingface.model_files import read_json
    from megatron.checkpointing.huggingface.raw_llama import PARAMS, TOKENIZER, RawLlama
    from megatron.checkpointing.tensor_files import replace_file

    size, source_dir = options.model_size, options.input_dir
    if size == "tokenizer_only":
        if not (source_dir / TOKENIZER).is_file():
            raise CheckpointError(f"{source_dir / TOKENIZER}: no such file; --input_dir must be the folder that has it")
        options.output_dir.mkdir(parents=True, exist_ok=True)
        replace_file(options.output_dir / TOKENIZER, (source_dir / TOKENIZER).read_bytes())
        print(f"{options.output_dir / TOKENIZER}: copied")
        return
    if options.num_output_shards < 1:
        raise CheckpointError("--num_output_shards, the tensor-parallel size, must be at least 1")
    raw = source_dir if (source_dir / PARAMS).is_file() else source_dir / size
    if not (raw / PARAMS).is_file():
        raise CheckpointError(
            f"{raw / PARAMS}: no such file; give the folder of params.json, or the folder above it, as --input_dir"
        )
    usual = 131072 if read_json(raw / PARAMS).get("use_scaled_rope") else _POSITIONS.get(size, 4096)
    model_type = "mistral" if size in _MISTRAL else "llama"
    with tempfile.TemporaryDirectory() as temporary_dir:
        links_dir = Path(temporary_dir) / raw.resolve().name
        links_dir.mkdir()
        folder = RawLlama(raw, links_dir, model_type, options.max_position_embeddings or usual)
        path, parity = import_hf(
            folder, options.output_dir, tensor=options.num_output_shards, pipe=1 if options.pipeline_parallel else 0,
            naming=options.names, progress=progress,
        )  # fmt: skip
    print(
        f"{path}: written for {options.num_output_shards} tensor ranks; the model's configuration is in "
        f"{path / 'configs' / 'hf_model.yml'}"
    )
    print(f"{path}: {parity}")


def main(argv: Sequence[str] | None = None) -> None:
    try:
        options = parse(argv)
        with local(options, ["input_dir"], ["output_dir"]):
            convert(options)
    except (UserError, OSError) as problem:
        sys.exit(f"{NAME}: error: {problem}")


if __name__ == "__main__":
    run_command(main)
