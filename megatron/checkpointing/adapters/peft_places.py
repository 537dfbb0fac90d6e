"""Converts between peft's fields and our keys of `lora` that tell which modules have adapters, and how large.

peft's fields are target_modules, layers_to_transform, rank_pattern and alpha_pattern.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.checkpointing.adapters.peft_names import PeftModule
from megatron.checkpointing.families.multimodal import memory_name
from megatron.neox_arguments import ModelArgs
from megatron.neox_arguments.values.lora_settings import block_adapters, module_names

_PATTERNS = {"rank_pattern": "r", "alpha_pattern": "alpha"}


def is_selected(config: Mapping[str, Any], name: str) -> bool:
    """Whether adapter_config.json gives the module `name` an adapter, by peft's rules.

    `target_modules` is a regular expression for the full name, or a list of name suffixes. A list applies
    only to blocks in `layers_to_transform`."""
    if _matches(config.get("exclude_modules"), name):
        return False
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    if not _matches(targets, name) or isinstance(targets, str) or layers in (None, []):
        return _matches(targets, name)
    if name in (targets or ()):
        return True
    patterns = config.get("layers_pattern") or r"[^.]*"
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        layer = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name)
        if layer is not None:
            return int(layer[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def is_left_out(config: Mapping[str, Any], block: int) -> bool:
    """Whether `layers_to_transform` of adapter_config.json (`config`) excludes block number `block`."""
    layers = config.get("layers_to_transform")
    if layers in (None, []) or isinstance(config.get("target_modules"), str):
        return False
    return block not in ([layers] if isinstance(layers, int) else layers)


def _matches(entries: str | Sequence[str] | None, name: str) -> bool:
    if isinstance(entries, str):
        return re.fullmatch(entries, name) is not None
    return any(f".{name}".endswith(f".{entry}") for entry in entries or ())


def _pattern_value(patterns: Mapping[str, Any] | None, module: PeftModule, default: Any) -> Any:
    for pattern, value in (patterns or {}).items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in (*module.names, *module.older)):
            return value
    return default


def placed(
    candidates: Sequence[PeftModule],
    is_adapted: Callable[[PeftModule], bool],
    config: Mapping[str, Any],
    r: int,
    alpha: float,
) -> dict[str, Any]:
    """Returns our keys of `lora` for adapted modules: target, layers_to_transform, rank_pattern,
    alpha_pattern.

    Keys that keep their default are left out.
    candidates: the target modules in every block.
    is_adapted: tells whether a candidate has an adapter.
    config: the content of adapter_config.json.
    r, alpha: the values for modules that no pattern in `config` matches."""
    chosen = [module for module in candidates if is_adapted(module)]
    lora: dict[str, Any] = {}
    blocks = sorted({module.block for module in chosen})
    if chosen == [module for module in candidates if module.block in blocks]:
        if len(chosen) < len(candidates):
            lora["layers_to_transform"] = blocks
    else:
        lora["target"] = [_full_name(module) for module in chosen]
    for table, default in (("rank_pattern", r), ("alpha_pattern", alpha)):
        values = {module: _pattern_value(config.get(table), module, default) for module in chosen}
        lora[table] = _shortest(values, default) or None
    return {key: value for key, value in lora.items() if value is not None}


def _shortest(values: Mapping[PeftModule, Any], default: Any) -> dict[str, Any]:
    """Returns {module name: value} for the modules whose value differs from `default`.

    The name is `target` if this module has the same value in all blocks, else the module's full name."""
    target_values: dict[str, set[Any]] = {}
    for module, value in values.items():
        target_values.setdefault(module.target, set()).add(value)
    return {
        module.target if len(target_values[module.target]) == 1 else _full_name(module): value
        for module, value in values.items()
        if value != default
    }


def _full_name(module: PeftModule) -> str:
    return module_names(module.target, module.block)[0].partition(".")[2]


def peft_sizes(args: ModelArgs, modules: Sequence[PeftModule], in_wrapper: bool) -> dict[str, dict[str, Any]]:
    """Returns peft's rank_pattern and alpha_pattern: the modules whose r or alpha differs from the default.

    in_wrapper: use the module names inside a multimodal model."""
    assert args.lora is not None
    patterns: dict[str, dict[str, Any]] = {table: {} for table in _PATTERNS}
    for module in modules:
        size = block_adapters(args, module.block)[module.target]
        for (table, key), value in zip(_PATTERNS.items(), size, strict=True):
            if value != args.lora[key]:
                names = map(memory_name, module.names) if in_wrapper else module.names
                patterns[table] |= dict.fromkeys(names, value)
    return patterns
