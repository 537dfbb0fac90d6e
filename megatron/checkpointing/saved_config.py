"""The configuration of a checkpoint on disk: the one it keeps, or the one in files that the user gives."""

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.manifest import read_manifest, saved_model
from megatron.checkpointing.weight_files import CheckpointDescription, describe_checkpoint
from megatron.neox_arguments import ConfigError, NeoXArgs, load
from megatron.neox_arguments.frozen import as_tuple
from megatron.neox_arguments.values.ffn_width import CONVENTIONS


def checkpoint_args(source: str | Path) -> NeoXArgs:
    """The configuration that a checkpoint keeps, with the padded vocabulary of its weights; also of one that
    holds adapters alone. Raises CheckpointError where none is known."""
    manifest = read_manifest(source)
    if manifest is None or manifest.base is None:
        return load_checkpoint_args(source)[0]
    return NeoXArgs.from_dict({**manifest.config, "padded_vocab_size": manifest.model.get("padded_vocab_size")})


def load_checkpoint_args(
    source: str | Path, config_files: Sequence[str | Path] = ()
) -> tuple[NeoXArgs, CheckpointDescription]:
    """The configuration of checkpoint `source`, and the description of its files.

    config_files: NeoX configurations to read instead of those that the checkpoint keeps. The padded
    vocabulary, and how intermediate_size is read where the configuration leaves it open (`compat_ffn_width`),
    follow from the shapes in the files. Raises CheckpointError where no configuration is known, ConfigError
    for an invalid one.
    """
    path = Path(source)
    manifest = read_manifest(path)
    if manifest is not None and manifest.base is not None:
        raise CheckpointError(
            f"{path}: holds adapters alone, over the weights of {manifest.base['path']}; lay them over these first "
            "(tools/ckpts/adapter.py merge), or write them as peft's (export)"
        )
    facts = describe_checkpoint(path)
    known = {"padded_vocab_size": saved_model(path).get("padded_vocab_size") or facts.vocab_rows}
    files = list(config_files)
    if not files and manifest is not None and manifest.config:
        return NeoXArgs.from_dict({**manifest.config, **known}), facts
    files = files or sorted(file for kind in ("yml", "yaml", "json") for file in path.glob(f"configs/*.{kind}"))
    if not files:
        raise CheckpointError(f"{path}: does not say how its model was configured; give --config_file")
    try:
        args = load(files, known)
        if args.compat_ffn_width is not None or as_tuple(args.ffn_size)[0] == facts.ffn_size:
            return args, facts
    except ConfigError as problem:
        if "compat_ffn_width" not in str(problem):
            raise
    for reading in CONVENTIONS:
        try:
            args = load(files, {**known, "compat_ffn_width": reading})
        except ConfigError:
            continue
        if as_tuple(args.ffn_size)[0] == facts.ffn_size:
            return args, facts
    return load(files, known), facts
