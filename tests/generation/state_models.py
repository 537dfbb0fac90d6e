"""Models with states: of Mamba, of Mamba 2, and a hybrid with attention."""

from typing import Any

POSITIONS = 128
_ALL = {"norm": "rmsnorm", "pos_emb": "none", "no_weight_tying": True, "max_position_embeddings": POSITIONS}
_HEADS = {"mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 8, "mamba_chunk_size": 4}
_KINDS = ["mamba", "attention", "mamba2", "mlp", "flash"]
MAMBA: dict[str, Any] = {**_ALL, "attention_config": [[["mamba"], 4]], "num_layers": 4}
MAMBA_2: dict[str, Any] = {**MAMBA, **_HEADS, "attention_config": [[["mamba2"], 4]]}
HYBRID = {**MAMBA_2, "attention_config": _KINDS, "num_layers": 5, "pos_emb": "rotary", "num_kv_heads": 2}
MODELS = {"mamba": MAMBA, "mamba 2": MAMBA_2, "hybrid": HYBRID}
