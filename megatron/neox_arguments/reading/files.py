"""Reads YAML and JSON files and `key=value` overrides, and records where each value was written."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.neox_arguments.errors import ConfigError, format_value
from megatron.neox_arguments.frozen import thaw
from megatron.neox_arguments.reading.yaml_loader import ConfigLoader, join_surrogates
from megatron.neox_arguments.values.local_paths import with_home

_GIVE_WAY = ("seq_length", "tokenizer_type", "vocab_file")
IMPORTED_MODEL_FILE = "hf_model.yml"  # file name of a configuration that an import from HuggingFace wrote


@dataclass
class RawConfig:
    """The merged files and overrides of a user, before they are checked and resolved.

    values: by key; sections are nested mappings.
    origins: places such as `a.yml:12`, by dotted path.
    config_files: texts of the files, by file name.
    spellings: each key as the user wrote it, with dashes or underscores.
    unread: files that could not be read in full.
    removed: dotted paths that an override has set to null.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    config_files: dict[str, str] = field(default_factory=dict)
    spellings: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    removed: set[str] = field(default_factory=set)

    def assign(self, path: str, value: Any, origin: str) -> None:
        """Sets the value at a dotted path. A value of None removes the key, so that its default applies
        again."""
        *parents, last = (part.replace("-", "_") for part in path.split("."))
        (self.removed.add if value is None else self.removed.discard)(".".join([*parents, last]))
        target = self.values
        for parent in parents:
            inner = target.get(parent)
            if inner is None and value is None:
                return
            if inner is not None and not isinstance(inner, Mapping):
                self.problems.append(
                    f"{origin}: {path}: cannot be set, because {parent} is not a mapping but {format_value(inner)}"
                )
                return
            target[parent] = target = dict(inner or {})
        path = ".".join([*parents, last])
        for key in [key for key in self.origins if key == path or key.startswith(path + ".")]:
            del self.origins[key]
        if value is None:
            target.pop(last, None)
        else:
            target[last] = _underscores(thaw(value))
            self.origins[path] = origin


def read_files(files: Sequence[str | Path]) -> RawConfig:
    """Merges files into one `RawConfig`.

    Unreadable files, invalid YAML, and keys that are set twice are recorded as problems. One exception: if a
    file is hf_model.yml of an imported model, later files may override its `seq_length` and tokenizer.
    """
    config = RawConfig()
    for file in files:
        try:
            text = with_home(file).read_text(encoding="utf-8")
            name = Path(file).name
            config.config_files[name if name not in config.config_files else str(file).replace("/", "_")] = text
            _merge_file(config, str(file), text)
            continue
        except FileNotFoundError:
            config.problems.append(f"{file}: no such file")
        except (OSError, UnicodeDecodeError) as cause:
            config.problems.append(f"{file}: cannot be read: {cause}")
        except yaml.MarkedYAMLError as cause:
            mark = cause.problem_mark or cause.context_mark
            config.problems.append(f"{file}:{mark.line + 1 if mark else '?'}: not valid YAML: {cause.problem}")
        except yaml.YAMLError as cause:
            config.problems.append(f"{file}: not valid YAML: {' '.join(str(cause).split())}")
        config.unread.append(str(file))
    return config


def file_assignments(files: Sequence[str | Path]) -> list[tuple[str, Any, str]]:
    """Returns the keys of files as overrides of another configuration: [(dotted path, value, origin)].

    A section replaces the whole section, a dotted key a part of it, and `key:` alone removes the key. Raises
    ConfigError.
    """
    config = read_files(files)
    if config.problems:
        raise ConfigError(config.problems)
    paths = [path for path in config.origins if not any(path.startswith(f"{section}.") for section in config.origins)]
    return [(path, value_at(config.values, path), config.origins[path]) for path in paths]


def value_at(values: Any, path: str) -> Any:
    """Returns the value at a dotted path in nested mappings; None if there is none."""
    for part in path.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def parse_overrides(overrides: Mapping[str, Any] | Sequence[str], origin: str) -> list[tuple[str, Any, str]]:
    """Parses `{"a.b": 1}` or `["a.b=1"]` (values are YAML) into [(dotted path, value, origin)]. Raises
    ConfigError."""
    if isinstance(overrides, Mapping):
        return [(path, value, origin) for path, value in overrides.items()]
    assignments, problems = [], []
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            problems.append(f'{origin}: expected KEY=VALUE, got "{text}"; write config files before {origin}')
            continue
        try:
            assignments.append((path.strip(), yaml.load(value, Loader=ConfigLoader), origin))
        except yaml.YAMLError as cause:
            reason = f" ({cause.problem})" if isinstance(cause, yaml.constructor.ConstructorError) else ""
            problems.append(f'{origin}: {path.strip()}: "{value[:200]}" is not valid YAML{reason}')
    if problems:
        raise ConfigError(problems)
    return assignments


def read_deepspeed_config(config: RawConfig, is_key: Callable[[str], bool]) -> None:
    """Copies the keys of `deepspeed_config_file` into `config`, with that file as their origin.

    is_key: whether a name is one of our keys; all other names go to deepspeed_extra_args.

    HuggingFace's value "auto" is skipped. If a key is also set elsewhere, both values must be equal, unless
    an override on the command line sets the key or removes it (null).
    """
    path = config.values.get("deepspeed_config_file")
    if not isinstance(path, str):
        return
    deepspeed_config = read_files([path])
    origin = config.origins["deepspeed_config_file"]
    config.problems += [f"{origin}: deepspeed_config_file: {problem}" for problem in deepspeed_config.problems]
    config.config_files |= deepspeed_config.config_files
    for name, value in deepspeed_config.values.items():
        _merge_value(config, name if is_key(name) else f"{_EXTRA}{name}", value, deepspeed_config.origins)


def _merge_value(config: RawConfig, path: str, value: Any, origins: Mapping[str, str]) -> None:
    """Merges one value of a DeepSpeed file into `config`; sections are merged key by key."""
    if value == "auto" or path in config.removed:
        return
    current: Any = config.values
    for part in path.split("."):
        current = current.get(part) if isinstance(current, Mapping) else None
    if isinstance(value, Mapping) and value and (current is None or isinstance(current, Mapping)):
        for name, inner in value.items():
            _merge_value(config, f"{path}.{name}", inner, origins)
        return
    origin = _nearest(path.removeprefix(_EXTRA), origins)
    if current is None:
        config.assign(path, value, origin)
    elif current != value and not config.origins.get(path, "").startswith("--"):
        origin_before = _nearest(path, config.origins)
        values = f"{format_value(value)}, but {origin_before} says {format_value(current)}"
        config.problems.append(f"{origin}: {path}: {values}; keep one of them")


def _nearest(path: str, origins: Mapping[str, str]) -> str:
    """Returns the origin of a dotted path, or of the nearest section that contains it."""
    while path not in origins:
        path = path.rpartition(".")[0]
    return origins[path]


_EXTRA = "deepspeed_extra_args."
_REFERENCE = re.compile(r"\$\{(\w+)(?::-([^}\n]*))?\}")
_TO_MARK = re.compile(f"{_REFERENCE.pattern}|[\ue000\ue001]")
_MARKED = re.compile("\ue000(\\d+)\ue001")


def _mark_references(text: str) -> tuple[str, list[str]]:
    """Replaces each `${NAME}` by a mark without braces, because YAML would read the braces as a mapping.

    Returns (the text with marks, the replaced texts in order). A mark consists of rare characters and a
    number. If the text itself contains these characters, they are replaced by marks too.
    """
    references: list[str] = []

    def mark(reference: re.Match[str]) -> str:
        references.append(reference[0])
        return f"\ue000{len(references) - 1}\ue001"

    return _TO_MARK.sub(mark, text), references


def _fill(node: yaml.Node, references: list[str], config: RawConfig, file: str) -> None:
    """Replaces the marks of `_mark_references` in a YAML document by values of environment variables."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            _fill(key, references, config, file)
            _fill(value, references, config, file)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _fill(value, references, config, file)
    elif _MARKED.search(node.value) or "${" in node.value:
        origin, num_problems = f"{file}:{node.start_mark.line + 1}", len(config.problems)
        node.value = _MARKED.sub(lambda mark: _value_of(references[int(mark[1])], config, origin), node.value)
        node.tag = "!environment"
        if "${" in node.value:
            config.problems.append(f"{origin}: {node.value}: only ${{NAME}} and ${{NAME:-default}} are replaced")
        if len(config.problems) > num_problems:
            node.tag, node.value = "tag:yaml.org,2002:null", "null"
            config.unread.append(file)


def _value_of(reference: str, config: RawConfig, origin: str) -> str:
    parts = _REFERENCE.fullmatch(reference)
    if parts is None:
        return reference
    name, default = parts.groups()
    value = os.environ.get(name) or default
    if value is None:
        config.problems.append(
            f"{origin}: {reference}: {name} is not set in the environment, or empty; export it, or write "
            f"${{{name}:-default}}"
        )
        return ""
    try:
        return join_surrogates(value)
    except UnicodeDecodeError:
        config.problems.append(f"{origin}: {reference}: {name} in the environment is not UTF-8 text; export it again")
        return ""


def _merge_file(config: RawConfig, file: str, text: str) -> None:
    text, references = _mark_references(text)
    loader = ConfigLoader(text.replace("\t", " ") if file.endswith(".json") else text)
    try:
        root = loader.get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            config.problems.append(f"{file}:{root.start_mark.line + 1}: expected `key: value` lines")
            return
        _fill(root, references, config, file)
        for key_node, value_node in root.value:
            spelling = str(key_node.value)
            if spelling == "<<":
                config.problems.append(
                    f"{file}:{key_node.start_mark.line + 1}: <<: works only inside sections; write the keys out"
                )
                continue
            key, origin = spelling.replace("-", "_"), f"{file}:{key_node.start_mark.line + 1}"
            if key in config.spellings and not _is_overridable(key, config.origins[key], file):
                first_spelling = config.spellings[key]
                as_spelled = f" (as {first_spelling})" if first_spelling != spelling else ""
                config.problems.append(
                    f"{origin}: {spelling}: already set at {config.origins[key]}{as_spelled}; keep one of them"
                )
                continue
            config.spellings[key], config.origins[key] = spelling, origin
            _note_lines(config, file, key, value_node)
            value = loader.construct_object(value_node, deep=True)
            if "." in key:  # as --print-config writes sub-keys
                config.assign(key, value, origin)
                continue
            config.values[key] = _underscores(value)
            if value is None:  # `key:` alone is the default, as in GPT-NeoX
                del config.values[key]
    finally:
        loader.dispose()


def _is_overridable(key: str, origin: str, file: str) -> bool:
    """Returns whether `file` may override a key set at `origin`. This holds for `seq_length` and the
    tokenizer in the file of an imported model.

    In an imported model's file `seq_length` is the longest sequence that the model can read; in a recipe it
    is the length of rows.
    """
    first_file = origin.rpartition(":")[0]
    return key in _GIVE_WAY and first_file != file and Path(first_file).name == IMPORTED_MODEL_FILE


def _note_lines(config: RawConfig, file: str, path: str, node: yaml.Node) -> None:
    """Records the line of every key in a section, and reports duplicate sub-keys."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        inner = f"{path}.{str(key_node.value).replace('-', '_')}"
        origin = f"{file}:{key_node.start_mark.line + 1}"
        if inner in config.origins:
            config.problems.append(f"{origin}: {inner}: already set at {config.origins[inner]}; keep one of them")
            continue
        config.origins[inner] = origin
        _note_lines(config, file, inner, value_node)


def _underscores(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k).replace("-", "_"): _underscores(v) for k, v in value.items()}
    return value
