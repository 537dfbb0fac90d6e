"""Checks a configuration, and that the files it names exist."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron.launch.doctor.check import Check, failed
from megatron.launch.environment import install_root
from megatron.neox_arguments import ConfigError, ModelArgs, NeoXArgs, load
from megatron.neox_arguments.frozen import as_tuple
from megatron.neox_arguments.model_args import ATTENTION_BLOCKS, DELTA_BLOCKS
from megatron.neox_arguments.reading.presets import files_of
from megatron.neox_arguments.values.remote_paths import is_remote

_MAX_PROBLEMS = 10  # problems of a configuration


def read_config(files: Sequence[str]) -> tuple[NeoXArgs | None, list[Check]]:
    """Returns the configuration and a passed check.

    If the configuration cannot train, returns None and a failed check for each problem.
    """
    try:
        files, _ = files_of(files, preset_root=install_root())
        args = load(files).check_training()
    except ConfigError as refused:
        num_omitted = len(refused.problems) - _MAX_PROBLEMS
        checks = [failed("config", problem) for problem in refused.problems[:_MAX_PROBLEMS]]
        return None, checks + ([failed("config", f"and {num_omitted} more problems")] if num_omitted > 0 else [])
    return args, [Check("config", "ok", f"{', '.join(files)}: can train")]


def data_checks(args: ModelArgs) -> list[Check]:
    """Checks that every .bin/.idx pair of the configuration exists and is not empty."""
    missing, prefixes = [], list(_prefixes(args))
    for key, prefix in prefixes:
        if absent := [end for end in (".idx", ".bin") if not _filled(f"{prefix}{end}")]:
            finding = f"{key}: {prefix}{' and '.join(absent)} missing or empty"
            missing.append(failed("data", finding, args.origin(key)))
    return missing or [Check("data", "ok", f"{len(prefixes)} pairs of .bin and .idx")]


def load_check(args: NeoXArgs) -> Check | None:
    """Checks that the folder named by the key `load` holds a checkpoint. Returns None if `load` is unset,
    equals `save`, or is remote."""
    place = args.load
    if place is None or place == args.save or is_remote(place) or place.startswith("hf://"):
        return None
    folder = Path(place)
    if any((folder / name).exists() for name in ("latest", "config.json")) or any(folder.glob("global_step*")):
        return Check("load", "ok", place)
    return failed(
        "load",
        f"{place} holds no checkpoint ({args.origin('load')})",
        "set load to a checkpoint's folder, or remove it",
    )


def tokenizer_check(args: NeoXArgs, build: Callable[[NeoXArgs], object]) -> Check:
    """Checks that the tokenizer can be built. build: builds it from a configuration, or raises an
    exception."""
    try:
        build(args)
    except Exception as problem:  # those of the tokenizer's own library too
        return failed("tokenizer", f"{args.tokenizer_type}: {problem}".splitlines()[0], args.origin("tokenizer_type"))
    return Check("tokenizer", "ok", f"{args.tokenizer_type}" + (f", {args.vocab_file}" if args.vocab_file else ""))


def checkpoint_bytes(args: ModelArgs) -> int:
    """Returns the estimated size of one checkpoint: weights and Adam's two moments; for 16-bit weights also
    fp32 master weights."""
    h, blocks = args.hidden_size, range(args.num_layers)
    kv_heads, widths = as_tuple(args.kv_heads), as_tuple(args.ffn_size) if args.has_dense_blocks else (0,)
    kinds = args.attention_config
    attends = [i for i in blocks if kinds[i] in ATTENTION_BLOCKS]
    attention = sum(2 * h * h + 2 * h * h * kv_heads[i % len(kv_heads)] // args.num_attention_heads for i in attends)
    mamba2_size = args.mamba2_heads * args.mamba_head_dim
    attention += sum(
        3 * h * (args.mamba_inner_size if kinds[i] == "mamba" else mamba2_size) for i in args.mamba_blocks
    )
    net = 2 * args.linear_num_key_heads * args.linear_key_head_dim
    net += 3 * args.linear_num_value_heads * args.linear_value_head_dim
    attention += h * net * sum(kind in DELTA_BLOCKS for kind in kinds)
    attention += 4 * h * h * sum(kind == "short_conv" for kind in kinds)
    matrices, experts = (3 if args.is_gated else 2) * h, args.moe_num_experts * args.expert_ffn_size
    experts += args.moe_shared_expert_intermediate_size or 0
    fed = sum(matrices * (experts if args.has_experts(i) else widths[i % len(widths)]) for i in blocks
              if args.has_experts(i) or args.has_dense(i))  # fmt: skip
    embeddings = (args.padded_vocab_size or 50304) * h * (1 if args.no_weight_tying is False else 2)
    parameters = attention + fed + embeddings
    parameters += ((attention + fed) // args.num_layers + 2 * h * h) * (args.mtp_num_layers or 0)
    return parameters * (12 if args.params_dtype == "fp32" else 14)


def _prefixes(args: ModelArgs) -> Iterator[tuple[str, str]]:
    for name in args.__dataclass_fields__:
        if name.endswith(("data_path", "data_paths")):
            value = getattr(args, name)
            for prefix in (value,) if isinstance(value, str) else value or ():
                if prefix is not None:
                    yield name, prefix


def _filled(file: str) -> bool:
    try:
        return Path(file).stat().st_size > 0
    except OSError:
        return False
