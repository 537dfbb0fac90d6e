"""Configurations and tensors of HuggingFace's families, both ways: names, bits, sizes and refusals."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.families.canonical_config import canonical_config
from megatron.checkpointing.families.convert import (
    check_hf_tensors,
    from_hf,
    hf_config,
    hf_shapes,
    to_hf,
    unchanged_family,
)
from megatron.checkpointing.families.registry import FAMILIES, family_of
from megatron.model import build_stage, freeze, layer_params
from megatron.model.init import stage_parameters
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.checkpointing.family_models import CASES, PADDED, VOCAB, collected, config_of, on_disk, random_model
from tests.checkpointing.golden import fails
from tests.model.stages import random_weights, small

# Cases that a simpler family computes too, which is then the one that is written.
SIMPLER = dict.fromkeys(("mistral full", "phi 3 short", "seed oss biases"), "llama")
SIMPLER |= {"phi 3": "mistral", "seed oss": "qwen2", "qwen 3.5 moe": "qwen3_next", "helium": "glm"}
SIMPLER |= dict.fromkeys(("cwm", "cwm plain"), "smollm3")


def refuse_read(name: str) -> Tensor:
    raise AssertionError(f"{name} was read")


def args_of(config: dict[str, Any], **overrides: Any) -> NeoXArgs:
    return NeoXArgs.from_dict({**from_hf(config, refuse_read)[0], **overrides})


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_changes_no_bit(case: str) -> None:
    dtype = (torch.float32, torch.bfloat16)[[*CASES].index(case) % 2]
    config, hf_tensors = on_disk(random_model(case, dtype))
    keys, tensors = from_hf(config, hf_tensors.__getitem__, padded_vocab_size=PADDED)
    weights = collected(tensors)
    args = NeoXArgs.from_dict(keys)
    expected_names = {n: {s.name for s in specs} for n, specs in layer_params(args).items() if specs}
    assert expected_names == {n: {*t} for n, t in weights.items()}
    back = dict(to_hf(args, weights.items(), family=config["model_type"], vocab_size=VOCAB))
    assert back.keys() == hf_tensors.keys()
    for name, tensor in hf_tensors.items():
        assert back[name].dtype == dtype and torch.equal(back[name], tensor), name
        assert back[name].is_contiguous() and back[name].untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("case", CASES)
def test_configuration_there_and_back(case: str) -> None:
    config = config_of(case).to_dict()
    args = args_of(config)
    written = hf_config(args)
    assert written["model_type"] == SIMPLER.get(case, config["model_type"])
    assert canonical_config(args_of(written)) == canonical_config(args)
    hf_fields = transformers.AutoConfig.for_model(**hf_config(args, family=config["model_type"])).to_dict()
    assert canonical_config(args_of(hf_fields)) == canonical_config(args)
    for name in ("rope_parameters", "layer_types", "sliding_window", "no_rope_layers", "num_key_value_heads"):
        for rope in (hf_fields[name], config[name]) if name == "rope_parameters" and name in hf_fields else ():
            rope.pop("type", None)  # transformers' older name for rope_type, which it keeps beside it
        assert hf_fields.get(name) == config.get(name), name


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in CASES.values()}))
def test_what_config_json_leaves_out_is_the_default_of_transformers(kind: str) -> None:
    full_config = getattr(transformers, kind)().to_dict()
    minimal_config = {"model_type": full_config["model_type"], "vocab_size": full_config["vocab_size"]}
    assert canonical_config(args_of(minimal_config)) == canonical_config(args_of(full_config))


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
_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def sizes(
    kind: str, vocab: int, hidden: int, layers: int, heads: int, kv: int, ffn: int, length: int, **overrides: Any
) -> dict[str, Any]:
    return {"model_type": kind, "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": ffn,
            "max_position_embeddings": length, **overrides}  # fmt: skip


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_on_the_meta_device(name: str) -> None:
    parameters, config = PUBLISHED[name]
    args = args_of(config)
    stage = build_stage(args, ParallelGroups.single(torch.device("meta")))
    assert sum(param.numel() for param in stage.parameters()) == parameters
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    # Those of experts are parameters here.
    biases = [buffer for buffer_name, buffer in model.named_buffers() if "e_score_correction_bias" in buffer_name]
    assert sum(tensor.numel() for tensor in (*model.parameters(), *biases)) == parameters
    # transformers 5 writes it otherwise
    assert canonical_config(args_of(model.config.to_dict())) == canonical_config(args)
    kind = config["model_type"]
    written = sum(torch.Size(shape).numel() for shape in hf_shapes(args, family=kind).values())
    assert written == parameters + args.num_layers * len(FAMILIES[kind].constants)
    assert unchanged_family(args, config) == kind


def test_two_last_layers_and_the_tied_head_of_smollm3() -> None:
    args = args_of(PUBLISHED["HuggingFaceTB/SmolLM3-3B"][1]).replace(trainable={"last_layers": 2, "head": True})
    stage = build_stage(args, ParallelGroups.single(torch.device("meta")))
    freeze(stage_parameters(stage), args)
    trained = sum(param.numel() for param in stage.parameters() if param.requires_grad)
    total = sum(param.numel() for param in stage.parameters())
    assert (trained, total, f"{trained / total:.2%}") == (418_914_304, 3_075_098_624, "13.62%")


def test_tensors_are_read_one_by_one() -> None:
    config, hf_tensors = on_disk(random_model("llama 3"))
    requested: list[str] = []

    def get(name: str) -> Tensor:
        requested.append(name)
        return hf_tensors[name]

    _, tensors = from_hf(config, get)
    assert requested == []
    assert next(tensors)[:2] == (0, "word_embeddings.weight") and len(requested) == 1
    names = [(layer, name) for layer, name, _ in tensors]
    assert names[-2:] == [(7, "norm.scale"), (8, "final_linear.weight")] and len(requested) == len(hf_tensors)
    args = NeoXArgs.from_dict(from_hf(config, refuse_read)[0])
    layers_read: list[int] = []

    def layers() -> Any:
        for layer, weights in random_weights(args).items():
            layers_read.append(layer)
            yield layer, weights

    written = to_hf(args, layers())
    assert next(written)[0] == "model.embed_tokens.weight" and layers_read == [0]


def test_added_rows_are_the_mean_of_the_others() -> None:
    config, hf_tensors = on_disk(random_model("mistral"))
    _, tensors = from_hf(config, hf_tensors.__getitem__, padded_vocab_size=PADDED)
    head = collected(tensors)[8]["final_linear.weight"]
    mean = hf_tensors["lm_head.weight"].mean(0)
    assert head.shape[0] == PADDED and torch.equal(head[:VOCAB], hf_tensors["lm_head.weight"])
    torch.testing.assert_close(head[VOCAB:], mean.expand(PADDED - VOCAB, -1))


def broken(case: str, change: Any) -> str:
    """Returns the message of `check_hf_tensors` for a damaged folder."""
    config, hf_tensors = on_disk(random_model(case))
    shapes = {name: tuple(tensor.shape) for name, tensor in hf_tensors.items()}
    check = partial(check_hf_tensors, config, from_hf(config, refuse_read)[0], shapes, "folder")
    check()
    change(shapes)
    return fails(".", check)


def test_missing_and_extra_tensors_are_told_by_kind() -> None:
    def change(shapes: dict[str, Any]) -> None:
        for i in (1, 3):
            del shapes[f"model.layers.{i}.mlp.up_proj.weight"]
        shapes["model.layers.0.self_attn.sinks"] = (8,)
        shapes["model.norm.weight"] = (31,)
        shapes["model.rotary_emb.inv_freq"] = (2,)  # a buffer

    missing, extra, reshaped = broken("llama 3", change).splitlines()[1:]
    assert re.search(r"missing model.layers.N.mlp.up_proj.weight .* 1, 3\)", missing)
    assert re.search(r"extra model.layers.N.self_attn.sinks .* 0\)", extra)
    assert re.search(r"model.norm.weight: .*\(31,\).*\(32,\)", reshaped)


def test_a_head_that_is_not_there_is_tied_and_other_tensors_are_skipped() -> None:
    """Buffers of old Pythia files, and the head of a tied model, as transformers skips them."""
    assert "tie_word_embeddings" in broken("qwen 3 windows", lambda shapes: shapes.pop("lm_head.weight"))
    buffers = {f"gpt_neox.layers.0.attention.{name}": (1,) for name in ("bias", "masked_bias", "rotary_emb.inv_freq")}
    for case, extra_shapes in (("gpt_neox", buffers), ("qwen 3", {"lm_head.weight": (VOCAB, 32)})):
        config, hf_tensors = on_disk(random_model(case))
        shapes = {name: tuple(tensor.shape) for name, tensor in hf_tensors.items()} | extra_shapes
        check_hf_tensors(config, from_hf(config, refuse_read)[0], shapes, "folder")


def test_what_cannot_be_read_is_refused() -> None:
    def refused(message: str, case: str, **changes: Any) -> None:
        with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)):
            from_hf({**config_of(case).to_dict(), **changes}, refuse_read)

    assert family_of({"model_type": "olmo3"}) == "olmo3" and set(FAMILIES) > {"llama", "gemma3_text"}
    refused("hidden_act: xielu", "llama 2", hidden_act="xielu")
    refused("layer_types: chunked_attention", "olmo 3", layer_types=["chunked_attention"] * 4)
    refused("config.json: rope_scaling.rope_type", "llama 2", rope_parameters={"rope_type": "other", "factor": 2.0})
    refused("long_factor is missing", "phi 3 long", rope_parameters={"rope_type": "longrope", "short_factor": [1.0]})
    refused("partial_rotary_factor: 0.5", "llama 2", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    windows = {"sliding_window": None, "layer_types": ["sliding_attention"] * 4}
    refused("sliding_window must not be null", "cwm", **windows)
    refused("sliding_window_pattern: LLLG", "exaone 4", sliding_window_pattern="LLLG", layer_types=None)
    refused("qk_layernorm: True", "stablelm", qk_layernorm=True)
    refused("head_dim: 5", "helium", head_dim=5)
    refused("use_bidirectional_attention: True", "gemma 1", use_bidirectional_attention=True)
    refused("vocab_size is missing", "llama 2", vocab_size=None)
    fails("padded_vocab_size 64.* 90", from_hf, config_of("llama 2").to_dict(), refuse_read, padded_vocab_size=64)


def test_what_no_family_computes_is_refused() -> None:
    _, summary, *nearest = fails(".", hf_config, small(pos_emb="alibi")).splitlines()
    assert "alibi" in summary and "pos_emb" in summary
    assert re.search("gpt_neox: .*rotary .*alibi", nearest[0]) and re.search("gpt2: .*learned .*alibi", nearest[1])
    fails(r"\(num_kv_heads\): 4 .* 2 ", hf_config, small(num_kv_heads=2), family="gpt_neox")
    fails("gpt3: .* gpt_neox, gpt2, llama", hf_config, small(), family="gpt3")
    with pytest.raises(CheckpointError, match="llama: .*layer_types"):
        hf_config(args_of(config_of("mistral").to_dict()), family="llama")
    fails("vocab_size 65: .* 64 ", hf_config, small(), vocab_size=65)
    args = small()
    weights = random_weights(args)
    del weights[2]["mlp.linear1.bias"]
    weights[2]["mlp.linear2.bias"] = torch.zeros(31)
    with pytest.raises(CheckpointError, match=r"layer 2: .*mlp.linear1.bias .*\(128,\), .* \(31,\)"):
        list(to_hf(args, weights.items()))


def test_models_of_other_families_are_told_the_nearest() -> None:
    def nearest_family(name: str) -> str:
        message = fails(".", family_of, getattr(transformers, name)().to_dict())
        assert "\n" not in message
        return message.partition("nearest to ")[2]

    assert re.match("config.json is gpt_neox .*one norm for attention", nearest_family("GPTJConfig"))
    assert re.match("config.json is mixtral .*one expert per token", nearest_family("Llama4TextConfig"))
    for name, nearest in (("DeepseekV32Config", "deepseek_v3"), ("DeepseekV4Config", "deepseek_v3"),
                          ("Ernie4_5_MoeConfig", "qwen2_moe"),
                          ("PhimoeConfig", "mixtral"),
                          ("GraniteMoeConfig", "mixtral"), ("FlexOlmoConfig", "olmoe")):  # fmt: skip
        assert nearest_family(name).startswith(f"config.json is {nearest} ("), name
    assert nearest_family("JetMoeConfig").startswith("config.json is ")
    for name, differs in (("VaultGemmaConfig", "norms"), ("HunYuanDenseV1Config", "norms"),
                          ("Emu3Config", "vq_config"), ("InternLM3Config", "biases")):  # fmt: skip
        assert differs in nearest_family(name).partition("): ")[2], name
    unknown = {**config_of("llama 2").to_dict(), "model_type": "mine"}
    fails("no field differs.*model_type: llama", family_of, unknown)
    assert nearest_family("Qwen2VLConfig").startswith("config.json: text_config is qwen2 ")
    fails("model_type: resnet .*gpt_neox, gpt2, llama", family_of, {"model_type": "resnet"})


def test_fields_are_read_as_transformers_reads_them() -> None:
    def keys_of(case: str, **changes: Any) -> dict[str, Any]:
        return from_hf({**config_of(case).to_dict(), **changes}, refuse_read)[0]

    assert keys_of("qwen 2", num_key_value_heads=None)["num_kv_heads"] == 8
    assert "head_dim" not in keys_of("seed oss", head_dim=None)
    assert keys_of("llama 2", rope_parameters={"rope_theta": None, "rope_type": "default"})["rotary_emb_base"] == 10000
    stretched = keys_of("phi 3 long", original_max_position_embeddings=16)["rope_scaling"]
    assert stretched["original_max_position_embeddings"] == 16  # the outer one wins
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    fails("llama_4_scaling_beta", keys_of, "ministral 3", rope_parameters=rope)
    fails("llama_4_scaling_beta", keys_of, "mistral", rope_parameters={"rope_type": "yarn", "factor": 2.0, **rope})
    mrope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "mrope_section": [1, 0, 0],
             "mrope_interleaved": True}  # fmt: skip
    assert keys_of("qwen 3.5", rope_parameters=mrope)["rope_scaling"].keys() == {
        "rope_type", "factor", "original_max_position_embeddings"
    }  # fmt: skip
    config = {**config_of("apertus").to_dict(), "rope_parameters": None, "rope_theta": 5000.0}
    hf_rope = transformers.AutoConfig.for_model(**config).rope_parameters
    assert from_hf(config, refuse_read)[0]["rotary_emb_base"] == hf_rope["rope_theta"] == 12000000.0
