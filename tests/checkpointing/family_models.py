"""Small models of every HuggingFace family, with random weights. Adding a family is one line of `CASES`."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load
from torch import Tensor

from megatron.checkpointing.families.convert import from_hf
from tests.model.stages import Weights

VOCAB, PADDED = 90, 96
_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8,
                          "intermediate_size": 48, "max_position_embeddings": 32, "bos_token_id": None,
                          "eos_token_id": None, "pad_token_id": None}  # fmt: skip
_GQA = {"num_key_value_heads": 4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": 1.2}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8, "rope_theta": 500000.0}  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"
_BASE = {"rope_type": "default", "rope_theta": 10000.0}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
_HEADS = {"num_heads": 8, "head_dim": 8, "state_size": 8}
_NEMOTRON = {**_GQA, "head_dim": 6, "mamba_num_heads": 8, "mamba_head_dim": 6, "n_groups": 4, "ssm_state_size": 6,
             "chunk_size": 7, "time_step_min": 0.4}  # fmt: skip
_LATENT = {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
           "num_key_value_heads": None}  # fmt: skip
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "first_k_dense_replace": 1}
_MLA = {**_LATENT, **_ROUTED}
_DEEPSEEK_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0,
                  "mscale": 0.7, "mscale_all_dim": 0.9}  # fmt: skip
_KIMI = {"num_key_value_heads": 8, "linear_num_heads": 4, "linear_head_dim": 6, "linear_conv_kernel_dim": 3}
_GEMMA4 = {**_GQA, "head_dim": 6, "global_head_dim": 10, "sliding_window": 5, "layer_types": [_SLIDING, _FULL] * 2}
_DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6,
          "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3}  # fmt: skip
_GRANITE_4 = {"embedding_multiplier": 6.0, "logits_scaling": 0.49, "residual_multiplier": 0.22,
              "attention_multiplier": 0.3, "shared_intermediate_size": 20, "mamba_n_heads": 8, "mamba_d_state": 6,
              "mamba_chunk_size": 7, "mamba_d_conv": 3}  # fmt: skip
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
    "olmo 2 GQA": ("Olmo2Config", {"num_key_value_heads": 2}),
    "olmo 3": ("Olmo3Config", {**_GQA, "sliding_window": 5, "rope_parameters": {
        _FULL: {**_YARN, "rope_theta": 500000.0}, _SLIDING: {**_BASE, "rope_theta": 500000.0}}}),
    "gemma 3": ("Gemma3TextConfig", {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 5,
        "query_pre_attn_scalar": 11, "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING], "rope_parameters": {
        _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}, _SLIDING: _BASE}}),
    "gpt 2": ("GPT2Config", {"n_inner": 40}),
    "gpt 2 untied": ("GPT2Config", {"tie_word_embeddings": False, "activation_function": "relu",
        "scale_attn_weights": False}),
    "qwen 2": ("Qwen2Config", {**_GQA}),
    "qwen 2 windows": ("Qwen2Config", {"num_key_value_heads": 8, "use_sliding_window": True, "sliding_window": 4,
        "max_window_layers": 2, "head_dim": 6, "rope_parameters": {**_YARN, "rope_theta": 1000000.0},
        "tie_word_embeddings": True}),
    "olmo 1": ("OlmoConfig", {"clip_qkv": 0.3}),
    "olmo 1 GQA": ("OlmoConfig", {**_GQA, "tie_word_embeddings": True}),
    "gemma 2": ("Gemma2Config", {**_GQA, "head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 11,
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5}),
    "phi 3": ("Phi3Config", {**_GQA, "sliding_window": 6}),
    "phi 3 long": ("Phi3Config", {"partial_rotary_factor": 0.5, "hidden_size": 64,
        "original_max_position_embeddings": 10, "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0], "rope_theta": 20.0}}),
    "phi 3 short": ("Phi3Config", {"original_max_position_embeddings": 24, "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0], "rope_theta": 10000.0}}),
    "ministral": ("MinistralConfig", {**_GQA, "head_dim": 6, "sliding_window": 5,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _FULL]}),
    "ministral 3": ("Ministral3Config", {**_GQA, "head_dim": 6, "rope_parameters": {**_YARN, "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.3}}),
    "granite": ("GraniteConfig", {**_GQA, "embedding_multiplier": 6.0, "logits_scaling": 0.49,
        "residual_multiplier": 0.22, "attention_multiplier": 0.3, "mlp_bias": True}),
    "glm 4": ("Glm4Config", {"num_key_value_heads": 2, "head_dim": 8}),
    "cohere 2": ("Cohere2Config", {**_GQA, "sliding_window": 5, "logit_scale": 0.7}),
    "gemma 1": ("GemmaConfig", {"num_key_value_heads": 1, "head_dim": 6}),
    "gemma 1 wide": ("GemmaConfig", {"num_key_value_heads": 8, "head_dim": 6, "attention_bias": True,
        "hidden_act": "gelu", "tie_word_embeddings": False}),
    "arcee": ("ArceeConfig", {**_GQA, "rope_parameters": {**_YARN, "rope_theta": 10000.0}}),
    "arcee biases": ("ArceeConfig", {"head_dim": 6, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu",
        "tie_word_embeddings": True}),
    "cwm": ("CwmConfig", {**_GQA, "head_dim": 6, "sliding_window": 5, "bos_token_id": 1}),
    "cwm plain": ("CwmConfig", {**_GQA, "head_dim": 4, "sliding_window": 3, "mlp_bias": True, "bos_token_id": 1,
        "rope_parameters": _BASE, "layer_types": [_SLIDING, _FULL, _FULL, _SLIDING]}),
    "ernie 4.5": ("Ernie4_5Config", {**_GQA, "head_dim": 6}),
    "ernie 4.5 biases": ("Ernie4_5Config", {"head_dim": None, "num_key_value_heads": None, "use_bias": True,
        "tie_word_embeddings": False}),
    "exaone 4": ("Exaone4Config", {**_GQA, "sliding_window": 5}),
    "exaone 4 full": ("Exaone4Config", {"head_dim": 6, "num_key_value_heads": 8, "sliding_window": None,
        "layer_types": [_FULL] * 4, "tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "glm": ("GlmConfig", {"num_key_value_heads": 2, "head_dim": 8}),
    "helium": ("HeliumConfig", {**_GQA, "head_dim": 4, "attention_bias": True}),
    "helium biases": ("HeliumConfig", {"num_key_value_heads": 8, "head_dim": 4, "mlp_bias": True,
        "tie_word_embeddings": True}),
    "stablelm": ("StableLmConfig", {**_GQA, "hidden_size": 64, "use_qkv_bias": True}),
    "stablelm parallel": ("StableLmConfig", {"num_key_value_heads": 8, "use_parallel_residual": True,
        "rope_parameters": {**_BASE, "partial_rotary_factor": 0.5}, "tie_word_embeddings": True}),
    "nemotron": ("NemotronConfig", {**_GQA, "head_dim": 8}),
    "nemotron biases": ("NemotronConfig", {"num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True,
        "hidden_act": "gelu", "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 777.0, "partial_rotary_factor": 1.0}}),
    "falcon": ("FalconConfig", {"ffn_hidden_size": 48}),
    "falcon heads": ("FalconConfig", {"multi_query": False, "parallel_attn": False, "bias": True, "num_kv_heads": 8,
        "tie_word_embeddings": False}),
    "starcoder 2": ("Starcoder2Config", {**_GQA, "sliding_window": 5}),
    "starcoder 2 untied": ("Starcoder2Config", {**_GQA, "use_bias": False, "tie_word_embeddings": False}),
    "apertus": ("ApertusConfig", {**_GQA, "rope_parameters": _LLAMA3}),
    "apertus plain": ("ApertusConfig", {**_GQA, "rope_parameters": {**_BASE, "rope_theta": 5000.0}}),
    "seed oss": ("SeedOssConfig", {**_GQA, "head_dim": 6}),
    "seed oss biases": ("SeedOssConfig", {"head_dim": 6, "attention_out_bias": True, "mlp_bias": True,
        "num_key_value_heads": 8}),
    "smollm 3": ("SmolLM3Config", {**_GQA}),
    "smollm 3 windows": ("SmolLM3Config", {**_GQA, "use_sliding_window": True, "sliding_window": 3, "mlp_bias": True,
        "no_rope_layers": [1, 0, 0, 1], "tie_word_embeddings": False}),
    "mixtral": ("MixtralConfig", {**_GQA, "head_dim": 6, **_EXPERTS, "sliding_window": 5}),
    "mixtral full": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": True,
        "num_key_value_heads": 8, "hidden_act": "gelu"}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 0.8}),
    "olmoe GQA": ("OlmoeConfig", {**_GQA, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "tie_word_embeddings": True, "attention_bias": True}),
    "qwen 2 moe": ("Qwen2MoeConfig", {"num_key_value_heads": 8, **_QWEN_EXPERTS, "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1]}),
    "qwen 2 moe windows": ("Qwen2MoeConfig", {**_GQA, **_QWEN_EXPERTS, "shared_expert_intermediate_size": 20,
        "head_dim": 6, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 3, "norm_topk_prob": True,
        "decoder_sparse_step": 2, "qkv_bias": False, "tie_word_embeddings": True}),
    "qwen 3 moe": ("Qwen3MoeConfig", {**_GQA, "head_dim": 6, **_QWEN_EXPERTS, "norm_topk_prob": True}),
    "qwen 3 moe windows": ("Qwen3MoeConfig", {**_GQA, **_QWEN_EXPERTS, "attention_bias": True, "mlp_only_layers": [0],
        "use_sliding_window": True, "sliding_window": 4, "decoder_sparse_step": 3, "tie_word_embeddings": True}),
    "gpt oss": ("GptOssConfig", {**_GQA, "head_dim": 6, **_EXPERTS, "sliding_window": 5, "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "rope_theta": 5.0,
        "truncate": False}}),
    "gpt oss plain": ("GptOssConfig", {"num_key_value_heads": 8, "head_dim": 4, "num_local_experts": 4,
        "num_experts_per_tok": 1, "attention_bias": False, "tie_word_embeddings": True, "rope_parameters": _BASE,
        "layer_types": [_FULL] * 4}),
    "deepseek 2": ("DeepseekV2Config", {**_MLA, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5, "rope_parameters": _DEEPSEEK_YARN}),
    "deepseek 2 greedy": ("DeepseekV2Config", {**_MLA, "q_lora_rank": None, "n_shared_experts": 1,
        "first_k_dense_replace": 0, "attention_bias": True, "tie_word_embeddings": True}),
    "deepseek 3": ("DeepseekV3Config", {**_MLA, "num_mtp_layers": 0, "n_group": 4, "topk_group": 2,
        "rope_parameters": _DEEPSEEK_YARN, "attention_bias": True}),
    "deepseek 3 halves": ("DeepseekV3Config", {**_MLA, "num_mtp_layers": 0, "q_lora_rank": None, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2, "rope_interleave": False, "v_head_dim": 12}),
    "glm 4 moe": ("Glm4MoeConfig", {**_GQA, **_ROUTED, "head_dim": 8, "use_qk_norm": True, "n_group": 2,
        "attention_bias": True, "num_mtp_layers": 0, "n_shared_experts": 2}),
    "glm 4 moe lite": ("Glm4MoeLiteConfig", {**_MLA, "num_key_value_heads": 8, "rope_interleave": False,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "attention_bias": True}),
    "dots 1": ("Dots1Config", {**_GQA, **_ROUTED, "head_dim": 6, "n_shared_experts": 2, "sliding_window": 5,
        "max_window_layers": 2, "norm_topk_prob": True}),
    "youtu": ("YoutuConfig", {**_LATENT, "num_key_value_heads": 8, "rope_parameters": _DEEPSEEK_YARN}),
    "minicpm 3": ("MiniCPM3Config", {**_LATENT, "scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 20,
        "attention_bias": True, "original_max_position_embeddings": 10, "rope_parameters": {"rope_type": "longrope",
        "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0], "rope_theta": 20.0, "attention_factor": 1.2}}),
    "qwen 3 next": ("Qwen3NextConfig", {**_GQA, **_DELTA, **_QWEN_EXPERTS, "head_dim": 8,
        "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]}),
    "qwen 3 next wide": ("Qwen3NextConfig", {**_DELTA, **_QWEN_EXPERTS, "num_key_value_heads": 8, "head_dim": 8,
        "linear_num_value_heads": 4, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 2,
        "layer_types": [_FULL, "linear_attention"] * 2, "norm_topk_prob": False, "attention_bias": True,
        "tie_word_embeddings": True}),
    "kimi linear": ("KimiLinearConfig", {**_MLA, **_KIMI, "num_local_experts": 8, "topk_group": 2, "n_group": 4,
        "q_lora_rank": None, "layer_types": ["linear_attention", _FULL] * 2}),
    "kimi linear dense": ("KimiLinearConfig", {**_MLA, **_KIMI, "num_local_experts": 4, "norm_topk_prob": False,
        "n_shared_experts": 2, "attention_bias": True, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "layer_types": [_FULL, "linear_attention", "linear_attention", _FULL]}),
    "qwen 3.5": ("Qwen3_5TextConfig", {**_GQA, **_DELTA, "linear_key_head_dim": 14, "head_dim": 8}),
    "qwen 3.5 wide": ("Qwen3_5TextConfig", {**_DELTA, "num_key_value_heads": 8, "head_dim": 16,
        "linear_num_value_heads": 4, "layer_types": [_FULL, "linear_attention"] * 2, "attention_bias": True,
        "tie_word_embeddings": True}),
    "qwen 3.5 moe": ("Qwen3_5MoeTextConfig", {**_GQA, **_DELTA, **_QWEN_EXPERTS, "head_dim": 8,
        "shared_expert_intermediate_size": 24}),
    "lfm 2": ("Lfm2Config", {**_GQA, "conv_L_cache": 4, "layer_types": ["conv", _FULL, "conv", _FULL],
        "block_multiple_of": 10, "rope_parameters": {"rope_type": "default", "rope_theta": 555.0}}),
    "lfm 2 biases": ("Lfm2Config", {"num_key_value_heads": 8, "conv_bias": True, "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 2], "tie_word_embeddings": False}),
    "lfm 2 moe": ("Lfm2MoeConfig", {**_GQA, **_QWEN_EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.5,
        "layer_types": ["conv", "conv", _FULL, "conv"]}),
    "minimax m2": ("MiniMaxM2Config", {**_GQA, **_EXPERTS, "head_dim": 8, "rotary_dim": 4}),
    "solar open": ("SolarOpenConfig", {**_GQA, **_ROUTED, "head_dim": 6, "n_group": 2, "attention_bias": True,
        "n_shared_experts": 2, "rope_parameters": {**_YARN, "rope_theta": 10000.0}}),
    "flex olmo": ("FlexOlmoConfig", {**_GQA, "num_experts": 8, "num_experts_per_tok": 3}),
    "flex olmo wide": ("FlexOlmoConfig", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "attention_bias": True, "tie_word_embeddings": True}),
    "exaone moe": ("ExaoneMoeConfig", {**_GQA, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "num_shared_experts": 2, "n_group": 4, "topk_group": 2, "sliding_window": 5}),
    "ernie 4.5 moe": ("Ernie4_5_MoeConfig", {**_GQA, "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 20}),
    "ernie 4.5 moe unshared": ("Ernie4_5_MoeConfig", {"num_key_value_heads": 8, "moe_num_experts": 4, "moe_k": 2,
        "moe_intermediate_size": 20, "moe_num_shared_experts": 0, "moe_layer_interval": 2, "moe_layer_start_index": 0,
        "tie_word_embeddings": False}),
    "hunyuan": ("HunYuanDenseV1Config", {**_GQA, "head_dim": 6}),
    "hunyuan plain": ("HunYuanDenseV1Config", {"head_dim": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "hunyuan moe": ("HunYuanMoEV1Config", {**_GQA, "head_dim": 6, "num_experts": 8, "moe_topk": [3, 3, 3, 3]}),
    "granite moe": ("GraniteMoeConfig", {**_GQA, **_EXPERTS, "embedding_multiplier": 6.0, "logits_scaling": 0.49,
        "residual_multiplier": 0.22, "attention_multiplier": 0.3, "attention_bias": True}),
    "granite moe shared": ("GraniteMoeSharedConfig", {"num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 20, "residual_multiplier": 0.5, "attention_multiplier": 0.3,
        "tie_word_embeddings": True}),
    "granite 4": ("GraniteMoeHybridConfig", {**_GQA, **_GRANITE_4, **_EXPERTS, "mamba_n_groups": 2, "layer_types": [
        "linear_attention", _FULL, "linear_attention", "linear_attention"]}),
    "granite 4 dense": ("GraniteMoeHybridConfig", {**_GRANITE_4, "num_local_experts": 0, "num_experts_per_tok": 0,
        "mamba_n_groups": 1, "position_embedding_type": "rope", "attention_bias": True, "mamba_proj_bias": True,
        "tie_word_embeddings": True, "layer_types": [_FULL, "linear_attention"] * 2,
        "time_step_limit": (0.3, 0.9)}),
    "gemma 4": ("Gemma4TextConfig", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 1.5}),
    "gemma 4 plain": ("Gemma4TextConfig", {**_GEMMA4, "num_key_value_heads": 8, "attention_bias": True,
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "hidden_activation": "silu",
        "tie_word_embeddings": False, "use_bidirectional_attention": "vision"}),
    "gemma 4 unified": ("Gemma4UnifiedTextConfig", {**_GEMMA4, "rope_parameters": {
        _SLIDING: _BASE, _FULL: {"rope_type": "default", "rope_theta": 777.0}}}),
    "mamba": ("MambaConfig", {"state_size": 6, "conv_kernel": 3, "layer_norm_epsilon": 1e-4,
        "intermediate_size": 64}),
    "mamba untied": ("MambaConfig", {"tie_word_embeddings": False, "expand": 3, "time_step_rank": 9,
        "use_conv_bias": False, "intermediate_size": 96}),
    "falcon mamba": ("FalconMambaConfig", {"state_size": 6, "mixer_rms_eps": 0.02, "tie_word_embeddings": False,
        "expand": 16, "intermediate_size": 64, "time_step_rank": 8}),
    "mamba 2": ("Mamba2Config", {**_HEADS, "n_groups": 4, "chunk_size": 5, "time_step_limit": (0.3, 0.9)}),
    "mamba 2 biases": ("Mamba2Config", {**_HEADS, "n_groups": 1, "chunk_size": 16, "use_bias": True,
        "use_conv_bias": False, "tie_word_embeddings": True, "time_step_limit": (0.6, float("inf"))}),
    "nemotron h": ("NemotronHConfig", {**_NEMOTRON, "layers_block_type": ["linear_attention", "moe", _FULL, "mlp",
        "linear_attention", "moe"], "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 2.5}),
    "nemotron h latent": ("NemotronHConfig", {**_NEMOTRON, "layers_block_type": ["moe", "linear_attention", _FULL,
        "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_latent_size": 12, "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 24, "norm_topk_prob": False}),
    "nemotron h dense": ("NemotronHConfig", {**_NEMOTRON, "layers_block_type": ["mlp", "linear_attention", _FULL,
        "mlp"], "mlp_bias": True, "use_bias": True, "mlp_hidden_act": "silu", "num_key_value_heads": 8}),
}  # fmt: skip
# A case of every family in sizes that nothing divides: a third of the heads, heads of their own width,
# another vocabulary, epsilon and base.
_ODD: dict[str, Any] = {"vocab_size": 91, "hidden_size": 36, "num_hidden_layers": 4, "num_attention_heads": 6,
                        "num_key_value_heads": 2, "intermediate_size": 50, "rms_norm_eps": 3e-4,
                        "rope_theta": 777.0}  # fmt: skip
_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}}
_WIDE = {"head_dim": 10}
_ODD_MLA = {"num_key_value_heads": None, "q_lora_rank": 9, "qk_rope_head_dim": 6, "v_head_dim": 7,
            "n_routed_experts": 6, "n_group": 3, "moe_intermediate_size": 22, "first_k_dense_replace": 2}  # fmt: skip
_ODD_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10,
              "linear_value_head_dim": 9, "linear_conv_kernel_dim": 4, "rms_norm_eps": 3e-3}  # fmt: skip
ODD: dict[str, dict[str, Any]] = {
    "gpt_neox": {"num_key_value_heads": 6, "layer_norm_eps": 3e-4, "rotary_pct": 0.4},
    "gpt 2": {"num_key_value_heads": 6, "layer_norm_epsilon": 3e-4, "n_inner": 50},
    **dict.fromkeys(("llama 3", "apertus"), {**_WIDE, "rope_parameters": {**_LLAMA3, "rope_theta": 777.0}}),
    **dict.fromkeys(("mistral", "qwen 3 windows", "gemma 2", "granite"), {**_WIDE, **_PLAIN_ROPE}),
    **dict.fromkeys(("qwen 2", "seed oss"), {**_WIDE, **_PLAIN_ROPE, "tie_word_embeddings": True}),
    **dict.fromkeys(("smollm 3", "olmo 1", "olmo 2 GQA"), _PLAIN_ROPE),
    "olmo 3": {},
    **dict.fromkeys(("gemma 4", "gemma 4 unified"), {**_WIDE, "global_head_dim": 14, "num_global_key_value_heads": 3}),
    "gemma 3": {**_WIDE, "tie_word_embeddings": False},
    "phi 3 long": {"partial_rotary_factor": 0.75, "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0], "rope_theta": 777.0,
        "partial_rotary_factor": 0.75}},
    "ministral 3": {**_WIDE, "rope_parameters": {**_YARN, "rope_theta": 777.0, "llama_4_scaling_beta": 0.3}},
    **dict.fromkeys(("glm 4", "glm"), {"head_dim": 12, "rope_parameters": {
        "rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.5}}),
    **dict.fromkeys(("gemma 1", "arcee", "ernie 4.5", "exaone 4"), {**_WIDE, **_PLAIN_ROPE}),
    "cwm": {**_WIDE, "rope_parameters": {**_LLAMA3, "rope_theta": 777.0}},
    "helium": {"head_dim": 6, **_PLAIN_ROPE},
    "stablelm": {"hidden_size": 48, "layer_norm_eps": 3e-4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.5}},
    "nemotron": {"head_dim": 12, "norm_eps": 3e-4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.5}},
    "falcon": {**_PLAIN_ROPE, "layer_norm_epsilon": 3e-4, "ffn_hidden_size": 50},
    "cohere 2": {**_PLAIN_ROPE, "layer_norm_eps": 3e-4},
    "starcoder 2": {**_WIDE, **_PLAIN_ROPE, "norm_epsilon": 3e-4},
    "mixtral": {**_WIDE, **_PLAIN_ROPE, "num_local_experts": 6},
    "olmoe": {**_PLAIN_ROPE, "num_experts": 6},
    "qwen 2 moe": {**_PLAIN_ROPE, "num_experts": 6, "moe_intermediate_size": 22,
        "shared_expert_intermediate_size": 26},
    "qwen 3 moe": {**_WIDE, **_PLAIN_ROPE, "num_experts": 10, "moe_intermediate_size": 22, "mlp_only_layers": [2]},
    "qwen 3 next": {**_WIDE, "rope_parameters": {**_PLAIN_ROPE["rope_parameters"], "partial_rotary_factor": 0.6},
        "num_experts": 6, "moe_intermediate_size": 22, "shared_expert_intermediate_size": 26,
        **_ODD_DELTA},
    "qwen 3.5": {**_WIDE, **_ODD_DELTA},
    "qwen 3.5 moe": {**_WIDE, **_ODD_DELTA, "num_experts": 6, "moe_intermediate_size": 22,
        "shared_expert_intermediate_size": 26},
    "gpt oss": {**_WIDE, "num_local_experts": 6, "rope_parameters": {**_YARN, "truncate": False, "rope_theta": 777.0}},
    # transformers' DeepSeek 2 needs even widths of latents and heads.
    "deepseek 2": {**_PLAIN_ROPE, **_ODD_MLA, "kv_lora_rank": 14, "qk_nope_head_dim": 8},
    "deepseek 3": {**_PLAIN_ROPE, **_ODD_MLA, "kv_lora_rank": 11, "qk_nope_head_dim": 5},
    "deepseek 3 halves": {"num_key_value_heads": None, "v_head_dim": 13, "rope_parameters": {
        **_DEEPSEEK_YARN, "rope_theta": 777.0}, "n_routed_experts": 10},
    "ministral": {**_WIDE, **_PLAIN_ROPE},
    "glm 4 moe": {**_WIDE, "rope_parameters": {**_PLAIN_ROPE["rope_parameters"], "partial_rotary_factor": 0.6},
        "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 22},
    "glm 4 moe lite": {**_PLAIN_ROPE, **_ODD_MLA, "num_key_value_heads": 6, "n_group": 1, "kv_lora_rank": 13},
    "dots 1": {**_WIDE, **_PLAIN_ROPE, "n_routed_experts": 6, "moe_intermediate_size": 22},
    "lfm 2": {**_PLAIN_ROPE, "norm_eps": 3e-3, "block_ffn_dim_multiplier": 1.3},
    "lfm 2 moe": {**_PLAIN_ROPE, "norm_eps": 3e-3, "num_experts": 6, "moe_intermediate_size": 22},
    "minimax m2": {**_WIDE, "rope_parameters": {**_PLAIN_ROPE["rope_parameters"], "partial_rotary_factor": 0.6},
        "num_local_experts": 6, "rotary_dim": None},
    "solar open": {**_WIDE, **_PLAIN_ROPE, "n_routed_experts": 6, "n_group": 1, "moe_intermediate_size": 22},
    "flex olmo": {**_PLAIN_ROPE, "num_experts": 6},
    "exaone moe": {**_WIDE, **_PLAIN_ROPE, "num_experts": 6, "n_group": 3, "moe_intermediate_size": 22},
    "ernie 4.5 moe": {**_PLAIN_ROPE, "moe_num_experts": 6, "moe_intermediate_size": 22},
    "hunyuan": {**_WIDE, "rope_parameters": {"rope_type": "dynamic", "alpha": 9.0, "factor": 1.0, "rope_theta": 777.0}},
    "hunyuan moe": {**_WIDE, **_PLAIN_ROPE, "num_experts": 6},
    **dict.fromkeys(("granite moe", "granite moe shared"), {**_PLAIN_ROPE, "num_local_experts": 6}),
    "granite 4": {**_PLAIN_ROPE, "num_local_experts": 6, "mamba_n_heads": 6},
    "youtu": {**_PLAIN_ROPE, "num_key_value_heads": 6, "kv_lora_rank": 11, "v_head_dim": 7},
    "minicpm 3": {"num_key_value_heads": None, "kv_lora_rank": 11, "v_head_dim": 7, "scale_depth": None},
    "mamba": {"intermediate_size": 36, "expand": 1, "layer_norm_epsilon": 3e-4, "state_size": 5, "time_step_rank": 7},
    "falcon mamba": {"intermediate_size": 108, "layer_norm_epsilon": 3e-4, "mixer_rms_eps": 0.01},
    "mamba 2": {"num_heads": 6, "head_dim": 12, "layer_norm_epsilon": 3e-4, "n_groups": 2, "state_size": 5},
    "nemotron h": {"head_dim": 10, "mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 2, "n_routed_experts": 6,
        "n_group": 3, "layer_norm_epsilon": 3e-4, "conv_kernel": 3},
    "nemotron h latent": {"head_dim": 10, "n_routed_experts": 6, "moe_latent_size": 14, "layer_norm_epsilon": 3e-4},
}  # fmt: skip
# Each way of stretching, over the families that know several; LongRoPE and Ministral's are theirs alone.
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0}, "dynamic": {"rope_type": "dynamic", "factor": 2.0}, "yarn": _YARN,
    "llama3": {key: value for key, value in _LLAMA3.items() if key != "rope_theta"},
}  # fmt: skip
SCALED = [*("gpt_neox sequential", "llama 2", "mistral", "qwen 2", "qwen 3", "smollm 3", "olmo 1", "olmo 2", "gemma 2"),
          *("gemma 1", "arcee", "ernie 4.5", "exaone 4 full", "helium"),
          *("granite", "glm 4", "cohere 2", "starcoder 2", "apertus", "seed oss"),
          *("mixtral", "olmoe", "qwen 2 moe", "qwen 3 moe", "gpt oss")]  # fmt: skip


def odd_model(case: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """`random_model` of a family in the sizes of `ODD`."""
    return random_model(case, dtype, **{**_ODD, **ODD[case], **overrides})


def config_of(case: str, **overrides: Any) -> Any:
    kind, changes = CASES[case]
    return getattr(transformers, kind)(**{**_SIZES, **changes, **overrides})


def random_model(case: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(case, **overrides), attn_implementation="eager", experts_implementation="eager"
    )
    return randomise(model, case).to(dtype).eval()


@torch.no_grad()
def randomise(model: Any, case: str) -> Any:
    """Every weight random, biases and norms included, none of them near another's usual value."""
    generator = torch.Generator().manual_seed(0)
    for name, param in model.named_parameters():
        value = 0.15 * torch.randn(param.shape, generator=generator)
        is_norm = param.dim() == 1 and name.endswith("weight")
        is_hybrid_qwen = case.startswith(("qwen 3 next", "qwen 3.5"))
        is_zero_centred = (
            ("gemma" in case and "gemma 4" not in case)
            or case in ("nemotron", "nemotron biases")
            or (is_hybrid_qwen and "linear_attn" not in name)
        )
        param.copy_(1 + value if is_norm and not is_zero_centred else value)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias", "layer_scalar")):
            at_first = float(name.endswith("layer_scalar"))
            buffer.copy_(at_first + 0.15 * torch.randn(buffer.shape, generator=generator))
    return model


def on_disk(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors that transformers writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        return config, load((Path(folder) / "model.safetensors").read_bytes())


def ours_of(model: Any) -> tuple[dict[str, Any], Weights]:
    """A model of transformers as keys of ours and whole weights, the vocabulary padded to `PADDED`."""
    config, tensors = on_disk(model)
    keys, weights = from_hf(config, tensors.__getitem__, padded_vocab_size=PADDED)
    return keys, collected(weights)


def collected(tensors: Any) -> Weights:
    weights: Weights = {}
    for layer, name, tensor in tensors:
        weights.setdefault(layer, {})[name] = tensor
    return weights
