"""Checks the keys of Mamba blocks, of short convolutions, and of hybrids of blocks with one sublayer."""

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.architectures import MambaKeys, ShortConvKeys
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.model_args import DELTA_BLOCKS, FULL_BLOCKS, MAMBA_2_BLOCKS, MAMBA_BLOCKS
from megatron.neox_arguments.resolved import ResolvedArgs

_MAMBA_1_KEYS = ("mamba_dt_rank", "mamba_bcdt_norm_epsilon")
_MAMBA_2_KEYS = (
    "mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_chunk_size", "mamba_time_step_limit",
)  # fmt: skip


def validate_mamba(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks `attention_config` of hybrid models, and the `mamba_*` keys against each other and the
    layout."""
    kinds = set(args.attention_config)
    _inert(args, kinds, problems)
    _hybrid(args, kinds, problems)
    _short_convolutions(args, kinds, problems)
    if not args.mamba_blocks:
        return
    if kinds & {*MAMBA_2_BLOCKS}:
        _heads(args, problems)
    if "mamba" in kinds and args.mamba_inner_size % args.tp:
        ranks = f"model_parallel_size {args.cite('model_parallel_size')}"
        problems.add("mamba_expand", f"gives {args.mamba_inner_size} channels, not a multiple of {ranks}; change one")
    if args.mamba_backend == "fla" and args.mamba_state_fp32 and args.params_dtype != "fp32":
        problems.add("mamba_backend", "fla keeps states in the dtype of the weights; set mamba_state_fp32: false")
    if args.mamba_backend == "fla" and "mamba" in kinds:
        problems.add("mamba_backend", "fla does not support Mamba 1 (kind mamba in attention_config); set auto")


def _inert(args: ResolvedArgs, kinds: set[str], problems: ErrorCollector) -> None:
    for name, declared in keys_of(MambaKeys).items():
        readers = ("mamba",) if name in _MAMBA_1_KEYS else MAMBA_2_BLOCKS if name in _MAMBA_2_KEYS else MAMBA_BLOCKS
        readers = (*readers, *DELTA_BLOCKS) if name == "mamba_backend" else readers
        if declared.source == "new" and not kinds & {*readers} and getattr(args, name) != declared.default:
            blocks = " or ".join(readers)
            problems.add(
                name,
                f"has no effect: no block of attention_config ({args.origin('attention_config')}) is {blocks}; "
                "remove it",
            )


def _short_convolutions(args: ResolvedArgs, kinds: set[str], problems: ErrorCollector) -> None:
    place = f"attention_config ({args.origin('attention_config')})"
    if args.gpt_j_residual and (with_states := sorted(kinds & {"short_conv", "mamba2_mlp"})):
        problems.add("gpt_j_residual", f"needs attention in each block, but {place} has {with_states[0]}; remove it")
    if "short_conv" not in kinds:
        for name, declared in keys_of(ShortConvKeys).items():
            if getattr(args, name) != declared.default:
                problems.add(name, f"has no effect: no block of {place} is short_conv; remove it")
        return
    if args.hidden_size % args.tp:
        ranks = f"model_parallel_size {args.cite('model_parallel_size')}"
        problems.add("hidden_size", f"{args.hidden_size} is not a multiple of {ranks}; change one of them")


def _hybrid(args: ResolvedArgs, kinds: set[str], problems: ErrorCollector) -> None:
    single_sublayer_kinds = kinds - set(FULL_BLOCKS) - {"rwkv", "gmlp", "amlp"}
    place = f"attention_config ({args.origin('attention_config')})"
    if "moe" in kinds and args.moe_num_experts == 1:
        problems.add("moe_num_experts", f"must be above 1, because {place} has moe blocks")
    has_none = not any(args.has_experts(block) for block in range(args.num_layers))
    if args.moe_num_experts > 1 and has_none and args.moe_layer_freq is None:
        problems.add("moe_num_experts", f"is above 1, but no block of {place} has experts; add moe blocks, or set 1")
    if not single_sublayer_kinds:
        return
    for key in ("gpt_j_residual", "norm_placement"):
        if getattr(args, key) != keys_of(type(args))[key].default and not kinds & set(FULL_BLOCKS):
            problems.add(key, f"has no effect: {place} has no block with both attention and MLP; remove it")
    for key in ("te_mha", "te_layernorm_mlp"):
        if getattr(args, key):
            problems.add(key, f"needs attention and MLP in each block, but {place} has other blocks; remove it")
    if args.pos_emb == "rpe":
        problems.add("pos_emb", f"rpe needs attention in each block, but {place} has others; set another pos_emb")


def _heads_of_ranks(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks that each tensor-parallel rank gets whole heads of Mamba 2: of whole groups, or of a single
    group."""
    heads, groups, state = args.mamba2_heads, args.mamba_num_groups, args.mamba_state_dim or 128
    ranks = f"model_parallel_size {args.cite('model_parallel_size')}"
    if heads % args.tp:
        problems.add("mamba_num_heads", f"{heads} heads of Mamba 2 are not a multiple of {ranks}; change one of them")
    elif groups % args.tp and args.tp % groups:
        problems.add("mamba_num_groups", f"{groups} is neither a multiple nor a divisor of {ranks}; change one of them")
    elif groups * state % args.tp:
        sharers = args.tp // groups
        problems.add("mamba_state_dim", f"{state} is not a multiple of {sharers}, the ranks per group ({ranks})")


def _heads(args: ResolvedArgs, problems: ErrorCollector) -> None:
    heads, groups, inner = args.mamba2_heads, args.mamba_num_groups, args.mamba_inner_size
    if (
        args.mamba_num_heads is not None
        and "mamba" not in args.attention_config
        and args.origin("mamba_expand") != "default"
    ):
        problems.add("mamba_expand", f"mamba_num_heads {args.cite('mamba_num_heads')} sets the width too; remove one")
    if args.mamba_num_heads is None and inner % args.mamba_head_dim:
        problems.add("mamba_head_dim", f"{args.mamba_head_dim} does not divide mamba_expand x hidden_size, {inner}")
    elif heads % groups:
        problems.add("mamba_num_groups", f"{groups} does not divide the {heads} heads of Mamba 2; set a divisor")
    else:
        _heads_of_ranks(args, problems)
    limit = args.mamba_time_step_limit
    if limit is not None and (len(limit) not in (1, 2) or list(limit) != sorted(limit)):
        problems.add("mamba_time_step_limit", f"expected [low, high] or [low], got {list(limit)}")
