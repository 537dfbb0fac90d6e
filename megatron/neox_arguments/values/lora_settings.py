"""Reads the section `lora`: which projections have adapters, their scale, and which modules have copies."""

import math
import re
from collections.abc import Collection, Mapping, Sequence

from megatron.neox_arguments.model_args import MAMBA_2_BLOCKS, ModelArgs

# Names of a block's linears in HuggingFace's models, as in peft's target_modules
_GPT_NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")
# Names of GPT-NeoX's modules, each with LLaMA's name of the same module
_ALIASES: Mapping[str, str] = {"dense": "o_proj", "dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj"}
_MLP_NAMES = ("dense_h_to_4h", "dense_4h_to_h", "up_proj", "gate_proj", "down_proj")
_ATTENTION_NAMES = ("query_key_value", "dense", "q_proj", "k_proj", "v_proj", "o_proj")
_OUTPUTS = ("dense", "o_proj")
_FUSED = "gate_up_proj"  # gate and up projection as one linear, as in Phi 3 and GLM 4
_LATENT_NAMES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
# Gated DeltaNet's linears in Qwen 3-Next; Qwen 3.5 divides the same rows among more linears.
_NEXT_NAMES = ("in_proj_qkvz", "in_proj_ba")
_NET_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_NET_NAMES = (*_NEXT_NAMES, *_NET_PARTS, "out_proj")
_FORGET_NAMES = ("f_a_proj", "f_b_proj")
_KIMI_NAMES = ("b_proj", *_FORGET_NAMES, "g_a_proj", "g_b_proj")  # besides those of attention
# in_proj is also that of short convolutions. Not out_proj: kernels read its weight without calling the
# module, as in peft.
_MAMBA_NAMES = ("in_proj", "x_proj")
ALL_LINEAR = "all-linear"
_NAMES = (*_LLAMA, *_GPT_NEOX, _FUSED, *_MAMBA_NAMES, *_LATENT_NAMES, *_NET_NAMES, *_KIMI_NAMES)
PARTS_OF_TARGETS: Mapping[str, tuple[str, ...]] = {
    "query_key_value": ("q_proj", "k_proj", "v_proj"), _FUSED: ("up_proj", "gate_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a"),
}  # fmt: skip
"""The names of linears that hold the rows of one linear of another family."""
MODULES = ("embed_tokens", "lm_head")
_MODULE_NAMES = {
    **dict.fromkeys(("embed_tokens", "embed_in", "wte", "embeddings"), "embed_tokens"),
    **dict.fromkeys(("lm_head", "embed_out"), "lm_head"),
}


def known_targets(args: ModelArgs) -> tuple[str, ...]:
    """Returns the names that `lora.target` may contain for this model. Routed experts have no adapters,
    shared experts have."""
    kinds = {*args.attention_config}
    absent: tuple[str, ...] = ("dense_h_to_4h",) if args.is_gated else ("gate_proj", _FUSED)
    absent += () if args.has_dense_blocks or _shares_experts(args) else (*_MLP_NAMES, _FUSED)
    present = {
        *({*_MLP_NAMES, _FUSED} - {*absent}),
        *(_attention_names(args) if args.attends else ()),
        *(_MAMBA_NAMES[:1] if kinds & {*MAMBA_2_BLOCKS, "short_conv"} else ()),
        *(_MAMBA_NAMES if "mamba" in kinds else ()),
        *(_NET_NAMES if "gated_delta_net" in kinds else ()),
    }
    if "kimi_delta_attention" in kinds:
        present |= {"q_proj", "k_proj", "v_proj", *_KIMI_NAMES, *_OUTPUTS}
    return tuple(name for name in _NAMES if name in present)


def _attention_names(args: ModelArgs) -> tuple[str, ...]:
    if args.kv_lora_rank is None:
        return _ATTENTION_NAMES
    queries = ("q_proj",) if args.q_lora_rank is None else _LATENT_NAMES[:2]
    return (*queries, *_LATENT_NAMES[2:], *_OUTPUTS)


def _shares_experts(args: ModelArgs) -> bool:
    return args.moe_shared_expert_intermediate_size is not None and any(map(args.has_experts, range(args.num_layers)))


def lora_targets(args: ModelArgs) -> tuple[str, ...]:
    """Returns the names of projections that have adapters, from `lora.target`.

    `all-linear` means every linear of the model in HuggingFace's format, without routed experts. A model with
    a gated MLP, latent attention or Kimi Delta Attention has LLaMA's linears, in which queries, keys and
    values are separate. Gated DeltaNet has those of Qwen 3-Next.
    """
    assert args.lora is not None
    target = args.lora["target"]
    if target == ALL_LINEAR:
        names = known_targets(args)
        separate = args.is_gated or not {"kv_a_proj_with_mqa", "b_proj"}.isdisjoint(names)
        absent = (*(_GPT_NEOX if separate else _LLAMA), _FUSED, *_NET_PARTS)
        return tuple(name for name in names if name not in absent)
    return (target,) if isinstance(target, str) else tuple(target)


def module_names(name: str, block: int) -> tuple[str, ...]:
    """Returns the full names of a projection of a block: LLaMA's, such as `model.layers.0.self_attn.q_proj`,
    then GPT-NeoX's."""
    aliases = (name, *(gpt_neox_name for gpt_neox_name, canonical in _ALIASES.items() if canonical == name))
    in_mlp = not {*aliases}.isdisjoint(_MLP_NAMES) or name == _FUSED
    if name in _MAMBA_NAMES:
        places = ("backbone.layers", "mixer"), ("model.layers", "conv"), ("model.layers", "mamba")
        return tuple(f"{stack}.{block}.{module}.{name}" for stack, module in places)
    if name in _NET_NAMES:
        return (f"model.layers.{block}.linear_attn.{name}",)
    if name in _FORGET_NAMES:  # in weight files, and in memory
        return tuple(f"model.layers.{block}.self_attn.{group}{name}" for group in ("", "forget_gate."))
    stacks = (("model.layers", "mlp" if in_mlp else "self_attn"), ("gpt_neox.layers", "mlp" if in_mlp else "attention"))
    return tuple(f"{stack}.{block}.{group}.{alias}" for stack, group in stacks for alias in aliases)


def is_targeted(entry: str, name: str, block: int) -> bool:
    """Returns whether an entry of `lora.target` means the projection `name` of block number `block`.

    The entry is the projection's name, such as `q_proj`, or the end of its full name, such as
    `layers.0.self_attn.q_proj`, as in peft.
    """
    return _ALIASES.get(entry, entry) == name or any(
        f".{full}".endswith(f".{entry}") for full in module_names(name, block)
    )


def is_pattern_of(pattern: str, name: str, block: int) -> bool:
    """Returns whether a key of `lora.rank_pattern` or `lora.alpha_pattern` matches the projection `name` of
    block number `block`.

    The key is a regular expression for the end of the projection's full name, as in peft.
    """
    return any(re.match(rf"(.*\.)?({pattern})$", full) for full in module_names(name, block))


def chosen_blocks(args: ModelArgs) -> Collection[int]:
    """Returns the numbers of the blocks that have adapters, counted from 0 (`lora.layers_to_transform`)."""
    assert args.lora is not None
    chosen = args.lora["layers_to_transform"]
    return range(args.num_layers) if chosen is None else (chosen,) if isinstance(chosen, int) else chosen


def block_targets(args: ModelArgs, block: int) -> tuple[str, ...]:
    """Returns the names of projections with adapters in block number `block`, counted from 0.

    They are the names used in checkpoints. The tuple is empty if the block has no adapters.
    """
    assert args.lora is not None
    if block not in chosen_blocks(args):
        return ()
    names = sorted({_ALIASES.get(name, name) for name in known_targets(args)})
    return tuple(name for name in names if any(is_targeted(entry, name, block) for entry in lora_targets(args)))


def block_adapters(args: ModelArgs, block: int) -> dict[str, tuple[int, float]]:
    """Returns (rank, alpha) for each projection with an adapter in a block, by name.

    They come from the first matching key of rank_pattern and of alpha_pattern, else from `r` and `alpha`.
    """
    assert args.lora is not None
    sizes = {}
    for name in block_targets(args, block):
        r, alpha = (
            next((value for key, value in (args.lora[table] or {}).items() if is_pattern_of(key, name, block)), usual)
            for table, usual in (("rank_pattern", args.lora["r"]), ("alpha_pattern", args.lora["alpha"]))
        )
        sizes[name] = (r, alpha)
    return sizes


def lora_scale(args: ModelArgs, r: int, alpha: float) -> float:
    """Returns the factor of an adapter's output: alpha / r, or alpha / sqrt(r) if `lora.rslora` is true."""
    assert args.lora is not None
    return alpha / (math.sqrt(r) if args.lora["rslora"] else r)


def adapter_names(args: ModelArgs) -> tuple[str, ...]:
    """Returns the names of projections that have adapters in any block, as used in checkpoints."""
    return tuple(sorted({name for block in range(args.num_layers) for name in block_targets(args, block)}))


def copied_modules(args: ModelArgs) -> frozenset[str]:
    """Returns which of embed_tokens and lm_head have a trained copy, from `lora.modules_to_save`.

    A tied output layer shares the copy of the embedding.
    """
    names = (args.lora or {}).get("modules_to_save") or ()
    return frozenset(_MODULE_NAMES.get(name, name) for name in names)


def conflicting_targets(args: ModelArgs) -> list[tuple[str, str]]:
    """Returns pairs of projections with adapters in one block that divide the same rows otherwise."""
    pairs = [(fused, part) for fused, parts in PARTS_OF_TARGETS.items() for part in parts]
    pairs += [(fused, part) for fused in _NEXT_NAMES for part in _NET_PARTS if (fused, part) not in pairs]
    blocks = {frozenset(block_targets(args, block)) for block in range(args.num_layers)}
    return [pair for pair in pairs if any(names.issuperset(pair) for names in blocks)]


def adapter_keys(args: ModelArgs) -> dict[str, object] | None:
    """Returns the settings of `lora` that are needed to use the adapters, for a checkpoint's manifest; None
    if `lora` is unset."""
    if args.lora is None:
        return None
    settings = {name: args.lora[name] for name in ("r", "alpha", "rslora", "dora")}
    settings |= {"target": list(adapter_names(args)), "modules_to_save": sorted(copied_modules(args))}
    adapters_by_block = {str(block): block_adapters(args, block) for block in range(args.num_layers)}
    if (
        any(adapters != adapters_by_block["0"] for adapters in adapters_by_block.values())
        or len({*adapters_by_block["0"].values()}) > 1
    ):
        settings["blocks"] = {
            block: {name: list(size) for name, size in adapters.items()}
            for block, adapters in adapters_by_block.items()
        }
    return settings


def weighted(text: str) -> tuple[str, float]:
    """Parses an entry of `adapter`, `PATH=WEIGHT` or `PATH` (weight 1), into (path, weight)."""
    path, equals, number = text.rpartition("=")
    try:
        return (path, float(number)) if equals and path else (text, 1.0)
    except ValueError:
        return text, 1.0


def served_adapters(adapter: Sequence[str]) -> dict[str, str]:
    """Returns the paths of adapters that the key `adapter` lists as NAME=PATH, by name. They are served
    together, each as model NAME."""
    paths = {}
    for text in adapter:
        name, equals, path = text.partition("=")
        if equals and "/" not in name and weighted(text) == (text, 1.0):
            paths[name] = path
    return paths


def merged_adapters(adapter: Sequence[str]) -> list[tuple[str, float]]:
    """Returns (path, weight) for every entry of the key `adapter`. These adapters are merged into the model's
    weights."""
    return [weighted(text) for text in adapter]
