"""Makes the table of families that `tools/ckpts/families.py` prints and docs/huggingface.md shows."""

import re
from dataclasses import dataclass

from megatron.checkpointing.families.family import Family
from megatron.checkpointing.families.multimodal import TEXT_TOWERS, families_inside
from megatron.checkpointing.families.registry import FAMILIES, small_model
from megatron.model import block_specs
from megatron.model.build_specs import has_one_norm, norm_kind
from megatron.model.specs import (
    AttentionSpec,
    GatedDeltaNetSpec,
    KimiDeltaAttentionSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    MambaSpec,
    MoESpec,
    ShortConvSpec,
)
from megatron.neox_arguments import ModelArgs

_NORMS = {
    "layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "non_parametric_layernorm": "LayerNorm without weights",
}  # fmt: skip
_PLACES = {"olmo3": "norms after attention and MLP", "sandwich": "norms before and after attention and MLP"}


@dataclass(frozen=True)
class FamilyRow:
    """A row of the table of supported families in docs/huggingface.md.

    title: the family's usual name.
    model_types, architectures: values in config.json, including those of multimodal models that contain the
        family.
    features: what the default configuration has in addition to attention, an MLP and rotary positions, in
        words.
    notes: differences from the published model, and special cases.
    """

    title: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    features: tuple[str, ...]
    notes: str


def family_rows() -> list[FamilyRow]:
    """Returns the table row of every supported family, sorted by title."""
    rows = [_row(family) for family in FAMILIES.values()]
    return sorted(rows, key=lambda row: row.title.lower())


def _row(family: Family) -> FamilyRow:
    multimodal_types = [name for name in TEXT_TOWERS if family.model_type in families_inside(name)]
    names = [re.sub("_([a-z])", lambda match: match[1].upper(), name.capitalize()) for name in multimodal_types]
    classes = [f"{name.replace('Vl', 'VL')}ForConditionalGeneration" for name in names]
    return FamilyRow(
        family.title, (family.model_type, *multimodal_types), (family.architecture, *classes),
        _features(small_model(family)), family.notes,
    )  # fmt: skip


def _features(args: ModelArgs) -> tuple[str, ...]:
    mixtures = [block.feed_forward for block in block_specs(args) if isinstance(block.feed_forward, MoESpec)]
    feeds = [block.feed_forward for block in block_specs(args) if block.feed_forward is not None]
    norm = _NORMS[norm_kind(args)] + (" (1 + w)" if args.zero_centered_gamma else "")
    norm += " without bias" if args.norm == "layernorm" and not args.use_bias_in_norms else ""
    features = {
        **_state_features(args),
        norm: True,
        _PLACES.get(args.norm_placement, ""): args.norm_placement in _PLACES,
        f"parallel attention and MLP{' with one norm' if has_one_norm(args) else ''}": args.gpt_j_residual,
        "ungated MLP": bool(feeds) and not args.is_gated,
        f"{args.moe_num_experts} experts, {args.moe_top_k} per token": bool(mixtures),
        "normalised scores": bool(mixtures) and args.norm_topk_prob,
        "sigmoid scores": bool(mixtures) and args.router_scores == "sigmoid",
        "groups of experts": bool(mixtures) and mixtures[0].router.top_groups < mixtures[0].router.groups,
        "dense blocks at the start": bool(mixtures) and args.has_dense(0),
        "expert-choice biases": bool(mixtures) and args.moe_router_bias_update_rate is not None,
        "a shared expert": bool(mixtures) and mixtures[0].shared is not None and not args.moe_shared_expert_gate,
        "a gated shared expert": bool(mixtures) and args.moe_shared_expert_gate,
        args.activation: args.activation in ("xielu", "relu2"),
        "learned positions": args.pos_emb == "learned",
        **_attention_features(args),
        "capped logits": args.final_logit_softcapping is not None,
        "scaled embeddings": args.embedding_multiplier != 1.0,
        "scaled logits": args.logit_scale != 1.0,
        "tied head": not args.no_weight_tying,
    }
    return tuple(words for words, holds in features.items() if holds)


def _state_features(args: ModelArgs) -> dict[str, bool]:
    """Returns {feature of blocks with states, in words: whether the model has it}; {} without such blocks."""
    mixers = [block.mixer for block in block_specs(args)]
    mamba = [mixer for mixer in mixers if isinstance(mixer, MambaSpec)]
    mamba2 = [mixer for mixer in mixers if isinstance(mixer, Mamba2Spec)]
    nets = [mixer for mixer in mixers if isinstance(mixer, GatedDeltaNetSpec)]
    if nets:
        rule = "Kimi Delta Attention" if isinstance(nets[0], KimiDeltaAttentionSpec) else "Gated DeltaNet"
        return {f"{rule} in {len(nets)} of {len(mixers)} blocks": True, "no positions": args.pos_emb == "none"}
    convolutions = sum(isinstance(mixer, ShortConvSpec) for mixer in mixers)
    if convolutions:
        return {f"short convolutions in {convolutions} of {len(mixers)} blocks": True}
    if not mamba and not mamba2:
        return {}
    if full := args.attention_config.count("mamba2_mlp"):
        return {f"Mamba 2 in {full} of {len(mixers)} blocks": True, "no positions": args.pos_emb == "none"}
    names = {"mamba": "Mamba", "mamba2": "Mamba 2", "attention": "attention", "mlp": "MLP", "moe": "expert"}
    kinds = [names[kind] for kind in names if kind in args.attention_config]
    single_kind = f"{kinds[0]} blocks only"
    return {
        single_kind if len(kinds) == 1 else f"{', '.join(kinds[:-1])} or {kinds[-1]} blocks, in any order": True,
        "no positions": args.pos_emb == "none",
        f"state size {(mamba or mamba2)[0].state}": True,
        "norms of B, C and time steps": bool(mamba) and mamba[0].norm_eps is not None,
        f"{mamba2[0].groups if mamba2 else 0} groups of heads": bool(mamba2) and mamba2[0].groups > 1,
    }


def _attention_features(args: ModelArgs) -> dict[str, bool]:
    mixers = [block.mixer for block in block_specs(args) if isinstance(block.mixer, AttentionSpec)]
    if not mixers:
        return {}
    attention, windows = mixers[0], {mixer.window is not None for mixer in mixers}
    turned = [mixer.rotary for mixer in mixers if mixer.rotary is not None]
    scalings = {rotary.scaling["rope_type"] for rotary in turned if rotary.scaling is not None}
    return {
        "latent attention": isinstance(attention, LatentAttentionSpec),
        "grouped queries": attention.kv_heads < attention.heads,
        "layers without positions": args.pos_emb == "rotary" and len(turned) < len(mixers),
        "partial rotary": args.kv_lora_rank is None and bool(turned) and turned[0].width < args.head_dim,
        "interleaved rotary": args.rotary_interleaved,
        "two rotary bases": len({rotary.base for rotary in turned}) > 1,
        " ".join(sorted(scalings)): bool(scalings),
        "queries scaled by position": any(
            rotary.scaling is not None and rotary.scaling["llama_4_scaling_beta"] is not None for rotary in turned
        ),
        "sliding windows in some layers": windows == {True, False},
        "sliding windows": windows == {True},
        "attention sinks": attention.sinks,
        "gated attention": attention.output_gate,
        "QK norms": attention.norms is not None and not attention.norms.after_rotary,
        "QK norms after rotation": attention.norms is not None and attention.norms.after_rotary,
        "QKV biases": attention.bias and not attention.output_bias,
        "biases": attention.output_bias,
        "capped attention logits": attention.softcap is not None,
    }
