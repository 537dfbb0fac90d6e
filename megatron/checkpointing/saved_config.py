"""How the model of a checkpoint on disk is configured, by what the checkpoint keeps or by a user's files."""

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.manifest import read_manifest, saved_model
from megatron.checkpointing.weights import CheckpointDescription, describe_checkpoint
from megatron.neox_arguments import ConfigError, NeoXArgs, load
from megatron.neox_arguments.frozen import each
from megatron.neox_arguments.values.ffn_width import READINGS


def load_checkpoint_args(
    source: str | Path, config_files: Sequence[str | Path] = ()
) -> tuple[NeoXArgs, CheckpointDescription]:
    """The configuration of a checkpoint, of `config_files` or of what it keeps, and what its files say.

    The padded vocabulary, and the reading of intermediate_size where the configuration leaves it open, are those of the
    files. Raises CheckpointError, ConfigError.
    """
    path = Path(source)
    facts, manifest = describe_checkpoint(path), read_manifest(path)
    known = {"padded_vocab_size": saved_model(path).get("padded_vocab_size") or facts.vocab_rows}
    files = list(config_files)
    if not files and manifest is not None and manifest.config:
        return NeoXArgs.from_dict({**manifest.config, **known}), facts
    files = files or sorted(file for kind in ("yml", "yaml", "json") for file in path.glob(f"configs/*.{kind}"))
    if not files:
        raise CheckpointError(f"{path}: does not say how its model was configured; give --config_file")
    try:
        args = load(files, known)
        if args.compat_ffn_width is not None or each(args.ffn_size)[0] == facts.ffn_size:
            return args, facts
    except ConfigError as problem:
        if "compat_ffn_width" not in str(problem):
            raise
    for reading in READINGS:
        try:
            args = load(files, {**known, "compat_ffn_width": reading})
        except ConfigError:
            continue
        if each(args.ffn_size)[0] == facts.ffn_size:
            return args, facts
    return load(files, known), facts
