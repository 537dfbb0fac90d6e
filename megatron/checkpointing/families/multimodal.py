"""Converts config.json and tensor names of multimodal models to those of their language model, and back.

All other tensors of the folder (vision tower, projector) are copied unchanged.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.family import Config, gives_score
from megatron.checkpointing.families.registry import FAMILIES

_LLAVA = {"llama": 32000, "mistral": 32000, "qwen2": 151936}
# Multimodal model_type -> model_type of its language model (the first by default) -> default vocab_size.
TEXT_TOWERS: Mapping[str, Mapping[str, int]] = {
    "gemma3": {"gemma3_text": 262208}, "gemma4": {"gemma4_text": 262144},
    "gemma4_unified": {"gemma4_unified_text": 262144}, "mistral3": {"mistral": 32000, "ministral3": 131072},
    "qwen3_5": {"qwen3_5_text": 248320}, "qwen3_5_moe": {"qwen3_5_moe_text": 248320},
    "qwen3_vl": {"qwen3_vl_text": 151936},
    "qwen2_vl": {"qwen2_vl_text": 152064}, "qwen2_5_vl": {"qwen2_5_vl_text": 152064},
    "llava": _LLAVA, "llava_next": _LLAVA, "llava_onevision": {"qwen2": 151936},
}  # fmt: skip
# Language models that are of a family with another model_type -> (family, their defaults).
_QWEN2_VL = {
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
}  # fmt: skip
_ALIASES: Mapping[str, tuple[str, Config]] = {
    "qwen2_vl_text": ("qwen2", _QWEN2_VL), "qwen2_5_vl_text": ("qwen2", _QWEN2_VL),
    "qwen3_vl_text": ("qwen3", {
        "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 500000.0,
    }),
}  # fmt: skip
# (prefix in the multimodal model, prefix in the language model alone) of the language model's tensors.
# Published files, and those that transformers writes, have other prefixes than modules in memory. peft uses
# the names in memory, which before transformers 4.52 were equal to the published ones.
_PUBLISHED = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."))
_IN_MEMORY = (("model.language_model.", "model."), ("lm_head.", "lm_head."), ("score.", "score."))
_UNPREFIXED = tuple((name, name) for name in ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head."))
_ROPE = ("rope_parameters", "rope_scaling")
# Fields of the language model that may be outside text_config.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")


def is_multimodal(config: Config) -> bool:
    """Whether a config.json describes a supported multimodal model (images and text)."""
    return str(config.get("model_type")) in TEXT_TOWERS


def families_inside(model_type: str) -> set[str]:
    """Returns the families of the language models that a multimodal model may have."""
    return {_ALIASES[name][0] if name in _ALIASES else name for name in TEXT_TOWERS[model_type]}


def text_config(config: Config) -> dict[str, Any]:
    """Returns the config.json of a multimodal model's language model; for any other model, `config` itself.

    Raises CheckpointError if this multimodal model is not supported with its language model's family."""
    model_type = str(config.get("model_type"))
    if not is_multimodal(config):
        return dict(config)
    towers = TEXT_TOWERS[model_type]
    text = _inner_fields(config)
    family = text.get("model_type") or next(iter(towers))
    if family not in towers:
        raise CheckpointError(
            f"config.json: text_config.model_type: {family} is not supported in {model_type}, only {', '.join(towers)}"
        )
    if gives_score(config):
        raise CheckpointError(f"config.json: a multimodal reward model ({model_type}) is not supported")
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    # As in transformers, fields outside text_config take precedence.
    alias, defaults = _ALIASES.get(family, (family, {}))
    if defaults is _QWEN2_VL:
        text = {name: _without_mrope(value) if name in _ROPE else value for name, value in text.items()}
    fields = {**defaults, "vocab_size": towers[family], **text, **shared}
    if config.get("tie_word_embeddings"):
        fields["tie_word_embeddings"] = True
    family = alias
    return {**fields, "model_type": family, "architectures": [FAMILIES[family].architecture]}


def _without_mrope(rope: Any) -> Any:
    """Returns rotary parameters with the type that transformers puts in place of `mrope`."""
    if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "mrope":
        return {**rope, "rope_type": "default"}
    return rope


def _is_flat(config: Config) -> bool:
    """Whether the fields of the language model stand outside `text_config`, as in Qwen 2 and 2.5 VL."""
    return "text_config" not in config and str(config.get("model_type")) in ("qwen2_vl", "qwen2_5_vl")


def _inner_fields(config: Config) -> dict[str, Any]:
    if _is_flat(config):
        return {name: value for name, value in config.items() if name not in ("model_type", "vision_config")}
    return dict(config.get("text_config") or {})


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """Returns {name in the language model alone: name stored in the multimodal folder} of its tensors.

    stored: all tensor names of the folder; those outside the language model are left out."""
    return {text_tensor: name for name in stored if (text_tensor := text_name(name)) is not None}


def text_name(name: str) -> str | None:
    """Converts a tensor or module name of a multimodal model to the name in the language model alone.

    name: as in files or in memory. Returns None for a part outside the language model."""
    for begins, text_prefix in (*_PUBLISHED, *_IN_MEMORY, *_UNPREFIXED):
        if name.startswith(begins):
            return text_prefix + name.removeprefix(begins)
    return None


def names_a_wrapper(name: str) -> bool:
    """Whether a tensor or module name has the prefix that a multimodal model gives its language model."""
    inner_name = text_name(name)
    return inner_name is not None and inner_name != name


def memory_name(name: str) -> str:
    """Converts a language model's tensor or module name to its name in a multimodal model in memory."""
    return _wrapped(name, _IN_MEMORY)


def text_modules(names: Iterable[str]) -> str:
    """Returns a regular expression for the language model's modules whose names end in one of `names`.

    It matches names as in files and in memory, but not modules of the vision tower with the same ending."""
    return rf"(.*\.)?language_model\..*\.({'|'.join(map(re.escape, names))})"


def stored_name(name: str, carried: Iterable[str]) -> str:
    """Converts a language model's tensor name to its name in a multimodal folder.

    carried: names of the folder's tensors outside the language model; they show which prefixes the folder
        uses."""
    prefixes = {carried_name.split(".")[0] for carried_name in carried}
    if "visual" in prefixes:  # Qwen 2 and 2.5 VL
        return name
    return _wrapped(name, _IN_MEMORY if "model" in prefixes else _PUBLISHED)


def _wrapped(name: str, style: Iterable[tuple[str, str]]) -> str:
    wrapped = (begins + name.removeprefix(prefix) for begins, prefix in style if name.startswith(prefix))
    return next(wrapped, name)  # blocks for multi-token prediction (mtp.) have the same names in both


def with_vocab_size(config: Config, rows: int) -> dict[str, Any]:
    """Returns `config`, multimodal or not, with its vocab_size raised to at least `rows`."""
    size = max(rows, text_config(config).get("vocab_size") or 0)
    if not is_multimodal(config) or _is_flat(config):
        return {**config, "vocab_size": size}
    return {**config, "text_config": {**(config.get("text_config") or {}), "vocab_size": size}}


def multimodal_config(text: Config, imported: Config, same_model: bool) -> dict[str, Any]:
    """Returns the config.json of a multimodal model whose language model was trained.

    text: the trained language model's config.json. imported: config.json of the imported multimodal model.
        same_model: the language model's configuration has not changed, so its fields stay as imported."""
    config, inner = dict(imported), _inner_fields(imported)
    new_fields = text if not same_model else {"vocab_size": text["vocab_size"]}
    if "vocab_size" not in inner and text["vocab_size"] == text_config(imported)["vocab_size"]:
        new_fields = {name: value for name, value in new_fields.items() if name != "vocab_size"}
    inner |= {
        name: value for name, value in new_fields.items() if name not in (*_SHARED, "architectures", "model_type")
    }
    for name in _SHARED:
        if name in text:
            place = inner if name in inner and config.get(name) is None else config
            if name in place or text[name] is not None and name not in ("torch_dtype", "dtype"):
                place[name] = text[name]
    dtype_field = "dtype" if "dtype" in imported else "torch_dtype"
    config[dtype_field] = text.get("torch_dtype", text.get("dtype"))
    config.pop("quantization_config", None)
    if not same_model and "tie_word_embeddings" in config:  # transformers prefers this field to that in text_config
        config["tie_word_embeddings"] = text["tie_word_embeddings"]
    return {**config, **inner} if _is_flat(imported) else {**config, "text_config": inner}
