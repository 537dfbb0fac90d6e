"""Models with states: of Mamba, of Mamba 2, and a hybrid with attention."""

from typing import Any

POSITIONS = 128
MAMBA: dict[str, Any] = {
    "attention_config": [[["mamba"], 4]],
    "num_layers": 4,
    "norm": "rmsnorm",
    "pos_emb": "none",
    "no_weight_tying": True,
    "max_position_embeddings": POSITIONS,
}
MAMBA_2: dict[str, Any] = {
    **MAMBA,
    "attention_config": [[["mamba2"], 4]],
    "mamba_head_dim": 16,
    "mamba_num_groups": 2,
    "mamba_state_dim": 8,
    "mamba_chunk_size": 4,
}
HYBRID: dict[str, Any] = {
    **MAMBA_2,
    "attention_config": ["mamba", "attention", "mamba2", "mlp", "flash"],
    "num_layers": 5,
    "pos_emb": "rotary",
    "num_kv_heads": 2,
}
MODELS = {"mamba": MAMBA, "mamba 2": MAMBA_2, "hybrid": HYBRID}
