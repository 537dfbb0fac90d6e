"""Small models with random weights: of attention, of states (Mamba, delta rules), a hybrid."""

from typing import Any

import torch

from megatron.generation import Model, for_inference
from megatron.mpu import ParallelGroups
from megatron.tokenizer import CharLevelTokenizer
from tests.model.runs import MODELS
from tests.model.stages import groups_of, make_stage, random_weights, small

POSITIONS = 128
_ALL = {"norm": "rmsnorm", "pos_emb": "none", "no_weight_tying": True, "max_position_embeddings": POSITIONS}
_HEADS = {"mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 8, "mamba_chunk_size": 4}
_KINDS = ["mamba", "attention", "mamba2", "mlp", "flash"]
MAMBA: dict[str, Any] = {**_ALL, "attention_config": [[["mamba"], 4]], "num_layers": 4}
MAMBA_2: dict[str, Any] = {**MAMBA, **_HEADS, "attention_config": [[["mamba2"], 4]]}
# One head of keys, one group of heads: tensor ranks share them.
_SHARED_HEADS = {"num_kv_heads": 1, "mamba_num_groups": 1}
HYBRID = {**MAMBA_2, **_SHARED_HEADS, "attention_config": _KINDS, "num_layers": 5, "pos_emb": "rotary"}
DELTA: dict[str, Any] = {
    **_ALL, "pos_emb": "rotary", "num_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_chunk_size": 4, "attention_output_gate": True,
    "attention_config": ["gated_delta_net", "global", "short_conv", "global"], "num_kv_heads": 2,
}  # fmt: skip
KIMI: dict[str, Any] = {
    **_ALL, "num_layers": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_chunk_size": 4, "attention_config": [[["kimi_delta_attention", "global"], "all"]],
}  # fmt: skip
STATE_MODELS = {"mamba": MAMBA, "mamba 2": MAMBA_2, "hybrid": HYBRID, "delta": DELTA, "kimi": KIMI}
# A tied head likes to say the last token again, and never ends.
UNTIED = {name: {**values, "no_weight_tying": True} for name, values in MODELS.items()}
UNTIED |= {name: {**values, "max_position_embeddings": 32} for name, values in STATE_MODELS.items()}


class SmallTokenizer(CharLevelTokenizer):
    """A tokenizer of few tokens, so that the end of document is sampled now and then."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


def random_model(values: dict[str, Any], world_size: int = 1, tokens: int = 10, columns: int | None = None) -> Model:
    """tokens: of the tokenizer."""
    args = for_inference(small(**values).for_world(world_size))
    groups = groups_of(args, world_size) if world_size > 1 else ParallelGroups.single()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.params_dtype]
    stage = make_stage(args, random_weights(args), groups).to(dtype)
    stage.dtype = dtype
    return Model(args, groups, SmallTokenizer(tokens), stage, dtype, columns)
