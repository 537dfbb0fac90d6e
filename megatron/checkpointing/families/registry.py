"""Lists the supported HuggingFace families, and finds the family of a config.json or the nearest one."""

import re
from collections.abc import Mapping
from typing import Any

from megatron.checkpointing.errors import CheckpointError, shortened
from megatron.checkpointing.families.apertus import APERTUS
from megatron.checkpointing.families.arcee import ARCEE
from megatron.checkpointing.families.cohere import COHERE2
from megatron.checkpointing.families.cwm import CWM
from megatron.checkpointing.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DOTS1, YOUTU
from megatron.checkpointing.families.ernie import ERNIE4_5, ERNIE4_5_MOE
from megatron.checkpointing.families.exaone import EXAONE4, EXAONE_MOE
from megatron.checkpointing.families.falcon import FALCON
from megatron.checkpointing.families.family import Config, Family
from megatron.checkpointing.families.gemma import GEMMA, GEMMA2, GEMMA3
from megatron.checkpointing.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from megatron.checkpointing.families.glm import GLM, GLM4
from megatron.checkpointing.families.glm_moe import GLM4_MOE, GLM4_MOE_LITE
from megatron.checkpointing.families.gpt2 import GPT2
from megatron.checkpointing.families.gpt_neox import GPT_NEOX
from megatron.checkpointing.families.gpt_oss import GPT_OSS
from megatron.checkpointing.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE, GRANITE_MOE_SHARED
from megatron.checkpointing.families.helium import HELIUM
from megatron.checkpointing.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from megatron.checkpointing.families.kimi_linear import KIMI_LINEAR
from megatron.checkpointing.families.lfm2 import LFM2, LFM2_MOE
from megatron.checkpointing.families.llama import LLAMA, SMOLLM3
from megatron.checkpointing.families.mamba import FALCON_MAMBA, MAMBA, MAMBA2
from megatron.checkpointing.families.minicpm import MINICPM3
from megatron.checkpointing.families.minimax import MINIMAX_M2
from megatron.checkpointing.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MIXTRAL
from megatron.checkpointing.families.nemotron import NEMOTRON
from megatron.checkpointing.families.nemotron_h import NEMOTRON_H
from megatron.checkpointing.families.olmo import FLEX_OLMO, OLMO1, OLMO2, OLMO3, OLMOE
from megatron.checkpointing.families.phi import PHI3
from megatron.checkpointing.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from megatron.checkpointing.families.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from megatron.checkpointing.families.seed_oss import SEED_OSS
from megatron.checkpointing.families.solar import SOLAR_OPEN
from megatron.checkpointing.families.stablelm import STABLELM
from megatron.checkpointing.families.starcoder import STARCODER2
from megatron.neox_arguments import ConfigError, NeoXArgs

# An export tries families in this order: simple ones first.
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        GPT_NEOX, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, OLMO1, OLMO2, OLMO3, GEMMA2, GEMMA3, PHI3, MINISTRAL3,
        GRANITE, GLM4, COHERE2, STARCODER2, APERTUS, SEED_OSS, GEMMA, ARCEE, CWM, ERNIE4_5, EXAONE4, GLM, HELIUM,
        STABLELM, NEMOTRON, HUNYUAN, FALCON, MINISTRAL, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE,
        QWEN3_NEXT, QWEN3_5_MOE, QWEN3_5, KIMI_LINEAR, LFM2, LFM2_MOE, GPT_OSS, DOTS1, GLM4_MOE, YOUTU, MINICPM3,
        DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE_LITE, MINIMAX_M2, SOLAR_OPEN, FLEX_OLMO, EXAONE_MOE, ERNIE4_5_MOE,
        HUNYUAN_MOE, GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_HYBRID, GEMMA4, GEMMA4_UNIFIED,
        MAMBA, FALCON_MAMBA, MAMBA2, NEMOTRON_H,
    )
}  # fmt: skip

# Fields of config.json that do not change what a trained model computes.
_NEUTRAL = {
    "model_type", "architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "vocab_size", "initializer_range", "pretraining_tp",
    "_name_or_path", "id2label", "label2id", "num_labels", "problem_type",
    "quantization_config", "return_dict", "output_attentions", "output_hidden_states", "tokenizer_class",
    "_attn_implementation", "tie_word_embeddings", "is_decoder", "finetuning_task", "chunk_size_feed_forward",
}  # fmt: skip
_NEUTRAL_PARTS = ("token_id", "dropout", "pdrop", "_init_", "initializer")
# All families with rotary positions read these fields, and may write other ones.
_ROTARY = {"rope_theta", "rope_scaling", "rope_parameters"}
_ACTIVATIONS = {"hidden_act", "hidden_activation", "activation_function"}  # fields whose values have synonyms
# Unsupported model types whose config.json does not show the difference -> (nearest family, difference).
_UNSUPPORTED = {
    "gptj": ("gpt_neox", "one norm for attention and MLP, interleaved rotary positions, no biases in attention"),
    "gpt_neo": ("gpt2", "sliding windows in every second layer, unscaled attention logits"),
    "gpt_bigcode": ("gpt2", "one key-value head for all queries (multi_query)"),
    "opt": ("gpt2", "an offset of learned positions, relu, a padding row of the tokenizer"),
    "bloom": ("gpt_neox", "ALiBi positions, a norm after the embedding"),
    "mpt": ("gpt2", "ALiBi positions, no biases"),
    "phi": ("gpt_neox", "one norm for attention and MLP, a bias in the output layer"),
    "gemma3n_text": ("gemma3_text", "embeddings in each layer, several residual streams, shared keys and values"),
    "cohere": ("cohere2", "no windows, rotary positions in all layers, in some sizes norms of queries and keys"),
    "internlm3": ("llama", "remote code with other names for biases (qkv_bias, bias); otherwise like LLaMA"),
    "iquestcoder": ("llama", "remote code; otherwise like LLaMA: set model_type: llama in config.json"),
    "vaultgemma": ("gemma2", "no norms after attention and MLP"),
    "bert-generation": ("gpt_neox", "norms after attention and MLP, learned positions, BERT's token types"),
    "llama4_text": (
        "mixtral",
        "one expert per token with scaled input, a shared expert, layers without positions, chunked attention",
    ),
    "deepseek_v32": ("deepseek_v3", "an indexer that chooses few tokens for each query (sparse attention)"),
    "deepseek_v4": ("deepseek_v3", "compressed sparse attention, several residual streams, hashed experts"),
    "kimi_k2": ("deepseek_v3", "remote code; otherwise like DeepSeek V3: set model_type: deepseek_v3 in config.json"),
    "glm_moe_dsa": ("deepseek_v3", "an indexer that chooses few tokens for each query (sparse attention)"),
    "qwen3_vl_moe_text": ("qwen3_moe", "the matrices of experts stand transposed in its files"),
    "mellum": ("qwen3_moe", "windows with another rotary base in some layers"),
    "nanochat": ("qwen3", "norms without weights, another one after the embedding, an ungated relu2 MLP"),
    "jais2": ("arcee", "LayerNorm in place of RMSNorm"),
    "olmo_hybrid": ("qwen3_next", "norms in other places, a rate of the delta rule up to 2, a dense MLP"),
    "phimoe": ("mixtral", "LayerNorm, biases, experts chosen by sparse mixer"),
    "bamba": ("nemotron_h", "a gated MLP in every block, partly rotated heads"),
    "jamba": ("nemotron_h", "norms of B, C and time steps with weights, an MLP or experts in every block"),
    "falcon_h1": ("nemotron_h", "attention in parallel with Mamba 2 in every block, gated MLPs, many factors"),
    "zamba2": ("nemotron_h", "attention blocks that share their weights and have adapters"),
}  # fmt: skip
_MAX_NAMED, _LONGEST = 6, 40


def family_of(config: Config) -> str:
    """Returns the `model_type` of a config.json, a key of FAMILIES.

    Raises CheckpointError for an unsupported model; it names the nearest family and the differences."""
    model_type, inner = config.get("model_type"), config.get("text_config")
    if model_type in FAMILIES:
        return str(model_type)
    source = "config.json: text_config" if isinstance(inner, Mapping) else "config.json"
    fields = inner if isinstance(inner, Mapping) else config
    if not any(fields.get(name) for name in ("hidden_size", "n_embd", "d_model")):
        supported = ", ".join(FAMILIES)
        raise CheckpointError(f"config.json: model_type: {model_type} is not supported; supported are {supported}")
    nearest, differences = nearest_family(fields)
    difference = f"it differs in {shortened(differences, _MAX_NAMED)}"
    if not differences and isinstance(inner, Mapping):
        difference = (
            f"its language model may be supported, but not the multimodal model around it: {_other_parts(config)}"
        )
    elif not differences:
        difference = (
            "no field differs, so the model's code must: compare its tensor names and its modeling_*.py with those of "
            f"{nearest.model_type}; if they are the same, set model_type: {nearest.model_type}"
        )
    raise CheckpointError(
        f"config.json: model_type: {model_type} is not supported; the family nearest to {source} is "
        f"{nearest.model_type} ({nearest.title}): {difference}"
    )


def _other_parts(config: Config) -> str:
    """Returns the end of an error that names a multimodal model's parts other than the language model."""
    parts = sorted(name for name in config if name.endswith("_config") and name != "text_config")
    return f"{', '.join(parts) or 'no other part'}; pass a folder of the language model alone"


def nearest_family(config: Config) -> tuple[Family, list[str]]:
    """Returns (the supported family nearest to an unsupported config.json, the differences in words).

    The differences are fields or values that the family does not support, or the text in `_UNSUPPORTED`."""
    model_type = str(config.get("model_type"))
    if model_type in _UNSUPPORTED:
        nearest, differs = _UNSUPPORTED[model_type]
        return FAMILIES[nearest], [differs]
    candidates = [(family, _unsupported_fields(family, config)) for family in FAMILIES.values()]
    return min(candidates, key=lambda pair: len(pair[1]) - _similarity(pair[0].model_type, model_type))


def _similarity(family: str, model_type: str) -> float:
    """Returns how similar two model types are by name, from 0 to 2.5.

    The number is subtracted from the number of differing fields."""
    begins = model_type.startswith(family.removesuffix("_text"))
    return 1.5 * (_stem(family) == _stem(model_type)) + begins


def _stem(model_type: str) -> str:
    return re.sub(r"[\d_].*", "", model_type)


def _unsupported_fields(family: Family, config: Config) -> list[str]:
    fields = {name: value for name, value in config.items() if not _is_neutral(name) and not _is_off(value)}
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
        fields.pop("num_key_value_heads", None)
    supported, problems = dict(family.to_config(small_model(family))), dict[str, str]()
    try:
        args = NeoXArgs.from_dict({**family.to_keys(config), "padded_vocab_size": 128}, "config.json")
        written = family.to_config(args)
        supported |= written
        for name, value in fields.items():
            if name in written and name not in _ROTARY | _ACTIVATIONS and written[name] != value:
                problems[name] = _field(name, value)
    except (CheckpointError, ConfigError) as problem:
        text = str(problem).splitlines()[0].removeprefix("config.json: ")
        problems[text.partition(":")[0]] = text
    names = {*supported, *_ROTARY, "layer_types"}
    unknown = [_field(name, value) for name, value in fields.items() if name not in names | problems.keys()]
    required = {"hidden_size", "n_embd", "num_hidden_layers", "n_layer"} & supported.keys()
    lacking = [f"no {name}" for name in sorted(required) if name not in config]
    return [*problems.values(), *unknown, *lacking]


def _field(name: str, value: Any) -> str:
    text = str(value)
    return f"{name}: {text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'}"


def small_model(family: Family) -> NeoXArgs:
    """Returns the configuration of a model with the family's defaults and a vocabulary of 128."""
    return NeoXArgs.from_dict({**family.to_keys({"vocab_size": 128, **family.typical}), "padded_vocab_size": 128})


def _is_neutral(name: str) -> bool:
    return name in _NEUTRAL or any(part in name for part in _NEUTRAL_PARTS)


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ([], {}, "")
