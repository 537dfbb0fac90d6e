"""Write a HuggingFace model, a local folder or a name on the Hub, as a checkpoint that training loads.

    python tools/ckpts/convert_hf_to_neox.py --hf-model EleutherAI/pythia-70m --output-dir checkpoints/pythia --tp 2

Before the checkpoint appears, its logits on a fixed batch are compared with those of transformers; a difference above
the bound is refused. `configs/hf_model.yml` in it is the model's configuration. After an interruption the same command
is given again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm  # noqa: E402

from megatron.checkpointing import CheckpointError  # noqa: E402
from megatron.checkpointing.huggingface import HFFolder, find_hf, import_hf  # noqa: E402
from megatron.neox_arguments import ConfigError  # noqa: E402

NAME = "convert_hf_to_neox.py"


def parser(te_names: bool) -> argparse.ArgumentParser:
    """te_names: whether Transformer-Engine's names are the default."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--hf-model", required=True, help="a folder, or ORG/NAME on the Hub")
    made.add_argument("--revision", help="branch, tag or commit on the Hub")
    made.add_argument("--output-dir", type=Path, help="folder for global_stepN; unset: checkpoints/<name of the model>")
    made.add_argument("--tp", type=int, default=1, help="tensor-parallel size of the files; any run can read them")
    made.add_argument("--pp", type=int, default=1, help="pipeline stages; 0: GPT-NeoX's files without a pipeline")
    made.add_argument("--iteration", type=int, default=0, help="N of global_stepN")
    made.add_argument("--transformer-engine", action="store_true", default=te_names, help="Transformer-Engine's names")
    made.add_argument("--no-transformer-engine", action="store_false", dest="transformer_engine", help="NeoX's names")
    made.add_argument("--save-tokenizer", action="store_true", help="its files also beside global_stepN")
    return made


def convert(options: argparse.Namespace) -> None:
    """The function under every command of this name. Raises CheckpointError, ConfigError."""
    if options.tp < 1 or options.pp < 0 or options.iteration < 0:
        raise CheckpointError("--tp must be at least 1, --pp and --iteration at least 0")
    folder = HFFolder(find_hf(options.hf_model, options.revision))
    name = Path(options.hf_model.split("@")[0]).name
    output = options.output_dir or Path("checkpoints") / name
    print(f"{folder.path}: {folder.config.get('model_type')}, {len(folder.shapes)} tensors", flush=True)
    path, parity = import_hf(
        folder, output, iteration=options.iteration, tensor=options.tp, pipe=options.pp,
        te_names=options.transformer_engine, save_tokenizer=options.save_tokenizer,
        each=lambda layers, count: tqdm(layers, total=count, unit="layer", file=sys.stderr, disable=None),
    )  # fmt: skip
    names = "Transformer-Engine's" if options.transformer_engine else "GPT-NeoX's (linear1, linear2)"
    print(f"{path}: {options.tp} tensor ranks, names {names}; its configuration is {path / 'configs' / 'hf_model.yml'}")
    if options.transformer_engine:
        print("te_layernorm_mlp: true computes tanh for erf in gelu, and norms with its own epsilon, as GPT-NeoX does")
    print(f"{path}: {parity}")


def run(name: str, argv: Sequence[str] | None, te_names: bool) -> None:
    try:
        convert(parser(te_names).parse_args(argv))
    except (CheckpointError, ConfigError, OSError) as problem:
        sys.exit(f"{name}: error: {problem}")


def main(argv: Sequence[str] | None = None) -> None:
    run(NAME, argv, te_names=False)


if __name__ == "__main__":
    main()
