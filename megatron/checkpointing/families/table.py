"""The families as a table for people: `tools/ckpts/families.py` prints it, docs/huggingface.md has it."""

from dataclasses import dataclass

from megatron.checkpointing.families.family import Family
from megatron.checkpointing.families.multimodal import TEXT_TOWERS
from megatron.checkpointing.families.registry import FAMILIES, small_model
from megatron.model import block_specs
from megatron.model.specs import AttentionSpec, Mamba2Spec, MambaSpec, MoESpec, has_one_norm, norm_kind
from megatron.neox_arguments import NeoXArgs

_NORMS = {
    "layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "non_parametric_layernorm": "LayerNorm without weights",
}  # fmt: skip
_PLACES = {"olmo3": "norms behind attention and MLP", "sandwich": "norms before and behind attention and MLP"}


@dataclass(frozen=True)
class FamilyRow:
    """A family in words. title: what people call it. model_types, architectures: in config.json, also of
    multimodal models whose language model it is. features: what its default configuration has beside
    attention, an MLP and rotary positions. notes: `Family.notes`."""

    title: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    features: tuple[str, ...]
    notes: str


def family_rows() -> list[FamilyRow]:
    """All families in the order of their titles."""
    rows = [_row(family) for family in FAMILIES.values()]
    return sorted(rows, key=lambda row: row.title.lower())


def _row(family: Family) -> FamilyRow:
    whole = [name for name, texts in TEXT_TOWERS.items() if family.model_type in texts]
    classes = [f"{name.capitalize()}ForConditionalGeneration" for name in whole]
    return FamilyRow(
        family.title, (family.model_type, *whole), (family.architecture, *classes), _features(small_model(family)),
        family.notes,
    )  # fmt: skip


def _features(args: NeoXArgs) -> tuple[str, ...]:
    mixtures = [block.feed_forward for block in block_specs(args) if isinstance(block.feed_forward, MoESpec)]
    feeds = [block.feed_forward for block in block_specs(args) if block.feed_forward is not None]
    norm = _NORMS[norm_kind(args)] + (" (1 + w)" if args.zero_centered_gamma else "")
    norm += " without bias" if args.norm == "layernorm" and not args.use_bias_in_norms else ""
    said = {
        **_of_states(args),
        norm: True,
        _PLACES.get(args.norm_placement, ""): args.norm_placement in _PLACES,
        f"attention beside the MLP{' behind one norm' if has_one_norm(args) else ''}": args.gpt_j_residual,
        "MLP without gate": bool(feeds) and not args.is_gated,
        f"{args.moe_num_experts} experts, {args.moe_top_k} a token": bool(mixtures),
        "their scores add up to 1": bool(mixtures) and args.norm_topk_prob,
        "sigmoid scores": bool(mixtures) and args.router_scores == "sigmoid",
        "biases of experts in the choice": bool(mixtures) and args.moe_router_bias_update_rate is not None,
        "a shared expert": bool(mixtures) and mixtures[0].shared is not None and not args.moe_shared_expert_gate,
        "a gated shared expert": bool(mixtures) and args.moe_shared_expert_gate,
        args.activation: args.activation in ("xielu", "relu2"),
        "learned positions": args.pos_emb == "learned",
        **_of_attention(args),
        "capped logits": args.final_logit_softcapping is not None,
        "scaled embeddings": args.embedding_multiplier != 1.0,
        "scaled logits": args.logit_scale != 1.0,
        "tied head": not args.no_weight_tying,
    }
    return tuple(words for words, holds in said.items() if holds)


def _of_states(args: NeoXArgs) -> dict[str, bool]:
    """The kinds of blocks of a model with states, and what those compute."""
    mixers = [block.mixer for block in block_specs(args)]
    first = [mixer for mixer in mixers if isinstance(mixer, MambaSpec)]
    second = [mixer for mixer in mixers if isinstance(mixer, Mamba2Spec)]
    if not first and not second:
        return {}
    names = {"mamba": "Mamba", "mamba2": "Mamba 2", "attention": "attention", "mlp": "MLP", "moe": "experts"}
    kinds = [names[kind] for kind in names if kind in args.attention_config]
    alone = f"blocks of {kinds[0]} alone"
    return {
        alone if len(kinds) == 1 else f"blocks of {', '.join(kinds[:-1])} or {kinds[-1]}, in any order": True,
        "no positions": args.pos_emb == "none",
        f"states of {(first or second)[0].state}": True,
        "norms of B, C and time steps": bool(first) and first[0].norm_eps is not None,
        f"{second[0].groups if second else 0} groups of heads": bool(second) and second[0].groups > 1,
    }


def _of_attention(args: NeoXArgs) -> dict[str, bool]:
    mixers = [block.mixer for block in block_specs(args) if isinstance(block.mixer, AttentionSpec)]
    if not mixers:
        return {}
    first, windows = mixers[0], {mixer.window is not None for mixer in mixers}
    turned = [mixer.rotary for mixer in mixers if mixer.rotary is not None]
    scalings = {rotary.scaling["rope_type"] for rotary in turned if rotary.scaling is not None}
    return {
        "grouped queries": first.kv_heads < first.heads,
        "layers without positions": args.pos_emb == "rotary" and len(turned) < len(mixers),
        "a part of each head rotates": bool(turned) and turned[0].width < args.head_dim,
        "neighbours rotate together": args.rotary_interleaved,
        "two rotary bases": len({rotary.base for rotary in turned}) > 1,
        " ".join(sorted(scalings)): bool(scalings),
        "queries grow with position": any(
            rotary.scaling is not None and rotary.scaling["llama_4_scaling_beta"] is not None for rotary in turned
        ),
        "windows in some layers": windows == {True, False},
        "windows": windows == {True},
        "attention sinks": first.sinks,
        "norms of queries and keys": first.norms is not None,
        "biases of queries, keys, values": first.bias and not first.output_bias,
        "biases": first.output_bias,
        "capped attention logits": first.softcap is not None,
    }
