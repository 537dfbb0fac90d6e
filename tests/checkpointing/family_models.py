"""Small models of every HuggingFace family, with random weights. Adding a family is one line of `CASES`."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load
from torch import Tensor

from tests.model.stages import Weights

VOCAB, PADDED = 90, 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 48,
    "max_position_embeddings": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_GQA = {"num_key_value_heads": 4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": 1.2}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8, "rope_theta": 500000.0,
}  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"
_BASE = {"rope_type": "default", "rope_theta": 10000.0}
# name: (configuration class, what it has otherwise than _SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "gpt_neox sequential": ("GPTNeoXConfig", {"use_parallel_residual": False, "rotary_pct": 1.0,
        "hidden_act": "gelu_new"}),
    "gpt_neox no bias": ("GPTNeoXConfig", {"attention_bias": False, "tie_word_embeddings": True, "rotary_pct": 1.0}),
    "llama 2": ("LlamaConfig", {}),
    "llama 3": ("LlamaConfig", {**_GQA, "rope_parameters": _LLAMA3}),
    "llama wide": ("LlamaConfig", {**_GQA, "head_dim": 6, "attention_bias": True, "mlp_bias": True}),
    "llama dynamic": ("LlamaConfig", {"max_position_embeddings": 16, "rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, "hidden_act": "gelu"}),
    "llama linear": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "mistral": ("MistralConfig", {**_GQA, "sliding_window": 5}),
    "mistral full": ("MistralConfig", {**_GQA, "sliding_window": None}),
    "qwen 3": ("Qwen3Config", {**_GQA, "head_dim": 6, "tie_word_embeddings": True}),
    "qwen 3 windows": ("Qwen3Config", {"head_dim": 4, "num_key_value_heads": 8, "use_sliding_window": True,
        "sliding_window": 4, "max_window_layers": 2, "attention_bias": True}),
    "olmo 2": ("Olmo2Config", {}),
    "olmo 2 GQA": ("Olmo2Config", {**_GQA}),
    "olmo 3": ("Olmo3Config", {**_GQA, "sliding_window": 5, "rope_parameters": {
        _FULL: {**_YARN, "rope_theta": 500000.0}, _SLIDING: {**_BASE, "rope_theta": 500000.0}}}),
    "gemma 3": ("Gemma3TextConfig", {**_GQA, "head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 11,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING], "rope_parameters": {
        _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}, _SLIDING: _BASE}}),
    "smollm 3": ("SmolLM3Config", {**_GQA}),
    "smollm 3 windows": ("SmolLM3Config", {**_GQA, "use_sliding_window": True, "sliding_window": 3, "mlp_bias": True,
        "no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": False}),
}  # fmt: skip


def config_of(case: str, **more: Any) -> Any:
    kind, changes = CASES[case]
    return getattr(transformers, kind)(**{**_SIZES, **changes, **more})


@torch.no_grad()
def random_model(case: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Every weight random, biases and norms included, none of them near another's usual value."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(case, **more), attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        value = 0.15 * torch.randn(param.shape, generator=generator)
        is_norm = param.dim() == 1 and name.endswith("weight") and "gemma" not in case
        param.copy_(1 + value if is_norm else value)
    return model.to(dtype).eval()


def on_disk(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors that transformers writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        return config, load((Path(folder) / "model.safetensors").read_bytes())


def collected(tensors: Any) -> Weights:
    weights: Weights = {}
    for layer, name, tensor in tensors:
        weights.setdefault(layer, {})[name] = tensor
    return weights
