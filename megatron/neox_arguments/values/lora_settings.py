"""Reads the section `lora`: the projections that have adapters, their scale, and the modules that are
copied."""

import math
import re
from collections.abc import Collection, Mapping, Sequence

from megatron.neox_arguments.model_args import ModelArgs

# The linears of a block by the names of HuggingFace's modules, as peft's target_modules has them.
_GPT_NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")
# The names of GPT-NeoX's modules that are one of LLaMA's by another name.
_ALIASES: Mapping[str, str] = {"dense": "o_proj", "dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj"}
_MLP_NAMES = ("dense_h_to_4h", "dense_4h_to_h", "up_proj", "gate_proj", "down_proj")
_ATTENTION_NAMES = ("query_key_value", "dense", "q_proj", "k_proj", "v_proj", "o_proj")
_FUSED = "gate_up_proj"  # both of a gated MLP as one, as Phi 3 and GLM 4 have it
_MAMBA_NAMES = ("in_proj", "x_proj")  # not out_proj, past whose module kernels read its weight: peft has none either
ALL_LINEAR = "all-linear"
MODULES = ("embed_tokens", "lm_head")
_MODULE_NAMES = {
    **dict.fromkeys(("embed_tokens", "embed_in", "wte", "embeddings"), "embed_tokens"),
    **dict.fromkeys(("lm_head", "embed_out"), "lm_head"),
}


def known_targets(args: ModelArgs) -> tuple[str, ...]:
    """The names that `lora.target` may hold for this model; routed experts have no adapters, shared ones
    have."""
    absent: tuple[str, ...] = ("dense_h_to_4h",) if args.is_gated else ("gate_proj", _FUSED)
    absent += () if args.has_dense_blocks or _shares_experts(args) else (*_MLP_NAMES, _FUSED)
    absent += () if args.attends else _ATTENTION_NAMES
    kinds = {args.attention_config[block] for block in args.mamba_blocks}
    absent += _MAMBA_NAMES if not kinds else () if "mamba" in kinds else ("x_proj",)
    return tuple(name for name in (*_LLAMA, *_GPT_NEOX, _FUSED, *_MAMBA_NAMES) if name not in absent)


def _shares_experts(args: ModelArgs) -> bool:
    return args.moe_shared_expert_intermediate_size is not None and any(map(args.has_experts, range(args.num_layers)))


def lora_targets(args: ModelArgs) -> tuple[str, ...]:
    """Returns the projections that have adapters.

    `all-linear` means every linear of HuggingFace's model. A model with a gated MLP has LLaMA's linears, in
    which queries, keys and values are separate. Routed experts are left out.
    """
    assert args.lora is not None
    target = args.lora["target"]
    if target == ALL_LINEAR:
        names = (*(_LLAMA if args.is_gated else _GPT_NEOX), *_MAMBA_NAMES)
        return tuple(name for name in names if name in known_targets(args))
    return (target,) if isinstance(target, str) else tuple(target)


def module_names(name: str, block: int) -> tuple[str, ...]:
    """The names that a projection of block number `block` has in patterns: LLaMA's, then GPT-NeoX's."""
    aliases = (name, *(gpt_neox_name for gpt_neox_name, canonical in _ALIASES.items() if canonical == name))
    in_mlp = not {*aliases}.isdisjoint(_MLP_NAMES) or name == _FUSED
    if name in _MAMBA_NAMES:
        return (f"backbone.layers.{block}.mixer.{name}",)
    stacks = (("model.layers", "mlp" if in_mlp else "self_attn"), ("gpt_neox.layers", "mlp" if in_mlp else "attention"))
    return tuple(f"{stack}.{block}.{group}.{alias}" for stack, group in stacks for alias in aliases)


def is_targeted(entry: str, name: str, block: int) -> bool:
    """Returns whether an entry of `lora.target` matches a projection of a block.

    The entry is the projection's name, or the end of its longer name, as peft reads a list.
    """
    return _ALIASES.get(entry, entry) == name or any(
        f".{full}".endswith(f".{entry}") for full in module_names(name, block)
    )


def is_pattern_of(pattern: str, name: str, block: int) -> bool:
    """Returns whether a key of `lora.rank_pattern` or `lora.alpha_pattern` matches a projection of a block.

    The key is a regular expression for the end of the projection's name, as in peft.
    """
    return any(re.match(rf"(.*\.)?({pattern})$", full) for full in module_names(name, block))


def chosen_blocks(args: ModelArgs) -> Collection[int]:
    """The numbers of the blocks, from 0, that have adapters (`lora.layers_to_transform`)."""
    assert args.lora is not None
    chosen = args.lora["layers_to_transform"]
    return range(args.num_layers) if chosen is None else (chosen,) if isinstance(chosen, int) else chosen


def block_targets(args: ModelArgs, block: int) -> tuple[str, ...]:
    """Returns the projections of block number `block`, counted from 0, that have adapters.

    Each has the name that it has in checkpoints. The tuple is empty if the block has no adapters.
    """
    assert args.lora is not None
    if block not in chosen_blocks(args):
        return ()
    names = sorted({_ALIASES.get(name, name) for name in known_targets(args)})
    return tuple(name for name in names if any(is_targeted(entry, name, block) for entry in lora_targets(args)))


def block_adapters(args: ModelArgs, block: int) -> dict[str, tuple[int, float]]:
    """Returns (rank, alpha) for each of `block_targets`: from the first matching pattern, else `r` and
    `alpha`."""
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
    """The factor of an adapter's output: alpha / r, with rslora alpha / sqrt(r)."""
    assert args.lora is not None
    return alpha / (math.sqrt(r) if args.lora["rslora"] else r)


def adapter_names(args: ModelArgs) -> tuple[str, ...]:
    """Returns the projections that have adapters in any block, by their names in checkpoints."""
    return tuple(sorted({name for block in range(args.num_layers) for name in block_targets(args, block)}))


def copied_modules(args: ModelArgs) -> frozenset[str]:
    """Returns the entries of `MODULES` that have a trained copy, as `lora.modules_to_save` asks.

    A tied head shares the copy of the embedding.
    """
    names = (args.lora or {}).get("modules_to_save") or ()
    return frozenset(_MODULE_NAMES.get(name, name) for name in names)


def adapter_keys(args: ModelArgs) -> dict[str, object] | None:
    """Returns the settings of `lora` that a user of the adapters needs, for manifests; None if `lora` is
    unset."""
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
    """Parses `PATH=WEIGHT` or `PATH` (weight 1) into (path, weight)."""
    path, equals, number = text.rpartition("=")
    try:
        return (path, float(number)) if equals and path else (text, 1.0)
    except ValueError:
        return text, 1.0


def served_adapters(adapter: Sequence[str]) -> dict[str, str]:
    """Returns the paths of the adapters written NAME=PATH in `adapter`, by name. They are served side by
    side."""
    paths = {}
    for text in adapter:
        name, equals, path = text.partition("=")
        if equals and "/" not in name and weighted(text) == (text, 1.0):
            paths[name] = path
    return paths


def merged_adapters(adapter: Sequence[str]) -> list[tuple[str, float]]:
    """Returns (path, factor) for every entry of `adapter`, to be merged into the weights."""
    return [weighted(text) for text in adapter]
