"""Sizes and numbers of parameters of published models."""

from typing import Any

# config.json as published (sizes, and what changes the maths): its folder under https://huggingface.co, and
# the parameters by the model card or by transformers.
_LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
_YARN = {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
         "original_max_position_embeddings": 8192, "rope_type": "yarn"}  # fmt: skip
_MINISTRAL = {"rope_type": "yarn", "type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "beta_fast": 32.0,
              "beta_slow": 1.0, "original_max_position_embeddings": 16384, "max_position_embeddings": 262144,
              "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}  # fmt: skip

_DEEPSEEK = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
_MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
          "rope_theta": 10000000, "rope_type": "default"}  # fmt: skip
_ALPHA = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
          "type": "dynamic"}  # fmt: skip
_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def sizes(
    kind: str, vocab: int, hidden: int, layers: int, heads: int, kv: int, ffn: int, length: int, **overrides: Any
) -> dict[str, Any]:
    return {"model_type": kind, "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": ffn,
            "max_position_embeddings": length, **overrides}  # fmt: skip


_GRANITE_4 = {"model_type": "granitemoehybrid", "vocab_size": 100352, "num_hidden_layers": 40, "mamba_d_state": 128,
              "mamba_n_groups": 1, "mamba_d_head": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256,
              "mamba_conv_bias": True, "mamba_proj_bias": False, "position_embedding_type": "nope",
              "tie_word_embeddings": True, "embedding_multiplier": 12, "attention_bias": False,
              "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 10000, "rope_scaling": None,
              "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]}  # fmt: skip
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "EleutherAI/pythia-70m": (70_426_624, sizes("gpt_neox", 50304, 512, 6, 8, 8, 2048, 2048, rotary_pct=0.25)),
    "openai-community/gpt2": (124_439_808, {
        "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
        "n_ctx": 1024, "activation_function": "gelu_new"}),
    "meta-llama/Llama-2-7b-hf": (6_738_415_616, sizes(
        "llama", 32000, 4096, 32, 32, 32, 11008, 4096, rms_norm_eps=1e-5)),
    "meta-llama/Llama-3.1-8B": (8_030_261_248, sizes(
        "llama", 128256, 4096, 32, 32, 8, 14336, 131072, rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling=_LLAMA31)),
    "HuggingFaceTB/SmolLM2-135M": (134_515_008, sizes(
        "llama", 49152, 576, 30, 9, 3, 1536, 8192, rope_theta=100000, tie_word_embeddings=True)),
    "mistralai/Mistral-7B-v0.1": (7_241_732_096, sizes(
        "mistral", 32000, 4096, 32, 32, 8, 14336, 32768, sliding_window=4096)),
    "Qwen/Qwen2.5-0.5B": (494_032_768, sizes(
        "qwen2", 151936, 896, 24, 14, 2, 4864, 32768, rope_theta=1000000.0, tie_word_embeddings=True,
        use_sliding_window=False, sliding_window=32768, max_window_layers=24)),
    "Qwen/Qwen2.5-7B": (7_615_616_512, sizes(
        "qwen2", 152064, 3584, 28, 28, 4, 18944, 131072, rope_theta=1000000.0, use_sliding_window=False,
        sliding_window=131072, max_window_layers=28)),
    "Qwen/Qwen3-0.6B": (596_049_920, sizes(
        "qwen3", 151936, 1024, 28, 16, 8, 3072, 40960, head_dim=128, rope_theta=1000000, tie_word_embeddings=True)),
    "Qwen/Qwen3-8B": (8_190_735_360, sizes(
        "qwen3", 151936, 4096, 36, 32, 8, 12288, 40960, head_dim=128, rope_theta=1000000)),
    "google/gemma-2b": (2_506_172_416, sizes(
        "gemma", 256000, 2048, 18, 8, 1, 16384, 8192, head_dim=256, hidden_act="gelu",
        hidden_activation="gelu_pytorch_tanh", rope_theta=10000.0, rope_scaling=None)),
    "google/gemma-4-31B": (30_697_345_340, sizes(
        "gemma4_text", 262144, 5376, 60, 32, 16, 21504, 262144, head_dim=256, global_head_dim=512, rms_norm_eps=1e-6,
        num_global_key_value_heads=4, attention_k_eq_v=True, sliding_window=1024, final_logit_softcapping=30.0,
        hidden_size_per_layer_input=0, num_kv_shared_layers=0, enable_moe_block=False, use_double_wide_mlp=False,
        tie_word_embeddings=True, use_bidirectional_attention="vision", rope_parameters={
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}})),
    "arcee-ai/AFM-4.5B-Base": (4_619_184_640, sizes(
        "arcee", 128004, 2560, 36, 20, 4, 18432, 65536, head_dim=128, hidden_act="relu2", rms_norm_eps=1e-5,
        rope_theta=10000.0, rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
                                          "original_max_position_embeddings": 4096, "rope_type": "yarn"})),
    "facebook/cwm": (32_581_097_472, sizes(
        "cwm", 128256, 6144, 64, 48, 8, 21504, 131072, head_dim=128, rms_norm_eps=1e-5, sliding_window=8192,
        bos_token_id=128000)),
    "baidu/ERNIE-4.5-0.3B-PT": (360_748_032, sizes(
        "ernie4_5", 103424, 1024, 18, 16, 2, 3072, 131072, head_dim=128, rms_norm_eps=1e-5, rope_theta=500000.0,
        use_bias=False, tie_word_embeddings=True)),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": (1_279_391_488, sizes(
        "exaone4", 102400, 2048, 30, 32, 8, 4096, 65536, head_dim=64, rms_norm_eps=1e-5, rope_theta=1000000,
        rope_scaling={**_LLAMA31, "factor": 16.0}, tie_word_embeddings=True, sliding_window=None,
        sliding_window_pattern=None, layer_types=["full_attention"] * 30)),
    "LGAI-EXAONE/EXAONE-4.0-32B": (32_003_216_384, sizes(
        "exaone4", 102400, 5120, 64, 40, 8, 27392, 131072, head_dim=128, rms_norm_eps=1e-5, rope_theta=1000000,
        rope_scaling={**_LLAMA31, "factor": 16.0}, sliding_window=4096, sliding_window_pattern="LLLG",
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16)),
    "zai-org/glm-4-9b-hf": (9_399_951_360, sizes(
        "glm", 151552, 4096, 40, 32, 2, 13696, 8192, head_dim=128, partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7,
        rope_theta=10000.0, attention_bias=True)),
    "kyutai/helium-1-2b": (2_023_868_416, sizes(
        "helium", 64000, 2048, 28, 16, 8, 8192, 4096, head_dim=128, rms_norm_eps=1e-8, rope_theta=20000.0)),
    "stabilityai/stablelm-3b-4e1t": (2_795_443_200, sizes(
        "stablelm", 50304, 2560, 32, 32, 32, 6912, 4096, partial_rotary_factor=0.25, layer_norm_eps=1e-5,
        rope_theta=10000, use_qkv_bias=False)),
    "stabilityai/stablelm-2-1_6b": (1_644_515_328, sizes(
        "stablelm", 100352, 2048, 24, 32, 32, 5632, 4096, partial_rotary_factor=0.25, layer_norm_eps=1e-5,
        rope_theta=10000, use_qkv_bias=True)),
    "nvidia/Minitron-4B-Base": (4_190_509_056, sizes(
        "nemotron", 256000, 3072, 32, 24, 8, 9216, 4096, head_dim=128, hidden_act="relu2", norm_eps=1e-5,
        partial_rotary_factor=0.5, rope_theta=10000.0)),
    "allenai/OLMo-1B-hf": (1_176_764_416, sizes("olmo", 50304, 2048, 16, 16, 16, 8192, 2048, tie_word_embeddings=True)),
    "allenai/OLMo-1.7-7B-hf": (6_888_095_744, sizes("olmo", 50304, 4096, 32, 32, 32, 11008, 4096, clip_qkv=8.0)),
    "allenai/OLMo-2-1124-7B": (7_298_617_344, sizes("olmo2", 100352, 4096, 32, 32, 32, 11008, 4096, rms_norm_eps=1e-6)),
    "allenai/Olmo-3-1025-7B": (7_298_011_136, sizes(
        "olmo3", 100278, 4096, 32, 32, 32, 11008, 65536, rope_scaling=_YARN)),
    "google/gemma-2-2b": (2_614_341_888, sizes(
        "gemma2", 256000, 2304, 26, 8, 4, 9216, 8192, head_dim=256, query_pre_attn_scalar=256, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh")),
    "google/gemma-2-27b": (27_227_128_320, sizes(
        "gemma2", 256000, 4608, 46, 32, 16, 36864, 8192, head_dim=128, query_pre_attn_scalar=144, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, hidden_activation="gelu_pytorch_tanh")),
    "google/gemma-3-270m": (268_098_176, sizes(
        "gemma3_text", 262144, 640, 18, 4, 1, 2048, 32768, head_dim=256, sliding_window=512,
        rope_local_base_freq=10000, rope_theta=1000000, _sliding_window_pattern=6)),
    # of its text_config, with the class's defaults where it says nothing
    "google/gemma-3-4b-pt": (3_880_263_168, sizes(
        "gemma3_text", 262208, 2560, 34, 8, 4, 10240, 131072, head_dim=256, sliding_window=1024,
        rope_scaling={"factor": 8.0, "rope_type": "linear"})),
    "HuggingFaceTB/SmolLM3-3B": (3_075_098_624, sizes(
        "smollm3", 128256, 2048, 36, 16, 4, 11008, 65536, rope_theta=5000000.0, no_rope_layer_interval=4)),
    "microsoft/Phi-3-mini-4k-instruct": (3_821_079_552, sizes(
        "phi3", 32064, 3072, 32, 32, 32, 8192, 4096, sliding_window=2047, rope_theta=10000.0)),
    "microsoft/Phi-4": (14_659_507_200, sizes("phi3", 100352, 5120, 40, 40, 10, 17920, 16384, rope_theta=250000)),
    "microsoft/Phi-4-mini-instruct": (3_836_021_760, sizes(
        "phi3", 200064, 3072, 32, 24, 8, 8192, 131072, rope_theta=10000.0, partial_rotary_factor=0.75,
        tie_word_embeddings=True, sliding_window=262144, original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + i for i in range(48)]})),
    "mistralai/Ministral-3-3B-Base-2512": (3_429_006_336, sizes(
        "ministral3", 131072, 3072, 26, 32, 8, 9216, 262144, head_dim=128, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters=_MINISTRAL)),
    "ibm-granite/granite-3.1-2b-base": (2_533_531_648, sizes(
        "granite", 49155, 2048, 40, 32, 8, 8192, 131072, rms_norm_eps=1e-5, rope_theta=5000000.0,
        tie_word_embeddings=True, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22,
        attention_multiplier=0.015625)),
    "zai-org/GLM-4-9B-0414": (9_400_279_040, sizes(
        "glm4", 151552, 4096, 40, 32, 2, 13696, 32768, head_dim=128, partial_rotary_factor=0.5, rms_norm_eps=1e-5,
        attention_bias=True)),
    "CohereLabs/c4ai-command-r7b-12-2024": (8_028_033_024, sizes(
        "cohere2", 256000, 4096, 32, 32, 8, 14336, 132096, sliding_window=4096, sliding_window_pattern=4,
        rope_theta=50000, logit_scale=0.25, layer_norm_eps=1e-5)),
    "tiiuae/falcon-7b": (6_921_720_704, {
        "model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
        "num_attention_heads": 71, "num_kv_heads": 71, "alibi": False, "bias": False, "multi_query": True,
        "new_decoder_architecture": False, "parallel_attn": True, "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048}),
    "mistralai/Ministral-8B-Instruct-2410": (8_019_808_256, sizes(
        "ministral", 131072, 4096, 36, 32, 8, 12288, 32768, head_dim=128, rms_norm_eps=1e-5, rope_theta=100000000.0,
        sliding_window=32768, layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 9)),
    "bigcode/starcoder2-3b": (3_030_371_328, sizes(
        "starcoder2", 49152, 3072, 30, 24, 2, 12288, 16384, sliding_window=4096, rope_theta=999999.4420358813,
        norm_epsilon=1e-5, hidden_act="gelu_pytorch_tanh", use_bias=True)),
    "swiss-ai/Apertus-8B-2509": (8_053_338_176, sizes(
        "apertus", 131072, 4096, 32, 32, 8, 21504, 65536, rope_theta=12000000, rope_scaling=_LLAMA31)),
    "ByteDance-Seed/Seed-OSS-36B-Base": (36_151_104_512, sizes(
        "seed_oss", 155136, 5120, 64, 80, 8, 27648, 524288, head_dim=128, rope_theta=10000000.0, attention_bias=True,
        attention_out_bias=False)),
    "mistralai/Mixtral-8x7B-v0.1": (46_702_792_704, sizes(
        "mixtral", 32000, 4096, 32, 32, 8, 14336, 32768, rms_norm_eps=1e-5, rope_theta=1000000.0, num_local_experts=8,
        num_experts_per_tok=2, output_router_logits=False, router_aux_loss_coef=0.02, sliding_window=None)),
    "allenai/OLMoE-1B-7B-0924": (6_919_161_856, sizes(
        "olmoe", 50304, 2048, 16, 16, 16, 1024, 4096, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=False, output_router_logits=False, router_aux_loss_coef=0.01, clip_qkv=None)),
    "Qwen/Qwen1.5-MoE-A2.7B": (14_315_784_192, sizes(
        "qwen2_moe", 151936, 2048, 24, 16, 16, 5632, 8192, rope_theta=1000000.0, use_sliding_window=False,
        sliding_window=32768, max_window_layers=21, decoder_sparse_step=1, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4, norm_topk_prob=False)),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, sizes(
        "qwen3_moe", 151936, 2048, 48, 32, 4, 6144, 40960, head_dim=128, rope_theta=1000000.0,
        use_sliding_window=False, sliding_window=None, max_window_layers=48, decoder_sparse_step=1,
        moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, mlp_only_layers=[])),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (79_674_391_296, sizes(
        "qwen3_next", 151936, 2048, 48, 16, 2, 5120, 262144, head_dim=256, partial_rotary_factor=0.25,
        rope_theta=10000000, rms_norm_eps=1e-6, full_attention_interval=4, linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128,
        decoder_sparse_step=1, moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=512,
        num_experts_per_tok=10, norm_topk_prob=True, mlp_only_layers=[], output_router_logits=False,
        router_aux_loss_coef=0.001)),
    "LiquidAI/LFM2-1.2B": (1_170_340_608, {
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "block_ff_dim": 12288, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True, "max_position_embeddings": 128000,
        "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "rope_theta": 1000000.0}),
    "LiquidAI/LFM2-8B-A1B": (8_339_930_560, {
        "model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 7168, "moe_intermediate_size": 1792,
        "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2, "norm_topk_prob": True,
        "use_expert_bias": True, "routed_scaling_factor": 1.0, "max_position_embeddings": 128000, "norm_eps": 1e-5,
        "conv_bias": False, "conv_L_cache": 3, "rope_theta": 1000000.0, "layer_types": [
            "full_attention" if block in (2, 6, 10, 14, 18, 21) else "conv" for block in range(24)]}),
    "ibm-granite/granite-4.0-h-micro": (3_191_396_096, {
        **_GRANITE_4, "hidden_size": 2048, "intermediate_size": 8192, "shared_intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_n_heads": 64, "num_local_experts": 0,
        "num_experts_per_tok": 0, "attention_multiplier": 0.015625, "logits_scaling": 8,
        "residual_multiplier": 0.22}),
    "ibm-granite/granite-4.0-h-tiny": (6_939_037_248, {
        **_GRANITE_4, "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024,
        "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48, "num_local_experts": 64,
        "num_experts_per_tok": 6, "attention_multiplier": 0.0078125, "logits_scaling": 6,
        "residual_multiplier": 0.22}),
    # of their text_config
    "Qwen/Qwen3.5-4B": (4_205_751_296, sizes(
        "qwen3_5_text", 248320, 2560, 32, 16, 4, 9216, 262144, head_dim=256, rms_norm_eps=1e-6,
        full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_value_head_dim=128, tie_word_embeddings=True, rope_parameters=_MROPE)),
    "Qwen/Qwen3.5-35B-A3B": (34_660_610_688, {
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 262144, "head_dim": 256,
        "rms_norm_eps": 1e-6, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "rope_parameters": _MROPE}),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": (49_122_681_728, {
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72,
        "hidden_act": "silu", "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "moe_intermediate_size": 1024,
        "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
        "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True, "first_k_dense_replace": 1,
        "model_max_length": 1048576, "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [n for n in range(1, 27) if n % 4], "short_conv_kernel_size": 4}}),
    "openai/gpt-oss-20b": (20_914_757_184, sizes(
        "gpt_oss", 201088, 2880, 24, 64, 8, 2880, 131072, head_dim=64, rms_norm_eps=1e-5, rope_theta=150000,
        rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                      "rope_type": "yarn", "truncate": False},
        attention_bias=True, experts_per_token=4, initial_context_length=4096, num_experts_per_tok=4,
        num_local_experts=32, output_router_logits=False, router_aux_loss_coef=0.9, sliding_window=128,
        swiglu_limit=7.0, tie_word_embeddings=False, layer_types=["sliding_attention", "full_attention"] * 12)),
    "deepseek-ai/DeepSeek-V2-Lite": (15_706_484_224, sizes(
        "deepseek_v2", 102400, 2048, 27, 16, 16, 10944, 163840, **_MLA, q_lora_rank=None, moe_intermediate_size=1408,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, n_group=1,
        topk_group=1, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=1.0,
        rope_theta=10000, rope_scaling={**_DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0.707})),
    "deepseek-ai/DeepSeek-V3": (671_026_419_200, sizes(
        "deepseek_v3", 129280, 7168, 61, 128, 128, 18432, 163840, **_MLA, q_lora_rank=1536, moe_intermediate_size=2048,
        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, n_group=8,
        topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5,
        num_nextn_predict_layers=1, rope_theta=10000,
        rope_scaling={**_DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 1.0})),
    "MiniMaxAI/MiniMax-M2": (228_689_764_864, sizes(
        "minimax_m2", 200064, 3072, 62, 48, 8, 1536, 196608, head_dim=128, rms_norm_eps=1e-6, rope_theta=5000000,
        rotary_dim=64, num_local_experts=256, num_experts_per_tok=8, scoring_func="sigmoid", use_qk_norm=True,
        qk_norm_type="per_layer", use_routing_bias=True, shared_intermediate_size=0)),
    "upstage/Solar-Open-100B": (102_651_799_552, sizes(
        "solar_open", 196608, 4096, 48, 64, 8, 10240, 131072, head_dim=128, rms_norm_eps=1e-5, rope_theta=1000000,
        moe_intermediate_size=1280, n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8,
        routed_scaling_factor=1.0, partial_rotary_factor=1.0,
        rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536})),
    "allenai/FlexOlmo-7x7B-1T": (33_270_665_216, sizes(
        "flex_olmo", 100352, 4096, 32, 32, 32, 11008, 4096, rms_norm_eps=1e-6, rope_theta=500000, num_experts=7,
        num_experts_per_tok=5, norm_topk_prob=False)),
    "LGAI-EXAONE/K-EXAONE-236B-A23B": (236_571_156_352, sizes(
        "exaone_moe", 153600, 6144, 48, 64, 8, 18432, 262144, head_dim=128, rms_norm_eps=1e-5, rope_theta=1000000,
        sliding_window=128, sliding_window_pattern="LLLG", moe_intermediate_size=2048, num_experts=128,
        num_experts_per_tok=8, num_shared_experts=1, first_k_dense_replace=1, routed_scaling_factor=2.5,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 12)),
    "baidu/ERNIE-4.5-21B-A3B-PT": (21_825_437_888, sizes(
        "ernie4_5_moe", 103424, 2560, 28, 20, 4, 12288, 131072, rms_norm_eps=1e-5, rope_theta=500000,
        tie_word_embeddings=True, use_bias=False, moe_intermediate_size=1536, moe_num_experts=64, moe_k=6,
        moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1, moe_layer_interval=1)),
    "tencent/Hunyuan-7B-Instruct": (7_504_568_320, sizes(
        "hunyuan_v1_dense", 128167, 4096, 32, 32, 8, 14336, 32768, head_dim=128, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=True, use_qk_norm=True, rope_scaling=_ALPHA)),
    "tencent/Hunyuan-A13B-Instruct": (80_393_183_232, sizes(
        "hunyuan_v1_moe", 128167, 4096, 32, 32, 8, 3072, 32768, head_dim=128, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=True, use_qk_norm=True, rope_scaling=_ALPHA, num_experts=64, moe_topk=[8] * 32)),
    "ibm-granite/granite-3.1-1b-a400m-base": (1_334_628_352, sizes(
        "granitemoe", 49155, 1024, 24, 16, 8, 512, 131072, rms_norm_eps=1e-6, rope_theta=1500000,
        tie_word_embeddings=True, embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22,
        attention_multiplier=0.015625, num_local_experts=32, num_experts_per_tok=8)),
    "openbmb/MiniCPM3-4B": (4_073_875_968, sizes(
        "minicpm3", 73448, 2560, 62, 40, 40, 6400, 32768, q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64,
        qk_rope_head_dim=32, rms_norm_eps=1e-5, scale_emb=12, scale_depth=1.4, dim_model_base=256,
        tie_word_embeddings=True)),
    "state-spaces/mamba-130m-hf": (129_135_360, {
        "model_type": "mamba", "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16,
        "d_inner": 1536, "d_model": 768, "intermediate_size": 1536, "n_layer": 24, "time_step_rank": 48,
        "fused_add_norm": True, "rms_norm": True, "ssm_cfg": {}, "pad_vocab_size_multiple": 8, "use_bias": False,
        "time_step_scale": 1.0, "residual_in_fp32": True}),
    "tiiuae/falcon-mamba-7b": (7_272_665_088, {
        "model_type": "falcon_mamba", "vocab_size": 65024, "hidden_size": 4096, "num_hidden_layers": 64,
        "intermediate_size": 8192, "expand": 16, "state_size": 16, "time_step_rank": 256,
        "tie_word_embeddings": False}),
    "state-spaces/mamba2-2.7b": (2_702_599_680, {  # as transformers' script converts it
        "model_type": "mamba2", "vocab_size": 50288, "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80,
        "n_groups": 1, "tie_word_embeddings": True}),
    "nvidia/Nemotron-H-8B-Base-8K": (8_100_852_736, {
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_hidden_layers": 52,
        "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128, "mamba_num_heads": 128,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "max_position_embeddings": 8192}),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31_577_940_288, {
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "chunk_size": 128, "n_routed_experts": 128,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "n_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "max_position_embeddings": 262144, "rope_theta": 10000, "partial_rotary_factor": 1.0, "moe_latent_size": None}),
}  # fmt: skip
