"""Models of images and text whose language model is one of the families: its config.json and tensors out of
theirs, and back.

What else such a folder holds (the tower that sees, the projector between) is carried along as it is.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.checkpointing.errors import CheckpointError
from megatron.checkpointing.families.family import Config, gives_score
from megatron.checkpointing.families.registry import FAMILIES

# model_type of the whole -> those of its language model, the first where config.json leaves it out, and the
# vocabulary of each where it leaves that out.
TEXT_TOWERS: Mapping[str, Mapping[str, int]] = {
    "gemma3": {"gemma3_text": 262208}, "mistral3": {"mistral": 32000, "ministral3": 131072},
}  # fmt: skip
# How the names of the language model's tensors begin in a folder, and in one of the language model alone: as
# files are published and transformers writes them, and as it names them in memory. peft has the names in
# memory: before transformers 4.52 those were the published ones.
_PUBLISHED = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."))
_IN_MEMORY = (("model.language_model.", "model."), ("lm_head.", "lm_head."), ("score.", "score."))
# Fields that may stand outside of text_config and are the language model's.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")


def is_multimodal(config: Config) -> bool:
    """Whether a config.json is that of a model of images and text whose language model is one of the
    families."""
    return str(config.get("model_type")) in TEXT_TOWERS


def text_config(config: Config) -> dict[str, Any]:
    """The config.json of the language model of a multimodal one; of any other model its own.

    Raises CheckpointError for a language model that is not of the family that such a model has.
    """
    model_type = str(config.get("model_type"))
    if not is_multimodal(config):
        return dict(config)
    towers = TEXT_TOWERS[model_type]
    text = config.get("text_config") or {}
    family = text.get("model_type") or next(iter(towers))
    if family not in towers:
        raise CheckpointError(
            f"config.json: text_config.model_type: {family} is not supported in {model_type}, only {', '.join(towers)}"
        )
    if gives_score(config):
        raise CheckpointError(f"config.json: a reward model with images ({model_type}) is not supported")
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    # As in transformers, what the whole says comes before what its part says.
    fields = {"vocab_size": towers[family], **text, **shared}
    return {**fields, "model_type": family, "architectures": [FAMILIES[family].architecture]}


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """The tensors of the language model in a multimodal folder: their names in a folder of its own, and those
    that they are stored under."""
    return {own: name for name in stored if (own := text_name(name)) is not None}


def text_name(name: str) -> str | None:
    """The name that a tensor or module of a multimodal model has in its language model alone, from either way
    of naming; None for one that is not the language model's."""
    for begins, instead in (*_PUBLISHED, *_IN_MEMORY):
        if name.startswith(begins):
            return instead + name.removeprefix(begins)
    return None


def names_a_wrapper(name: str) -> bool:
    """Whether a tensor or module is named as within a multimodal model, and not as in a language model."""
    inner_name = text_name(name)
    return inner_name is not None and inner_name != name


def memory_name(name: str) -> str:
    """The name that a tensor or module of a language model has in memory within a multimodal model."""
    return _wrapped(name, _IN_MEMORY)


def text_modules(names: Iterable[str]) -> str:
    """A regular expression of the modules of the language model that end in these names, in both ways of
    naming: those of the tower that sees have the same ends."""
    return rf"(.*\.)?language_model\..*\.({'|'.join(map(re.escape, names))})"


def stored_name(name: str, carried: Iterable[str]) -> str:
    """The inverse of `text_names` for one tensor. carried: the folder's other tensors, which tell how its
    names begin."""
    style = _IN_MEMORY if any(other.startswith("model.") for other in carried) else _PUBLISHED
    return _wrapped(name, style)


def _wrapped(name: str, style: Iterable[tuple[str, str]]) -> str:
    return next(begins + name.removeprefix(instead) for begins, instead in style if name.startswith(instead))


def with_vocab_size(config: Config, rows: int) -> dict[str, Any]:
    """A config.json, of a multimodal model or of another, of a vocabulary that has `rows` rows at least."""
    size = max(rows, text_config(config).get("vocab_size") or 0)
    if not is_multimodal(config):
        return {**config, "vocab_size": size}
    return {**config, "text_config": {**(config.get("text_config") or {}), "vocab_size": size}}


def whole_config(text: Config, before: Config, same_model: bool) -> dict[str, Any]:
    """The config.json of a multimodal model again.

    text: that of its language model now, the result of `with_fields`. before: that of the whole which was
    imported. same_model: the language model has the configuration that it had, so that its fields stay as
    they were written.
    """
    whole, inner = dict(before), dict(before.get("text_config") or {})
    own = text if not same_model else {"vocab_size": text["vocab_size"]}
    if "vocab_size" not in inner and text["vocab_size"] == text_config(before)["vocab_size"]:
        own = {name: value for name, value in own.items() if name != "vocab_size"}
    inner |= {name: value for name, value in own.items() if name not in (*_SHARED, "architectures")}
    for name in _SHARED:
        if name in text:
            place = inner if name in inner and whole.get(name) is None else whole
            if name in place or text[name] is not None and name not in ("torch_dtype", "dtype"):
                place[name] = text[name]
    named = "dtype" if "dtype" in before else "torch_dtype"
    whole[named] = text.get("torch_dtype", text.get("dtype"))
    whole.pop("quantization_config", None)
    if not same_model and "tie_word_embeddings" in whole:  # which transformers reads before the inner one
        whole["tie_word_embeddings"] = text["tie_word_embeddings"]
    return {**whole, "text_config": inner}
