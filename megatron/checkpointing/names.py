"""Foreign parameter names, in one table, and the few tensors whose rows other writers order differently.

Ours are GPT-NeoX's current names. Read besides: NeoX before mid-2024 (Pythia, 20B), its llama conversions
(w1, w2, w3), wrapped norms (apex), and Transformer-Engine naming (te_mha, te_layernorm_mlp; the geodesic fork).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from megatron.checkpointing.errors import CheckpointError

# foreign beginning -> ours; the first that fits is used
_RENAMES: tuple[tuple[str, str], ...] = (
    ("attention.qkv.", "attention.query_key_value."),  # te_mha
    ("attention.proj.", "attention.dense."),
    ("mlp.layer_norm_", "post_attention_layernorm."),  # te_layernorm_mlp holds the norm before it
    ("mlp.fc1_", "mlp.linear1."),
    ("mlp.fc2_", "mlp.linear2."),
    ("mlp.dense_h_to_4h.", "mlp.linear1."),  # NeoX before mid-2024
    ("mlp.dense_4h_to_h.", "mlp.linear2."),
    ("mlp.w2.", "mlp.linear2."),  # llama conversions of that time
    ("input_layernorm.norm.", "input_layernorm."),  # norms wrapped in a module
    ("post_attention_layernorm.norm.", "post_attention_layernorm."),
    ("norm.norm.", "norm."),
)
# Buffers and blobs that hold nothing trained.
_IGNORED = re.compile(
    r".*_extra_state|attention\.(masked_)?bias|attention\.rotary_emb\..*|(attention\.)?alibi_embed\..*|rotary_emb\..*"
)
_UNSURE = {
    "attention.qkv.": "rows of grouped queries",
    "mlp.fc1_": "order of gate and up",
}


def our_name(name: str, expected: Collection[str]) -> str | None:
    """Our name of a foreign one; the name itself when it is already ours or unknown; None for what is left out."""
    if _IGNORED.fullmatch(name):
        return None
    for foreign, ours in _RENAMES:
        if name.startswith(foreign):
            name = ours + name.removeprefix(foreign)
            break
    scale = name.removesuffix(".weight") + ".scale"  # wrapped and TE RMSNorms say weight where NeoX says scale
    return scale if name not in expected and scale in expected else name


def to_our_names(
    tensors: Mapping[str, Tensor], expected: Collection[str], *, gated: bool, grouped: bool, where: str
) -> dict[str, Tensor]:
    """One layer of one tensor rank under our names.

    expected: our names of that layer. gated, grouped: the model has a gated MLP, grouped queries.
    Raises CheckpointError for two names of one tensor, and where another writer's row order is not known for sure.
    """
    tensors = dict(tensors)
    out: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        up, gate = f"mlp.w3.{kind}", f"mlp.w1.{kind}"
        if up in tensors and gate in tensors:
            out[f"mlp.linear1.{kind}"] = torch.cat([tensors.pop(up), tensors.pop(gate)])
    for name, tensor in tensors.items():
        ours = our_name(name, expected)
        if ours is None:
            continue
        for prefix, rows in _UNSURE.items():
            if name.startswith(prefix) and (grouped if "qkv" in prefix else gated):
                raise CheckpointError(
                    f"{where}: {name}: the {rows} in Transformer-Engine's naming cannot be read yet; "
                    "convert the checkpoint to NeoX names first"
                )
        if ours in out:
            raise CheckpointError(f"{where}: {name} and another tensor both stand for {ours}; remove one of them")
        out[ours] = tensor
    return out
