"""What `lora` asks for: the projections that have adapters, their factor, the modules that are copied."""

import math
from collections.abc import Mapping

from megatron.neox_arguments.resolved import ResolvedArgs

# The linears of a block by the names of HuggingFace's modules, as peft's target_modules has them.
_GPT_NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")
# The names of GPT-NeoX's modules that are one of LLaMA's by another name.
_SAME: Mapping[str, str] = {"dense": "o_proj", "dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj"}
_OF_MLP = ("dense_h_to_4h", "dense_4h_to_h", "up_proj", "gate_proj", "down_proj")
_OF_ATTENTION = ("query_key_value", "dense", "q_proj", "k_proj", "v_proj", "o_proj")
_FUSED = "gate_up_proj"  # both of a gated MLP as one, as Phi 3 and GLM 4 have it
ALL_LINEAR = "all-linear"
MODULES = ("embed_tokens", "lm_head")
_MODULE_NAMES = {**{name: name for name in MODULES}, "embed_in": "embed_tokens", "embed_out": "lm_head"}


def known_targets(args: ResolvedArgs) -> tuple[str, ...]:
    """The names that `lora.target` may hold for this model; experts and Mamba's mixers have no
    adapters."""
    others: tuple[str, ...] = ("dense_h_to_4h",) if args.is_gated else ("gate_proj", _FUSED)
    others += () if args.has_dense_blocks else (*_OF_MLP, _FUSED)
    others += () if args.attends else _OF_ATTENTION
    return tuple(name for name in (*_LLAMA, *_GPT_NEOX, _FUSED) if name not in others)


def lora_targets(args: ResolvedArgs) -> tuple[str, ...]:
    """The projections that have adapters. `all-linear`: those of every linear that HuggingFace's model has: a
    gated MLP is LLaMA's and its kin's, whose queries, keys and values are linears of their own; experts are
    none."""
    assert args.lora is not None
    target = args.lora["target"]
    if target == ALL_LINEAR:
        names = _LLAMA if args.is_gated else _GPT_NEOX
        return tuple(name for name in names if name in known_targets(args))
    return (target,) if isinstance(target, str) else tuple(target)


def adapter_names(args: ResolvedArgs) -> tuple[str, ...]:
    """The projections that have adapters, each by the one name that it has in checkpoints."""
    return tuple(sorted({_SAME.get(name, name) for name in lora_targets(args)}))


def lora_scale(args: ResolvedArgs) -> float:
    """The factor of the adapters' output: alpha / r, with rslora alpha / sqrt(r)."""
    assert args.lora is not None
    r = args.lora["r"]
    return args.lora["alpha"] / (math.sqrt(r) if args.lora["rslora"] else r)


def copied_modules(args: ResolvedArgs) -> frozenset[str]:
    """Of `MODULES` those of which a copy is trained beside adapters; of a tied head the embedding's is its
    own."""
    named = (args.lora or {}).get("modules_to_save") or ()
    return frozenset(_MODULE_NAMES.get(name, name) for name in named)


def adapter_keys(args: ResolvedArgs) -> dict[str, object] | None:
    """What of `lora` says what the weights of adapters mean, for manifests; None without adapters."""
    if args.lora is None:
        return None
    kept = {name: args.lora[name] for name in ("r", "alpha", "rslora", "dora")}
    return {**kept, "target": list(adapter_names(args)), "modules_to_save": sorted(copied_modules(args))}


def weighted(text: str) -> tuple[str, float]:
    """`PATH=WEIGHT` or `PATH`, whose weight is 1."""
    path, equals, number = text.rpartition("=")
    try:
        return (path, float(number)) if equals and path else (text, 1.0)
    except ValueError:
        return text, 1.0


def served_adapters(args: ResolvedArgs) -> dict[str, str]:
    """The paths of the adapters of `adapter` that are served at once, by name: those written NAME=PATH."""
    named = {}
    for text in args.adapter:
        name, equals, path = text.partition("=")
        if equals and "/" not in name and weighted(text) == (text, 1.0):
            named[name] = path
    return named


def merged_adapters(args: ResolvedArgs) -> list[tuple[str, float]]:
    """(path, factor) of the adapters of `adapter` that weights take in."""
    return [weighted(text) for text in args.adapter]
