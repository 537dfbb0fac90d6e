"""Checks that need more than one key; every problem names its key, its place and what to change."""

from typing import TYPE_CHECKING

from megatron.neox_arguments.declare import keys_of
from megatron.neox_arguments.errors import Problems
from megatron.neox_arguments.read import show

if TYPE_CHECKING:
    from megatron.neox_arguments.neox_args import NeoXArgs


def validate(args: "NeoXArgs") -> Problems:
    """Problems of any use of the configuration."""
    problems = Problems(args.origins)
    _model(args, problems)
    _parallel(args, problems)
    _schedule(args, problems)
    _checkpoints(args, problems)
    _data(args, problems)
    return problems


def validate_training(args: "NeoXArgs") -> Problems:
    """Problems of training: keys that other commands do without."""
    problems = Problems(args.origins)
    if args.train_iters is None:
        problems.add("train_iters", "is required for training: optimizer steps of the run")
    if args.data_path is None and args.train_data_paths is None:
        problems.add("data_path", "is required for training (or train_data_paths, valid_data_paths, test_data_paths)")
    if args.train_batch_size is None and args.train_micro_batch_size_per_gpu is None:
        problems.add(
            "train_micro_batch_size_per_gpu",
            "is required for training (or train_batch_size, with or without gradient_accumulation_steps)",
        )
    _vocab_file(args, problems)
    return problems


def validate_generation(args: "NeoXArgs") -> Problems:
    """Problems of text generation."""
    problems = Problems(args.origins)
    if args.load is None and args.save is None:
        problems.add("load", "is required for generation: the folder of the checkpoint (`save` serves too)")
    _vocab_file(args, problems)
    if args.text_gen_type == "input-file" and args.sample_input_file is None:
        problems.add("sample_input_file", "is required by text_gen_type: input-file (or use -i FILE)")
    if not args.prompt_end:
        problems.add("prompt_end", 'is empty; it separates prompts, as "\\n" (in double quotes) does')
    if args.maximum_tokens >= args.max_position_embeddings:
        problems.add(
            "maximum_tokens",
            f"{args.maximum_tokens} leaves no place for a context in max_position_embeddings "
            f"{_at(args, 'max_position_embeddings')}; use at most {args.max_position_embeddings - 1}",
        )
    return problems


def _model(args: "NeoXArgs", problems: Problems) -> None:
    heads, kv_heads = args.num_attention_heads, args.kv_heads
    if args.hidden_size % heads:
        problems.add(
            "hidden_size",
            f"{args.hidden_size} is not a multiple of num_attention_heads {_at(args, 'num_attention_heads')}",
        )
    elif args.pos_emb == "rotary" and (
        int(args.head_dim * args.rotary_pct) % 2 or int(args.head_dim * args.rotary_pct) == 0
    ):
        problems.add(
            "rotary_pct" if args.rotary_pct != 1 else "pos_emb",
            f"{int(args.head_dim * args.rotary_pct)} of {args.head_dim} dimensions a head would be rotated; "
            "rotary_pct x hidden_size / num_attention_heads must be even",
        )
    if heads % kv_heads:
        problems.add(
            "num_kv_heads", f"{kv_heads} does not divide num_attention_heads {_at(args, 'num_attention_heads')}"
        )
    if args.seq_length > args.max_position_embeddings:
        problems.add(
            "seq_length",
            f"{args.seq_length} is more than max_position_embeddings {_at(args, 'max_position_embeddings')}",
        )
    if args.intermediate_size is not None and args.expansion_factor is not None:
        problems.add(
            "expansion_factor", f"intermediate_size {_at(args, 'intermediate_size')} says the width; remove one"
        )
    try:
        ffn = args.ffn_size
    except ValueError as cause:
        key = "compat_ffn_width" if args.compat_ffn_width else "intermediate_size"
        problems.add(key, str(cause) if args.compat_ffn_width else f"{args.intermediate_size} {cause}")
        return
    if ffn % args.tp:
        key = "intermediate_size" if args.intermediate_size else "model_parallel_size"
        problems.add(
            key, f"the MLP's width {ffn} is not a multiple of model_parallel_size {_at(args, 'model_parallel_size')}"
        )


def _parallel(args: "NeoXArgs", problems: Problems) -> None:
    tp, key = args.tp, "model_parallel_size"
    if tp > args.kv_heads and args.num_kv_heads is not None:
        problems.add(key, f"{tp} is more than num_kv_heads {_at(args, 'num_kv_heads')}; use at most {args.kv_heads}")
    elif args.num_attention_heads % tp or args.kv_heads % tp:
        name = "num_attention_heads" if args.num_attention_heads % tp else "num_kv_heads"
        problems.add(key, f"{tp} does not divide {name} {_at(args, name)}")
    if args.padded_vocab_size is not None and args.padded_vocab_size % tp:
        problems.add("padded_vocab_size", f"{args.padded_vocab_size} is not a multiple of {key} {_at(args, key)}")
    if args.pp > args.num_layers:
        problems.add(
            "pipe_parallel_size", f"{args.pp} stages for num_layers {_at(args, 'num_layers')}; use fewer stages"
        )
    if args.pp > 1 and args.zero_stage > 1:
        stage = f"zero_optimization.stage {args.zero_stage} ({args.origin('zero_optimization.stage')})"
        problems.add("pipe_parallel_size", f"{args.pp} stages work with ZeRO 0 and 1 only, not with {stage}")
    if args.sequence_parallel and args.seq_length % tp:
        problems.add("sequence_parallel", f"{key} {tp} does not divide seq_length {_at(args, 'seq_length')}")
    method = args.pipe_partition_method
    if method.lower() not in ("uniform", "parameters") and not method.lower().startswith("type:"):
        problems.add("pipe_partition_method", f'expected uniform, parameters or type:REGEX, got "{method}"')


def _schedule(args: "NeoXArgs", problems: Problems) -> None:
    if args.min_lr > args.lr:
        problems.add(
            "min_lr", f"{args.min_lr} is more than optimizer.params.lr {args.lr} ({args.origin('optimizer.params.lr')})"
        )
    if "lr_decay_iters" in args.given and args.lr_decay_fraction is not None:
        problems.add(
            "lr_decay_fraction", f"lr_decay_iters is set at {args.origin('lr_decay_iters')}; remove one of them"
        )
    wsd = args.lr_wsd_decay_iters
    if args.lr_decay_style == "wsd" and wsd is None:
        problems.add("lr_decay_style", "wsd needs lr_wsd_decay_iters: iterations of the final decay")
    elif args.lr_decay_style != "wsd" and wsd is not None:
        problems.add(
            "lr_wsd_decay_iters", f"only lr_decay_style wsd reads it, not {_at(args, 'lr_decay_style')}; remove it"
        )
    elif wsd is not None and args.lr_decay_iters is not None and wsd > args.lr_decay_iters * (1 - args.warmup):
        problems.add(
            "lr_wsd_decay_iters",
            f"{wsd} and the warm-up ({args.warmup}) do not fit into lr_decay_iters {_at(args, 'lr_decay_iters')}",
        )


def _checkpoints(args: "NeoXArgs", problems: Problems) -> None:
    factor = args.checkpoint_factor
    if args.save is not None and factor is None and args.extra_save_iters is None:
        problems.add("save", "needs checkpoint_factor or extra_save_iters: when to save")
    if factor is not None and args.checkpoint_scale == "linear" and factor != int(factor):
        problems.add(
            "checkpoint_factor", f"expected a whole number of iterations with checkpoint_scale linear, got {factor}"
        )
    if factor is not None and args.checkpoint_scale == "log" and factor <= 1:
        problems.add("checkpoint_factor", f"expected more than 1 with checkpoint_scale log, got {factor}")
    if any(iteration < 0 for iteration in args.extra_save_iters or ()):
        problems.add("extra_save_iters", "expected iterations from 0 on")


def _data(args: "NeoXArgs", problems: Problems) -> None:
    names = ("train_data_paths", "valid_data_paths", "test_data_paths")
    present = [name for name in names if getattr(args, name) is not None]
    if present and args.data_path is not None:
        problems.add("data_path", f"{present[0]} is set too ({args.origin(present[0])}); remove one of them")
    elif 0 < len(present) < 3:
        missing = ", ".join(name for name in names if name not in present)
        problems.add(present[0], f"needs {missing} too; train, valid and test paths come together")
    parts = args.split.replace("/", ",").split(",")
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) <= 0:
        problems.add("split", f'expected up to three shares like "969, 30, 1", got "{args.split}"')
    _blend(args, problems)


def _blend(args: "NeoXArgs", problems: Problems) -> None:
    for name in ("train", "valid", "test"):
        key, paths = f"{name}_data_weights", getattr(args, f"{name}_data_paths")
        weights, origin = getattr(args, key), args.origin(f"{name}_data_paths")
        if paths == ():
            problems.add(f"{name}_data_paths", "expected at least one path, got none")
        if weights is None:
            continue
        if args.weight_by_num_documents:
            problems.add(key, f"weight_by_num_documents ({args.origin('weight_by_num_documents')}) sets it; remove one")
        elif paths is None:
            problems.add(key, f"weighs {name}_data_paths, which is not set; remove it")
        elif len(weights) != len(paths):
            problems.add(key, f"expected a weight for each of {len(paths)} paths ({origin}), got {len(weights)}")
        if any(weight <= 0 for weight in weights):
            problems.add(key, f"expected numbers above 0, got {show(weights)}; leave out the path of a set not wanted")
    if args.weight_by_num_documents and args.train_data_paths is None:
        problems.add("weight_by_num_documents", "weighs the sets of train_data_paths, which is not set; remove it")
    for key in ("weighted_sampler_alpha", "compat_weight_by_num_documents"):
        if not args.weight_by_num_documents and getattr(args, key) != keys_of(type(args))[key].default:
            problems.add(key, "only weight_by_num_documents: true reads it; remove it")


def _vocab_file(args: "NeoXArgs", problems: Problems) -> None:
    needed = {"HFTokenizer": {"vocab_file": "tokenizer.json"}}
    needed["GPT2BPETokenizer"] = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    for key, file in needed.get(args.tokenizer_type, {}).items():
        if getattr(args, key) is None:
            problems.add(key, f"is required by tokenizer_type {_at(args, 'tokenizer_type')}: its {file}")


def _at(args: "NeoXArgs", key: str) -> str:
    """`12 (a.yml:3)`: a key's value with its place."""
    value, origin = getattr(args, key), args.origin(key)
    return f"{value} ({origin})"
