"""Checks the keys of multi-head latent attention."""

from megatron.neox_arguments.errors import ErrorCollector
from megatron.neox_arguments.keys.architectures import LatentAttentionKeys
from megatron.neox_arguments.keys.declaration import keys_of
from megatron.neox_arguments.resolved import ResolvedArgs

_KEY = "kv_lora_rank"
_WIDTHS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Keys of usual attention that latent attention does not have.
_REFUSED = (
    "use_qk_layernorm", "add_qkv_bias", "clip_qkv", "attention_sinks", "attention_output_gate", "global_head_dim",
    "attention_k_eq_v", "use_v_norm", "te_mha",
)  # fmt: skip


def validate_latent_attention(args: ResolvedArgs, problems: ErrorCollector) -> None:
    """Checks the keys of latent attention: its widths, and that no key of usual attention contradicts it."""
    if args.kv_lora_rank is None:
        for name, declared in keys_of(LatentAttentionKeys).items():
            if getattr(args, name) != declared.default:
                problems.add(name, f"is read only with {_KEY}, the width of latents; set that, or remove this key")
        return
    place = args.origin(_KEY)
    missing = [name for name in _WIDTHS if getattr(args, name) is None]
    if missing:
        problems.add(_KEY, f"needs {', '.join(missing)}; set them")
        return
    if not args.attends:
        problems.add(_KEY, "no block of attention_config has attention; remove it")
    if args.pos_emb not in ("rotary", "none"):
        problems.add(_KEY, f"needs pos_emb: rotary or none, not {args.cite('pos_emb')}")
    assert args.qk_nope_head_dim is not None and args.qk_rope_head_dim is not None
    if args.qk_rope_head_dim % 2 and args.pos_emb == "rotary":
        problems.add("qk_rope_head_dim", f"{args.qk_rope_head_dim} must be even: rotary positions rotate pairs")
    width = args.qk_nope_head_dim + args.qk_rope_head_dim
    if args.head_dim != width:
        problems.add("head_dim", f"is qk_nope_head_dim + qk_rope_head_dim = {width} with {_KEY} ({place}); remove it")
    if args.rotary_pct != 1:
        problems.add("rotary_pct", f"qk_rope_head_dim says what is rotated with {_KEY} ({place}); remove it")
    if args.kv_heads != args.num_attention_heads:
        problems.add("num_kv_heads", f"heads share no keys and values with {_KEY} ({place}); remove it")
    for name in _REFUSED:
        if getattr(args, name):
            problems.add(name, f"does not work with {_KEY} ({place}); remove one of them")
    if args.rope_scaling is not None and args.rope_scaling["llama_4_scaling_beta"] is not None:
        problems.add("rope_scaling.llama_4_scaling_beta", f"does not work with {_KEY} ({place}); remove it")
