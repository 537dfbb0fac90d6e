"""Reads the configuration of a checkpoint on disk, from the checkpoint or from files that the user names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.manifest import Manifest, read_manifest, saved_model
from megatron.checkpointing.weight_files import CheckpointDescription, describe_checkpoint
from megatron.neox_arguments import ConfigError, NeoXArgs, load
from megatron.neox_arguments.frozen import as_tuple
from megatron.neox_arguments.values.ffn_width import CONVENTIONS


def _config(manifest: Manifest) -> dict[str, Any]:
    """Returns the saved keys but `load_ema`, which says with which weights the run began."""
    return {key: value for key, value in manifest.config.items() if key != "load_ema"}


def checkpoint_args(source: str | Path) -> NeoXArgs:
    """Returns the configuration saved in a checkpoint, which may hold adapters only.

    `padded_vocab_size` is set. Raises CheckpointError if no configuration is saved."""
    manifest = read_manifest(source)
    if manifest is None or manifest.base is None:
        return load_checkpoint_args(source)[0]
    return NeoXArgs.from_dict({**_config(manifest), "padded_vocab_size": manifest.model.get("padded_vocab_size")})


def load_checkpoint_args(
    source: str | Path, config_files: Sequence[str | Path] = ()
) -> tuple[NeoXArgs, CheckpointDescription]:
    """Returns (configuration of checkpoint `source`, description of its files).

    config_files: NeoX configurations to read instead of the saved one. `padded_vocab_size` comes from the
        checkpoint. If `compat_ffn_width` is not set, the weights' shapes decide how intermediate_size is
        meant. Raises CheckpointError without a configuration, ConfigError for an invalid one."""
    path = Path(source)
    manifest = read_manifest(path)
    if manifest is not None and manifest.base is not None:
        raise CheckpointError(
            f"{path}: holds adapters alone, without the base weights ({manifest.base['path']}); merge both first, or "
            "export the adapters to peft's format (tools/ckpts/adapter.py merge, export)"
        )
    facts = describe_checkpoint(path)
    overrides = {"padded_vocab_size": saved_model(path).get("padded_vocab_size") or facts.vocab_rows}
    files: list[Path] = [Path(file) for file in config_files]
    if not files and manifest is not None and manifest.config:
        return NeoXArgs.from_dict({**_config(manifest), **overrides}), facts
    files = files or sorted(file for kind in ("yml", "yaml", "json") for file in path.glob(f"configs/*.{kind}"))
    if not config_files and (odd := next((file for file in files if not file.is_file()), None)) is not None:
        raise CheckpointError(f"{odd}: not a regular file; restore it, or pass the configuration with --config_file")
    if not files:
        raise CheckpointError(
            f"{path}: stores no configuration of its model; pass the configuration files with --config_file"
        )
    try:
        args = load(files, overrides)
        if args.compat_ffn_width is not None or as_tuple(args.ffn_size)[0] == facts.ffn_size:
            return args, facts
    except ConfigError as problem:
        if "compat_ffn_width" not in str(problem):
            raise
    for reading in CONVENTIONS:
        try:
            args = load(files, {**overrides, "compat_ffn_width": reading})
        except ConfigError:
            continue
        if as_tuple(args.ffn_size)[0] == facts.ffn_size:
            return args, facts
    return load(files, overrides), facts
